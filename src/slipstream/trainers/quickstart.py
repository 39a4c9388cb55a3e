"""The quickstart: one command from nothing to a trained model, a summary and a report.

Owns: its settings (``quickstart.yaml`` beside this file, and ``quickstart_full.yaml`` laid over it), the summary
and the closing words.  Refuses: training code of its own.

Running the same command again resumes; when the run is finished, it prints the result again at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import load_settings
from slipstream.config.settings import RunSettings
from slipstream.errors import SettingsError
from slipstream.ledger.journal import write_atomically
from slipstream.trainers.progress import RunResult
from slipstream.trainers.run import train

_HERE = Path(__file__).parent
SUMMARY = "summary.json"


@dataclass(frozen=True)
class QuickstartResult:
    """What the quickstart leaves behind: ``summary`` as written to ``summary_path``, and words for people."""

    summary: Mapping[str, Any]
    summary_path: Path
    report: Path | None
    text: str
    finished: bool
    stop_reason: str | None = None


def quickstart_settings(seed: int = 0, full: bool = False, run_dir: Path | None = None) -> RunSettings:
    """The settings of the short or the full quickstart.

    Every seed and length has a directory of its own; ``runs/quickstart`` is a link to the one that was started last.
    """
    files = [_HERE / "quickstart.yaml", *([_HERE / "quickstart_full.yaml"] if full else [])]
    directory = run_dir if run_dir is not None else Path("runs") / f"quickstart{'-full' if full else ''}-seed{seed}"
    # Not an override: that would be read as YAML, and a path may hold anything.
    return load_settings(files, [f"seed={seed}"]).settings.model_copy(update={"run_dir": directory.expanduser()})


def quickstart(seed: int = 0, full: bool = False, run_dir: Path | None = None) -> QuickstartResult:
    """Train, evaluate, write ``summary.json`` and ``report.html``; resumes an interrupted quickstart.

    Raises ``SettingsError`` when ``runs/quickstart`` cannot be made a link, ``LedgerError`` when the summary cannot be
    written, and what ``train`` raises.
    """
    settings = quickstart_settings(seed, full, run_dir)
    if run_dir is None:
        _link(Path("runs") / "quickstart", settings.run_dir)
    result = train(settings)
    summary = _summary(settings, result)
    path = result.run_dir / SUMMARY
    if result.finished:
        write_atomically(path, f"{json.dumps(summary, indent=1)}\n".encode(), "free space, then run it again")
    return QuickstartResult(summary, path, result.report, _words(summary, result), result.finished, result.stop_reason)


def _link(link: Path, target: Path) -> None:
    """Point ``link`` at ``target``, atomically; a real directory of that name is somebody's work and stays."""
    if link.exists() and not link.is_symlink():
        raise SettingsError(f"{link} is a directory of its own; move it away, or choose another with --run-dir")
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a dead process that had this id
        temporary.symlink_to(target.name, target_is_directory=True)
        os.replace(temporary, link)
    except OSError as error:
        raise SettingsError(
            f"{link} cannot be made a link to the run ({error}); make {link.parent} a directory that can be written, "
            "or choose another place with --run-dir"
        ) from error


def _summary(settings: RunSettings, result: RunResult) -> dict[str, Any]:
    accuracy = result.accuracy
    return {
        "seed": settings.seed,
        "accuracy_before": accuracy.get("start"),
        "accuracy_after_sft": accuracy.get("sft", accuracy.get("start")),
        "accuracy_after": accuracy.get("rl"),
        "questions": result.eval_prompts,
        "minutes": round(result.seconds / 60, 2),
        "steps": result.steps,
        "ended_by": result.stop_reason,
        "peak_memory_gb": round(result.peak_memory_gb, 2),
    }


def _words(summary: Mapping[str, Any], result: RunResult) -> str:
    if not result.finished:
        return f"Stopped after step {result.steps} ({result.stop_reason}).  The same command goes on from there."
    before, middle, after = (100 * summary[key] for key in ("accuracy_before", "accuracy_after_sft", "accuracy_after"))
    lines = [
        "Execution accuracy on held-out questions (greedy decoding):",
        f"  untouched model           {before:5.1f} %",
        f"  after supervised warm-up  {middle:5.1f} %   ({middle - before:+.1f})",
        f"  after RL                  {after:5.1f} %   ({after - middle:+.1f} from {summary['steps']} RL steps alone)",
        f"{summary['minutes']:.1f} minutes, peak memory {summary['peak_memory_gb']:.1f} GB",
        *([f"RL was ended by {summary['ended_by']}"] if summary["ended_by"] else []),
        "",
        "Next:",
        "  make quickstart FULL=1                                  the longer run, 50 steps",
        f"  slipstream ledger {result.run_dir} 'SELECT data_source, avg(total_reward) FROM trajectories GROUP BY 1'",
        "  docs/environments.md                                    train on an environment of your own",
    ]
    return "\n".join(lines)
