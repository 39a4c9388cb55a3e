"""Rows, turns, trajectories and groups.

Owns: the one trajectory type and the facts derived from it (trained tokens, votes, returns).
Refuses: tensors, engines, environments.

A trajectory is a tree of rows.  A root row holds all of its tokens; a child row shares the first
``fork_point`` tokens of its parent and continues with its own spans.  A shared prefix is context in
the child, so each sampled token is trained in exactly one row: the one that owns its span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ContractError
from slipstream.trajectory.outcome import Missing, Outcome
from slipstream.trajectory.spans import Origin, Span

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """``(parent, fork point, spans)``; ``parent`` is an index into the trajectory's rows."""

    spans: tuple[Span, ...]
    parent: int | None = None
    fork_point: int = 0

    def __post_init__(self) -> None:
        if self.fork_point < 0 or (self.parent is None and self.fork_point != 0):
            raise ContractError(f"row: fork point {self.fork_point} needs a parent and must be >= 0")

    def __len__(self) -> int:
        return self.fork_point + sum(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward: which turn, which component, how much.

    Without a ``position`` (an index into the turn's sampled tokens) it lands on the turn's last sampled token.
    """

    turn: int
    value: float | Missing
    component: str = "reward"
    position: int | None = None

    def __post_init__(self) -> None:
        if self.turn < 0:
            raise ContractError(f"reward: turn {self.turn} must be >= 0")
        if not isinstance(self.value, Missing):
            if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
                raise ContractError(f"reward: value must be a number or Missing, got {type(self.value).__name__}")
            if not math.isfinite(self.value):
                raise ContractError(f"reward: value {self.value!r} is not finite; use Missing(reason)")


@dataclass(frozen=True, slots=True)
class Turn:
    """What happened in one turn, for people: text, timings, and why generation stopped.

    ``llm_seconds`` and ``env_seconds`` are wall-clock; ``finish_reason`` and ``stop_reason`` come from the engine.
    """

    index: int
    action: str
    observations: tuple[Message, ...] = ()
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    llm_seconds: float = 0.0
    env_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: rows of spans, turns, rewards and an outcome.

    ``scheduled_step`` is the step at which the group was admitted; it is never used in place of the
    per-token versions.  ``group_id`` names the group explicitly; nothing infers it from a position.
    """

    trajectory_id: str
    group_id: str
    prompt_uid: str
    sample: int
    attempt: int
    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    rewards: tuple[Reward, ...]
    outcome: Outcome
    scheduled_step: int
    pass_index: int = 0
    env_class: str = ""
    env_revision: str = ""
    data_source: str = ""
    prompt: tuple[Message, ...] = ()
    env_metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if row.parent is None:
                continue
            if not 0 <= row.parent < i:
                raise ContractError(f"{self.trajectory_id}: row {i} has parent {row.parent}; parents come first")
            if row.fork_point > len(self.rows[row.parent]):
                raise ContractError(
                    f"{self.trajectory_id}: row {i} forks at {row.fork_point}, "
                    f"past the {len(self.rows[row.parent])} tokens of row {row.parent}"
                )
        turns_with_tokens = {s.turn for s in self.sampled_spans()}
        if None in turns_with_tokens and self.rewards:
            raise ContractError(f"{self.trajectory_id}: sampled spans need their turn when rewards are given")
        for reward in self.rewards:
            if reward.turn not in turns_with_tokens and not isinstance(reward.value, Missing):
                raise ContractError(
                    f"{self.trajectory_id}: a reward for turn {reward.turn}, which has no sampled tokens to carry it"
                )

    def sampled_spans(self) -> Iterator[Span]:
        """Every SAMPLED span, in row order."""
        return (span for row in self.rows for span in row.spans if span.origin is Origin.SAMPLED)

    def row_tokens(self, index: int) -> list[int]:
        """All token ids of a row, the shared prefix included."""
        row = self.rows[index]
        head = [] if row.parent is None else self.row_tokens(row.parent)[: row.fork_point]
        for span in row.spans:
            head.extend(span.token_ids)
        return head

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(span) for span in self.sampled_spans())

    @property
    def unscored(self) -> str | None:
        """The reason of the first Missing reward, or None."""
        return next((r.value.reason for r in self.rewards if isinstance(r.value, Missing)), None)

    @property
    def votes(self) -> bool:
        """Whether this member counts in its group's baseline.

        Failed, cancelled, unscored and zero-length members are absent, never a zero.
        """
        return self.outcome.votes and self.unscored is None and bool(self.rewards) and self.sampled_tokens > 0

    @property
    def total_reward(self) -> float:
        """Sum of all rewards; raises ``ContractError`` when one is Missing (check ``votes`` first)."""
        if (reason := self.unscored) is not None:
            raise ContractError(f"{self.trajectory_id}: reward is missing ({reason})")
        return float(sum(r.value for r in self.rewards if not isinstance(r.value, Missing)))

    def turn_rewards(self) -> dict[int, float]:
        """Reward by turn, components summed; Missing values raise as in ``total_reward``."""
        out: dict[int, float] = {}
        for r in self.rewards:
            if isinstance(r.value, Missing):
                raise ContractError(f"{self.trajectory_id}: reward of turn {r.turn} is missing ({r.value.reason})")
            out[r.turn] = out.get(r.turn, 0.0) + float(r.value)
        return out

    def versions(self) -> dict[str, int]:
        """Tokens by weight version, from the server-reported runs; ``Missing`` runs count under ``"?"``."""
        counts: dict[str, int] = {}
        for span in self.sampled_spans():
            if isinstance(span.versions, Missing) or span.versions is None:
                counts["?"] = counts.get("?", 0) + len(span)
                continue
            for run in span.versions:
                counts[run.version] = counts.get(run.version, 0) + run.end - run.start
        return counts


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt; ``size`` is how many were asked for, absent members included."""

    group_id: str
    prompt_uid: str
    size: int
    members: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if self.size < len(self.members):
            raise ContractError(f"group {self.group_id}: {len(self.members)} members for a size of {self.size}")
        seen: set[tuple[int, int]] = set()
        for member in self.members:
            if member.group_id != self.group_id:
                raise ContractError(f"group {self.group_id} holds {member.trajectory_id} of group {member.group_id}")
            key = (member.sample, member.attempt)
            if key in seen:
                raise ContractError(f"group {self.group_id}: sample {key[0]} attempt {key[1]} appears twice")
            seen.add(key)

    @property
    def voters(self) -> tuple[Trajectory, ...]:
        """Members that count in the baseline."""
        return tuple(m for m in self.members if m.votes)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled for this group."""
        return sum(m.sampled_tokens for m in self.members)
