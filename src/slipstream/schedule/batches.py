"""Schedules of whole batches: synchronous, and one step off.

Owns: batches that are drawn, awaited and consumed as a whole.

* ``sync``: a step starts its groups, waits for all of them, and consumes them; nothing crosses an update.  It is
  SkyRL's capacity rule ``accepted + running <= (S + step + 1) * B`` (steps count from 0) at ``S = 0``.
* ``one_step_off``: once a step has its batch, the next batch starts, and runs while this one is trained.  A publish
  waits until it is complete, so that every token of a group is of one version.  Lag is 0 in the first step, then 1.

Over-sampling (``draw > B``): ``draw`` prompts are rolled out and the first ``B``, in submission order, that the judge
lets pass are trained on.  The rest are left out as ``surplus``.  When fewer pass, the short batch is trained at its
true denominator.  A group that fails is not replaced.

Dynamic sampling (``enough > 0``): while fewer than ``enough`` groups of a step pass, ``draw`` more are rolled out, in
at most ``max_rounds`` rounds; after the last one the step trains what it has.

>>> schedule = BatchSchedule(prompts_per_step=2)
>>> schedule.begin_step(0)
>>> schedule.admit()
2
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ContractError
from slipstream.schedule.book import BookedSchedule, Entry
from slipstream.schedule.protocol import Clock, Judge
from slipstream.trajectory import Group


class BatchSchedule(BookedSchedule):
    """Submit ``draw`` groups, wait for all, train on at most ``prompts_per_step``.

    Args:
        draw: groups started for a step; None draws ``prompts_per_step``.
        ahead: 0 is synchronous; 1 samples the next batch while this one is trained.
        enough: passing groups below which a step draws again; 0 never does.
        max_rounds: draws of a step, the first one included.
    """

    def __init__(
        self,
        prompts_per_step: int,
        draw: int | None = None,
        judge: Judge | None = None,
        *,
        ahead: int = 0,
        enough: int = 0,
        max_rounds: int = 1,
        steps: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(prompts_per_step, judge, steps=steps, max_batches=None, clock=clock)
        self.draw = draw if draw is not None else prompts_per_step
        if prompts_per_step > self.draw:
            raise ContractError(f"schedule: want 1 <= prompts_per_step <= draw, got {prompts_per_step} and {self.draw}")
        if ahead not in (0, 1):
            raise ContractError(f"schedule: batches are sampled 0 or 1 steps ahead, not {ahead}")
        if not 0 <= enough <= prompts_per_step or max_rounds < 1:
            raise ContractError(f"schedule: want 0 <= enough <= {prompts_per_step} and max_rounds >= 1")
        self.kind = "one_step_off" if ahead else "sync"
        self.drains_before_publish = bool(ahead)
        self._ahead = ahead
        self._enough, self._max_rounds = enough, max_rounds
        self._drawn: Counter[int] = Counter()
        self._extra_rounds = 0

    def _slot(self) -> int:
        """The step for which groups are drawn now."""
        return self._current if self._selection is None else self._current + 1

    def _room(self) -> int:
        slot = self._slot()
        if not self._ahead and (not self._open or slot > self._current):
            return 0
        if self.steps is not None and slot >= self.steps:
            return 0
        rounds = 1 + (self._extra_rounds if slot == self._current else 0)
        return rounds * self.draw - self._drawn[slot]

    def submitted(self, group_id: str, again: str | None = None) -> None:
        """A rollout started; order matters for over-sampling."""
        slot = self._slot()
        super().submitted(group_id, again)
        self._drawn[slot] += 1

    def _requeue(self, entry: Entry, tries: int) -> None:
        super()._requeue(entry, tries)
        self._drawn[entry.slot] -= 1

    def _choose(self) -> list[Entry] | None:
        batch = [e for e in self._entries.values() if e.slot == self._current]
        if self.admit() > 0 or not all(e.ready for e in batch):
            return None
        if sum(e.reason is None for e in batch) < self._enough and self._extra_rounds + 1 < self._max_rounds:
            self._extra_rounds += 1
            if self.admit() > 0:  # not when the data has ended
                return None
        passed = 0
        for entry in batch:
            passed += entry.reason is None
            if passed > self.prompts_per_step and entry.reason is None:
                entry.reason = "surplus"
        return batch

    def end_step(self, step: int) -> None:
        """Close the step after its publish."""
        super().end_step(step)
        self._drawn = Counter({slot: n for slot, n in self._drawn.items() if slot > step})
        self._extra_rounds = 0

    def state_dict(self) -> dict[str, Any]:
        """Between steps only."""
        return {**super().state_dict(), "drawn": self._drawn[self._current]}

    def load_state_dict(self, state: Mapping[str, Any], buffered: Sequence[Group] = ()) -> None:
        """Restore; groups that were running are drawn again for the same batch."""
        super().load_state_dict(state, buffered)
        self._drawn = Counter({self._current: state["drawn"] - len(state["running"])})
