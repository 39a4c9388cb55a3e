"""The journal of rollouts: what a killed run need not do again.

Owns: completed turns and finished members on disk, since the last checkpoint and in it; reading them back.
Refuses: deciding what goes on (the schedule), how an episode goes on (``rollout.progress``).

Lifecycle: ``RolloutJournal(run_dir, after=NAME)`` -> ``on_event`` for every rollout event -> at a checkpoint, in one
instant, ``cut(NAME)`` gives what the checkpoint has to hold and begins the file of what follows it -> ``close``.

``rollouts/after-NAME.jsonl`` holds what came after checkpoint NAME.  A resume reads the checkpoint's own
``rollouts.jsonl`` and the file after it.  Work counts only as far as weights of the run's lineage sampled it: what a
dead start sampled after the checkpoint with weights that are lost is left where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.ledger.codec import decode, decode_span, encode, encode_span, tag, untag
from slipstream.ledger.journal import Journal, dump_line, read_lines
from slipstream.ledger.records import TrajectoryRecord
from slipstream.rollout.environment import StepResult
from slipstream.rollout.progress import GroupProgress, MemberProgress, TurnRecord
from slipstream.rollout.types import (
    AttemptCancelled,
    AttemptSuperseded,
    GroupFinished,
    GroupTask,
    MemberFinished,
    RolloutEvent,
    TurnCompleted,
)
from slipstream.trajectory import Group, Trajectory

IN_CHECKPOINT = "rollouts.jsonl"
_FOLDER = "rollouts"

Line = dict[str, Any]
Members = dict[int, MemberProgress]


class RolloutJournal:
    """The writer; ``after`` names the checkpoint that the run stands at (``start`` when there is none)."""

    def __init__(self, run_dir: Path, after: str) -> None:
        self._folder = run_dir / _FOLDER
        self._open: dict[str, Members] = {}
        self._journal = Journal(self._path(after))

    def _path(self, name: str) -> Path:
        return self._folder / f"after-{name}.jsonl"

    def started(self, task: GroupTask) -> None:
        """A group starts, with what an earlier start of the run completed of it: from now on that is in ``cut``."""
        if task.progress:
            self._open[task.group_id] = dict(task.progress)

    def on_event(self, event: RolloutEvent) -> None:
        """Write down what a rollout event tells; evaluations are not kept."""
        if event.task.eval:
            return
        group = event.task.group_id
        members = self._open.setdefault(group, dict(event.task.progress))
        match event:
            case TurnCompleted():
                before = members.get(event.sample)
                turns = before.turns if before is not None and before.attempt == event.attempt else ()
                members[event.sample] = MemberProgress(event.attempt, (*turns, event.record))
                self._journal.append(_turn_line(group, event.sample, event.attempt, event.record))
            case MemberFinished():
                members[event.trajectory.sample] = MemberProgress(event.trajectory.attempt, finished=event.trajectory)
                self._journal.append(_member_line(group, event.trajectory))
            case AttemptSuperseded():
                members[event.trajectory.sample] = MemberProgress(event.trajectory.attempt + 1)
                self._journal.append(_again_line(group, event.trajectory.sample, event.trajectory.attempt + 1))
            case GroupFinished() | AttemptCancelled():
                self._open.pop(group, None)

    def gone(self, group_id: str) -> None:
        """A running group was evicted: nothing of it will be asked for again."""
        self._open.pop(group_id, None)
        self._journal.append({"kind": "gone", "group": group_id})

    @staticmethod
    def lines_of(buffered: Sequence[Group]) -> list[str]:
        """The lines of finished groups."""
        return [dump_line(_group_line(group)) for group in buffered]

    def cut(self, name: str, buffered: Sequence[Group], unclaimed: Mapping[str, GroupProgress]) -> list[str]:
        """The lines of checkpoint ``name``: finished groups that no step has recorded, and parts of running ones.

        ``unclaimed`` is recovered work whose groups have not been started again.  Everything told after this call goes
        to a new file.
        """
        lines = self.lines_of(buffered)
        for group, members in (*self._open.items(), *unclaimed.items()):
            for sample, member in members.items():
                lines += [dump_line(line) for line in _lines(group, sample, member)]
        self._journal.close()
        path = self._path(name)
        path.unlink(missing_ok=True)  # of a start that died after a checkpoint of this name
        self._journal = Journal(path)
        return lines

    def prune(self, names: Iterable[str]) -> None:
        """Remove files that follow checkpoints which are gone."""
        kept = {self._path(name) for name in names}
        for path in self._folder.glob("after-*.jsonl"):
            if path not in kept and path != self._journal.path:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what it holds stays."""
        self._journal.close()


def has_journal(run_dir: Path) -> bool:
    """Whether an earlier start left sampled work behind before its first checkpoint."""
    path = run_dir / _FOLDER / "after-start.jsonl"
    return path.is_file() and path.stat().st_size > 0


def recover(
    run_dir: Path, after: str, checkpoint: Path | None, newest: int
) -> tuple[list[Group], dict[str, GroupProgress]]:
    """Finished groups of a checkpoint, and what is known of unfinished groups at it and after it.

    Args:
        run_dir: the run.
        after: the checkpoint's name (``start`` without one).
        checkpoint: its directory, or None.
        newest: publish counter of the checkpoint's weights; tokens of later ones are not of the lineage.
    """
    groups: list[Group] = []
    open_groups: dict[str, Members] = {}
    if checkpoint is not None:
        groups = _read(checkpoint / IN_CHECKPOINT, open_groups)
    _read(run_dir / _FOLDER / f"after-{after}.jsonl", open_groups)
    progress: dict[str, GroupProgress] = {}
    for group_id, members in open_groups.items():
        kept = {sample: left for sample, m in members.items() if (left := m.sampled_by(newest)) is not None}
        if kept:
            progress[group_id] = kept
    return groups, progress


def _read(path: Path, open_groups: dict[str, Members]) -> list[Group]:
    groups: list[Group] = []
    for line in read_lines(path):
        if line["kind"] == "group":
            members = tuple(decode(row).trajectory for row in line["members"])
            groups.append(Group(line["group"], line["prompt_uid"], line["size"], members))
            continue
        if line["kind"] == "gone":
            open_groups.pop(line["group"], None)
            continue
        members_of = open_groups.setdefault(line["group"], {})
        sample = int(line["sample"])
        if line["kind"] == "member":
            trajectory = decode(line["row"]).trajectory
            before = members_of.get(sample)
            turns = before.turns if before is not None and before.attempt == trajectory.attempt else ()
            members_of[sample] = MemberProgress(trajectory.attempt, turns, trajectory)
        elif line["kind"] == "again":
            members_of[sample] = MemberProgress(int(line["attempt"]))
        else:
            before = members_of.get(sample)
            turns = before.turns if before is not None and before.attempt == line["attempt"] else ()
            record = _decode_turn(line["turn"])
            # A later start may have sampled turns anew that stand here already.
            turns = tuple(turn for turn in turns if turn.turn < record.turn)
            members_of[sample] = MemberProgress(int(line["attempt"]), (*turns, record))
    return groups


def _lines(group: str, sample: int, member: MemberProgress) -> list[Line]:
    if member.finished is not None:
        return [_member_line(group, member.finished)]
    if not member.turns:
        return [_again_line(group, sample, member.attempt)]
    return [_turn_line(group, sample, member.attempt, record) for record in member.turns]


def _group_line(group: Group) -> Line:
    rows = [_row(member) for member in group.members]
    return {"kind": "group", "group": group.group_id, "prompt_uid": group.prompt_uid, "size": group.size,
            "members": rows}  # fmt: skip


def _member_line(group: str, trajectory: Trajectory) -> Line:
    return {"kind": "member", "group": group, "sample": trajectory.sample, "row": _row(trajectory)}


def _again_line(group: str, sample: int, attempt: int) -> Line:
    return {"kind": "again", "group": group, "sample": sample, "attempt": attempt}


def _turn_line(group: str, sample: int, attempt: int, record: TurnRecord) -> Line:
    return {"kind": "turn", "group": group, "sample": sample, "attempt": attempt, "turn": _encode_turn(record)}


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row = encode(TrajectoryRecord(trajectory, 0, "train", "in_flight", None, 1, 0))
    row["env_metrics"] = [list(item) for item in row["env_metrics"]]
    return row


def _encode_turn(record: TurnRecord) -> dict[str, Any]:
    step = record.step
    return {
        "turn": record.turn,
        "context": record.context,
        "spans": [encode_span(span) for span in record.spans],
        "text": record.text,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "llm_seconds": record.llm_seconds,
        "env_seconds": record.env_seconds,
        "observations": tag(list(step.observations)),
        "components": tag(step.components),
        "done": step.done,
        "action": step.postprocessed_action,
        "snapshot": record.snapshot,
    }


def _decode_turn(raw: Mapping[str, Any]) -> TurnRecord:
    step = StepResult(tuple(untag(raw["observations"])), untag(raw["components"]), raw["done"], raw["action"])
    return TurnRecord(
        raw["turn"], raw["context"], tuple(decode_span(span) for span in raw["spans"]), raw["text"],
        raw["finish_reason"], raw["stop_reason"], raw["llm_seconds"], raw["env_seconds"], step, raw["snapshot"],
    )  # fmt: skip
