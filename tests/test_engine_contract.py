"""The embedded engine's contract: stops, versions, pausing, updating, failing, closing, exactness."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest
import torch

from engine_kit import gap, logits_of, model_and_tokenizer, prompt, request, running, weights
from slipstream.config.settings import InferenceSettings
from slipstream.errors import DeadlineError, InferenceError, RequestError
from slipstream.inference.checksum import tensor_checksum
from slipstream.inference.conformance import run_conformance
from slipstream.inference.embedded.engine import EmbeddedEngine, end_tokens
from slipstream.inference.embedded.linear import PackedLinear
from slipstream.inference.embedded.tiny import tiny_model, tiny_model_dir
from slipstream.inference.fake import processed_logprobs
from slipstream.trajectory import SamplingSpec


async def tokens_made(engine, count):
    while (await engine.metrics())["generation_tokens_total"] < count:
        await asyncio.sleep(0.001)


async def update(engine, source, version):
    await engine.start_weight_update()
    names = list(weights(source).items())
    for at in range(0, len(names), 5):  # several chunks: fused matrices arrive in pieces
        await engine.update_weights(dict(names[at : at + 5]))
    await engine.finish_weight_update(version)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
async def test_conformance_suite(arch):
    model, tokenizer = model_and_tokenizer(arch)
    async with running(arch) as engine:
        results = await run_conformance(engine, tokenizer, weights=weights(model), tolerance=1e-3)
    assert [r for r in results if r.status == "failed"] == []
    assert {r.name for r in results if r.status == "skipped"} <= {r.name for r in results if r.name.startswith("http")}


# ---- stops


async def test_a_stop_string_that_spans_tokens_cuts_the_text_and_keeps_the_token():
    _, tokenizer = model_and_tokenizer()
    async with running() as engine:
        free = await engine.generate(request(prompt(8), max_tokens=60))
        decoded = [tokenizer.decode([t]) for t in free.token_ids]
        at = next(
            i for i in range(8, 58) if all(d.isascii() and len(d) == 1 and d.isprintable() for d in decoded[i : i + 2])
        )
        stop = decoded[at] + decoded[at + 1]
        cut = await engine.generate(request(prompt(8), max_tokens=60, stop=(stop, "never there")))
    first = free.text.index(stop)
    assert cut.text == free.text[:first]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert stop in tokenizer.decode(list(cut.token_ids))
    assert stop not in tokenizer.decode(list(cut.token_ids[:-1]))


async def test_a_stop_string_inside_one_token_keeps_the_whole_token():
    _, tokenizer = model_and_tokenizer()
    th = tokenizer.convert_tokens_to_ids("th")
    async with running() as engine:
        for seed in range(40):
            free = await engine.generate(request(prompt(8), seed=seed, max_tokens=60))
            if th in free.token_ids and "h" not in tokenizer.decode(list(free.token_ids[: free.token_ids.index(th)])):
                break
        cut = await engine.generate(request(prompt(8), seed=seed, max_tokens=60, stop=("h",)))
    assert cut.token_ids == free.token_ids[: free.token_ids.index(th) + 1]
    assert cut.text == tokenizer.decode(list(cut.token_ids))[:-1]


async def test_every_declared_eos_ends_a_request():
    model, tokenizer = tiny_model(0)
    model.generation_config.eos_token_id = [100, 101]
    model.config.eos_token_id = 102
    assert end_tokens(model, tokenizer) == {100, 101, 102, tokenizer.eos_token_id}
    engine = EmbeddedEngine(model, tokenizer, InferenceSettings(dtype="float32", threads=1))
    await engine.start()
    try:
        hot = SamplingSpec(temperature=3)
        asked = [request(prompt(8), seed=n, ignore_eos=False, max_tokens=400, sampling=hot) for n in range(30)]
        ends = {r.token_ids[-1] for r in await engine.generate_many(asked) if r.finish_reason == "stop"}
        assert ends == {100, 101, 102, tokenizer.eos_token_id}
    finally:
        await engine.close()


async def test_min_tokens_bans_stops_and_says_so_in_the_logprobs():
    model, tokenizer = model_and_tokenizer()
    hot = SamplingSpec(temperature=3)
    async with running() as engine:
        asked = [
            request(prompt(8), seed=n, ignore_eos=False, min_tokens=20, max_tokens=200, sampling=hot) for n in range(8)
        ]
        results = await engine.generate_many(asked)
    assert any(r.finish_reason == "stop" for r in results)
    for ask, got in zip(asked, results, strict=True):
        assert len(got.token_ids) > 20
        rows = logits_of(model, [*ask.token_ids, *got.token_ids])[7:]
        rows[:20, tokenizer.eos_token_id] = -np.inf  # renormalised without the banned id
        want = [processed_logprobs(row, hot)[token] for row, token in zip(rows, got.token_ids, strict=False)]
        assert got.logprobs == pytest.approx(want, abs=1e-3)


async def test_the_context_ends_a_request_with_length():
    async with running(max_model_len=40) as engine:
        got = await engine.generate(request(prompt(30), max_tokens=100))
        assert (len(got.token_ids), got.finish_reason) == (10, "length")
        with pytest.raises(RequestError, match="leave no room in a context of 40"):
            await engine.generate(request(prompt(40)))


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        ((5, 300), {}, "token ids must lie in"),
        ((5,), {"stop_token_ids": (4000,)}, "stop_token_ids must lie in"),
        ((5,), {"model": "someone-else"}, "no model 'someone-else'"),
    ],
)
async def test_bad_requests_are_refused_by_name(ids, fields, message):
    async with running() as engine:
        with pytest.raises(RequestError, match=message):
            await engine.generate(request(ids, **fields))
        assert await engine.health()


async def test_one_bad_request_admits_none_of_its_batch():
    async with running() as engine:
        with pytest.raises(RequestError):
            await engine.generate_many([request(prompt(4)), request((999,))])
        assert (await engine.metrics())["prompt_tokens_total"] == 0


async def test_stop_strings_need_a_tokenizer():
    model, _ = model_and_tokenizer()
    engine = EmbeddedEngine(model, None, InferenceSettings(dtype="float32", threads=1))
    await engine.start()
    try:
        assert (await engine.generate(request(prompt(4)))).text == ""
        with pytest.raises(RequestError, match="tokenizer"):
            await engine.generate(request(prompt(4), stop=("x",)))
    finally:
        await engine.close()


async def test_a_streams_text_never_shows_the_beginning_of_its_stop_string():
    async with running() as engine:
        free = await engine.generate(request(prompt(8), max_tokens=60))
        middle = next(i for i in range(10, 50) if free.text[i : i + 3].isascii() and free.text[i : i + 3].isprintable())
        stop = free.text[middle : middle + 3]
        parts = [p async for p in engine.stream(request(prompt(8), max_tokens=60, stop=(stop,)))]
    assert "".join(p.text for p in parts) == free.text[: free.text.index(stop)]
    assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]


# ---- versions and updates


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
async def test_each_token_was_made_by_the_weights_that_its_version_names(arch):
    """Old tokens score right under the old weights and wrong under the new, and the other way round.

    Keys made by the old weights are kept, so new tokens are re-scored with the old cache: transformers' own.
    """
    old, _ = model_and_tokenizer(arch)
    new, _ = model_and_tokenizer(arch, 1)
    async with running(arch) as engine:
        ask = request(prompt(20), max_tokens=120)
        task = asyncio.create_task(engine.generate(ask))
        await tokens_made(engine, 30)
        await engine.pause("keep")
        await update(engine, new, "policy/0/1")
        await engine.resume()
        got = await task
    (first, second) = got.versions
    assert (first.version, second.version) == ("policy/0/0", "policy/0/1")
    assert (first.start, first.end, second.end) == (0, second.start, 120)
    cut = first.end
    with torch.no_grad():
        ids = torch.tensor([[*ask.token_ids, *got.token_ids]])
        at = 20 + cut - 1  # the first token fed to the new weights
        past = old(input_ids=ids[:, :at], use_cache=True)
        before = torch.log_softmax(past.logits[0, 19:], -1).gather(-1, ids[0, 20 : 20 + cut, None])[:, 0]
        after = new(input_ids=ids[:, at:-1], past_key_values=past.past_key_values).logits
        after = torch.log_softmax(after[0], -1).gather(-1, ids[0, 20 + cut :, None])[:, 0]
    # The last token of the old run was sampled by the old weights, which is position at - 1.
    assert got.logprobs[:cut] == pytest.approx(before.tolist(), abs=1e-3)
    assert got.logprobs[cut:] == pytest.approx(after.tolist(), abs=1e-3)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2"])
async def test_an_update_reaches_every_matrix_and_the_checksum_reads_it_back(arch):
    new, _ = model_and_tokenizer(arch, 1)
    async with running(arch) as engine:
        before = dict(await engine.checksum())
        await engine.pause("abort")
        await update(engine, new, "policy/0/1")
        held = await engine.checksum()
        await engine.resume()
        sent = {name: tensor_checksum(value) for name, value in weights(new).items()}
        assert {name: held[name] for name in sent} == sent
        assert not [name for name in sent if before[name] == held[name]]
        ask = request(prompt(20), max_tokens=20)
        got = await engine.generate(ask)
        assert gap(new, ask, got) < 2e-4
        assert [v.version for v in got.versions] == ["policy/0/1"]


async def test_a_checksum_sees_one_wrong_number_in_a_packed_matrix():
    async with running() as engine:
        before = dict(await engine.checksum())
        layer: PackedLinear = engine._core.runner._stack[1].qkv
        plain = layer.plain().clone()
        plain[70, 3] += 1e-3  # in the rows of k_proj
        layer.write_rows(0, layer.out_features, plain)
        layer.commit()
        after = await engine.checksum()
    assert [n for n in before if before[n] != after[n]] == ["model.layers.1.self_attn.k_proj.weight"]


async def test_a_tied_head_follows_its_embedding():
    new, _ = model_and_tokenizer("llama", 1)
    async with running() as engine:
        await engine.pause("abort")
        await update(engine, new, "v1")
        held = await engine.checksum()
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 parameter\\(s\\) were not sent.*model.norm.weight"),
        (lambda w: w.update({"model.nowhere": torch.zeros(1)}), "unknown parameter.*model.nowhere"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight has shape \\(3,\\)"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}), "must be a floating-point"),
    ],
)
async def test_incomplete_or_wrong_updates_are_refused_by_name_and_can_be_mended(change, message):
    new, _ = model_and_tokenizer(seed=1)
    wrong = weights(new)
    change(wrong)
    async with running() as engine:
        await engine.pause("abort")
        await engine.start_weight_update()
        with pytest.raises(InferenceError, match=message):  # noqa: PT012 - a chunk or the end may be refused
            await engine.update_weights(wrong)
            await engine.finish_weight_update("v1")
        with pytest.raises(InferenceError, match="update is open"):
            await engine.resume()
        await engine.update_weights(weights(new))
        await engine.finish_weight_update("v1")
        await engine.resume()
        ask = request(prompt(9))
        assert gap(new, ask, await engine.generate(ask)) < 2e-4


async def test_an_update_needs_a_paused_and_drained_engine():
    async with running() as engine:
        with pytest.raises(InferenceError, match="pause first"):
            await engine.start_weight_update()
        with pytest.raises(InferenceError, match="start_weight_update first"):
            await engine.update_weights({})


async def test_weights_are_cast_to_the_engines_dtype():
    new, _ = model_and_tokenizer(seed=1)
    async with running(dtype="bfloat16") as engine:
        await engine.pause("abort")
        await update(engine, new, "v1")
        held = await engine.checksum()
    for name, value in weights(new).items():
        assert held[name] == tensor_checksum(value.to(torch.bfloat16))


# ---- pausing


async def test_pause_wait_finishes_what_runs_and_holds_what_waits():
    async with running(max_batch_size=2) as engine:
        tasks = [asyncio.create_task(engine.generate(request(prompt(5, n), max_tokens=100))) for n in range(3)]
        await tokens_made(engine, 4)
        await engine.pause("wait")
        await asyncio.sleep(0.05)
        assert [t.done() for t in tasks] == [True, True, False]
        await engine.resume()
        assert all(len(r.token_ids) == 100 for r in await asyncio.gather(*tasks))


async def test_a_frozen_request_goes_on_as_if_nothing_had_happened():
    async with running() as engine:
        whole = await engine.generate(request(prompt(20), max_tokens=150))
        before = (await engine.metrics())["generation_tokens_total"]
        task = asyncio.create_task(engine.generate(request(prompt(20), max_tokens=150)))
        await tokens_made(engine, before + 20)
        await engine.pause("keep")
        frozen = (await engine.metrics())["generation_tokens_total"]
        await asyncio.sleep(0.05)
        assert (await engine.metrics())["generation_tokens_total"] == frozen
        await engine.resume()
        got = await task
    assert got.token_ids == whole.token_ids
    assert got.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


# ---- failing and closing


def engine_threads():
    return [t for t in threading.enumerate() if t.name.startswith("slipstream-engine")]


async def test_a_request_that_still_waits_is_ended_without_tokens_and_the_engine_lives():
    async with running(max_batch_size=1) as engine:
        requests = [request(prompt(5, i), max_tokens=400) for i in range(3)]
        asked = [asyncio.create_task(engine.generate(one)) for one in requests]
        await tokens_made(engine, 3)
        assert (await engine.metrics())["num_requests_waiting"] == 2
        await engine.abort([requests[1].request_id])
        ended = await asyncio.wait_for(asked[1], 30)
        assert (ended.token_ids, ended.versions, ended.finish_reason) == ((), (), "abort")
        await engine.abort([one.request_id for one in requests])
        assert len((await asyncio.wait_for(engine.generate(request(prompt(5))), 30)).token_ids) == 8
        for task in asked:
            task.cancel()


async def test_closing_fails_what_is_in_flight_and_leaves_no_thread():
    async with running(max_batch_size=1) as engine:
        tasks = [asyncio.create_task(engine.generate(request(prompt(5), max_tokens=400))) for _ in range(3)]
        await tokens_made(engine, 3)
        waiting = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        await engine.close()
        for task in (*tasks, waiting):
            with pytest.raises(InferenceError, match="closed"):
                await task
        assert not engine_threads()
        assert not await engine.health()
        with pytest.raises(InferenceError, match="closed"):
            await engine.generate(request(prompt(5)))
        await engine.close()


async def test_a_crash_reaches_every_waiter_with_its_cause():
    async with running() as engine:
        tasks = [asyncio.create_task(engine.generate(request(prompt(5, n), max_tokens=400))) for n in range(3)]
        await tokens_made(engine, 3)

        def explode(*_):
            raise MemoryError("no room for logits")

        engine._core.runner.logits = explode
        for task in tasks:
            with pytest.raises(InferenceError, match="no room for logits") as caught:
                await task
            assert isinstance(caught.value.__cause__, MemoryError)
        with pytest.raises(InferenceError, match="no room for logits"):
            await engine.metrics()
        assert not await engine.health()


async def test_calls_before_start_are_refused():
    model, tokenizer = model_and_tokenizer()
    engine = EmbeddedEngine(model, tokenizer)
    with pytest.raises(InferenceError, match="start"):
        await engine.generate(request(prompt(5)))
    await engine.close()


async def test_a_cancelled_call_frees_its_place():
    async with running(max_batch_size=1) as engine:
        task = asyncio.create_task(engine.generate(request(prompt(5), max_tokens=500)))
        await tokens_made(engine, 3)
        task.cancel()
        await asyncio.wait([task])
        assert len((await engine.generate(request(prompt(6), max_tokens=3))).token_ids) == 3
        assert (await engine.metrics())["num_requests_running"] == 0


async def test_a_deadline_names_the_request():
    async with running(request_timeout_seconds=0.05) as engine:
        await engine.pause("keep")
        ask = request(prompt(5))
        with pytest.raises(DeadlineError, match=ask.request_id):
            await engine.generate(ask)


async def test_an_engine_loads_a_directory(tmp_path):
    folder = tiny_model_dir(tmp_path / "model", seed=2)
    model, _ = tiny_model(2)
    engine = EmbeddedEngine(str(folder), settings=InferenceSettings(dtype="float32", threads=1))
    await engine.start()
    try:
        assert (await engine.info()).model == "model"
        ask = request(prompt(9), model="model")
        assert gap(model, ask, await engine.generate(ask)) < 2e-4
    finally:
        await engine.close()


# ---- exactness


async def transcript(delays):
    """Three overlapping batches, submitted with the given delays; everything they return."""
    async with running(dtype="bfloat16", determinism="exact", max_batch_size=3) as engine:
        tasks = []
        for delay in delays:
            batch = [request(prompt(4 + m, m), max_tokens=5 + 7 * m, seed=None, group_id=f"g{m}") for m in range(4)]
            tasks.append(asyncio.create_task(engine.generate_many(batch)))
            await asyncio.sleep(delay)
        return [(r.token_ids, r.logprobs) for task in tasks for r in await task]


async def test_exact_mode_gives_equal_bits_whatever_the_timing():
    assert await transcript([0, 0, 0]) == await transcript([0.05, 0.002, 0.1])


async def test_exact_mode_never_mixes_two_calls_in_a_batch(monkeypatch):
    async with running(determinism="exact", max_batch_size=3) as engine:
        seen = []
        step = engine._core.step

        def watched():
            step()
            seen.append({s.batch for s in engine._core.running})

        monkeypatch.setattr(engine._core, "step", watched)
        calls = [[request(prompt(6, m), max_tokens=5 + 9 * m, seed=m) for m in range(4)] for _ in range(3)]
        await asyncio.gather(*(engine.generate_many(call) for call in calls))
    assert {len(batches) for batches in seen} <= {0, 1}
    assert [b for b, _ in itertools.groupby(min(x) for x in seen if x)] == [1, 2, 3]
