"""What the rollout room is asked for, and what it tells while it works.

Owns: ``GroupTask``, the ``Generator`` protocols, rollout events.  Refuses: how a group is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from slipstream.config.settings import SamplingSettings
from slipstream.errors import ContractError
from slipstream.rollout.meter import TokenMeter
from slipstream.rollout.progress import GroupProgress, TurnRecord
from slipstream.trajectory import Group, Message, SamplingSpec, Trajectory


@dataclass(frozen=True)
class GroupTask:
    """One prompt to be answered ``n`` times.

    ``sampling`` None means the rollout settings' own.  ``eval`` tasks go through the same loop; their failures do not
    count against the training budget.  ``progress`` is what an earlier start of the run had done of it;
    ``first_attempt`` numbers the first try, so that a prompt that is sampled anew draws other noise.
    """

    group_id: str
    prompt_uid: str
    messages: tuple[Message, ...]
    env_class: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    scheduled_step: int = 0
    pass_index: int = 0
    eval: bool = False
    sampling: SamplingSettings | None = None
    progress: GroupProgress = field(default_factory=dict)
    first_attempt: int = 0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ContractError(f"group {self.group_id}: n must be >= 1, got {self.n}")
        if not self.messages:
            raise ContractError(f"group {self.group_id}: no messages")

    @property
    def phase(self) -> str:
        """``train`` or ``eval``."""
        return "eval" if self.eval else "train"

    @property
    def data_source(self) -> str:
        """The row's ``data_source`` column, or an empty string."""
        return str(self.extras.get("data_source", "") or "")


class Generator(Protocol):
    """Turns a task into a group.  Failures of members are values in the group, not exceptions."""

    async def generate_group(self, task: GroupTask) -> Group:
        """All ``n`` samples; raises ``BudgetExceededError`` when too many have failed."""
        ...


@runtime_checkable
class Metered(Protocol):
    """A generator that can say where its tokens are; the loop then proves that none is lost."""

    meter: TokenMeter

    def held_tokens(self) -> int:
        """Sampled tokens of training groups that are not finished, those of finished members included."""
        ...


@dataclass(frozen=True)
class TurnCompleted:
    """A turn was sampled and answered by its environment."""

    task: GroupTask
    sample: int
    attempt: int
    record: TurnRecord


@dataclass(frozen=True)
class TurnRecovered:
    """An engine or an environment was lost under a later turn, and the episode went on from its completed turns."""

    task: GroupTask
    trajectory_id: str
    turn: int
    fault: str
    reason: str


@dataclass(frozen=True)
class MemberFinished:
    """A member of a group that still runs has its outcome."""

    task: GroupTask
    trajectory: Trajectory


@dataclass(frozen=True)
class AttemptSuperseded:
    """A failed attempt that was tried again; its tokens count as superseded."""

    task: GroupTask
    trajectory: Trajectory


@dataclass(frozen=True)
class AttemptCancelled:
    """An episode, or a finished member of a group, that was taken back; the task that ran it was cancelled."""

    task: GroupTask
    trajectory: Trajectory


@dataclass(frozen=True)
class GroupFinished:
    """A group is complete."""

    task: GroupTask
    group: Group


RolloutEvent = TurnCompleted | TurnRecovered | MemberFinished | AttemptSuperseded | AttemptCancelled | GroupFinished
OnEvent = Callable[[RolloutEvent], None]


def sampling_spec(settings: SamplingSettings) -> SamplingSpec:
    """The distribution part of the sampling settings."""
    return SamplingSpec(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )
