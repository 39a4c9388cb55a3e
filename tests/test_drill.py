"""The drill: faults at random moments, and what a run makes of them.  `make drill` prints the table.

`DRILL_MOMENTS` (default 20) says how many random moments each fault is tried at.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from run_kit import EXACT, start, tiny_settings, weights_digest
from slipstream.envs import BaseTextEnv, register
from slipstream.errors import CheckpointError
from slipstream.ledger import LedgerReader
from slipstream.trainers.checkpoint import CheckpointStore
from slipstream.trainers.run import train
from test_trainers_async import ASYNC
from test_trainers_run import StopAt, trained_prompts

pytestmark = pytest.mark.proof
MOMENTS = int(os.environ.get("DRILL_MOMENTS", "20"))
TABLE: list[tuple[str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print what was injected and what happened, once all drills are done."""
    yield
    widths = [max(len(row[i]) for row in [("fault", "moments", ""), *TABLE]) for i in range(2)]
    print("\n" + "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in TABLE), flush=True)


def tell(fault: str, moments: int, happened: str) -> None:
    TABLE.append((fault, str(moments), happened))
    print(f"{fault}: {moments} moments: {happened}", flush=True)


def conserved(run_dir: Path) -> None:
    """The token account balances at every step that counts."""
    for event in LedgerReader(run_dir).events("step", live_only=True):
        account = event.data["account"]
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled"), event.step


def kill_and_resume(tiny_dir: Path, run_dir: Path, moment: float, *overrides: str) -> None:
    """One run in its own process group, killed (signal 9) after ``moment`` seconds, then run to its end."""
    process = start(tiny_dir, run_dir, *overrides)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=moment)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE], "a child was left"
    resumed = start(tiny_dir, run_dir, *overrides)
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, f"killed at {moment:.1f} s: {output}"


def moments(lifetime: float, seed: int) -> list[float]:
    """Random moments, spread over a lifetime in seconds."""
    generator = random.Random(seed)
    return [lifetime * (i + generator.random()) / MOMENTS for i in range(MOMENTS)]


def test_kill_a_synchronous_run_and_resume_is_bit_equal(tiny_dir: Path, tmp_path: Path) -> None:
    more = [*EXACT, "schedule.steps=12"]
    began = time.monotonic()
    whole = start(tiny_dir, tmp_path / "whole", *more)
    output, _ = whole.communicate(timeout=600)
    lifetime = time.monotonic() - began
    assert whole.returncode == 0, output
    want, prompts = weights_digest(tmp_path / "whole"), trained_prompts(tmp_path / "whole")
    assert set(prompts.values()) == {1}
    for i, moment in enumerate(moments(lifetime, 20)):
        run_dir = tmp_path / f"run-{i:02d}"
        kill_and_resume(tiny_dir, run_dir, moment, *more)
        assert weights_digest(run_dir) == want, f"killed at {moment:.1f} s: the weights differ"
        assert trained_prompts(run_dir) == prompts, f"killed at {moment:.1f} s: prompts lost or repeated"
        conserved(run_dir)
    tell("kill -9, synchronous exact", MOMENTS, "resumed: weights equal to the bit, every prompt once, books balance")


def test_kill_an_asynchronous_run_and_resume_trains_every_prompt_once(tiny_dir: Path, tmp_path: Path) -> None:
    more = [*ASYNC, "schedule.steps=12", "data.eval=[]", "rollout.sampling.max_tokens_per_turn=24"]
    began = time.monotonic()
    whole = start(tiny_dir, tmp_path / "whole", *more)
    output, _ = whole.communicate(timeout=600)
    lifetime = time.monotonic() - began
    assert whole.returncode == 0, output
    kept = 0
    for i, moment in enumerate(moments(lifetime, 21)):
        run_dir = tmp_path / f"run-{i:02d}"
        kill_and_resume(tiny_dir, run_dir, moment, *more)
        counts = trained_prompts(run_dir)
        assert set(counts.values()) == {1}, f"killed at {moment:.1f} s: a prompt was trained twice"
        assert len(counts) == 48, f"killed at {moment:.1f} s: prompts were lost"
        conserved(run_dir)
        kept += any(
            record.trajectory.versions().keys() & {f"policy/0/{n}" for n in range(20)}
            for record in LedgerReader(run_dir).trajectories(phase="train")
            if record.live and record.incarnation > 0
        )
    tell(
        "kill -9, asynchronous",
        MOMENTS,
        f"resumed: every prompt once, books balance; in {kept} runs unfinished work of the dead start was trained on",
    )


class Faulty(BaseTextEnv):
    """Rewards digits; some of its calls hang, some are slow, some raise; which, depends on a seed and the count."""

    calls = 0
    faults: ClassVar[Counter[str]] = Counter()
    kind = ""
    rng = random.Random(0)

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        if self.rng.random() < 0.3:
            self.faults[self.kind] += 1
            if self.kind == "raise":
                raise RuntimeError("the sandbox is gone")
            time.sleep(1.0 if self.kind == "hang" else 0.1 * self.rng.random())
        done = self.turns == 2
        observations = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": observations, "reward": len(action) / 100, "done": done, "metadata": {}}


register(id="faulty_drill", entry_point=Faulty)


@pytest.mark.parametrize("kind", ["hang", "slow", "raise"])
def test_an_environment_that_hangs_is_slow_or_raises(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    Faulty.kind, Faulty.rng = kind, random.Random(kind)
    Faulty.faults.clear()
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "env_class": "faulty_drill"} for i in range(32)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    more = [
        *ASYNC, f"data.train={tmp_path / 'd.jsonl'}", "data.eval=[]", "rollout.env_step_seconds=0.4",
        "rollout.failures.attempts=3", "rollout.failures.max_failed_fraction=0.9",
    ]  # fmt: skip
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *more)).finished
    assert Faulty.faults[kind] >= 20
    conserved(tmp_path / "r")
    fates = Counter(r.disposition for r in LedgerReader(tmp_path / "r").trajectories(phase="train"))
    for record in LedgerReader(tmp_path / "r").trajectories(phase="train"):
        assert record.disposition == "trained" or record.advantage is None, "what failed has no advantage, not a zero"
    what = ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items()))
    names = {"hang": "environment hangs", "slow": "verifier is slow", "raise": "environment raises"}
    tell(names[kind], Faulty.faults[kind], f"the run went on; samples: {what}")


def test_a_torn_checkpoint_is_named_and_an_older_one_serves(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *ASYNC, "data.eval=[]", "checkpoint.every_steps=1")
    train(settings, [StopAt(4)])
    root = tmp_path / "r" / "checkpoints"
    whole = tmp_path / "whole"
    shutil.copytree(root / "rl-000004", whole)
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.name != "manifest.json")
    generator = random.Random(4)
    for i in range(MOMENTS):
        name = files[i % len(files)]
        body = bytearray((whole / name).read_bytes())
        if generator.random() < 0.5:
            body = body[: generator.randrange(len(body))]
        else:
            body[generator.randrange(len(body))] ^= 1 << generator.randrange(8)
        (root / "rl-000004" / name).write_bytes(bytes(body))
        with pytest.raises(CheckpointError, match=name.name):
            train(settings)
        (root / "rl-000004" / name).write_bytes((whole / name).read_bytes())
    (root / "rl-000004" / files[0]).write_bytes(b"")
    CheckpointStore(root).point_to("rl-000003")
    assert train(settings).finished
    assert set(trained_prompts(tmp_path / "r").values()) == {1}
    conserved(tmp_path / "r")
    tell("checkpoint torn or flipped", MOMENTS, "refused, naming the file; from the one before, every prompt once")


def test_a_full_disk_stops_the_run_naming_the_file_and_it_goes_on_with_room(tiny_dir: Path, tmp_path: Path) -> None:
    """A limit on file sizes refuses writes as a full disk does, at whichever file grows first."""
    more = [*ASYNC, "data.eval=[]", "checkpoint.every_steps=1"]
    run_dir = tmp_path / "r"
    train(tiny_settings(tiny_dir, run_dir, *more), [StopAt(1)])
    generator = random.Random(9)
    biggest = max(p.stat().st_size for p in run_dir.rglob("*") if p.is_file())
    before, causes = resource.getrlimit(resource.RLIMIT_FSIZE), Counter[str]()
    for i in range(MOMENTS):
        copy = tmp_path / f"copy-{i:02d}"
        shutil.copytree(run_dir, copy)
        settings = tiny_settings(tiny_dir, copy, *more, "schedule.steps=3")
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(biggest * generator.uniform(0.05, 0.95)), before[1]))
        try:
            with pytest.raises(OSError, match=r"write|written|large|space") as caught:
                train(settings)
            causes[type(caught.value).__name__] += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert train(settings).finished
        assert set(trained_prompts(copy).values()) == {1}
        conserved(copy)
        shutil.rmtree(copy)
    tell("no room for a file", MOMENTS, f"stopped with {dict(causes)}; with room again, every prompt once")
