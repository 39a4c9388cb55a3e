"""The synchronous schedule: staleness 0.

Owns: SkyRL's capacity rule ``accepted + running <= (S + step + 1) * B`` at ``S = 0`` (steps count from 0),
with optional over-sampling.  Refuses: overlap.  A step starts its groups, waits for all of them, and consumes
them; nothing is buffered across an update.

Over-sampling (``draw > B``): ``draw`` prompts are rolled out and the first ``B``, in submission order, that the
judge lets pass are trained on.  The rest are left out as ``surplus``.  When fewer pass, the short batch is
trained at its true denominator.

>>> schedule = SyncSchedule(prompts_per_step=2)
>>> schedule.begin_step(0)
>>> schedule.admit()
2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.errors import ContractError
from slipstream.schedule.counters import Counters
from slipstream.schedule.protocol import Judge, Selection
from slipstream.trajectory import Group


class SyncSchedule:
    """Submit ``draw`` groups, wait for all, train on at most ``prompts_per_step``."""

    def __init__(self, prompts_per_step: int, draw: int | None = None, judge: Judge | None = None) -> None:
        self.prompts_per_step = prompts_per_step
        self.draw = draw if draw is not None else prompts_per_step
        if not 1 <= prompts_per_step <= self.draw:
            raise ContractError(f"schedule: want 1 <= prompts_per_step <= draw, got {prompts_per_step} and {self.draw}")
        self._judge: Judge = judge or (lambda group: None if group.voters else "no_voters")
        self.counters = Counters()
        self._step: int | None = None
        self._order: list[str] = []
        self._done: dict[str, Group] = {}
        self._gone: set[str] = set()
        self._selection: Selection | None = None

    def begin_step(self, step: int) -> None:
        """Open a step; the previous one must have been ended."""
        if self._step is not None:
            raise ContractError(f"schedule: step {self._step} is still open, cannot begin {step}")
        self._step = step
        self._order, self._done, self._gone = [], {}, set()
        self._selection = None

    def admit(self) -> int:
        """Groups that may start now: the step's draw minus what was submitted for it."""
        return 0 if self._step is None else self.draw - len(self._order)

    def submitted(self, group_id: str) -> None:
        """A rollout was started; order matters for over-sampling."""
        if self.admit() < 1:
            raise ContractError(f"schedule: group {group_id} submitted beyond the capacity of {self.draw}")
        self._order.append(group_id)
        self.counters.submit()

    def finished(self, group: Group) -> None:
        """A rollout came back, with voters (accepted) or without (failed)."""
        if group.group_id not in self._order or group.group_id in self._done:
            raise ContractError(f"schedule: group {group.group_id} finished but was not running")
        self._done[group.group_id] = group
        self.counters.move("running", "accepted" if group.voters else "failed")

    def cancelled(self, group_id: str, why: str) -> None:
        """A rollout was taken back."""
        self._gone.add(group_id)
        self.counters.move("running", "cancelled")

    def select(self) -> Selection | None:
        """All of the step's groups judged, once none is running."""
        if self._selection is not None or self._step is None or self.admit() > 0 or self.counters.running > 0:
            return self._selection
        kept: list[Group] = []
        left_out: list[tuple[Group, str]] = []
        for group_id in self._order:
            if group_id in self._gone:
                continue
            group = self._done[group_id]
            if not group.voters:
                left_out.append((group, "no_voters"))
                continue
            reason = self._judge(group)
            if reason is None and len(kept) == self.prompts_per_step:
                reason = "surplus"
            if reason is None:
                kept.append(group)
            else:
                left_out.append((group, reason))
                self.counters.move("accepted", "filtered")
        self._selection = Selection(self._step, kept, left_out, short=len(kept) < self.prompts_per_step)
        return self._selection

    def end_step(self, step: int) -> None:
        """Close the step after its publish."""
        if step != self._step:
            raise ContractError(f"schedule: ending step {step} while step {self._step} is open")
        self._step, self._selection = None, None
        self._order, self._done = [], {}

    def buffered(self) -> Sequence[Group]:
        """Nothing crosses an update."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Between steps only."""
        if self._step is not None:
            raise ContractError("schedule: state is saved between steps only")
        return {"kind": "sync", "counters": self.counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        if state.get("kind") != "sync":
            raise ContractError(f"schedule: state of kind {state.get('kind')!r} does not fit the synchronous schedule")
        self.counters = Counters.from_state(state["counters"])
