"""Ctrl-C: the run ends, what it did is kept, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import typer

from cli_helpers import slipstream, start, tiny_run
from slipstream.config.settings import RunSettings

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


def interrupt(process: subprocess.Popen[str], by: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Send a signal; exit code, further output, errors.  Asserts that no child of it is left."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(by)
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
    wait_for(process, "step 3/")  # a step is told of before it is saved
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


def test_an_asked_end_keeps_what_generate_has_finished(tiny_dir: Path, tmp_path: Path) -> None:
    """SIGTERM is a Ctrl-C to every command: the Parquet file is written, though it is written at the end."""
    import pyarrow.parquet as parquet

    output = tmp_path / "out.parquet"
    items = tiny_run(tiny_dir, tmp_path / "run", data__train="builtin:arithmetic?n=4000")
    process = start("generate", *items, "--output", output, cwd=tmp_path)
    assert process.stderr is not None
    assert any("1/4000 prompts" in line for line in process.stderr)  # a carriage return ends a line too
    code, _, err = interrupt(process, signal.SIGTERM)
    assert code == 130, err
    assert "Traceback" not in err
    assert 1 <= parquet.read_table(output).num_rows < 8000
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_ctrl_c_while_a_served_model_loads_is_no_error(tmp_path: Path) -> None:
    from slipstream.inference import server
    from slipstream.inference.fake import FakeEngine

    class Slow(FakeEngine):
        async def start(self) -> None:
            signal.raise_signal(signal.SIGINT)  # uvicorn's handler is in place: as while a model loads
            await super().start()

    engine = Slow(300)
    server.serve(engine, port=0)
    assert engine._closed


def test_what_keeps_an_engine_from_starting_is_the_servers_error() -> None:
    from slipstream.errors import ModelError
    from slipstream.inference import server
    from slipstream.inference.fake import FakeEngine

    class Broken(FakeEngine):
        async def start(self) -> None:
            raise ModelError("/nowhere: no weights")

    engine = Broken(300)
    with pytest.raises(ModelError, match="/nowhere: no weights"):
        server.serve(engine, port=0)
    assert engine._closed


def test_the_command_to_go_on_with_can_be_pasted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from slipstream.cli.main import _finish
    from slipstream.trainers.progress import RunResult

    result = RunResult(run_dir=tmp_path, accuracy={}, steps=3, seconds=1.0, peak_memory_gb=1.0, eval_prompts=0,
                       report=None, finished=False, stop_reason="interrupted")  # fmt: skip
    with pytest.raises(typer.Exit):
        _finish(result, ["run_dir=runs/my #1", "seed=1"], "train")
    assert capsys.readouterr().err.endswith("slipstream train 'run_dir=runs/my #1' seed=1\n")


def test_an_interrupted_quickstart_exits_as_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from slipstream.trainers import quickstart
    from slipstream.trainers.progress import RunResult

    def stopped(settings: RunSettings) -> RunResult:
        return RunResult(run_dir=settings.run_dir, accuracy={}, steps=3, seconds=1.0, peak_memory_gb=1.0,
                         eval_prompts=0, report=None, finished=False, stop_reason="interrupted")  # fmt: skip

    monkeypatch.setattr(quickstart, "train", stopped)
    done = slipstream("quickstart", "--run-dir", tmp_path / "run")
    assert done.exit_code == 130
    assert "Stopped after step 3" in done.output
    assert "summary:" not in done.output
