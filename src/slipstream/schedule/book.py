"""What every schedule shares: the book of outstanding groups.

Owns: the life of a group from submission to a step's record (running, ready, training), judging, eviction, requeueing,
the counters, lag and age figures, and the state for a checkpoint.
Refuses: the policy.  A schedule says how many groups may start (``_room``), which of the ready ones a step takes
(``_choose``), which have become too old (``_expired``) and when to stop drawing (``_spent``); see this room's classes.

Judging happens once, when a group comes back.  With ``replaces`` a group that the judge refuses makes room for another
at once, so that rejected groups can never block producers; without, it takes its place in a step and is left out there.

``outstanding`` groups are running, ready, or in the step that is being trained: ``accepted - consumed + running``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypedDict

from slipstream.errors import BudgetExceededError, CheckpointError, ContractError, DataError
from slipstream.schedule.counters import Counters
from slipstream.schedule.protocol import Clock, Judge, Selection
from slipstream.trajectory import Group

STALE = "stale"


@dataclass
class Entry:
    """One outstanding group.

    ``order`` counts submissions, ``rank`` finishes, ``tries`` evictions of its prompt; ``slot`` is the schedule's own.
    """

    group_id: str
    order: int
    scheduled: int
    slot: int
    tries: int
    submitted_at: float
    group: Group | None = None
    rank: int = -1
    finished_at: float = 0.0
    reason: str | None = None
    overtaken: int = 0

    @property
    def ready(self) -> bool:
        """Whether the group has come back."""
        return self.group is not None


@dataclass
class Toll:
    """What was trained and what was evicted, cumulative: the bias that a schedule's evictions cause.

    ``seconds`` are from submission to the end of the rollout (for an abort, to the abort: a lower bound).
    """

    trained: int = 0
    trained_seconds: float = 0.0
    evicted: int = 0
    evicted_seconds: float = 0.0


class BookOptions(TypedDict, total=False):
    """Keyword arguments of ``BookedSchedule`` that every schedule passes on."""

    steps: int | None
    max_batches: int | None
    clock: Clock


class BookedSchedule:
    """Base of the schedules; implements the protocol but for the hooks.

    Args:
        prompts_per_step: ``B``, the groups a step takes.
        judge: why a group must not be trained on; the default refuses groups without voters.
        steps: length of the run in steps; nothing is started that no step would consume.  None is endless.
        replaces: groups that the judge refuses are replaced by others instead of making the step short.
        max_batches: with more than ``max_batches * B`` rejected groups in one step, ``select`` raises.
        clock: seconds, for ages.
    """

    kind = ""
    drains_before_publish = False

    def __init__(
        self,
        prompts_per_step: int,
        judge: Judge | None = None,
        *,
        steps: int | None = None,
        replaces: bool = False,
        max_batches: int | None = 30,
        clock: Clock = time.monotonic,
    ) -> None:
        if prompts_per_step < 1:
            raise ContractError(f"schedule: prompts_per_step must be >= 1, got {prompts_per_step}")
        self.prompts_per_step = prompts_per_step
        self.steps = steps
        self.counters = Counters()
        self._judge: Judge = judge or (lambda group: None if group.voters else "no_voters")
        self._replaces = replaces
        self._reject_limit = None if max_batches is None else max_batches * prompts_per_step
        self._clock = clock
        self._current = 0
        self._open = False
        self._dry = False
        self._entries: dict[str, Entry] = {}
        self._training: list[Entry] = []
        self._left: list[tuple[Group, str]] = []
        self._again: deque[tuple[str, int]] = deque()
        self._taken: dict[str, int] = {}
        self._aborts: dict[str, str] = {}
        self._selection: Selection | None = None
        self._rejected: Counter[str] = Counter()
        self._submissions = 0
        self._finishes = 0
        self._toll = Toll()

    # -- the policy: hooks ---------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many more groups may be outstanding now."""
        raise NotImplementedError

    def _choose(self) -> list[Entry] | None:
        """The ready entries that the open step consumes; None to wait."""
        raise NotImplementedError

    def _expired(self) -> Iterable[Entry]:
        """Entries that may no longer be trained on at the current step."""
        return ()

    def _spent(self) -> bool:
        """Whether enough was drawn for the next batch; it is what there is once nothing runs."""
        return False

    def _slot(self) -> int:
        """What a new entry's ``slot`` is."""
        return self._current

    def _requeues(self, entry: Entry) -> bool:
        """Whether an expired entry's prompt is sampled anew."""
        return False

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The open step, or between steps the next one."""
        return self._current

    @property
    def outstanding(self) -> int:
        """Groups that are running, ready or in training."""
        return len(self._entries) + len(self._training)

    def begin_step(self, step: int) -> None:
        """Open a step; the previous one must have been ended, and steps never go back."""
        if self._open:
            raise ContractError(f"schedule: step {self._current} is still open, cannot begin {step}")
        if step < self._current:
            raise ContractError(f"schedule: cannot begin step {step}; step {self._current} is next")
        self._current, self._open, self._selection = step, True, None
        self._expire()

    def end_step(self, step: int) -> None:
        """Close the step after its publish; capacity for the next one opens."""
        if not self._open or step != self._current:
            raise ContractError(f"schedule: ending step {step} while step {self._current} is open or next")
        self._open, self._selection, self._training = False, None, []
        self._current = step + 1
        self._expire()

    # -- the life of a group -------------------------------------------------------------------------------------

    def admit(self) -> int:
        """Groups that may start now."""
        room = max(self._room(), 0)
        return min(room, len(self._again)) if self._dry else room

    def next_requeued(self) -> str | None:
        """Take a prompt that goes before any new one."""
        if not self._again:
            return None
        group_id, tries = self._again.popleft()
        self._taken[group_id] = tries
        return group_id

    def submitted(self, group_id: str, again: str | None = None) -> None:
        """A rollout started."""
        if self._room() < 1:
            raise ContractError(f"schedule: group {group_id} submitted beyond the capacity; {self.outstanding} are out")
        if group_id in self._entries:
            raise ContractError(f"schedule: group {group_id} is already outstanding")
        if again is not None and again not in self._taken:
            raise ContractError(f"schedule: {again} was not handed out by next_requeued")
        tries = 0 if again is None else self._taken.pop(again)
        entry = Entry(group_id, self._submissions, self._current, self._slot(), tries, self._clock())
        self._submissions += 1
        self._entries[group_id] = entry
        self.counters.submit()

    def finished(self, group: Group) -> None:
        """A rollout came back: ready to be trained on, refused by the judge, failed, or too old by now."""
        entry = self._running_entry(group.group_id, "finished")
        entry.finished_at, entry.rank = self._clock(), self._finishes
        self._finishes += 1
        if not group.voters:
            self._drop(entry, "failed")
            self._leave_out(group, "no_voters")
            return
        self.counters.move("running", "accepted")
        entry.group = group
        if group.group_id in self._aborts:
            self._evict(entry)
            return
        entry.reason = self._judge(group)
        if entry.reason is not None and self._replaces:
            del self._entries[group.group_id]
            self.counters.move("accepted", "filtered")
            self._leave_out(group, entry.reason)

    def failed(self, group_id: str, why: str) -> None:
        """A rollout ended without a group."""
        self._drop(self._running_entry(group_id, "failed"), "failed")
        self._rejected[why] += 1

    def cancelled(self, group_id: str, why: str, *, again: bool = False) -> None:
        """A rollout was taken back."""
        entry = self._running_entry(group_id, "was cancelled")
        expired = group_id in self._aborts
        self._drop(entry, "cancelled")
        if expired:
            self._rejected[why] += 1
            self._toll.evicted += 1
            self._toll.evicted_seconds += self._clock() - entry.submitted_at
        if expired and self._requeues(entry):
            self._requeue(entry, entry.tries + 1)
        elif again:
            self._requeue(entry, entry.tries)

    def exhausted(self) -> None:
        """No prompt is left but the requeued ones."""
        self._dry = True

    def aborts(self) -> Sequence[tuple[str, str]]:
        """Running groups to take back now."""
        return list(self._aborts.items())

    def _running_entry(self, group_id: str, event: str) -> Entry:
        entry = self._entries.get(group_id)
        if entry is None or entry.ready:
            raise ContractError(f"schedule: group {group_id} {event} but was not running")
        return entry

    def _drop(self, entry: Entry, state: str) -> None:
        """A running entry leaves the book."""
        del self._entries[entry.group_id]
        self._aborts.pop(entry.group_id, None)
        self.counters.move("running", state)

    def _leave_out(self, group: Group, reason: str) -> None:
        self._left.append((group, reason))
        self._rejected[reason] += 1

    def _requeue(self, entry: Entry, tries: int) -> None:
        self._again.append((entry.group_id, tries))

    def _expire(self) -> None:
        for entry in list(self._expired()):
            if entry.ready:
                self._evict(entry)
            else:
                self._aborts[entry.group_id] = STALE

    def _evict(self, entry: Entry) -> None:
        """A ready entry is too old: it is left out, and its prompt may be sampled anew."""
        assert entry.group is not None
        del self._entries[entry.group_id]
        self._aborts.pop(entry.group_id, None)
        self.counters.move("accepted", "filtered")
        self._leave_out(entry.group, STALE)
        self._toll.evicted += 1
        self._toll.evicted_seconds += entry.finished_at - entry.submitted_at
        if self._requeues(entry):
            self._requeue(entry, entry.tries + 1)

    # -- selection -----------------------------------------------------------------------------------------------

    def ready(self) -> list[Entry]:
        """Ready entries in finish order."""
        return sorted((e for e in self._entries.values() if e.ready), key=lambda e: e.rank)

    @property
    def n_ready(self) -> int:
        """How many entries are ready."""
        return len(self._entries) - self.counters.running

    def select(self) -> Selection | None:
        """The step's groups; the same object until the step ends."""
        if self._selection is not None or not self._open:
            return self._selection
        picked = self._choose()
        if picked is None:
            if self.counters.running or self.admit():
                self._check_rejections()
                return None
            picked = self.ready()  # nothing more can come: the step takes what there is
            if not picked and not self._spent():
                raise DataError(self._why_empty())
        elif not picked and self._dry and not self._left:
            raise DataError(self._why_empty())
        self._selection = self._consume(picked)
        return self._selection

    def _consume(self, picked: Sequence[Entry]) -> Selection:
        now = self._clock()
        last = max((entry.order for entry in picked), default=-1)
        for entry in picked:
            del self._entries[entry.group_id]
        for entry in self._entries.values():
            if entry.order < last:
                entry.overtaken += sum(other.order > entry.order for other in picked)
        kept: list[Entry] = []
        left, self._left = self._left, []
        for entry in sorted(picked, key=lambda e: e.order):
            assert entry.group is not None
            if entry.reason is None:
                kept.append(entry)
            else:
                left.append((entry.group, entry.reason))
                self.counters.move("accepted", "filtered")
        self._training = list(picked)
        self._rejected.clear()  # from here on groups are sampled for later steps
        self._toll.trained += len(kept)
        self._toll.trained_seconds += sum(e.finished_at - e.submitted_at for e in kept)
        return Selection(
            step=self._current,
            groups=[e.group for e in kept if e.group is not None],
            left_out=left,
            short=len(kept) < self.prompts_per_step,
            lags={e.group_id: self._current - e.scheduled for e in kept},
            waits={e.group_id: now - e.finished_at for e in kept},
        )

    def _check_rejections(self) -> None:
        count = sum(self._rejected.values())
        if self._reject_limit is not None and count >= self._reject_limit:
            raise BudgetExceededError(
                f"step {self._current + 1} waits for {self.prompts_per_step} groups, but {count} have been rejected "
                f"({self._reasons()}) and {self.n_ready} are ready; look at these rollouts, "
                "or raise schedule.max_batches_per_step"
            )

    def _reasons(self) -> str:
        return ", ".join(f"{reason} {n}" for reason, n in self._rejected.most_common()) or "none rejected"

    def _why_empty(self) -> str:
        c = self.counters
        return (
            f"no prompt is left for step {self._current + 1}: of {c.submitted} groups {c.accepted} were trained on, "
            f"{c.filtered} filtered, {c.failed} failed and {c.cancelled} cancelled (in this step: {self._reasons()}); "
            "give more prompts, or fewer schedule.steps"
        )

    # -- figures and state ---------------------------------------------------------------------------------------

    def running(self) -> Sequence[str]:
        """Ids of running groups, oldest first."""
        return [e.group_id for e in self._entries.values() if not e.ready]

    def buffered(self) -> Sequence[Group]:
        """Ready groups, and left-out ones that no step has recorded."""
        ready = [e.group for e in self._entries.values() if e.group is not None]
        return [*ready, *(group for group, _ in self._left)]

    def metrics(self) -> dict[str, float]:
        """See the protocol."""
        now, toll = self._clock(), self._toll
        out = {f"schedule/{name}": float(value) for name, value in self.counters.state_dict().items()}
        out["schedule/outstanding"] = float(self.outstanding)
        out["schedule/buffered"] = float(self.n_ready)
        ages = [now - e.submitted_at for e in self._entries.values() if not e.ready]
        out["schedule/running_seconds_max"] = max(ages, default=0.0)
        if self._selection is not None:
            lags, waits = list(self._selection.lags.values()), list(self._selection.waits.values())
            out["schedule/lag_mean"] = fmean(lags) if lags else 0.0
            out["schedule/lag_max"] = float(max(lags, default=0))
            out["schedule/queue_seconds_mean"] = fmean(waits) if waits else 0.0
            out["schedule/queue_seconds_max"] = max(waits, default=0.0)
            out["schedule/short_batch"] = float(self._selection.short)
            for lag, n in sorted(Counter(lags).items()):
                out[f"schedule/lag_{lag}"] = float(n)
            for reason, n in Counter(reason for _, reason in self._selection.left_out).items():
                out[f"schedule/left_out_{reason}"] = float(n)
        if toll.evicted:
            out["schedule/evicted_share"] = toll.evicted / (toll.evicted + toll.trained)
            out["schedule/evicted_seconds_mean"] = toll.evicted_seconds / toll.evicted
            out["schedule/trained_seconds_mean"] = toll.trained_seconds / max(toll.trained, 1)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Between steps only."""
        if self._open:
            raise ContractError("schedule: state is saved between steps only")
        now = self._clock()
        return {
            "kind": self.kind,
            "current": self._current,
            "counters": self.counters.state_dict(),
            "exhausted": self._dry,
            "submissions": self._submissions,
            "finishes": self._finishes,
            "ready": [
                {
                    "group_id": e.group_id, "order": e.order, "scheduled": e.scheduled, "slot": e.slot,
                    "tries": e.tries, "rank": e.rank, "reason": e.reason, "overtaken": e.overtaken,
                    "ran": e.finished_at - e.submitted_at, "waited": now - e.finished_at,
                }
                for e in self.ready()
            ],
            "left_out": [[group.group_id, reason] for group, reason in self._left],
            "running": [[e.group_id, e.tries] for e in self._entries.values() if not e.ready],
            "requeued": [*self._taken.items(), *self._again],
            "toll": vars(self._toll).copy(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], buffered: Sequence[Group] = ()) -> None:
        """Restore; what was running is cancelled in the books and its prompts come first."""
        if state.get("kind") != self.kind:
            raise ContractError(
                f"schedule: state of kind {state.get('kind')!r} does not fit schedule.kind={self.kind}; "
                "resume with the same schedule"
            )
        groups = {group.group_id: group for group in buffered}
        wanted = {e["group_id"] for e in state["ready"]} | {group_id for group_id, _ in state["left_out"]}
        if wanted != groups.keys():
            odd = sorted(wanted ^ groups.keys())[:3]
            raise CheckpointError(f"schedule: buffered groups and state disagree about {odd}; the checkpoint is torn")
        now = self._clock()
        self._current, self._open, self._dry = state["current"], False, state["exhausted"]
        self._submissions, self._finishes = state["submissions"], state["finishes"]
        self._selection, self._training, self._aborts = None, [], {}
        self._entries = {}
        for e in state["ready"]:
            done = now - e["waited"]
            self._entries[e["group_id"]] = Entry(
                e["group_id"], e["order"], e["scheduled"], e["slot"], e["tries"], done - e["ran"],
                groups[e["group_id"]], e["rank"], done, e["reason"], e["overtaken"],
            )  # fmt: skip
        self._left = [(groups[group_id], reason) for group_id, reason in state["left_out"]]
        self._again = deque((str(i), int(n)) for i, n in [*state["running"], *state["requeued"]])
        self._taken = {}
        self._toll = Toll(**state["toll"])
        self.counters = Counters.from_state(state["counters"])
        if self.counters.running != len(state["running"]):
            raise CheckpointError("schedule: the counters and the running groups disagree; the checkpoint is torn")
        self.counters.move("running", "cancelled", len(state["running"]))
