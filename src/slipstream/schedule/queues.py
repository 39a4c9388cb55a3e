"""Schedules with a queue: fully asynchronous, with a hard bound, and windowed.

Owns: three policies over the book.  In all of them at most ``(S + 1) * B`` groups are outstanding (running, ready or in
training), which is SkyRL's capacity rule ``accepted + running <= (S + step + 1) * B``, and groups run across updates
and epoch borders.  They differ in what a step takes, and so in the lag they allow:

=================  ====================================================  ==========================  =================
schedule           a step takes                                          lag of a trained group      drops
=================  ====================================================  ==========================  =================
``fully_async``    the first ``B`` that finished                         bounded on average only     nothing
``bounded``        the oldest that are ready; none may be older than     ``<= S``, queue time        ``drop``: the old
                   ``S``, else ``drop``, ``requeue`` or ``wait``         included
``windowed``       the oldest that are ready, but a running group is     ``<= S + ceil(overtake/B)`` nothing
                   overtaken by at most ``overtake`` later ones
=================  ====================================================  ==========================  =================

``max_running`` limits the groups that run at once, below the capacity.

Dynamic sampling (``max_rounds``): refused groups are replaced (``full_batch``) until ``max_rounds * B`` have been
refused since the last batch was chosen.  Then nothing more starts, and when what runs has come back the step trains
what is ready, if only that is nothing, at its true denominator.

>>> schedule = FullyAsyncSchedule(1, max_staleness=2)
>>> schedule.begin_step(0)
>>> schedule.admit()
3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Unpack

from slipstream.errors import ContractError
from slipstream.schedule.book import BookedSchedule, BookOptions, Entry
from slipstream.schedule.protocol import Judge

OnStale = Literal["drop", "requeue", "wait"]

MAX_REQUEUES = 3
"""A prompt that has been evicted this often is dropped: it is slower than the bound allows."""


class QueueOptions(BookOptions, total=False):
    """What the three schedules have in common beside ``max_staleness``; see ``FullyAsyncSchedule``."""

    max_running: int | None
    full_batch: bool
    max_rounds: int | None


class FullyAsyncSchedule(BookedSchedule):
    """The capacity rule with consumption in finish order.

    Drops nothing, so after draining the trained groups are the sampled ones.  A slow group may be consumed with any
    lag: it holds one place of ``(S + 1) * B`` while others pass.

    Args:
        max_staleness: ``S`` of the capacity rule, in steps; 0 is synchronous training.
        max_running: groups that run at once; None leaves it to the capacity.
        full_batch: refused groups are replaced, so that a step trains on ``B`` groups.
        max_rounds: batches of refused or failed groups after which a step trains what it has; None never does.
        **options: ``max_batches``, ``steps`` and ``clock`` of ``BookedSchedule``.
    """

    kind = "fully_async"

    def __init__(
        self,
        prompts_per_step: int,
        judge: Judge | None = None,
        *,
        max_staleness: int,
        max_running: int | None = None,
        full_batch: bool = False,
        max_rounds: int | None = None,
        **options: Unpack[BookOptions],
    ) -> None:
        super().__init__(prompts_per_step, judge, replaces=full_batch, **options)
        if max_rounds is not None and max_rounds < 1:
            raise ContractError(f"schedule: want max_rounds >= 1, got {max_rounds}")
        if max_staleness < 0 or (max_running is not None and max_running < 1):
            raise ContractError(
                f"schedule: want max_staleness >= 0 and max_running >= 1, got {max_staleness} and {max_running}"
            )
        self.max_staleness = max_staleness
        self.max_running = max_running
        self.max_rounds = max_rounds

    def _spent(self) -> bool:
        return self.max_rounds is not None and self._rejected.total() >= self.max_rounds * self.prompts_per_step

    def _room(self) -> int:
        if self._spent():
            return 0
        if self.max_staleness == 0 and not self._open:
            return 0  # synchronous: nothing is sampled while the loop evaluates or saves
        ahead = self.max_staleness + 1
        if self.steps is not None:
            ahead = min(ahead, max(self.steps - self._current, 0))
        # A short batch holds the places of a whole one, or what starts beside it would be older than the bound allows.
        room = (ahead - (self._selection is not None)) * self.prompts_per_step - len(self._entries)
        return room if self.max_running is None else min(room, self.max_running - self.counters.running)

    def _choose(self) -> list[Entry] | None:
        return self.ready()[: self.prompts_per_step] if self.n_ready >= self.prompts_per_step else None


class BoundedSchedule(FullyAsyncSchedule):
    """No group is trained on that was scheduled more than ``max_staleness`` steps before, queue time included.

    ``on_stale`` says what becomes of a group that would be older:

    * ``wait``: nothing.  A step takes groups so that every other one can still be consumed in time, and waits for those
      that are due.  Drops nothing; a slow group stops the trainer.
    * ``drop``: a ready one is left out as ``stale``, a running one is aborted.  Never waits; the trained lengths are
      biased towards short ones, and ``metrics`` says by how much.
    * ``requeue``: as ``drop``, but its prompt is sampled anew, before new prompts (at most ``MAX_REQUEUES`` times).
      Prompts are not lost, but long answers are.
    """

    kind = "bounded"

    def __init__(
        self,
        prompts_per_step: int,
        judge: Judge | None = None,
        *,
        max_staleness: int,
        on_stale: OnStale = "wait",
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(prompts_per_step, judge, max_staleness=max_staleness, **options)
        self.on_stale = on_stale

    def _expired(self) -> Iterable[Entry]:
        if self.on_stale == "wait":
            return ()
        return [e for e in self._entries.values() if self._current - e.scheduled > self.max_staleness]

    def _requeues(self, entry: Entry) -> bool:
        return self.on_stale == "requeue" and entry.tries < MAX_REQUEUES

    def _choose(self) -> list[Entry] | None:
        """Oldest first; with ``wait``, only a choice after which every other group can still be in time.

        Due step of a group: ``scheduled + S``.  Of the groups due by step ``d``, steps after this one can consume
        ``(d - current) * B``; this step must take the rest (``must[d]``).  Taking the oldest first satisfies every
        ``must`` that the ready ones can; when one is not satisfied, a group that is due has not come back yet.
        """
        batch = self.prompts_per_step
        if self.n_ready < batch and (self.counters.running or self.admit()):
            return None
        picked = sorted(self.ready(), key=lambda e: (e.scheduled, e.rank))[:batch]
        if self.on_stale == "wait":
            for lag in range(self.max_staleness + 1):
                by_then = self._current + lag
                due = sum(e.scheduled + self.max_staleness <= by_then for e in self._entries.values())
                taken = sum(e.scheduled + self.max_staleness <= by_then for e in picked)
                if due - taken > lag * batch:
                    return None
        return picked or None


class WindowedSchedule(FullyAsyncSchedule):
    """First in, first out, with a window: a running group is overtaken by at most ``overtake`` later ones.

    ``overtake=0`` consumes strictly in submission order.  Larger windows let steps go on without a slow group, for a
    while: then the step waits for it.  Drops nothing; lag is at most ``S + ceil(overtake / B)``.
    """

    kind = "windowed"

    def __init__(
        self,
        prompts_per_step: int,
        judge: Judge | None = None,
        *,
        max_staleness: int,
        overtake: int,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(prompts_per_step, judge, max_staleness=max_staleness, **options)
        if overtake < 0:
            raise ContractError(f"schedule: overtake must be >= 0 groups, got {overtake}")
        self.overtake = overtake

    def _choose(self) -> list[Entry] | None:
        """In submission order.  The oldest running group has been overtaken most, so it alone sets the limit."""
        if self.n_ready < self.prompts_per_step:
            return None
        picked: list[Entry] = []
        left: int | None = None
        for entry in sorted(self._entries.values(), key=lambda e: e.order):
            if not entry.ready:
                left = self.overtake - entry.overtaken if left is None else left
            elif left is None or left > 0:
                picked.append(entry)
                left = None if left is None else left - 1
            if len(picked) == self.prompts_per_step:
                return picked
        return None
