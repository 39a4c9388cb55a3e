"""What a run saves and how it goes on: checkpoints with everything in them, and the journal of rollouts.

Owns: the content of a checkpoint, resuming from one, the journal's files.
Refuses: how a checkpoint is made whole (``checkpoint``), when one is due (the loop and the phases).

A checkpoint is of one instant: the schedule, the data cursor and the journal are cut together, while rollouts run; the
heavy files are written in a thread, and the policy does not step meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.config import check_resume, load_settings
from slipstream.config.settings import RunSettings
from slipstream.errors import CheckpointError
from slipstream.ledger import Ledger
from slipstream.rollout.progress import GroupProgress
from slipstream.trainers.checkpoint import Checkpoint, CheckpointStore
from slipstream.trainers.journal import IN_CHECKPOINT, RolloutJournal, has_journal, recover
from slipstream.trainers.loop import Loop
from slipstream.trainers.parts import Parts
from slipstream.trainers.progress import Progress
from slipstream.trainers.waiting import within
from slipstream.trajectory import Group
from slipstream.weights import VersionCounter

START = "start"
"""What the journal calls a run that stands before its first checkpoint."""


def keeps_rollouts(settings: RunSettings) -> bool:
    """Whether unfinished rollouts are gone on with after a resume; see ``checkpoint.rollouts``."""
    how = settings.checkpoint.rollouts
    exact_sync = settings.training.determinism == "exact" and settings.schedule.kind == "sync"
    return how == "continue" or (how == "auto" and not exact_sync)


class Saver:
    """Saves and resumes one run directory.

    ``buffered`` and ``recovered`` are what ``resume`` found for the loop: finished groups that no step has recorded,
    and by group id what is known of unfinished ones.
    """

    def __init__(self, run_dir: Path, settings: RunSettings) -> None:
        self.run_dir = run_dir
        self.settings = settings
        named = [rule.to for rule in settings.rules if rule.to is not None]
        self.store = CheckpointStore(run_dir / "checkpoints", settings.checkpoint.keep, named)
        self.journal: RolloutJournal | None = None
        self.buffered: Sequence[Group] = ()
        self.recovered: Mapping[str, GroupProgress] = {}
        self._at = START

    def find(self) -> Checkpoint | None:
        """The checkpoint to go on from, whole and of the same configuration."""
        how = self.settings.checkpoint.resume
        if how == "never":
            if self.store.names() or has_journal(self.run_dir):
                raise CheckpointError(
                    f"{self.run_dir} already holds a run; choose another run_dir, or set checkpoint.resume=auto"
                )
            return None
        found = self.store.latest()
        if found is None and how == "must":
            raise CheckpointError(f"{self.run_dir}: checkpoint.resume=must, but there is no checkpoint")
        if found is not None:
            check_resume(RunSettings.model_validate(found.state["settings"]), self.settings, resolved=False)
        elif has_journal(self.run_dir):
            # Nothing is trained yet, but what was sampled is used.
            check_resume(load_settings([self.run_dir / "settings.yaml"], []).settings, self.settings, resolved=False)
        return found

    # -- saving ------------------------------------------------------------------------------------------------

    async def save(self, progress: Progress, parts: Parts, ledger: Ledger, loop: Loop | None) -> None:
        """Write a checkpoint; raises ``CheckpointError`` and leaves earlier ones alone when it cannot."""
        started = time.perf_counter()
        lines: list[str] = []
        # No await in here: this is one instant.
        if loop is not None:
            progress.schedule = loop.schedule.state_dict()
            progress.sampler = loop.rollouts.sampler.state_dict()
            progress.rollouts = loop.rollouts.state_dict()
            progress.update = loop.update.state_dict()
            lines = self._cut(progress.name, loop)
        state = {
            "progress": asdict(progress),
            "settings": self.settings.model_dump(mode="json"),
            "version": parts.counter.state_dict(),
            "unpublished": parts.stale,
            "incarnation": ledger.incarnation,
        }

        def fill(directory: Path) -> None:
            for handle in parts.backend.saved_handles:
                parts.backend.save(handle, directory / handle).result(parts.deadline)
            if lines:
                (directory / IN_CHECKPOINT).write_text("\n".join(lines) + "\n")

        path = await asyncio.to_thread(self.store.save, progress.name, state, fill)
        self._at = path.name
        if self.journal is not None:
            self.journal.prune(self.store.names())
        ledger.event("checkpoint", step=progress.rl_steps, name=path.name, seconds=time.perf_counter() - started)

    def _cut(self, name: str, loop: Loop) -> list[str]:
        if self.journal is None:
            # Nothing is journalled, but finished groups would be sampled again for nothing.
            return RolloutJournal.lines_of(loop.schedule.buffered())
        return self.journal.cut(name, loop.schedule.buffered(), loop.rollouts.recovered)

    def open_journal(self, progress: Progress) -> None:
        """Begin (or go on with) the journal of what follows the checkpoint that the run stands at."""
        self.journal = RolloutJournal(self.run_dir, self._at)

    def close(self) -> None:
        """Close the journal."""
        if self.journal is not None:
            self.journal.close()

    # -- resuming ----------------------------------------------------------------------------------------------

    async def resume(
        self, found: Checkpoint | None, parts: Parts, ledger: Ledger, say: Callable[[str], None]
    ) -> Progress:
        """Load everything that a checkpoint holds, and mark in the ledger what is done again."""
        progress = Progress(data_fingerprint=parts.fingerprint)
        number = 1  # of the weights that the run goes on from: the initial ones get it at the first publish
        if found is not None:
            # Once more, now that lengths are known which the settings leave open.
            check_resume(RunSettings.model_validate(found.state["settings"]), self.settings)
            progress = Progress(**found.state["progress"])
            await self._load(found, progress, parts)
            self._at = found.directory.name
            last = int(found.state["version"]["counter"])
            number = last + bool(found.state["unpublished"])
            # The same weights keep their number in the new incarnation, so that numbers stay aligned with steps.  Those
            # of an unfinished warm start change before they are published (again).
            warming = progress.sft_steps < self.settings.sft.steps
            parts.counter = VersionCounter("policy", ledger.incarnation, last if warming else max(number - 1, 0))
        directory = found.directory if found is not None else None
        if progress.sft_steps >= self.settings.sft.steps:
            self.buffered, recovered = recover(self.run_dir, self._at, directory, max(number, 1))
            self.recovered = recovered if keeps_rollouts(self.settings) else {}
        buffered = sum(group.sampled_tokens for group in self.buffered)
        in_flight = sum(member.tokens for group in self.recovered.values() for member in group.values())
        lost = ledger.rewind(progress.rl_steps, buffered=buffered, in_flight=in_flight)
        if found is not None:
            say(self._words(found, progress, lost["steps"]))
        return progress

    def _words(self, found: Checkpoint, progress: Progress, lost_steps: int) -> str:
        words = (
            f"resumed from {found.directory.name}: {progress.sft_steps} supervised and {progress.rl_steps} RL steps "
            "are done"
        )
        if lost_steps:
            words += f"; {lost_steps} later steps are superseded"
        if self.recovered or self.buffered:
            turns = sum(len(m.turns) for group in self.recovered.values() for m in group.values())
            whole = sum(m.finished is not None for group in self.recovered.values() for m in group.values())
            words += (
                f"; {len(self.buffered)} finished groups, {whole} finished samples and {turns} completed turns of "
                "others are kept"
            )
        return words

    async def _load(self, found: Checkpoint, progress: Progress, parts: Parts) -> None:
        if progress.data_fingerprint != parts.fingerprint:
            raise CheckpointError(
                f"{found.directory}: the training data has changed since this checkpoint; "
                "restore the files, or start a new run_dir"
            )
        backend: Any = parts.backend
        if progress.sft_steps < self.settings.sft.steps:
            # A checkpoint holds moments, not settings: the phase it was written in says which optimiser goes on.
            call = backend.reset_optimizer(self.settings.sft.optimizer, self.settings.sft.steps)
            await within(call, parts.deadline, "phase change")
        for handle in backend.handles:
            if handle not in backend.saved_handles and not (found.directory / handle).is_dir():
                continue  # nothing of its own, then as now
            await within(backend.load(handle, found.directory / handle), parts.deadline, f"loading the {handle}")
