"""Does the replica hold what was sent?  Two kinds of evidence.

Owns: comparing checksums read back with those of the export, and probing log-probs of fixed tokens.
Refuses: taking an answer of "ok" for evidence; a comparison that could not have failed.

Checksums decide when the engine reports ours (``slipstream.inference.checksum``).  Anything else is *unknown*:
another engine's hash, a missing name, or the SHA-256 of empty bytes that some engines answer for weights they have
repacked.  Unknown is settled by a probe: the replica scores fixed tokens, and the trainer says what they must score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.errors import ContractError
from slipstream.inference.checksum import parse_checksum
from slipstream.inference.types import Engine, GenerateRequest
from slipstream.trajectory import SamplingSpec

Verdict = Literal["ok", "failed", "unknown"]
_SHOWN = 3


@dataclass(frozen=True)
class Verification:
    """``kind`` is the evidence used; ``detail`` names what differs, or what could not be told."""

    kind: Literal["checksum", "probe", "none"]
    verdict: Verdict
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"kind": self.kind, "verdict": self.verdict, "detail": self.detail}


@dataclass(frozen=True)
class Probe:
    """Fixed tokens and what the published weights must score them.

    ``expected[i]`` holds the temperature-1 log-probs of ``sequences[i][1:]``.  ``tolerance`` is the largest allowed
    difference: it must exceed the numerical gap between trainer and engine, and be smaller than what an update
    changes, else the probe cannot tell old weights from new ones.
    """

    sequences: Sequence[Sequence[int]]
    expected: Sequence[Sequence[float]] = field(repr=False)
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if not self.sequences or len(self.sequences) != len(self.expected):
            raise ContractError(f"probe: {len(self.expected)} expectations for {len(self.sequences)} sequences")
        for ids, values in zip(self.sequences, self.expected, strict=True):
            if len(ids) < 2 or len(values) != len(ids) - 1:
                raise ContractError(f"probe: {len(values)} log-probs for {len(ids)} tokens, want one less and >= 1")

    async def gap(self, engine: Engine, label: str) -> float:
        """Largest absolute difference between expected and engine log-probs, in nats."""
        worst = 0.0
        for i, (ids, expected) in enumerate(zip(self.sequences, self.expected, strict=True)):
            request = GenerateRequest(
                f"probe-{label}-{i}",
                tuple(ids),
                # Nothing is sampled for its own sake.  A vLLM that returns kept sets refuses greedy requests.
                sampling=SamplingSpec(temperature=1.0, top_k=1),
                max_tokens=1,
                prompt_logprobs=True,
                # A salt of its own: nothing that other weights computed may be reused.
                cache_salt=f"probe-{label}",
            )
            result = await engine.generate(request)
            got = result.prompt_logprobs
            if got is None or len(got) != len(ids):
                raise ContractError("probe: the engine did not return the prompt's log-probs")
            for want, have in zip(expected, got[1:], strict=True):
                worst = max(worst, abs(want - have) if have is not None else float("inf"))
        return worst

    async def verify(self, engine: Engine, label: str) -> Verification:
        """Run the probe."""
        gap = await self.gap(engine, label)
        # Written so that a NaN fails.
        verdict: Verdict = "ok" if gap <= self.tolerance else "failed"
        return Verification("probe", verdict, f"largest log-prob gap {gap:.4g}, tolerance {self.tolerance:g}")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def compare_checksums(sent: Mapping[str, str], held: Mapping[str, str]) -> Verification:
    """The verdict on checksums read back.

    ``failed`` when a name that both sides know differs, or when the engine holds a parameter that was not sent and is
    not a tied copy of one that was (it would keep old weights); ``unknown`` when any sent name cannot be compared.
    """
    known = {name: value for name, value in held.items() if parse_checksum(value) is not None}
    wrong = [name for name in sent if name in known and known[name] != sent[name]]
    if wrong:
        name = wrong[0]
        return Verification(
            "checksum",
            "failed",
            f"{len(wrong)} of {len(sent)} parameters differ ({_list(wrong)}): "
            f"sent {sent[name]}, the replica holds {known[name]}",
        )
    values = set(sent.values())
    stale = [name for name, value in known.items() if name not in sent and value not in values]
    if stale:
        return Verification("checksum", "failed", f"parameters held but not sent: {_list(stale)}")
    missing = [name for name in sent if name not in known]
    if missing:
        return Verification(
            "checksum", "unknown", f"no comparable checksum for {len(missing)} of {len(sent)} names ({_list(missing)})"
        )
    return Verification("checksum", "ok", f"{len(sent)} parameters")
