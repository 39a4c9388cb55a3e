"""The schedule of a run, written down so that it can be repeated to the bit.

Owns: ``recording.jsonl``: which groups started at which step, which requests were decoded together (waves), after which
engine step each version was published, and what each step selected; the schedule that repeats it.
Refuses: sampling, training.

What else a run depends on is keyed already: noise by seed and prompt, the order of prompts by seed and pass.  Recorded
is what depends on time.  Only ``determinism=exact`` is recorded, since only there do engine and trainer repeat bits.

>>> schedule = RecordedSchedule([StepPlan(admitted=("a@0",), selected=("a@0",), left_out={})])
>>> schedule.begin_step(0)
>>> schedule.admit()
1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ContractError, LedgerError
from slipstream.ledger.journal import Journal, read_lines
from slipstream.rollout.types import GroupTask
from slipstream.schedule import Counters, Selection
from slipstream.trajectory import Group

FILE = "recording.jsonl"


class Recorder:
    """Writes ``recording.jsonl``; ``incarnation`` is this start's."""

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        self._journal = Journal(run_dir / FILE)
        self._journal.append({"start": incarnation})

    def wave(self, request_ids: Sequence[str]) -> None:
        """These requests are decoded together, in this order."""
        self._journal.append({"wave": list(request_ids)})

    def admitted(self, task: GroupTask) -> None:
        """A group starts."""
        self._journal.append({"admit": task.group_id, "step": task.scheduled_step})

    def selected(self, selection: Selection) -> None:
        """A step has its groups."""
        self._journal.append(
            {
                "select": selection.step + 1,
                "groups": [group.group_id for group in selection.groups],
                "left_out": {group.group_id: reason for group, reason in selection.left_out},
            }
        )

    def published(self, version: str, engine_step: int) -> None:
        """A version was published after so many engine steps."""
        self._journal.append({"publish": version, "engine_step": engine_step})

    def taken_back(self, group_id: str) -> None:
        """A group was taken back in the middle."""
        self._journal.append({"taken_back": group_id})

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


@dataclass(frozen=True)
class StepPlan:
    """What a recorded step did."""

    admitted: tuple[str, ...]
    selected: tuple[str, ...]
    left_out: Mapping[str, str]


@dataclass
class Recording:
    """A recorded run: waves in order, the engine step of each publish, and what each step did."""

    waves: list[list[str]] = field(default_factory=list)
    publishes: list[int] = field(default_factory=list)
    steps: list[StepPlan] = field(default_factory=list)

    @classmethod
    def load(cls, run_dir: Path) -> Recording:
        """Read ``recording.jsonl``.

        Raises:
            LedgerError: there is none, or it is of a run that cannot be repeated to the bit, with the reason.
        """
        path = run_dir / FILE
        if not path.is_file():
            raise LedgerError(
                f"{path} is missing: only runs with training.determinism=exact record their schedule; "
                "`replay --step N` repeats single updates of any run"
            )
        out = cls()
        admitted: dict[int, list[str]] = {}
        selected: dict[int, tuple[tuple[str, ...], dict[str, str]]] = {}
        starts = 0
        for line in read_lines(path):
            if "start" in line:
                starts += 1
            elif "wave" in line:
                out.waves.append(line["wave"])
            elif "admit" in line:
                admitted.setdefault(line["step"], []).append(line["admit"])
            elif "publish" in line:
                out.publishes.append(line["engine_step"])
            elif "select" in line:
                selected[line["select"]] = (tuple(line["groups"]), line["left_out"])
            else:
                raise LedgerError(
                    f"{run_dir}: group {line.get('taken_back')} was taken back while it was being sampled; where that "
                    "cut it is not repeatable to the bit (schedule.on_stale=wait takes none back)"
                )
        if starts > 1:
            raise LedgerError(
                f"{run_dir} was started {starts} times; a resumed run begins with an empty cache, so only a run that "
                "went through in one start is repeated whole (`replay --step N` repeats any update)"
            )
        for step in sorted(selected):
            groups, left_out = selected[step]
            out.steps.append(StepPlan(tuple(admitted.get(step, ())), groups, left_out))
        return out


class RecordedSchedule:
    """The schedule protocol, repeating a recording: same groups at the same steps, whatever finishes when."""

    drains_before_publish = False

    def __init__(self, plans: Sequence[StepPlan]) -> None:
        self.counters = Counters()
        self._plans = list(plans)
        self._current = 0
        self._open = False
        self._waiting = list(self._plans[0].admitted) if self._plans else []
        self._running: list[str] = []
        self._done: dict[str, Group] = {}
        self._selection: Selection | None = None

    @property
    def current(self) -> int:
        """The open step, or between steps the next one."""
        return self._current

    def begin_step(self, step: int) -> None:
        """Open a step."""
        if step >= len(self._plans):
            raise ContractError(f"the recording has {len(self._plans)} steps; there is no step {step + 1}")
        self._current, self._open, self._selection = step, True, None

    def admit(self) -> int:
        """Groups of this step that have not started."""
        return len(self._waiting)

    def next_requeued(self) -> str | None:
        """None: prompts come in the sampler's order."""
        return None

    def submitted(self, group_id: str, again: str | None = None) -> None:
        """A rollout started; it must be the recorded one."""
        want = self._waiting.pop(0)
        if group_id != want:
            raise ContractError(f"step {self._current + 1}: group {group_id} started where {want} did in the recording")
        self._running.append(group_id)
        self.counters.submit()

    def finished(self, group: Group) -> None:
        """A rollout came back."""
        self._running.remove(group.group_id)
        self._done[group.group_id] = group
        self.counters.move("running", "accepted" if group.voters else "failed")

    def failed(self, group_id: str, why: str) -> None:
        """A rollout ended without a group."""
        self._running.remove(group_id)
        self.counters.move("running", "failed")

    def cancelled(self, group_id: str, why: str, *, again: bool = False) -> None:
        """A rollout was taken back (the replay ends)."""
        self._running.remove(group_id)
        self.counters.move("running", "cancelled")

    def exhausted(self) -> None:
        """The recording says what there is."""

    def aborts(self) -> Sequence[tuple[str, str]]:
        """None: such runs are not repeated."""
        return ()

    def select(self) -> Selection | None:
        """The recorded groups, once all are back."""
        if self._selection is None and self._open:
            plan = self._plans[self._current]
            wanted = [*plan.selected, *plan.left_out]
            if all(group_id in self._done for group_id in wanted):
                back = {group_id: self._done.pop(group_id) for group_id in wanted}
                self._selection = Selection(
                    self._current,
                    [back[group_id] for group_id in plan.selected],
                    [(back[group_id], reason) for group_id, reason in plan.left_out.items()],
                )
        return self._selection

    def end_step(self, step: int) -> None:
        """Close the step; everything that started at the next one may start now."""
        self._open, self._selection, self._current = False, None, step + 1
        if step + 1 < len(self._plans):
            self._waiting += self._plans[step + 1].admitted

    def running(self) -> Sequence[str]:
        """Ids of running groups."""
        return list(self._running)

    def buffered(self) -> Sequence[Group]:
        """Groups that are back and that no step has taken."""
        return list(self._done.values())

    def metrics(self) -> Mapping[str, float]:
        """The counters."""
        return {f"schedule/{name}": float(value) for name, value in self.counters.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """A replay is not resumed; its checkpoints hold weights."""
        return {"kind": "recorded"}

    def load_state_dict(self, state: Mapping[str, Any], buffered: Sequence[Group] = ()) -> None:
        """Refused: a replay begins at the beginning."""
        raise ContractError("a replay is not resumed; remove its directory and start it again")
