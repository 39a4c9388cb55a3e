"""What conformance checks are made of: the bench they work at, and their registry.

Owns: ``Bench`` (an engine, a prompt, requests with fresh ids), the form every answer must have, ``check``.
Refuses: any single check (``conformance_data``, ``conformance_control``) and running them (``conformance``).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from slipstream.inference.types import Engine, GenerateRequest, GenerateResult
from slipstream.trajectory import Span


class CheckFailed(Exception):
    """The engine broke the contract; the message says how."""


class NotApplicable(Exception):
    """The check cannot say anything about this engine."""


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
    long_tokens: int = 400
    """Length of a request that is to be interrupted."""
    patience: float = 30.0
    """Seconds within which a request must end once nothing holds it back."""
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
        return self.request(max_tokens=min(self.long_tokens, self.max_model_len - len(self.prompt) - 1), **fields)

    async def score(
        self, ids: Sequence[int], *, after: Sequence[int] | None = None, cache_salt: str | None = None
    ) -> list[float]:
        """Temperature-1 log-probs of ``ids`` after the prompt (or ``after``), read from the prompt log-probs."""
        prompt = tuple(after if after is not None else self.prompt)
        result = await self.run(token_ids=(*prompt, *ids), max_tokens=1, prompt_logprobs=True, cache_salt=cache_salt)
        values = result.prompt_logprobs
        require(values is not None, "prompt_logprobs were asked for and not returned")
        tail = cast("tuple[float | None, ...]", values)[len(prompt) :]
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
