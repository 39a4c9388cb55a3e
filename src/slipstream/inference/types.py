"""The inference contract's types: what every engine answers, in process or over HTTP.

Owns: requests, results, the ``Engine`` protocol (data plane + control plane), finish reasons.
Refuses: text-to-ids for sampled tokens; knowing trainers or environments.

The wire form is the HTTP API of vLLM >= 0.32; field names here are the same.  An engine reports, for
each request, the tokens, the log-probabilities *of the distribution really sampled*, and version runs
that cover every token exactly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from slipstream.errors import ContractError
from slipstream.trajectory import SamplingSpec, VersionRun

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
TopLogprobs: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Ids and log-probs, most likely first."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One token-in, token-out request.

    ``session_id`` names the trajectory: turns of one session reuse the KV of their common prefix.
    ``group_id`` is a hint that several requests share a prompt (the engine may compute it once).
    ``seed`` keys the sampling noise: token ``i`` of the output is drawn with noise ``(seed, i)``.
    ``cache_salt`` separates prefix caches; ``min_tokens`` bans stops before that many tokens.
    ``kept_sets`` and ``routed_experts`` ask for what the trainer has to replay, ``top_logprobs`` for so many of the
    most likely tokens in every place; see ``GenerateResult``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingSpec = SamplingSpec()  # noqa: RUF009 - frozen, so sharing it is safe
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    model: str = "policy"
    session_id: str | None = None
    group_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    prompt_logprobs: bool = False
    kept_sets: bool = False
    routed_experts: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ContractError(f"request {self.request_id}: an empty prompt cannot be continued")
        if self.max_tokens < 1:
            raise ContractError(f"request {self.request_id}: max_tokens must be >= 1, got {self.max_tokens}")
        if self.top_logprobs < 0:
            raise ContractError(f"request {self.request_id}: top_logprobs must be >= 0, got {self.top_logprobs}")


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The engine's answer.

    ``token_ids`` keeps every generated token, also when ``text`` is cut at a stop string (the whole last
    token stays).  ``stop_reason`` is the stop string or stop token id that matched, else None.
    ``text`` is decoded without special tokens and cut before the stop string.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    versions: tuple[VersionRun, ...]
    text: str = ""
    cached_tokens: int = 0
    prompt_logprobs: tuple[float | None, ...] | None = None
    """At temperature 1, one per prompt token; None for the first, which nothing predicts."""
    finished: bool = True
    """False on the partial results of ``stream``, whose ``finish_reason`` means nothing yet."""
    kept_sets: tuple[npt.NDArray[np.int32], ...] | None = field(default=None, compare=False)
    """Per token, the ids that top-p, top-k and min-p left (vLLM's ``sampling_mask``); None when nothing was cut."""
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)
    """``(prompt + output - 1, layers, top-k)``: the experts of every token that was fed, prompt first.  A mixture of
    experts only, and only on the whole result."""
    top_logprobs: tuple[TopLogprobs, ...] | None = field(default=None, compare=False)
    """Per token, the ``GenerateRequest.top_logprobs`` most likely tokens in its place, of those that can be drawn at
    all; which ones does not depend on what was drawn.  None when nobody asked."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is: model name, context length, end-of-sequence ids."""

    model: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class KeepsSessions(Protocol):
    """What an engine also has when it keeps something for each session, such as a place on a replica."""

    async def finish_session(self, session_id: str) -> None:
        """No more requests of this session follow; raises nothing."""
        ...


@runtime_checkable
class Engine(Protocol):
    """One replica.  The embedded engine implements this directly; ``HttpEngine`` speaks it over HTTP.

    Lifecycle: construct -> ``start()`` -> any number of calls -> ``close()``.  Calls after ``close`` raise
    ``InferenceError``; requests in flight at ``close`` raise it too, they never hang.
    """

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def info(self) -> EngineInfo: ...

    async def health(self) -> bool: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Finish one request.  ``abort`` as finish reason returns the tokens made so far."""
        ...

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Finish several requests, admitted in order as one batch; results in the same order."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        """Partial results (new tokens only); ``versions`` is complete only on the last one."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort these requests, or all of them."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop decoding.  ``abort`` ends running requests, ``wait`` lets them finish, ``keep`` freezes them.

        New requests queue in every mode until ``resume``.
        """
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def start_weight_update(self) -> None:
        """Open an update; the engine must be paused."""
        ...

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        """Load one chunk.  In process: ``{name: tensor}`` in checkpoint names."""
        ...

    async def finish_weight_update(self, weight_version: str) -> None:
        """Commit the update under this version; tokens sampled later carry it."""
        ...

    async def weight_version(self) -> str: ...

    async def checksum(self) -> Mapping[str, str]:
        """Content hash per parameter as the model now holds it (verification reads this back)."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def metrics(self) -> Mapping[str, float]: ...
