"""Ctrl-C: the run ends, what it did is kept, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil

from cli_helpers import slipstream, start, tiny_run

ENVIRONMENT = '''
import subprocess, sys
from slipstream.envs import register
from slipstream.envs.arithmetic import ArithmeticEnv


class WithChild(ArithmeticEnv):
    """Holds a child process while it is open, as a sandbox would."""

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        self.child = subprocess.Popen(["sleep", "600"])

    def close(self):
        self.child.kill()
        self.child.wait()


register("with-child", WithChild)
'''
SLOW_IMPORT = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read the process's output up to a line that holds ``text``; pytest's own limit bounds the wait."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}: {process.stderr and process.stderr.read()}")


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Send SIGINT; exit code, further output, errors.  Asserts that no child of it is left."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return process.returncode, out, err


def test_ctrl_c_in_the_middle_of_a_run_and_the_same_command_again(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "child_env.py").write_text(ENVIRONMENT)
    rows = tmp_path / "rows.jsonl"
    from cli_helpers import write_rows
    from slipstream.envs.arithmetic import arithmetic_rows

    write_rows(rows, [{**row, "env_class": "with-child"} for row in arithmetic_rows(8)])
    changes = {"data__train": rows, "env__modules": "child_env", "checkpoint__every_steps": 0}
    items = tiny_run(tiny_dir, tmp_path / "run", **changes, schedule__steps=100_000)
    process = start("train", *items, cwd=tmp_path)
    wait_for(process, "step 2/")
    code, out, err = interrupt(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert "go on with the same command" in err
    done = int(out.split(" RL steps")[0].split()[-1])
    assert done >= 2
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"rl-{done:06d}"

    again = slipstream("train", *tiny_run(tiny_dir, tmp_path / "run", **{**changes, "env__modules": "[]"},
                                          schedule__steps=done + 1))  # fmt: skip
    assert again.exit_code == 2  # the modules are part of what a run is
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        again = slipstream("train", *tiny_run(tiny_dir, tmp_path / "run", **changes, schedule__steps=done + 1))
    finally:
        sys.path.remove(str(tmp_path))
    assert again.exit_code == 0, again.output
    assert f"resumed from rl-{done:06d}" in again.output
    assert f"{done + 1} RL steps" in again.output


def test_ctrl_c_twice_stops_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    """The second one does not wait for the step; the last checkpoint stays."""
    items = tiny_run(tiny_dir, tmp_path / "run", schedule__steps=100_000, checkpoint__every_steps=1)
    process = start("train", *items, cwd=tmp_path)
    wait_for(process, "step 1/")
    process.send_signal(signal.SIGINT)
    code, _, err = interrupt(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_ctrl_c_before_anything_has_started(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT)
    process = start("train", "env.modules=slow_import", "data.train=builtin:arithmetic", cwd=tmp_path)
    wait_for(process, "importing")
    code, _, err = interrupt(process)
    assert (code, err.strip()) == (130, "interrupted")
    assert not (tmp_path / "runs").exists()
