"""The conformance suite of the inference contract.

Owns: named checks that any ``Engine`` must pass, in process or over HTTP, and ``run_conformance``.
Refuses: knowing which engine it tests; a check that does not apply says so (``skipped``), it does not pass.

>>> import asyncio
>>> from slipstream.inference.fake import FakeEngine
>>> results = asyncio.run(run_conformance(FakeEngine(300, scale=1.0), None, only=["length"]))
>>> [(r.name, r.status) for r in results]
[('length', 'passed')]

A check is an async function of a ``Bench`` that raises ``CheckFailed`` or ``NotApplicable``.  Each runs under a
deadline, and the engine is resumed after each, so that one failure does not hide the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.types import Engine, GenerateRequest, GenerateResult, PauseMode
from slipstream.trajectory import SamplingSpec, Span

Status = Literal["passed", "failed", "skipped"]


class CheckFailed(Exception):
    """The engine broke the contract; the message says how."""


class NotApplicable(Exception):
    """The check cannot say anything about this engine."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    status: Status
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """True unless the check failed; a skipped check is not a failure."""
        return self.status != "failed"


def require(holds: object, message: str) -> None:
    """Raise ``CheckFailed`` unless ``holds``."""
    if not holds:
        raise CheckFailed(message)


@dataclass
class Bench:
    """What a check works with."""

    engine: Engine
    tokenizer: Any
    prompt: tuple[int, ...]
    weights: Mapping[str, Any] | None
    tolerance: float
    max_model_len: int
    eos: tuple[int, ...]
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def request(self, **fields: Any) -> GenerateRequest:
        """A request with a fresh id; 8 tokens, seed 1, no end of sequence, unless ``fields`` say otherwise."""
        base: dict[str, Any] = {"token_ids": self.prompt, "max_tokens": 8, "seed": 1, "ignore_eos": True, **fields}
        return GenerateRequest(f"conformance-{id(self):x}-{next(self._names)}", **base)

    async def run(self, **fields: Any) -> GenerateResult:
        """Generate once and hold the answer to the contract's form."""
        request = self.request(**fields)
        result = await self.engine.generate(request)
        check_form(request, result)
        return result

    def long(self, **fields: Any) -> GenerateRequest:
        """A request that runs for a while."""
        return self.request(max_tokens=min(400, self.max_model_len - len(self.prompt) - 1), **fields)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Temperature-1 log-probs of ``ids`` after the prompt, read from the prompt log-probs."""
        result = await self.run(token_ids=(*self.prompt, *ids), max_tokens=1, prompt_logprobs=True)
        values = result.prompt_logprobs
        require(values is not None, "prompt_logprobs were asked for and not returned")
        tail = cast("tuple[float | None, ...]", values)[len(self.prompt) :]
        require(all(v is not None for v in tail), "prompt_logprobs are missing after the first token")
        return [float(v) for v in tail if v is not None]

    async def update(self, version: str) -> None:
        """One in-place update of a paused engine: the given weights, or none (a new name only)."""
        await self.engine.start_weight_update()
        if self.weights is not None:
            await self.engine.update_weights(self.weights)
        await self.engine.finish_weight_update(version)


def check_form(request: GenerateRequest, result: GenerateResult) -> None:
    """What holds of every answer: lengths, signs, exact version cover, reasons."""
    require(result.request_id == request.request_id, "the answer carries another request's id")
    require(len(result.logprobs) == len(result.token_ids), "log-probs and tokens differ in number")
    if result.token_ids:
        # The trajectory contract is the judge: finite log-probs <= 0, runs that cover every token exactly.
        Span.sampled(result.token_ids, result.logprobs, result.versions, request.sampling)
    require(len(result.token_ids) <= request.max_tokens, "more than max_tokens tokens")
    if result.finish_reason != "stop":
        require(result.stop_reason is None, f"stop_reason {result.stop_reason!r} with {result.finish_reason}")


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS[getattr(function, "__name__", str(function))] = function
    return function


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
    room = min(200, bench.max_model_len - len(bench.prompt) - 10)
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
    """Reusing a session's KV does not change what is sampled."""
    first = await bench.run(session_id="conformance", seed=3)
    second = (*bench.prompt, *first.token_ids, *bench.prompt[:3])
    with_session = await bench.run(token_ids=second, session_id="conformance", seed=4)
    without = await bench.run(token_ids=second, cache_salt="elsewhere", seed=4)
    require(with_session.token_ids == without.token_ids, "a session's second turn samples other tokens")
    gap = max(abs(a - b) for a, b in zip(with_session.logprobs, without.logprobs, strict=True))
    require(gap <= bench.tolerance, f"a session's second turn has log-probs off by {gap:.4f}")


@check
async def prefix_cache_resets(bench: Bench) -> None:
    """A repeated prompt is cached; after a reset, and under another salt, it is not."""
    prompt = (bench.prompt * 64)[: min(96, bench.max_model_len // 2)]
    await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)
    if (await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)).cached_tokens == 0:
        raise NotApplicable("the engine reports no cached tokens")
    salted = await bench.run(token_ids=prompt, cache_salt="b", max_tokens=1)
    require(salted.cached_tokens == 0, f"another salt found {salted.cached_tokens} cached tokens")
    await bench.engine.reset_prefix_cache()
    after = await bench.run(token_ids=prompt, cache_salt="a", max_tokens=1)
    require(after.cached_tokens == 0, f"{after.cached_tokens} tokens are cached after a reset")


async def _start(bench: Bench, request: GenerateRequest, delay: float) -> asyncio.Task[GenerateResult]:
    task = asyncio.create_task(bench.engine.generate(request))
    await asyncio.sleep(delay)
    return task


# How long a request runs before it is interrupted: fast engines need short delays, slow ones long ones.
_DELAYS = (0.1, 0.03, 0.01, 0.003, 0.3, 1.0)


@check
async def pause_abort_ends_running(bench: Bench) -> None:
    """``abort`` ends running requests and returns the tokens made so far."""
    for delay in _DELAYS:
        request = bench.long()
        task = await _start(bench, request, delay)
        await bench.engine.pause("abort")
        result = await _ended(task, "pause(abort)")
        await bench.engine.resume()
        check_form(request, result)
        if result.finish_reason == "abort":
            return
    raise CheckFailed("pause(abort) never ended a running request")


@check
async def pause_wait_lets_running_finish(bench: Bench) -> None:
    """``wait`` returns when running requests have finished in full."""
    request = bench.request(max_tokens=min(64, bench.max_model_len - len(bench.prompt) - 1))
    task = await _start(bench, request, 0.05)
    await bench.engine.pause("wait")
    result = await _ended(task, "pause(wait)")
    require(len(result.token_ids) == request.max_tokens, f"pause(wait) cut the request at {len(result.token_ids)}")


@check
async def pause_keep_freezes(bench: Bench) -> None:
    """``keep`` freezes running requests; they finish in full after ``resume``."""
    for delay in _DELAYS:
        request = bench.long()
        task = await _start(bench, request, delay)
        await bench.engine.pause("keep")
        frozen = not task.done()
        if frozen:
            await _still_waiting(task, "a running request went on under pause(keep)")
        await bench.engine.resume()
        result = await _ended(task, "resume")
        require(len(result.token_ids) == request.max_tokens, "the frozen request did not finish in full")
        if frozen:
            return
    raise CheckFailed("every request finished before pause(keep) could freeze it")


@check
async def new_requests_queue_while_paused(bench: Bench) -> None:
    """In every pause mode a new request waits for ``resume`` and then finishes."""
    modes: tuple[PauseMode, ...] = ("abort", "wait", "keep")
    for mode in modes:
        await bench.engine.pause(mode)
        require(await bench.engine.is_paused(), f"is_paused is false after pause({mode})")
        task = await _start(bench, bench.request(), 0.0)
        await _still_waiting(task, f"a new request was answered under pause({mode})")
        await bench.engine.resume()
        require(not await bench.engine.is_paused(), "is_paused is true after resume")
        result = await _ended(task, "resume")
        require(len(result.token_ids) == 8, f"a request queued under pause({mode}) gave {result}")


async def _still_waiting(task: asyncio.Task[GenerateResult], message: str) -> None:
    done, _ = await asyncio.wait({task}, timeout=0.2)
    require(not done, message)


async def _ended(task: asyncio.Task[GenerateResult], after: str) -> GenerateResult:
    done, _ = await asyncio.wait({task}, timeout=30)
    if not done:
        task.cancel()
        raise CheckFailed(f"the request did not end within 30 s of {after}")
    return task.result()


@check
async def abort_by_id(bench: Bench) -> None:
    """``abort`` ends the named request and no other."""
    for delay in _DELAYS:
        request, other = bench.long(), bench.request(max_tokens=32)
        task, kept = await _start(bench, request, 0.0), await _start(bench, other, delay)
        await bench.engine.abort([request.request_id])
        result = await _ended(task, "abort")
        check_form(request, result)
        require(len((await _ended(kept, "abort")).token_ids) == 32, "abort ended another request too")
        if result.finish_reason == "abort":
            return
    raise CheckFailed("abort never ended the named request")


@check
async def versions_cover_an_update(bench: Bench) -> None:
    """A request frozen across an update reports two runs, each token under the weights that made it."""
    old = await bench.engine.weight_version()
    for attempt, delay in enumerate(_DELAYS):
        new = f"conformance/0/{attempt + 1}"
        request = bench.long(seed=None)
        task = await _start(bench, request, delay)
        await bench.engine.pause("keep")
        await bench.update(new)
        require(await bench.engine.weight_version() == new, "weight_version did not follow the update")
        await bench.engine.resume()
        result = await _ended(task, "resume")
        check_form(request, result)
        names = [run.version for run in result.versions]
        require(set(names) <= {old, new}, f"versions {names}, want {old} and {new}")
        if names == [old, new]:
            after = await bench.run()
            require([r.version for r in after.versions] == [new], "a new request reports an old version")
            return
        old = new
    raise CheckFailed("no request spanned an update: versions never showed two runs")


@check
async def update_out_of_order_is_refused(bench: Bench) -> None:
    """An update of a running engine is an error and changes nothing."""
    before = await bench.engine.weight_version()
    try:
        await bench.engine.start_weight_update()
    except InferenceError:
        require(await bench.engine.weight_version() == before, "a refused update changed the version")
        await bench.run()
        return
    raise CheckFailed("start_weight_update was accepted while running")


@check
async def unknown_parameter_is_refused(bench: Bench) -> None:
    """A chunk with a name the model does not have is an error that names it."""
    if bench.weights is None:
        raise NotApplicable("no weights were given to send")
    name = "no.such.parameter"
    await bench.engine.pause("abort")
    await bench.engine.start_weight_update()
    try:
        await bench.engine.update_weights({name: next(iter(bench.weights.values()))})
    except InferenceError as error:
        require(name in str(error), f"the error does not name {name}: {error}")
    else:
        raise CheckFailed("an unknown parameter was accepted")
    finally:
        await bench.engine.update_weights(bench.weights)
        await bench.engine.finish_weight_update("conformance/1/0")


@check
async def checksum_reads_back(bench: Bench) -> None:
    """The checksum is of what the model holds: it follows the weights sent."""
    if bench.weights is None:
        raise NotApplicable("no weights were given to send")
    from slipstream.inference.checksum import parse_checksum, tensor_checksum

    await bench.engine.pause("abort")
    await bench.update("conformance/2/0")
    held = await bench.engine.checksum()
    if not any(parse_checksum(value) for value in held.values()):
        raise NotApplicable("the engine reports another kind of checksum")
    wrong = [name for name, tensor in bench.weights.items() if held.get(name) != tensor_checksum(tensor)]
    require(not wrong, f"the engine does not hold what was sent: {wrong[:5]}")


@check
async def metrics_count(bench: Bench) -> None:
    """Counters grow with the work done."""
    name = "generation_tokens_total"
    before = await bench.engine.metrics()
    await bench.run()
    after = await bench.engine.metrics()
    require(name in after, f"no metric {name}; there are {sorted(after)}")
    require(after[name] - before.get(name, 0) >= 8, f"{name} grew by {after[name] - before.get(name, 0)}, want 8")


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
    for i, choice in enumerate(choices):
        single = await bench.run(seed=20 + i, max_tokens=6)
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


async def _one(name: str, bench: Bench, deadline: float) -> CheckResult:
    started = time.perf_counter()
    status: Status = "failed"
    try:
        async with asyncio.timeout(deadline):
            await CHECKS[name](bench)
        status, detail = "passed", ""
    except NotApplicable as reason:
        status, detail = "skipped", str(reason)
    except CheckFailed as failure:
        detail = str(failure)
    except TimeoutError:
        detail = f"not done within {deadline:g} s"
    except Exception as error:  # noqa: BLE001 - the suite's fault boundary: what an engine raises is a finding
        detail = f"{type(error).__name__}: {error}"
    with contextlib.suppress(InferenceError):
        async with asyncio.timeout(deadline):
            if await bench.engine.is_paused():
                await bench.engine.resume()
            await bench.engine.abort(None)
    return CheckResult(name, status, detail, time.perf_counter() - started)


async def run_conformance(
    engine: Engine,
    tokenizer: Any,
    *,
    prompt: Sequence[int] | None = None,
    weights: Mapping[str, Any] | None = None,
    tolerance: float = 0.05,
    deadline: float = 60.0,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
) -> list[CheckResult]:
    """Run the checks against a started, running engine, one after another.

    Args:
        engine: the engine.  Its weight version is changed; its weights only to ``weights``.
        tokenizer: its tokenizer, or None to leave out the checks on text.
        prompt: token ids to continue; default: an encoded sentence, or small ids without a tokenizer.
        weights: a full set ``{checkpoint name: tensor}`` to send in updates, in the engine's dtype; None sends none.
        tolerance: largest allowed log-prob difference (bfloat16 engines need about 0.05).
        deadline: seconds for one check.
        only: names of the checks to run.
        skip: names to leave out (an engine's known deviations).
    """
    unknown = sorted({*(only or ()), *skip} - set(CHECKS))
    if unknown:
        raise RequestError(f"no such conformance check: {', '.join(unknown)}")
    if prompt is None:
        text = "The quick brown fox jumps over the lazy dog."
        prompt = tokenizer.encode(text, add_special_tokens=False) if tokenizer is not None else range(1, 13)
    info = await engine.info()
    bench = Bench(engine, tokenizer, tuple(prompt), weights, tolerance, info.max_model_len, info.eos_token_ids)
    names = [n for n in CHECKS if (only is None or n in only) and n not in skip]
    return [await _one(name, bench, deadline) for name in names]
