"""Running the command line on a tiny model, in this process or as a child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from slipstream.cli.main import app


def slipstream(*arguments: object) -> Result:
    """One command in this process; ``output`` holds stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """One command as a child that answers SIGINT, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        # A test run in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def tiny_run(model: Path, run_dir: Path, **changes: object) -> list[str]:
    """Overrides of a run that takes a second or two; ``changes`` use ``__`` for dots."""
    settings: dict[str, object] = {
        "run_dir": run_dir,
        "model.path": model,
        "model.dtype": "float32",
        "inference.dtype": "float32",
        "inference.kv_cache_tokens": 4096,
        "data.train": "builtin:arithmetic?n=8",
        "env.id": "arithmetic",
        "rollout.samples_per_prompt": 2,
        "rollout.max_prompt_tokens": 128,
        "rollout.max_total_tokens": 160,
        "rollout.sampling.max_tokens_per_turn": 4,
        "eval.sampling.max_tokens_per_turn": 4,
        "schedule.prompts_per_step": 4,
        "schedule.steps": 1,
        "logging.report": "false",
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
