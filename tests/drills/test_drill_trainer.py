"""Signal 9 to the trainer, at random moments of its life, and the same command again."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill_forge import Ended, Forge
from drill_kit import ASYNC, MOMENTS, Drill, conserved, drilling, sound, trained_prompts

from run_kit import EXACT, arguments, weights_digest
from slipstream.ledger import LedgerReader

pytestmark = pytest.mark.proof
SECONDS = 900.0
TRIES = 5
REPLICAS = [
    "inference.replicas=2", "inference.router.process=client", "inference.launch.health_seconds=2",
    "rollout.failures.attempts=4",
]  # fmt: skip


def command(arguments: list[str]) -> None:
    """``slipstream ARGUMENTS`` in this process."""
    from slipstream.cli.main import app

    app(arguments)


class Killer:
    """Runs one configuration to its end, with and without a kill."""

    def __init__(self, forge: Forge, drill: Drill, model: Path, folder: Path, overrides: list[str]) -> None:
        self.forge, self.drill, self.model, self.folder = forge, drill, model, folder
        self.overrides = overrides
        self.whole = folder / "whole"
        ended = self._run(self.whole)
        assert ended.status == 0, ended.output
        self.lifetime = ended.seconds
        self.hit_again = 0

    def _run(self, run_dir: Path, kill_after: float | None = None) -> Ended:
        words = arguments(self.model, run_dir, *self.overrides)
        log = self.folder / f"{run_dir.name}.log"
        return self.forge.run(
            "test_drill_trainer:command", log, SECONDS, kill_after=kill_after, arguments=words[words.index("train") :]
        )

    def kill_and_resume(self, i: int, *, again: bool = False) -> Path:
        """One kill that hit a living run, with ``again`` one more for what goes on, then the end; its directory.

        The second kill comes at any moment of a whole lifetime and may find the run at its end: ``hit_again`` counts.
        """
        for attempt in range(TRIES):
            run_dir = self.folder / f"run-{i:02d}-{attempt}"
            moment = self.lifetime * self.drill.spread(i)
            with self.drill.nothing_left():
                killed = self._run(run_dir, moment)
            if killed.killed:
                break
            assert killed.status == 0, killed.output
            # It was faster than the first one.
            self.lifetime = min(self.lifetime, killed.seconds)
        else:
            raise AssertionError(f"{TRIES} runs had ended before their moment")
        if again:
            with self.drill.nothing_left():
                self.hit_again += self._run(run_dir, self.lifetime * self.drill.rng.random()).killed
        with self.drill.nothing_left():
            resumed = self._run(run_dir)
        assert resumed.status == 0, f"killed at {moment:.2f} s: {resumed.output}"
        self.lifetime = max(self.lifetime, moment)
        return run_dir


def stood_at(run_dir: Path) -> str:
    """Where the second start began."""
    starts = LedgerReader(run_dir).events("run_started")
    if len(starts) < 2:
        return "before the ledger was opened"
    return "at a checkpoint" if starts[-1].data["resumed_from"] else "before the first checkpoint"


def test_a_synchronous_exact_run(forge: Forge, tiny_dir: Path, tmp_path: Path) -> None:
    with drilling("kill the trainer, synchronous, exact", "signal 9 at a random moment of its life") as drill:
        drill.known.add(forge.pid)
        killer = Killer(forge, drill, tiny_dir, tmp_path, [*EXACT, "schedule.steps=8"])
        want, prompts = weights_digest(killer.whole), trained_prompts(killer.whole)
        assert set(prompts.values()) == {1}
        for i in range(MOMENTS):
            run_dir = killer.kill_and_resume(i)
            assert weights_digest(run_dir) == want, f"{run_dir}: the weights differ"
            assert trained_prompts(run_dir) == prompts, f"{run_dir}: prompts lost or repeated"
            conserved(run_dir)
            drill.happened(f"killed {stood_at(run_dir)}; resumed, weights equal to the bit, every prompt once")


def test_an_asynchronous_run(forge: Forge, tiny_dir: Path, tmp_path: Path) -> None:
    with drilling("kill the trainer, asynchronous", "signal 9 at a random moment of its life") as drill:
        drill.known.add(forge.pid)
        more = [*ASYNC, "schedule.steps=8", "rollout.sampling.max_tokens_per_turn=16"]
        killer = Killer(forge, drill, tiny_dir, tmp_path, more)
        kept = 0
        for i in range(MOMENTS):
            run_dir = killer.kill_and_resume(i)
            assert len(trained_prompts(run_dir)) == 32, f"{run_dir}: prompts were lost"
            sound(run_dir)
            kept += goes_on_with_old_work(run_dir)
            drill.happened(f"killed {stood_at(run_dir)}; resumed, every prompt once, books balance")
        drill.notes["runs_that_trained_on_work_of_the_dead_start"] = kept


def test_a_run_that_is_killed_twice(forge: Forge, tiny_dir: Path, tmp_path: Path) -> None:
    """What the second start took over from the first must outlive it, too."""
    injected = "signal 9 at a random moment, and at another one of the run that goes on"
    with drilling("kill the trainer twice", injected) as drill:
        drill.known.add(forge.pid)
        more = [*ASYNC, "schedule.steps=8", "rollout.sampling.max_tokens_per_turn=16"]
        killer = Killer(forge, drill, tiny_dir, tmp_path, more)
        for i in range(MOMENTS):
            run_dir = killer.kill_and_resume(i, again=True)
            assert len(trained_prompts(run_dir)) == 32, f"{run_dir}: prompts were lost"
            sound(run_dir)
            drill.happened("resumed, every prompt once, books balance")
        drill.notes["second_kills_that_hit"] = killer.hit_again
        assert killer.hit_again > MOMENTS // 4


def goes_on_with_old_work(run_dir: Path) -> bool:
    """Whether the resumed run trained on tokens that the killed one had sampled."""
    return any(
        name.startswith("policy/0/")
        for record in LedgerReader(run_dir).trajectories(phase="train")
        if record.live and record.incarnation > 0
        for name in record.trajectory.versions()
    )


def test_a_run_with_engine_processes(forge: Forge, tiny_dir: Path, tmp_path: Path) -> None:
    """What counts here is that the engines go, too."""
    name = "kill the trainer above two engine processes"
    with drilling(name, "signal 9 at a random moment of its life") as drill:
        drill.known.add(forge.pid)
        killer = Killer(forge, drill, tiny_dir, tmp_path, [*ASYNC, *REPLICAS, "schedule.steps=4"])
        for i in range(MOMENTS):
            run_dir = killer.kill_and_resume(i)
            assert len(trained_prompts(run_dir)) == 16, f"{run_dir}: prompts were lost"
            sound(run_dir)
            drill.happened(f"killed {stood_at(run_dir)}; engines gone; resumed, every prompt once, books balance")
