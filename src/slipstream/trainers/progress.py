"""How far a run has come, and how it ended.

Owns: ``Progress`` (part of every checkpoint) and ``RunResult``.  Refuses: doing anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """How far a run has come; part of every checkpoint."""

    sft_steps: int = 0
    rl_steps: int = 0
    sampler: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    rollouts: dict[str, Any] | None = None
    update: dict[str, Any] | None = None
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    """Of the latest evaluation."""
    peak_memory_gb: float = 0.0
    data_fingerprint: str = ""
    finished: bool = False
    ended_by: str | None = None
    """Why the run made its last RL step before ``schedule.steps``, once it has (``Control.finish``)."""

    @property
    def name(self) -> str:
        """The checkpoint's directory name."""
        return f"rl-{self.rl_steps:06d}" if self.rl_steps else f"sft-{self.sft_steps:06d}"


@dataclass(frozen=True)
class RunResult:
    """How a run ended.  ``accuracy`` maps stages (``start``, ``sft``, ``rl``) to mean scores over ``eval_prompts``.

    ``stop_reason`` says why, unless all its steps were made; a finished run has one too (``Control.finish``).
    """

    run_dir: Path
    steps: int
    finished: bool
    stop_reason: str | None
    accuracy: Mapping[str, float]
    eval_prompts: int
    seconds: float
    peak_memory_gb: float
    report: Path | None
