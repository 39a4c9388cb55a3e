"""Doing a recorded run, or one of its updates, again, and comparing.

Owns: ``replay_run`` (a whole exact run from its recorded schedule, compared to the bit) and ``replay_update`` (one
optimiser update from the ledger's trajectories, without an engine).  Refuses: writing into the run that is replayed.

    verdict = replay_run(Path("runs/a"))          # needs determinism=exact
    verdict = replay_update(Path("runs/a"), 7)    # any run; begins at a checkpoint before, or at the first weights
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.algorithms.filters import apply_filters, stand_ins, without_overlong
from slipstream.config import load_settings, resolve_settings
from slipstream.config.settings import RunSettings
from slipstream.envs.registration import import_modules
from slipstream.errors import CheckpointError, LedgerError
from slipstream.ledger import Event, LedgerReader
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.checkpoint import Checkpoint, CheckpointStore
from slipstream.trainers.parts import build_backend
from slipstream.trainers.progress import Progress
from slipstream.trainers.recording import Recording
from slipstream.trainers.run import Run
from slipstream.trainers.update import PolicyUpdate, UpdateResult
from slipstream.trainers.waiting import within
from slipstream.trajectory import Group, Trajectory

COUNTS_OF_THE_SCHEDULE = ("schedule/",)
"""Metrics that say how far sampling was ahead at an instant; they are not repeated."""


@dataclass(frozen=True)
class RunVerdict:
    """``differing`` are the steps whose content is not equal, or that one side lacks.

    ``evaluations`` names those that differ or that one side lacks; ``weights_equal`` compares the exported models, if
    both are.
    """

    steps: int
    differing: Sequence[int]
    evaluations: Sequence[str]
    weights_equal: bool | None
    replayed_in: Path

    @property
    def equal(self) -> bool:
        """Everything that was compared is equal to the bit."""
        return not self.differing and not self.evaluations and self.weights_equal is not False


def replay_run(run_dir: Path, into: Path | None = None) -> RunVerdict:
    """Train again along the recorded schedule, in ``into`` (default: ``replay`` in the run), and compare.

    Raises:
        LedgerError: the run has no recording that can be repeated (with the reason), or ``into`` exists.
    """
    recording = Recording.load(run_dir)
    settings = _settings(run_dir)
    target = into if into is not None else run_dir / "replay"
    if into is not None and into.exists():
        raise LedgerError(f"{into} exists; name a directory that does not")
    shutil.rmtree(target, ignore_errors=True)
    settings = settings.model_copy(
        update={
            "run_dir": target,
            "checkpoint": settings.checkpoint.model_copy(update={"every_steps": 0}),
            "logging": settings.logging.model_copy(update={"sinks": ("jsonl",), "report": False}),
            "rules": (),
        }
    )
    last = _StopAfter(len(recording.steps), settings.schedule.steps)
    asyncio.run(Run(settings, [last], recording=recording).run())
    return _compare(run_dir, target, len(recording.steps), whole=len(recording.steps) >= settings.schedule.steps)


class _StopAfter(Callback):
    """Ends the replay where the recording ends."""

    def __init__(self, recorded: int, steps: int) -> None:
        self._last = recorded if recorded < steps else None

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if info.phase == "rl" and info.step == self._last:
            control.stop("the recording ends here")


def _settings(run_dir: Path) -> RunSettings:
    path = run_dir / "settings.yaml"
    if not path.is_file():
        raise LedgerError(f"{path} is missing; is {run_dir} a run directory?")
    settings = load_settings([path], []).settings
    import_modules(settings.env.modules)
    return settings


def _compare(first: Path, second: Path, steps: int, *, whole: bool) -> RunVerdict:
    """Unless the ``whole`` run was recorded, the replay has no evaluation after its last step."""
    one, other = LedgerReader(first), LedgerReader(second)
    mine, theirs = (reader.step_digests(without=COUNTS_OF_THE_SCHEDULE) for reader in (one, other))
    there = mine.keys() & theirs.keys()
    differing = [step for step in range(1, steps + 1) if step not in there or mine[step] != theirs[step]]
    scores = [{_name(e): e.data["scores"] for e in r.events("eval", live_only=True)} for r in (one, other)]
    if not whole:
        scores = [{name: s for name, s in held.items() if name[::2] != (steps, "rl")} for held in scores]
    weights = [_weights_digest(path) for path in (first, second)]
    same = None if None in weights else weights[0] == weights[1]
    evaluations = [
        f"{stage} of {name} at step {step}"
        + (" (not in the replay)" if key not in scores[1] else " (only in the replay)" if key not in scores[0] else "")
        for key in sorted(scores[0].keys() | scores[1].keys())
        for step, name, stage in [key]
        if scores[0].get(key) != scores[1].get(key)
    ]
    return RunVerdict(steps, differing, evaluations, same, second)


def _name(event: Event) -> tuple[Any, ...]:
    return event.step, event.data["name"], event.data["stage"]


def _weights_digest(run_dir: Path) -> str | None:
    files = sorted((run_dir / "model").glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.blake2b()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


# -- one update ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateVerdict:
    """A repeated update beside the recorded one.

    ``metrics`` maps metrics of the update to (recorded, repeated); ``logprob_gap`` is the largest absolute difference
    of a trained token's log-prob, over ``tokens`` tokens.
    """

    step: int
    began_at: str
    updates: int
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tokens: int = 0
    logprob_gap: float = 0.0

    @property
    def gap(self) -> float:
        """The largest difference of anything compared; 0 is equal to the bit."""
        return max([self.logprob_gap, *(abs(a - b) for a, b in self.metrics.values())])


def replay_update(run_dir: Path, step: int) -> UpdateVerdict:
    """Repeat the update of ``step`` from the ledger's trajectories.

    It begins at the newest checkpoint before the step, or at the run's first weights, and goes through the updates in
    between.  No engine and no environment take part.

    Raises:
        LedgerError: the ledger has no live record of a step that is needed.
        CheckpointError: the run had a supervised phase and no checkpoint from after it and before the step is left.
    """
    return asyncio.run(_replay_update(run_dir, step))


async def _replay_update(run_dir: Path, step: int) -> UpdateVerdict:
    reader = LedgerReader(run_dir)
    events = {event.step: event for event in reader.events("step", live_only=True)}
    found = _checkpoint_before(run_dir, step)
    first = _settings(run_dir)
    settings = RunSettings.model_validate(found.state["settings"]) if found else resolve_settings(first, 0)
    done = int(found.state["progress"]["rl_steps"]) if found else 0
    if found is None and settings.sft.steps:
        raise CheckpointError(
            f"{run_dir}: no checkpoint from before step {step} is left, and the first weights are those after the "
            "supervised phase; choose a later step, or keep more checkpoints (checkpoint.keep)"
        )
    backend = build_backend(settings)
    try:
        update = PolicyUpdate(backend, settings.algorithm, settings.schedule.step_deadline_seconds)
        if found is not None:
            await _load(backend, found, settings, update)
        for number in range(done + 1, step + 1):
            if number not in events:
                raise LedgerError(f"{run_dir}: the ledger has no live record of step {number}")
            groups = list(_selected(reader, events[number]))
            if settings.algorithm.overlong.factor > 0:
                groups = [replace(g, members=tuple(without_overlong(m) for m in g.members)) for g in groups]
            filtered = apply_filters(groups, settings.algorithm, settings.rollout)
            if settings.algorithm.dynamic_sampling.kind == "replace":
                filtered = stand_ins(filtered, settings.schedule.prompts_per_step)
            result = await update(filtered, number - 1, str(events[number].data["weight_version_before"]))
        return _judge(reader, result, step, found.directory.name if found else "the first weights", step - done)
    finally:
        backend.close()


def _checkpoint_before(run_dir: Path, step: int) -> Checkpoint | None:
    store = CheckpointStore(run_dir / "checkpoints")
    usable: list[tuple[int, str]] = []
    for name in store.names():
        phase, _, number = name.partition("-")
        at = int(number) if phase == "rl" else 0
        if at < step:
            usable.append((at, name))
    for _, name in sorted(usable, reverse=True):
        found = store.open(name)
        progress = Progress(**found.state["progress"])
        if progress.sft_steps >= int(found.state["settings"]["sft"]["steps"]):
            return found
    return None


async def _load(backend: Any, found: Checkpoint, settings: RunSettings, update: PolicyUpdate) -> None:
    deadline = settings.schedule.step_deadline_seconds
    for directory in sorted(path for path in found.directory.iterdir() if path.name in backend.handles):
        await within(backend.load(directory.name, directory), deadline, f"loading the {directory.name}")
    progress = Progress(**found.state["progress"])
    if progress.rl_steps == 0 and settings.sft.steps:
        call = backend.reset_optimizer(settings.training.optimizer, settings.schedule.steps)
        await within(call, deadline, "phase change")
        if "reference" in backend.handles:
            await within(backend.set_reference(), deadline, "phase change")
    if progress.update is not None:
        update.load_state_dict(progress.update)


def _selected(reader: LedgerReader, event: Event) -> Iterator[Group]:
    """The groups that a step trained on, as they were."""
    wanted: dict[str, list[Trajectory]] = {group_id: [] for group_id in event.data["selected"]}
    sizes: dict[str, int] = {}
    for record in reader.trajectories(phase="train", step=int(event.step or 0)):
        member = record.trajectory
        if member.group_id in wanted and record.disposition not in ("superseded", "stale"):
            wanted[member.group_id].append(member)
            sizes[member.group_id] = record.group_size
    for group_id, members in wanted.items():
        if not members:
            raise LedgerError(
                f"step {event.step}: group {group_id} was trained on, but has no trajectory in the ledger"
            )
        yield Group(group_id, members[0].prompt_uid, sizes[group_id], tuple(members))


def _judge(reader: LedgerReader, result: UpdateResult, step: int, began: str, updates: int) -> UpdateVerdict:
    recorded = next(row.values for row in reader.metrics("train") if row.step == step)
    metrics = {n: (recorded[n], float(v)) for n, v in result.metrics.items() if n in recorded}
    gap, tokens = 0.0, 0
    for record in reader.trajectories(phase="train", step=step):
        repeated = result.trainer_logprobs.get(record.trajectory.trajectory_id)
        if repeated is None or record.trainer_logprobs is None:
            continue
        for old, new in zip(record.trainer_logprobs, repeated, strict=True):
            if old is not None and new is not None:
                tokens += len(old)
                gap = max(gap, float(np.max(np.abs(np.asarray(old) - np.asarray(new)), initial=0.0)))
    return UpdateVerdict(step, began, updates, metrics, tokens, gap)
