"""Signal 9 to engine processes and to the router, while a run samples and publishes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from drill_kit import ASYNC, ENDLESS, MOMENTS, Drill, Kill, cause, drilling, fates, sound, versions_are_known
from test_drill_environment import STARTS, Until

from run_kit import tiny_settings
from slipstream.errors import BudgetExceededError, InferenceError, PublishError
from slipstream.inference.launch.router import router_installed
from slipstream.ledger import LedgerReader
from slipstream.trainers.run import train

pytestmark = pytest.mark.proof
REPLICAS = [
    *ASYNC, *ENDLESS, "inference.replicas=2", "inference.launch.health_seconds=2", "inference.launch.restarts=200",
    "rollout.failures.attempts=6", "rollout.failures.max_failed_fraction=0.9", "env.id=pause_drill",
    "env.modules=[drill_env]",
]  # fmt: skip


def found(words: str) -> list[psutil.Process]:
    """Processes below this one whose command has a word of this pattern: not their guards."""
    below = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if any(re.fullmatch(words, part) for part in line) and "guard.py" not in " ".join(line):
            below.append(process)
    return below


class Killer(threading.Thread):
    """Kills one of the processes that serve, ``MOMENTS`` times, at random moments; each process once.

    Three times in four it waits for a step of the run first, else it may hit the start.  It is done when the last one
    has been replaced: ``whole`` of them serve again.
    """

    def __init__(self, drill: Drill, words: str, whole: int, pause: float, ports: set[int]) -> None:
        super().__init__()
        self.kills: list[Kill] = []
        self.steps = 0
        self.over = threading.Event()
        self._drill, self._words, self._whole, self._pause, self._ports = drill, words, whole, pause, ports

    def run(self) -> None:
        rng, seen, after = self._drill.rng, set[int](), 0
        while len(self.kills) < MOMENTS and not self.over.wait(rng.uniform(0.0, self._pause)):
            processes = [p for p in found(self._words) if p.pid not in seen and _listens(p, self._ports)]
            if processes and self.steps >= after:
                victim = rng.choice(processes)
                seen.add(victim.pid)
                self.kills.append(Kill(time.time(), _log_of(victim)))
                victim.kill()
                after = self.steps + (rng.random() < 0.75)
        while not self.over.wait(0.2):
            if len([p for p in found(self._words) if p.pid not in seen and _listens(p, self._ports)]) >= self._whole:
                return


def _log_of(process: psutil.Process) -> str:
    """Its name in the ledger: its log is called so."""
    return Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem


def _listens(process: psutil.Process, ports: set[int]) -> bool:
    """Whether it serves already; notes its ports."""
    try:
        own = [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return False
    ports.update(own)
    return bool(own)


def run_under(settings: Any, killer: Killer) -> Counter[str]:
    """Start the run again and again until the killer is done; why it stopped in between."""
    stopped: Counter[str] = Counter()

    def over() -> bool:
        killer.steps += 1
        return not killer.is_alive()

    killer.start()
    try:
        for _ in range(STARTS):
            try:
                train(settings, [Until(over)])
            except (InferenceError, PublishError, BudgetExceededError) as error:
                stopped[cause(error)] += 1
                continue
            return stopped
        raise AssertionError(f"not done after {STARTS} starts: {stopped}")
    finally:
        killer.over.set()
        killer.join()


def judge(drill: Drill, kills: list[Kill], stopped: Counter[str], run_dir: Path) -> None:
    """The books, and what came of each kill: the ledger tells of every death, but where that start ended with it."""
    sound(run_dir)
    versions_are_known(run_dir)
    reader = LedgerReader(run_dir)
    came = fates(kills, reader.events())
    for _, fate in came:
        drill.happened("the run went on, and the ledger tells of it" if fate == "told" else f"{fate}; resumed")
    assert all(fate for _, fate in came), f"deaths that the ledger does not tell of: {[k for k, f in came if not f]}"
    assert len(reader.events("error")) == stopped.total()
    drill.notes["steps"] = len(reader.events("step", live_only=True))
    lost = [r for r in reader.trajectories(phase="train") if r.disposition == "superseded"]
    drill.notes["attempts_superseded"] = len(lost)
    drill.notes["turns_gone_on_with"] = len(reader.events("recovered"))


needs_router = pytest.mark.skipif(not router_installed(), reason="the wheel vllm-router is not installed")


@pytest.mark.parametrize("router", ["client", pytest.param("vllm-router", marks=needs_router)])
def test_an_engine(router: str, tiny_dir: Path, tmp_path: Path) -> None:
    injected = "signal 9 to a random one of two engine processes, at a random moment in which one serves"
    name = "kill an engine" if router == "client" else f"kill an engine behind {router}"
    with drilling(name, injected) as drill:
        with drill.nothing_left() as ports:
            killer = Killer(drill, "serve", 2, 3.0, ports)
            settings = tiny_settings(tiny_dir, tmp_path / "r", *REPLICAS, f"inference.router.process={router}")
            stopped = run_under(settings, killer)
        judge(drill, killer.kills, stopped, tmp_path / "r")


@needs_router
def test_the_router(tiny_dir: Path, tmp_path: Path) -> None:
    injected = "signal 9 to vllm-router at a random moment in which it serves two engine processes"
    with drilling("kill the router", injected) as drill:
        with drill.nothing_left() as ports:
            killer = Killer(drill, r"vllm::router|vllm_router\.\S+", 1, 2.0, ports)
            settings = tiny_settings(tiny_dir, tmp_path / "r", *REPLICAS, "rollout.failures.attempts=2")
            stopped = run_under(settings, killer)
        judge(drill, killer.kills, stopped, tmp_path / "r")
