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
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import InferenceError, RequestError
from slipstream.inference import conformance_control, conformance_data
from slipstream.inference.conformance_bench import CHECKS, Bench, CheckFailed, NotApplicable
from slipstream.inference.types import Engine

__all__ = ["CHECKS", "CheckResult", "run_conformance"]

# Importing the two modules registers their checks.
_MODULES = (conformance_data, conformance_control)

Status = Literal["passed", "failed", "skipped"]


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
    long_tokens: int = 400,
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
        long_tokens: length of requests that are to be interrupted; slow engines want fewer.
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
    bench = Bench(
        engine,
        tokenizer,
        tuple(prompt),
        weights,
        tolerance,
        info.max_model_len,
        info.eos_token_ids,
        long_tokens=long_tokens,
        patience=deadline / 2,
    )
    names = [n for n in CHECKS if (only is None or n in only) and n not in skip]
    return [await _one(name, bench, deadline) for name in names]
