"""The schedule protocol: admission, selection, eviction and abort in one object.

Owns: when a group may start, which finished groups a step trains on, and why the others are not.
Refuses: how a rollout or an update is done.

Lifecycle, driven by the one loop::

    schedule.begin_step(step)
    while (selection := schedule.select()) is None:
        for _ in range(schedule.admit()):
            schedule.submitted(group_id)          # the loop starts a rollout
        schedule.finished(group)                  # one rollout came back
    ...update, publish...
    schedule.end_step(step)

``step`` counts from 0.  A step consumes at most ``B`` prompts, takes one or more optimiser steps and ends in
one publish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.schedule.counters import Counters
from slipstream.trajectory import Group

Judge = Callable[[Group], str | None]
"""Says why a finished group must not be trained on (a stable short reason), or None when it may."""


@dataclass(frozen=True)
class Selection:
    """What a step trains on, and every group it decided against, with the reason.

    ``left_out`` holds ``(group, reason)``; reasons are stable names such as ``zero_variance``,
    ``no_voters`` or ``surplus``.
    """

    step: int
    groups: Sequence[Group]
    left_out: Sequence[tuple[Group, str]] = ()
    short: bool = False
    notes: Sequence[str] = field(default_factory=tuple)


class Schedule(Protocol):
    """Admission, selection, eviction and abort."""

    counters: Counters

    def begin_step(self, step: int) -> None: ...

    def admit(self) -> int:
        """How many groups may be submitted now."""
        ...

    def submitted(self, group_id: str) -> None: ...

    def finished(self, group: Group) -> None: ...

    def cancelled(self, group_id: str, why: str) -> None: ...

    def select(self) -> Selection | None:
        """The step's groups, or None while it has to wait for running ones."""
        ...

    def end_step(self, step: int) -> None: ...

    def buffered(self) -> Sequence[Group]:
        """Finished groups that no step has consumed (they are part of a checkpoint)."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
