"""Conformance checks of the control plane: pause modes, abort, in-place updates, checksums, metrics.

Owns: what running, frozen and queued requests must do around an interruption.
Refuses: what a single answer contains (``conformance_data``).
"""

from __future__ import annotations

import asyncio
import contextlib

from slipstream.errors import InferenceError
from slipstream.inference.checksum import parse_checksum, tensor_checksum
from slipstream.inference.client import HttpEngine
from slipstream.inference.conformance_bench import Bench, CheckFailed, NotApplicable, check, check_form, require
from slipstream.inference.types import GenerateRequest, GenerateResult, PauseMode


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
        result = await _ended(bench, task, "pause(abort)")
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
    result = await _ended(bench, task, "pause(wait)")
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
        result = await _ended(bench, task, "resume")
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
        result = await _ended(bench, task, "resume")
        require(len(result.token_ids) == 8, f"a request queued under pause({mode}) gave {result}")


async def _still_waiting(task: asyncio.Task[GenerateResult], message: str) -> None:
    done, _ = await asyncio.wait({task}, timeout=0.2)
    require(not done, message)


async def _ended(bench: Bench, task: asyncio.Task[GenerateResult], after: str) -> GenerateResult:
    done, _ = await asyncio.wait({task}, timeout=bench.patience)
    if not done:
        task.cancel()
        raise CheckFailed(f"the request did not end within {bench.patience:g} s of {after}")
    return task.result()


@check
async def abort_by_id(bench: Bench) -> None:
    """``abort`` ends the named request and no other."""
    for delay in _DELAYS:
        request, other = bench.long(), bench.request(max_tokens=32)
        task, kept = await _start(bench, request, 0.0), await _start(bench, other, delay)
        await bench.engine.abort([request.request_id])
        result = await _ended(bench, task, "abort")
        check_form(request, result)
        require(len((await _ended(bench, kept, "abort")).token_ids) == 32, "abort ended another request too")
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
        result = await _ended(bench, task, "resume")
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
    await bench.engine.finish_weight_update(before)
    raise CheckFailed("start_weight_update was accepted while running")


@check
async def unknown_parameter_is_refused(bench: Bench) -> None:
    """A chunk with a name the model does not have is an error that names it."""
    if bench.weights is None:
        raise NotApplicable("no weights were given to send")
    name = "no_such_parameter"
    await bench.engine.pause("abort")
    await bench.engine.start_weight_update()
    try:
        # An engine may look at names when it is sent them, or when it is told that they are all.
        await bench.engine.update_weights({name: next(iter(bench.weights.values()))})
        await bench.engine.finish_weight_update("conformance/1/0")
    except InferenceError as error:
        require(name in str(error), f"the error does not name {name}: {error}")
    else:
        raise CheckFailed("an unknown parameter was accepted")
    finally:
        await _restore(bench, "conformance/1/1")


async def _restore(bench: Bench, version: str) -> None:
    """Sound weights again, whether the failed update is still open or not."""
    assert bench.weights is not None
    if isinstance(bench.engine, HttpEngine):
        # Ends an open update of an engine that takes weights by our plug-in; others know no such message.
        with contextlib.suppress(InferenceError):
            await bench.engine.transfer({"kind": "abandon"})
    with contextlib.suppress(InferenceError):
        await bench.engine.start_weight_update()
    await bench.engine.update_weights(bench.weights)
    await bench.engine.finish_weight_update(version)


@check
async def checksum_reads_back(bench: Bench) -> None:
    """The checksum is of what the model holds: it follows the weights sent."""
    if bench.weights is None:
        raise NotApplicable("no weights were given to send")
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
