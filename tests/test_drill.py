"""The drill: kill -9 at random moments, resume, compare bits.  `make drill`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from run_kit import EXACT, start, weights_digest
from test_trainers_run import trained_prompts

KILLS = 20


@pytest.mark.proof
def test_kill_at_random_moments_and_resume_is_bit_equal(tiny_dir: Path, tmp_path: Path) -> None:
    """Twenty kills, spread over the whole life of a run, each in a run of its own."""
    began = time.monotonic()
    whole = start(tiny_dir, tmp_path / "whole", *EXACT, "schedule.steps=12")
    output, _ = whole.communicate(timeout=300)
    lifetime = time.monotonic() - began
    assert whole.returncode == 0, output
    want, prompts = weights_digest(tmp_path / "whole"), trained_prompts(tmp_path / "whole")
    assert set(prompts.values()) == {1}
    moments = random.Random(20)
    for kill in range(KILLS):
        run_dir = tmp_path / f"run-{kill:02d}"
        moment = lifetime * (kill + moments.random()) / KILLS
        process = start(tiny_dir, run_dir, *EXACT, "schedule.steps=12")
        try:
            process.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        resumed = start(tiny_dir, run_dir, *EXACT, "schedule.steps=12")
        output, _ = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, f"killed at {moment:.1f} s: {output}"
        assert weights_digest(run_dir) == want, f"killed at {moment:.1f} s: the weights differ"
        assert trained_prompts(run_dir) == prompts, f"killed at {moment:.1f} s: prompts lost or repeated"
        print(
            f"kill {kill + 1}/{KILLS} at {moment:5.1f} s of {lifetime:.1f} s: bit-equal, every prompt once", flush=True
        )
