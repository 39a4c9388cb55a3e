"""Conformance checks of the data plane: tokens, log-probs, stops, seeds, caches, and the HTTP shapes.

Owns: what one request must answer.  Refuses: pauses and updates (``conformance_control``).
"""

from __future__ import annotations

from typing import Any

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.conformance_bench import Bench, CheckFailed, NotApplicable, check, require
from slipstream.trajectory import SamplingSpec


@check
async def tokens_in_tokens_out(bench: Bench) -> None:
    """Ids come back as sampled; the text is their decoding without special tokens."""
    result = await bench.run()
    require(len(result.token_ids) == 8, f"asked for 8 tokens, got {len(result.token_ids)}")
    if bench.tokenizer is not None:
        want = bench.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        require(result.text == want, f"text {result.text!r} is not the decoding of the ids, {want!r}")


@check
async def length(bench: Bench) -> None:
    """``max_tokens`` ends with reason length and exactly that many tokens."""
    result = await bench.run(max_tokens=5)
    require((len(result.token_ids), result.finish_reason) == (5, "length"), f"got {result}")


@check
async def seeds_reproduce(bench: Bench) -> None:
    """The same seed gives the same tokens, whatever else is running."""
    alone = await bench.run(seed=11)
    crowd = [bench.request(seed=seed) for seed in (12, 11, 13)]
    again = (await bench.engine.generate_many(crowd))[1]
    require(again.token_ids == alone.token_ids, f"seed 11 gave {alone.token_ids}, then {again.token_ids}")


@check
async def seeds_differ(bench: Bench) -> None:
    """Different seeds give different samples."""
    hot = SamplingSpec(temperature=1.5)
    requests = [bench.request(seed=seed, sampling=hot) for seed in range(8)]
    results = await bench.engine.generate_many(requests)
    require([r.request_id for r in results] == [r.request_id for r in requests], "results are not in request order")
    require(len({r.token_ids for r in results}) > 1, "8 seeds gave one and the same output")


@check
async def greedy_is_argmax(bench: Bench) -> None:
    """Temperature 0 does not depend on the seed."""
    cold = SamplingSpec(temperature=0)
    a, b = await bench.run(seed=1, sampling=cold), await bench.run(seed=2, sampling=cold)
    require(a.token_ids == b.token_ids, "greedy decoding depends on the seed")


@check
async def sampling_equals_scoring(bench: Bench) -> None:
    """At temperature 1 the sampled log-probs are what the same tokens score as a prompt."""
    result = await bench.run()
    scored = await bench.score(result.token_ids)
    gap = max(abs(a - b) for a, b in zip(result.logprobs, scored, strict=True))
    require(gap <= bench.tolerance, f"sampled and scored log-probs differ by {gap:.4f}")


@check
async def logprobs_follow_temperature(bench: Bench) -> None:
    """At temperature T, log-prob differences are those at temperature 1 divided by T (processed log-probs)."""
    spec = SamplingSpec(temperature=2.0)
    requests = [bench.request(seed=seed, max_tokens=1, sampling=spec) for seed in range(12)]
    seen = {r.token_ids[0]: r.logprobs[0] for r in await bench.engine.generate_many(requests)}
    if len(seen) < 2:
        raise NotApplicable("12 seeds at temperature 2 gave a single first token")
    (a, hot_a), (b, hot_b) = list(seen.items())[:2]
    plain = (await bench.score([a]))[0] - (await bench.score([b]))[0]
    gap = abs((hot_a - hot_b) - plain / 2)
    require(gap <= bench.tolerance, f"log-probs at temperature 2 are off by {gap:.4f}: are they those sampled from?")


@check
async def logprobs_follow_truncation(bench: Bench) -> None:
    """With top_k = 1 the sampled distribution is a point: its log-probs are 0."""
    result = await bench.run(sampling=SamplingSpec(top_k=1))
    require(max(map(abs, result.logprobs)) < 1e-3, f"top_k=1 reports log-probs {result.logprobs}, want 0")


@check
async def stop_string_keeps_the_whole_token(bench: Bench) -> None:
    """Text is cut before the stop string; the ids keep the token that completed it."""
    for seed in range(20):
        free = await bench.run(seed=seed, max_tokens=24)
        stop = _stop_candidate(free.text)
        if stop is None:
            continue
        cut = await bench.run(seed=seed, max_tokens=24, stop=(stop,))
        require((cut.finish_reason, cut.stop_reason) == ("stop", stop), f"stop {stop!r}: got {cut}")
        require(cut.text == free.text[: free.text.find(stop)], f"text {cut.text!r} is not cut before {stop!r}")
        require(free.token_ids[: len(cut.token_ids)] == cut.token_ids, "the ids are not a prefix of the free run's")
        if bench.tokenizer is not None:
            text, before = (
                bench.tokenizer.decode(list(ids), skip_special_tokens=True)
                for ids in (cut.token_ids, cut.token_ids[:-1])
            )
            require(stop in text, "the token that completed the stop string is missing from the ids")
            require(stop not in before, "the ids go on after the token that completed the stop string")
        return
    raise NotApplicable("no output of 20 had text to stop at")


def _stop_candidate(text: str) -> str | None:
    """Two characters from the middle of a text."""
    for at in range(len(text) // 3, len(text) - 2):
        piece = text[at : at + 2]
        # A replacement character may be half of a character that a later token completes.
        if piece.isprintable() and "\ufffd" not in piece:
            return piece
    return None


@check
async def stop_token_ids_end(bench: Bench) -> None:
    """A stop token id ends the request, is kept, and is named as the reason."""
    free = await bench.run(max_tokens=16)
    stop = free.token_ids[7]
    cut = await bench.run(max_tokens=16, stop_token_ids=(stop,))
    want = free.token_ids[: free.token_ids.index(stop) + 1]
    require(cut.token_ids == want, f"stop id {stop}: got {cut.token_ids}, want {want}")
    require((cut.finish_reason, cut.stop_reason) == ("stop", stop), f"reasons {cut.finish_reason}, {cut.stop_reason}")


@check
async def end_of_sequence(bench: Bench) -> None:
    """EOS ends with reason stop and no stop_reason; ``ignore_eos`` and ``min_tokens`` go on past it."""
    if not bench.eos:
        raise NotApplicable("the engine does not tell its end-of-sequence ids")
    hot = SamplingSpec(temperature=1.5)
    room = min(bench.long_tokens // 2, bench.max_model_len - len(bench.prompt) - 10)
    requests = [bench.request(seed=s, sampling=hot, ignore_eos=False, max_tokens=room) for s in range(16)]
    ended = [
        (r, a)
        for r, a in zip(requests, await bench.engine.generate_many(requests), strict=True)
        if a.finish_reason == "stop"
    ]
    if not ended:
        raise NotApplicable(f"no end of sequence in 16 x {room} tokens")
    request, result = min(ended, key=lambda pair: len(pair[1].token_ids))
    n = len(result.token_ids)
    require(result.token_ids[-1] in bench.eos, f"stopped on {result.token_ids[-1]}, which is not an EOS id")
    require(result.stop_reason is None, f"stop_reason is {result.stop_reason!r} on EOS, want None")
    require(not set(result.token_ids[:-1]) & set(bench.eos), "went on past an EOS id")
    on = await bench.run(seed=request.seed, sampling=hot, ignore_eos=True, max_tokens=n + 3)
    require(len(on.token_ids) == n + 3, "ignore_eos stopped at EOS")
    late = await bench.run(seed=request.seed, sampling=hot, ignore_eos=False, min_tokens=n + 2, max_tokens=n + 4)
    require(len(late.token_ids) >= n + 2, f"min_tokens={n + 2} gave {len(late.token_ids)} tokens")


@check
async def prompt_too_long_is_refused(bench: Bench) -> None:
    """A prompt that fills the context is the request's fault."""
    ids = (bench.prompt * (bench.max_model_len // len(bench.prompt) + 1))[: bench.max_model_len]
    try:
        await bench.engine.generate(bench.request(token_ids=ids))
    except InferenceError:
        return
    raise CheckFailed(f"a prompt of {len(ids)} tokens was accepted in a context of {bench.max_model_len}")


@check
async def stream_adds_up(bench: Bench) -> None:
    """Partial results concatenate to the whole answer; the last carries all version runs."""
    whole = await bench.run(seed=5, max_tokens=12)
    parts = [part async for part in bench.engine.stream(bench.request(seed=5, max_tokens=12))]
    require(tuple(t for p in parts for t in p.token_ids) == whole.token_ids, "streamed ids differ from the whole")
    require("".join(p.text for p in parts) == whole.text, "streamed text differs from the whole")
    require(parts[-1].versions == whole.versions, f"the last part carries {parts[-1].versions}")
    require(parts[-1].finish_reason == whole.finish_reason, "the last part has another finish_reason")


@check
async def sessions_change_nothing(bench: Bench) -> None:
    """Reusing a session's KV does not change the distribution: a fresh pass scores the same."""
    first = await bench.run(session_id="conformance", seed=3)
    second = (*bench.prompt, *first.token_ids, *bench.prompt[:3])
    result = await bench.run(token_ids=second, session_id="conformance", seed=4)
    # Scored, not sampled again: in bfloat16 another batch shape may tip a draw, which is no fault.
    scored = await bench.score(result.token_ids, after=second, cache_salt="elsewhere")
    gap = max(abs(a - b) for a, b in zip(result.logprobs, scored, strict=True))
    require(gap <= bench.tolerance, f"a session's second turn has log-probs off by {gap:.4f}")


@check
async def prefix_cache_resets(bench: Bench) -> None:
    """A repeated prompt is cached; after a reset, and under another salt, it is not."""
    prompt = (bench.prompt * 64)[: min(192, bench.max_model_len // 2)]
    await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)
    if (await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)).cached_tokens == 0:
        raise NotApplicable("the engine reports no cached tokens")
    salted = await bench.run(token_ids=prompt, cache_salt="b", max_tokens=1)
    require(salted.cached_tokens == 0, f"another salt found {salted.cached_tokens} cached tokens")
    await bench.engine.reset_prefix_cache()
    after = await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)
    require(after.cached_tokens == 0, f"{after.cached_tokens} tokens are cached after a reset")


def _http(bench: Bench) -> HttpEngine:
    if not isinstance(bench.engine, HttpEngine):
        raise NotApplicable("not an HTTP engine")
    return bench.engine


@check
async def http_unknown_fields_are_refused(bench: Bench) -> None:
    """A key that the server does not know is a 4xx that names it, at the top and inside sampling_params."""
    http = _http(bench)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "no_such_key": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1, "no_such_key": 1}}),
        ("/v1/chat/completions", {**chat, "no_such_key": 1}),
        ("/v1/completions", {"prompt": [1], "no_such_key": 1}),
    ]
    for path, body in bodies:
        try:
            await http.call("POST", path, body)
        except RequestError as error:
            require("no_such_key" in str(error), f"{path}: the error does not name the key: {error}")
        else:
            raise CheckFailed(f"{path} accepted an unknown key")


@check
async def http_n_is_seeds_in_order(bench: Bench) -> None:
    """``n`` choices of seed s are the samples of seeds s, s+1, ..."""
    http = _http(bench)
    params = {"max_tokens": 6, "n": 3, "seed": 20, "ignore_eos": True, "logprobs": 0}
    answer = await http.call(
        "POST", "/inference/v1/generate", {"token_ids": list(bench.prompt), "sampling_params": params}
    )
    choices = sorted(answer["choices"], key=lambda c: c["index"])
    require([c["index"] for c in choices] == [0, 1, 2], "the choices are not numbered 0, 1, 2")
    require(len({tuple(c["token_ids"]) for c in choices}) > 1, "three samples are all the same")
    # Side by side as the choices were, so that a low-precision engine rounds alike.
    singles = await bench.engine.generate_many([bench.request(seed=20 + i, max_tokens=6) for i in range(3)])
    for i, (choice, single) in enumerate(zip(choices, singles, strict=True)):
        require(tuple(choice["token_ids"]) == single.token_ids, f"choice {i} is not the sample of seed {20 + i}")


@check
async def http_chat_returns_token_ids(bench: Bench) -> None:
    """Chat completions hand out the prompt ids, the sampled ids and their log-probs."""
    http = _http(bench)
    if bench.tokenizer is None:
        raise NotApplicable("no tokenizer")
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "seed": 2,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = await http.call("POST", "/v1/chat/completions", body)
    choice = answer["choices"][0]
    require(len(choice["token_ids"]) == 5, f"choice has token_ids {choice['token_ids']}")
    require(len(choice["logprobs"]["content"]) == 5, "log-probs and ids differ in number")
    same = await bench.run(token_ids=tuple(answer["prompt_token_ids"]), seed=2, max_tokens=5)
    require(list(same.token_ids) == choice["token_ids"], "chat and token endpoints sample different tokens")
