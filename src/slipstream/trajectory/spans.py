"""Spans: what every token is, where it came from, and which weights sampled it.

Owns: ``Span``, ``SamplingSpec``, ``VersionRun``, ``SideChannel`` and their validation.
Refuses: masks.  Whether a token is trained is *derived* from its span's origin.

>>> span = Span.sampled([5, 6], [-0.1, -0.7], [VersionRun("policy/0/3", 0, 2)], SamplingSpec())
>>> len(span), span.trained
(2, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from slipstream.errors import ContractError
from slipstream.trajectory.outcome import Missing


class Origin(StrEnum):
    """Where the tokens of a span came from."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVATION = "observation"
    SYNTHETIC = "synthetic"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The distribution a token was drawn from; the scorer applies the same one.

    ``top_k`` of -1 and ``top_p`` of 1 mean no truncation.  ``temperature`` 0 is greedy and is for
    evaluation only: nothing sampled greedily can be trained on by a ratio loss.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            (math.isfinite(self.temperature) and self.temperature >= 0, "temperature must be finite and >= 0"),
            (0 < self.top_p <= 1, "top_p must lie in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k must be -1 (off) or >= 1"),
            (0 <= self.min_p < 1, "min_p must lie in [0, 1)"),
            (self.repetition_penalty > 0, "repetition_penalty must be > 0"),
        )
        for holds, rule in rules:
            if not holds:
                raise ContractError(f"sampling: {rule}; got {self}")

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True when logits depend on the tokens seen before, which no trainer replays."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def cut(self) -> bool:
        """True when the sampler's support is smaller than the vocabulary; the kept sets say which ids it holds."""
        return not self.greedy and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    @property
    def truncated(self) -> bool:
        """True when tokens come from another distribution than the model's at this temperature: cut or penalised."""
        return self.penalised or self.top_p < 1 or self.top_k != -1 or self.min_p > 0


KEPT_SETS = "kept_sets"
"""Side channel of SAMPLED tokens: per token the ids that a truncating sampler kept, int32, ascending."""

ROUTED_EXPERTS = "routed_experts"
"""Side channel of a row's tokens, ``(tokens, layers, top-k)`` int16: the experts of the input that *predicts* each
token (the token before it), as the engine chose them; -1 where the engine did not say."""

TOP_LOGPROBS = "top_logprobs"
"""Side channel of SAMPLED tokens: per token ``(ids, log-probs)`` of the tokens that the sampler held most likely in its
place, most likely first; log-probs are of the distribution really sampled."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""Side channel of SAMPLED tokens: the log-prob that a teacher gives each of them, in nats."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Tokens ``[start, end)`` of a span were sampled by ``version``, as the *server* reported it."""

    version: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not self.version:
            raise ContractError("a version run needs a version name")
        if not 0 <= self.start < self.end:
            raise ContractError(f"version run [{self.start}, {self.end}) is empty or negative")


@dataclass(frozen=True, slots=True)
class SideChannel:
    """Named data that travels with tokens, a span or a row and is sliced by the same code as ids."""

    name: str
    align: Literal["token", "span", "row"]
    values: Any
    """A sequence (one entry per token when ``align == "token"``), any value otherwise, or ``Missing``."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens with one origin.

    Lengths of ``token_ids`` and ``logprobs`` are equal, and version runs cover the tokens exactly,
    because the constructor refuses anything else.
    """

    origin: Origin
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | Missing | None = None
    versions: tuple[VersionRun, ...] | Missing | None = None
    sampling: SamplingSpec | None = None
    turn: int | None = None
    side: Mapping[str, SideChannel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.origin, Origin):
            raise ContractError(f"origin {self.origin!r} is not an Origin")
        if any(type(t) is not int or t < 0 for t in self.token_ids):
            raise ContractError(f"{self.origin} span: token ids must be non-negative ints")
        if self.origin is Origin.SAMPLED:
            self._check_sampled()
        elif self.logprobs is not None or self.versions is not None or self.sampling is not None:
            raise ContractError(
                f"{self.origin} span: log-probs, versions and sampling are forbidden; only SAMPLED tokens have them"
            )
        for name, channel in self.side.items():
            if name != channel.name:
                raise ContractError(f"side channel stored as {name!r} calls itself {channel.name!r}")
            sized = channel.align == "token" and not isinstance(channel.values, Missing)
            if sized and len(channel.values) != len(self.token_ids):
                raise ContractError(
                    f"side channel {name!r} has {len(channel.values)} entries for {len(self.token_ids)} tokens"
                )

    def _check_sampled(self) -> None:
        n = len(self.token_ids)
        if n == 0:
            raise ContractError("SAMPLED span: empty; a turn without tokens has no span")
        if self.sampling is None:
            raise ContractError("SAMPLED span: the sampling spec is required")
        if self.logprobs is None:
            raise ContractError("SAMPLED span: log-probs are required (or Missing with a reason)")
        if self.versions is None:
            raise ContractError("SAMPLED span: version runs are required (or Missing with a reason)")
        if not isinstance(self.logprobs, Missing):
            if len(self.logprobs) != n:
                raise ContractError(f"SAMPLED span: {len(self.logprobs)} log-probs for {n} tokens")
            for i, value in enumerate(self.logprobs):
                if not math.isfinite(value) or value > 0:
                    raise ContractError(f"SAMPLED span: log-prob {value!r} at {i} must be finite and <= 0")
        if not isinstance(self.versions, Missing):
            at = 0
            for run in self.versions:
                if run.start != at:
                    raise ContractError(f"SAMPLED span: version runs leave a gap or overlap at token {at}")
                at = run.end
            if at != n:
                raise ContractError(f"SAMPLED span: version runs cover {at} of {n} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> bool:
        """True for origins whose tokens a loss may touch (SAMPLED by RL, TARGET by likelihood losses)."""
        return self.origin in (Origin.SAMPLED, Origin.TARGET)

    @classmethod
    def prompt(cls, ids: Iterable[int]) -> Span:
        """A PROMPT span."""
        return cls(Origin.PROMPT, tuple(ids))

    @classmethod
    def observation(cls, ids: Iterable[int], turn: int | None = None) -> Span:
        """An OBSERVATION span: tool or environment output, template glue, re-rendered history."""
        return cls(Origin.OBSERVATION, tuple(ids), turn=turn)

    @classmethod
    def synthetic(cls, ids: Iterable[int], turn: int | None = None) -> Span:
        """A SYNTHETIC span: tokens that the library itself added."""
        return cls(Origin.SYNTHETIC, tuple(ids), turn=turn)

    @classmethod
    def target(cls, ids: Iterable[int], turn: int | None = None) -> Span:
        """A TARGET span: given text to learn."""
        return cls(Origin.TARGET, tuple(ids), turn=turn)

    @classmethod
    def sampled(
        cls,
        ids: Iterable[int],
        logprobs: Iterable[float] | Missing,
        versions: Sequence[VersionRun] | Missing,
        sampling: SamplingSpec,
        turn: int | None = None,
        side: Mapping[str, SideChannel] | None = None,
    ) -> Span:
        """A SAMPLED span, exactly as the engine returned it."""
        return cls(
            Origin.SAMPLED,
            tuple(ids),
            logprobs if isinstance(logprobs, Missing) else tuple(float(x) for x in logprobs),
            versions if isinstance(versions, Missing) else tuple(versions),
            sampling,
            turn,
            side or {},
        )
