"""What is known of unfinished work: completed turns and finished members, enough to go on after a kill.

Owns: ``TurnRecord``, ``MemberProgress``.  Refuses: writing them down (the trainer's journal does).

A turn is *completed* when its tokens were sampled and its environment answered.  An episode that goes on from records
takes the sampled spans as they are (no finished token is sampled again) and brings its environment back: by
``restore(snapshot)`` when the environment gave snapshots, else by repeating the actions and comparing what it answers.

>>> MemberProgress().tokens
0
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ContractError
from slipstream.rollout.environment import StepResult
from slipstream.trajectory import Failed, Missing, Span, Trajectory, WeightVersion


@dataclass(frozen=True)
class TurnRecord:
    """One completed turn.

    ``context`` is ``context_digest`` of the tokens that the turn continued; ``snapshot`` is the environment's state
    after the turn, as JSON, or None.
    """

    turn: int
    context: str
    spans: tuple[Span, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    llm_seconds: float
    env_seconds: float
    step: StepResult
    snapshot: Any = None

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(span) for span in self.spans)


@dataclass(frozen=True)
class MemberProgress:
    """One sample of a group: its ``attempt`` with the turns that are completed, and its end if it is finished."""

    attempt: int = 0
    turns: tuple[TurnRecord, ...] = ()
    finished: Trajectory | None = None

    @property
    def tokens(self) -> int:
        """Sampled tokens that are kept."""
        return self.finished.sampled_tokens if self.finished is not None else sum(t.tokens for t in self.turns)

    def sampled_by(self, newest: int) -> MemberProgress | None:
        """What is left when only weights up to publish counter ``newest`` belong to the run's lineage, or None.

        A failure is not kept: the run may have been stopped to mend what failed, so the sample is tried again.
        """
        if self.finished is not None and isinstance(self.finished.outcome, Failed):
            return None
        if self.finished is not None and _within(self.finished.sampled_spans(), newest):
            return self
        kept = 0
        while kept < len(self.turns) and _within(self.turns[kept].spans, newest):
            kept += 1
        return MemberProgress(self.attempt, self.turns[:kept]) if kept else None


GroupProgress = Mapping[int, MemberProgress]
"""By sample index."""


def context_digest(ids: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()


def _within(spans: Iterable[Span], newest: int) -> bool:
    """Whether every token is known to come from weights up to ``newest``."""
    for span in spans:
        if span.versions is None or isinstance(span.versions, Missing):
            return False
        try:
            counters = [WeightVersion.parse(run.version).counter for run in span.versions]
        except ContractError:  # a foreign version says nothing about this run's lineage
            return False
        if max(counters) > newest:
            return False
    return True
