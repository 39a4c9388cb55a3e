"""The schedule protocol: admission, selection, eviction and abort in one object.

Owns: when a group may start, which finished groups a step trains on, which are too old, and why the others are not
trained on.  Refuses: how a rollout or an update is done; waiting (its owner calls it when something has happened).

Lifecycle, driven by the one loop::

    schedule.begin_step(step)
    while (selection := schedule.select()) is None:
        pump()                                      # whenever something has happened; see below
    ...update, pumping on while rollouts run...
    ...publish; first wait for the running groups when schedule.drains_before_publish...
    schedule.end_step(step)

    def pump():
        for group_id, why in schedule.aborts():     # running groups to take back now
            ...cancel and await the task...
            schedule.cancelled(group_id, why)
        for _ in range(schedule.admit()):           # groups that may start now
            again = schedule.next_requeued()        # a prompt that goes before any new one, or None
            schedule.submitted(group_id, again)     # scheduled at step schedule.current
        schedule.finished(group)                    # one rollout came back (or failed, or was cancelled)

``step`` counts from 0.  A step consumes at most ``B`` prompts, takes one or more optimiser steps and ends in one
publish.  The *lag* of a group is the step that consumes it minus the step at which it was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.schedule.counters import Counters
from slipstream.trajectory import Group

Judge = Callable[[Group], str | None]
"""Says why a finished group must not be trained on (a stable short reason), or None when it may."""

Clock = Callable[[], float]
"""Seconds since any fixed moment: ``time.monotonic``, or a simulator's virtual time."""


@dataclass(frozen=True)
class Selection:
    """What a step trains on, and every group it decided against, with the reason.

    ``groups`` are in submission order, so that a batch does not depend on the order in which its members finished.
    ``left_out`` holds ``(group, reason)``; reasons are stable names: ``no_voters`` (no member has a score),
    ``surplus`` (over-sampling), ``stale`` (evicted as too old) or what the judge said, such as ``zero_variance``.
    ``lags`` maps the id of each trained group to its lag in steps; ``waits`` to the seconds between its finish and
    this selection.
    """

    step: int
    groups: Sequence[Group]
    left_out: Sequence[tuple[Group, str]] = ()
    short: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    lags: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)


class Schedule(Protocol):
    """Admission, selection, eviction and abort."""

    counters: Counters

    drains_before_publish: bool
    """Whether a publish waits until no group is running (so that no group sees two versions)."""

    @property
    def current(self) -> int:
        """The open step, or between steps the next one; groups that start now are scheduled at it."""
        ...

    def begin_step(self, step: int) -> None: ...

    def admit(self) -> int:
        """How many groups may start now; 0 also when there is nothing to start."""
        ...

    def next_requeued(self) -> str | None:
        """Take the id of a group whose prompt must be started before any new one; None when there is none.

        These are groups that were evicted to be sampled anew, and after a resume those that were running.
        """
        ...

    def submitted(self, group_id: str, again: str | None = None) -> None:
        """A rollout started; ``again`` is what ``next_requeued`` gave for it."""
        ...

    def finished(self, group: Group) -> None:
        """A rollout came back, with all, some or none of its members scored."""
        ...

    def failed(self, group_id: str, why: str) -> None:
        """A rollout ended without a group."""
        ...

    def cancelled(self, group_id: str, why: str, *, again: bool = False) -> None:
        """A rollout was taken back; ``again`` puts its prompt first in the queue."""
        ...

    def exhausted(self) -> None:
        """There are no more prompts.  Steps take what there is; a step for which nothing is left raises."""
        ...

    def aborts(self) -> Sequence[tuple[str, str]]:
        """Running groups that must be taken back now, with the reason; repeated until each has ended."""
        ...

    def select(self) -> Selection | None:
        """The step's groups, or None while it has to wait for running ones.

        Raises:
            DataError: prompts have run out and nothing is left to train on.
            BudgetExceededError: too many groups were rejected while the step was waiting for enough of them.
        """
        ...

    def end_step(self, step: int) -> None: ...

    def running(self) -> Sequence[str]:
        """Ids of the groups whose rollouts run, oldest first."""
        ...

    def buffered(self) -> Sequence[Group]:
        """Finished groups that no step has recorded (they are part of a checkpoint)."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """``schedule/*``: counters, lag and ages of the last selection, what is outstanding, the bias of evictions."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON, between steps only; the groups of ``buffered`` are kept beside it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], buffered: Sequence[Group] = ()) -> None:
        """Go on from ``state_dict``.  Groups that were running then are requeued, oldest first."""
        ...
