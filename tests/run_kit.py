"""Tiny whole runs for tests: settings, and a subprocess that can be killed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from slipstream.config import load_settings
from slipstream.config.settings import RunSettings

BASE = [
    "model.dtype=float32",
    "inference.dtype=float32",
    "inference.threads=1",
    "training.threads=1",
    "training.optimizer.lr=0.002",
    f"data.train={Path(__file__).parent / 'data' / 'letters.jsonl'}",
    f"data.eval={Path(__file__).parent / 'data' / 'letters_eval.jsonl'}",
    "env.id=letters",
    "env.modules=[run_env]",
    "rollout.max_turns=2",
    "rollout.samples_per_prompt=3",
    "rollout.sampling.max_tokens_per_turn=6",
    "rollout.max_prompt_tokens=128",
    "rollout.max_total_tokens=192",
    "eval.sampling.max_tokens_per_turn=6",
    "schedule.prompts_per_step=4",
    "schedule.steps=6",
    "algorithm.drop_zero_variance=false",
    "checkpoint.every_steps=2",
    "logging.sinks=[jsonl]",
    "logging.report=false",
]
EXACT = ["training.determinism=exact"]


def tiny_settings(model: Path, run_dir: Path, *overrides: str) -> RunSettings:
    """Settings of a run that takes a second or two once torch is imported."""
    return load_settings([], [*BASE, f"model.path={model}", f"run_dir={run_dir}", *overrides]).settings


def arguments(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The command line of the same run."""
    return [
        sys.executable, "-m", "slipstream.cli", "train", *BASE,
        f"model.path={model}", f"run_dir={run_dir}", *overrides,
    ]  # fmt: skip


def start(model: Path, run_dir: Path, *overrides: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Start the run in a process of its own, in its own process group; ``path`` holds modules of its own."""
    folders = [Path(__file__).parent, *([path] if path is not None else [])]
    return subprocess.Popen(
        arguments(model, run_dir, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )


def weights_digest(run_dir: Path) -> str:
    """Hash of the exported model's weights."""
    return hashlib.blake2b((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()
