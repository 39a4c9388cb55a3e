"""Server and client: strict bodies, statuses, streaming, deadlines, the control plane, the socket."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from fakes import ByteTokenizer
from slipstream.errors import InferenceError, RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import bind, build_app, serve
from slipstream.inference.types import Engine, GenerateRequest
from slipstream.inference.wire import request_json
from slipstream.trajectory import SamplingSpec

TOKENIZER = ByteTokenizer()


def fake(**options):
    return FakeEngine(259, tokenizer=TOKENIZER, eos_token_ids=(257,), max_model_len=256, **options)


def connect(engine, **options):
    return HttpEngine.in_process(build_app(engine, TOKENIZER), **options)


def request(name="r", **fields):
    return GenerateRequest(name, (1, 2, 3), **{"max_tokens": 6, "seed": 1, "ignore_eos": True, **fields})


async def decoding(engine):
    """Wait until the engine has made a token."""
    async with asyncio.timeout(10):
        while not (await engine.metrics())["generation_tokens_total"]:
            await asyncio.sleep(0.002)


def test_client_is_an_engine():
    assert isinstance(HttpEngine("http://x"), Engine)


async def test_every_request_field_survives_the_wire():
    engine = fake()
    sent = request(
        sampling=SamplingSpec(0.7, 0.9, 5, 0.05, 1.1, 0.2, 0.3),
        stop=("a", "bc"),
        stop_token_ids=(7, 8),
        min_tokens=2,
        session_id="s",
        group_id="g",
        cache_salt="salt",
        priority=3,
        prompt_logprobs=True,
    )
    await connect(engine).generate(sent)
    assert engine.requests == [sent]


async def test_answer_is_the_same_over_http_and_in_process():
    sent = request(prompt_logprobs=True, max_tokens=30)
    direct = await fake(scale=1.0).generate(sent)
    assert await connect(fake(scale=1.0)).generate(sent) == direct


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "tokens": 1}, "unknown field 'tokens'"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"maxtokens": 1}},
            "sampling_params.maxtokens",
        ),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": ["a"], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [999], "sampling_params": {}}, "token ids"),
        ("/inference/v1/generate", {"token_ids": [1] * 256, "sampling_params": {}}, "256 tokens"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 5000}}, "logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 2}},
            "logit_bias",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ""}, "empty prompt"),
        ("/abort_requests", {"ids": []}, "ids"),
        ("/update_weights", {"update_info": {"path": "x", "packed": True}}, "packed"),
    ],
)
async def test_bad_bodies_are_400_and_name_the_key(path, body, named):
    with pytest.raises(RequestError, match="HTTP 400") as caught:
        await connect(fake()).call("POST", path, body)
    assert named in str(caught.value)


async def test_unknown_query_parameter_is_refused():
    with pytest.raises(RequestError, match="unknown query parameter 'mod'"):
        await connect(fake()).call("POST", "/pause", params={"mod": "keep"})


async def test_unknown_model_is_404():
    with pytest.raises(RequestError, match=r"404.*'other' is not served"):
        await connect(fake(), model="other").generate(request())


async def test_engine_failure_is_retryable_and_names_url_and_cause():
    def reply(_):
        raise InferenceError("the decoder died")

    with pytest.raises(InferenceError, match=r"POST http://in-process/inference.*500.*the decoder died") as caught:
        await connect(fake(reply=reply)).generate(request())
    assert not isinstance(caught.value, RequestError)


async def test_a_bug_in_the_engine_is_a_500_with_its_cause():
    def reply(_):
        raise ZeroDivisionError("oops")

    with pytest.raises(InferenceError, match="500: ZeroDivisionError: oops"):
        await connect(fake(reply=reply)).generate(request())


async def test_deadline_ends_the_call_and_aborts_the_request():
    engine = fake(step_seconds=0.01)
    client = connect(engine, timeout_seconds=0.1)
    with pytest.raises(InferenceError, match=r"no answer within 0.1 s"):
        await client.generate(request(max_tokens=250))
    async with asyncio.timeout(1):
        while (await engine.metrics())["num_requests_running"]:
            await asyncio.sleep(0.005)


async def test_refused_connection_names_the_url():
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(InferenceError, match=f"{url}.*is the server running"):
        await HttpEngine(url).generate(request())
    assert not await HttpEngine(url).health()


async def test_close_ends_requests_in_flight():
    engine = fake(step_seconds=0.01)
    client = connect(engine)
    task = asyncio.create_task(client.generate(request(max_tokens=250)))
    await decoding(engine)
    await client.close()
    with pytest.raises(InferenceError, match="closed"):
        await task
    with pytest.raises(InferenceError, match="closed"):
        await client.generate(request())


async def test_duplicate_request_id_is_refused():
    engine = fake(step_seconds=0.005)
    client = connect(engine)
    first = asyncio.create_task(client.generate(request(max_tokens=250)))
    await decoding(engine)
    with pytest.raises(RequestError, match="already in flight"):
        await client.call(
            "POST", "/inference/v1/generate", {"request_id": "r", "token_ids": [1], "sampling_params": {}}
        )
    await first


async def test_answer_without_versions_is_refused():
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/inference/v1/generate")
    async def generate():
        content = [{"token_id": 5, "logprob": -0.5}]
        return {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": content}}]}

    with pytest.raises(InferenceError, match=r"weight_versions cover 0 of 1 tokens; vLLM >= 0.32"):
        await HttpEngine.in_process(app).generate(request())


async def test_abort_of_the_parent_id_aborts_all_choices():
    engine = fake(step_seconds=0.005)
    client = connect(engine)
    body = {"request_id": "p", "token_ids": [1], "sampling_params": {"n": 3, "max_tokens": 200, "ignore_eos": True}}
    task = asyncio.create_task(client.call("POST", "/inference/v1/generate", body))
    await decoding(engine)
    assert (await client.call("POST", "/abort_requests", {"request_ids": ["p"]}))["aborted"] == 3
    assert [c["finish_reason"] for c in (await task)["choices"]] == ["abort"] * 3


# ---- OpenAI shapes


async def events(client, path, body):
    lines = []
    async with client._http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


async def test_chat_completion():
    client = connect(fake(reply=lambda r: list(b"hello")))
    answer = await client.call("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert choice["token_ids"] == [*b"hello", 257]
    assert [c["token"] for c in choice["logprobs"]["content"]][:5] == list("hello")
    assert answer["prompt_token_ids"] == TOKENIZER.encode(
        TOKENIZER.apply_chat_template(CHAT["messages"], tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )
    assert answer["usage"]["completion_tokens"] == 6
    assert choice["weight_versions"] == [{"version": "policy/0/0", "start": 0, "end": 6}]


async def test_chat_stream_adds_up_per_choice():
    client = connect(fake(scale=1.0))
    body = {**CHAT, "n": 2, "seed": 4, "return_token_ids": True, "stream_options": {"include_usage": True}}
    whole = await client.call("POST", "/v1/chat/completions", {k: v for k, v in body.items() if k != "stream_options"})
    chunks = await events(client, "/v1/chat/completions", body)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(p["delta"]["content"] for p in parts) == choice["message"]["content"]
        assert [t for p in parts for t in p.get("token_ids") or []] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]


async def test_stream_failure_is_an_error_event():
    engine = fake(step_seconds=0.005)
    client = connect(engine)
    task = asyncio.create_task(events(client, "/v1/chat/completions", {**CHAT, "ignore_eos": True, "max_tokens": 200}))
    await decoding(engine)
    await engine.close()
    assert "closed" in (await task)[-1]["error"]["message"]


async def test_completions_number_choices_prompt_by_prompt():
    client = connect(fake(reply=lambda r: [r.token_ids[-1]]))
    answer = await client.call("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 0})
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert answer["choices"][0]["logprobs"]["tokens"][0] == "a"


async def test_tokenize_and_detokenize():
    client = connect(fake())
    tokens = (await client.call("POST", "/tokenize", {"prompt": "abc", "add_special_tokens": False}))["tokens"]
    assert tokens == list(b"abc")
    assert (await client.call("POST", "/detokenize", {"tokens": tokens}))["prompt"] == "abc"


async def test_metrics_use_the_names_of_vllm():
    client = connect(fake())
    await client.generate(request())
    text = await client.call("GET", "/metrics")
    assert 'vllm:generation_tokens_total{model_name="policy",engine="0"} 6.0' in text
    assert 'finished_reason="length"} 1.0' in text
    assert (await client.metrics())["prompt_tokens_total"] == 3


async def test_token_only_server_refuses_text():
    client = HttpEngine.in_process(build_app(FakeEngine(300), None))
    assert len((await client.generate(request())).token_ids) == 6
    with pytest.raises(RequestError, match="no tokenizer"):
        await client.call("POST", "/v1/completions", {"prompt": "abc"})


# ---- control plane


async def test_update_before_pause_is_409():
    with pytest.raises(InferenceError, match=r"409.*pause"):
        await connect(fake()).start_weight_update()


async def test_weights_travel_through_a_file_that_is_gone_after(tmp_path):
    engine = fake()
    app = build_app(engine, TOKENIZER, transfer_root=tmp_path)
    client = HttpEngine.in_process(app, transfer_dir=tmp_path)
    await client.start()
    bias = np.arange(259, dtype=np.float32)
    await client.pause("keep")
    await client.start_weight_update()
    await client.update_weights({"head.bias": bias})
    await client.finish_weight_update("policy/0/9")
    await client.resume()
    assert np.array_equal(engine.weights["head.bias"], bias)
    assert await client.weight_version() == "policy/0/9"
    assert await client.checksum() == await engine.checksum()
    assert list(tmp_path.iterdir()) == []


async def test_files_outside_the_transfer_directory_are_refused(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    client = HttpEngine.in_process(build_app(fake(), TOKENIZER, transfer_root=inside))
    for path in (tmp_path / "secret", inside / ".." / "secret", inside / "link"):
        with pytest.raises(RequestError, match="outside the transfer directory"):
            await client.call("POST", "/update_weights", {"update_info": {"path": str(path)}})


async def test_server_without_a_transfer_directory_refuses_weights():
    with pytest.raises(RequestError, match="takes no weights; start it with a transfer directory"):
        await connect(fake()).call("POST", "/update_weights", {"update_info": {"path": "x"}})


async def test_renaming_the_version_needs_a_pause_and_keeps_the_weights():
    engine = fake()
    client = connect(engine)
    before = await engine.checksum()
    await client.pause("keep")
    await client.call("POST", "/update_weight_version", {"new_version": "v7"})
    await client.resume()
    assert (await client.generate(request())).versions[0].version == "v7"
    assert await engine.checksum() == before


async def test_weight_checker_compares():
    client = connect(fake())
    held = dict(await client.checksum())
    same = await client.call("POST", "/weight_checker", {"action": "compare", "baseline": held})
    held["head.bias"] = "float32[259]:00000000"
    other = await client.call("POST", "/weight_checker", {"action": "compare", "baseline": held})
    assert (same["match"], other["mismatches"]) == (True, ["head.bias"])


async def test_sleep_and_wake_up():
    client = connect(fake())
    await client.call("POST", "/sleep")
    assert (await client.call("GET", "/is_sleeping"))["is_sleeping"]
    assert await client.is_paused()
    await client.call("POST", "/wake_up")
    assert not await client.is_paused()


async def test_server_info_and_world_size():
    client = connect(fake())
    assert (await client.call("GET", "/get_world_size"))["world_size"] == 1
    assert (await client.call("GET", "/server_info"))["weight_version"] == "policy/0/0"
    info = await client.info()
    assert (info.max_model_len, info.eos_token_ids) == (256, (257,))


# ---- a real socket


@pytest.fixture
def served():
    """A fake engine behind uvicorn in a thread; yields its base URL and engine."""
    import uvicorn

    engine = fake(step_seconds=0.01)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(engine, TOKENIZER), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}", engine
    server.should_exit = True
    thread.join(10)
    sock.close()
    assert not thread.is_alive()


async def test_stream_arrives_while_it_is_made(served):
    url, _ = served
    async with HttpEngine(url) as client:
        started = time.perf_counter()
        arrivals = [time.perf_counter() - started async for _ in client.stream(request(max_tokens=40))]
    assert len(arrivals) >= 30
    assert arrivals[0] < arrivals[-1] / 2


async def test_client_that_goes_away_frees_the_engine(served):
    url, engine = served
    async with HttpEngine(url) as client:
        task = asyncio.create_task(client.generate(request(max_tokens=250)))
        while not engine.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if (await client.metrics())["num_requests_running"] == 0:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("the engine still decodes for a client that is gone")


def test_port_in_use_names_the_port_and_the_mend():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(InferenceError, match=rf"127.0.0.1:{port} .*in use.*--port"):
            serve(fake(), "127.0.0.1", port)


SERVE = """
from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import serve
serve(FakeEngine(300, step_seconds=0.01), port=0, log_level="warning", ready=lambda url: print(url, flush=True))
print("closed", flush=True)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_the_server_cleanly_and_at_once(busy):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    answers = []

    def ask():
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
        answers.append(httpx.post(f"{url}/inference/v1/generate", json=body, timeout=30))

    try:
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        client = threading.Thread(target=ask)
        if busy:
            client.start()
            while 'num_requests_running{model_name="policy",engine="0"} 1.0' not in httpx.get(f"{url}/metrics").text:
                time.sleep(0.02)
        started = time.perf_counter()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        took = time.perf_counter() - started
        if busy:
            client.join(10)
    finally:
        process.kill()
    assert (process.returncode, out.strip(), err) == (0, "closed", "")
    assert took < 4
    assert [(a.status_code, "closed" in a.text) for a in answers] == [(503, True)] * busy
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host, int(port)))


def test_salts_are_sent_in_the_characters_that_vllm_takes():
    sent = {
        salt: request_json(request(cache_salt=salt))["cache_salt"] for salt in ("policy/0/1", "policy-0-1", "a@b" * 99)
    }
    assert len(set(sent.values())) == 3
    for salt in sent.values():
        assert len(salt) <= 128
        assert not set(salt) & set("@/\\\0")
