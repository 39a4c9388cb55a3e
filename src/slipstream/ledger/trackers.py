"""Sinks of experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

Owns: mapping ``log(metrics, step)`` to each tracker's own client, and resuming the same tracker run (the run's id
is kept in ``<run_dir>/trackers.json``).  Refuses: importing a client before it is asked for; TensorFlow and torch.

Each client comes with an extra (``pip install 'slipstream[wandb]'``); a missing one is a ``SettingsError`` naming it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import SettingsError
from slipstream.ledger.journal import write_atomically


def require(module: str, extra: str) -> ModuleType:
    """Import a tracker's client; ``SettingsError`` names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(
            f"logging.sinks: {extra} needs the package {module.split('.')[0]!r} ({error}); "
            f"install it with: pip install 'slipstream[{extra}]'"
        ) from error


def _saved_id(run_dir: Path, tracker: str) -> str | None:
    path = run_dir / "trackers.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text("utf-8")).get(tracker)
    return None if found is None else str(found)


def _save_id(run_dir: Path, tracker: str, run_id: str) -> None:
    path = run_dir / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    write_atomically(path, json.dumps(known | {tracker: run_id}).encode())


class TensorBoardSink:
    """Scalars as TensorBoard event files, written without TensorFlow or torch."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(directory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event with all scalars of the step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def note(self, text: str) -> None:
        """Notes are not scalars."""

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Phases are told from the metrics' names."""

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; a resumed run goes on under the same id."""

    name = "wandb"

    def __init__(self, run_dir: Path, project: str, run_name: str | None, config: Any) -> None:
        wandb = require("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=run_name or run_dir.name,
            config=config,
            dir=str(run_dir),
            id=_saved_id(run_dir, "wandb"),
            resume="allow",
        )
        _save_id(run_dir, "wandb", str(self._run.id))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log under ``trainer/global_step``, so that a resumed run may log an earlier step again."""
        self._run.log({**metrics, "trainer/global_step": step})

    def note(self, text: str) -> None:
        """Notes are not metrics."""

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Phases are told from the metrics' names."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """MLflow, at ``MLFLOW_TRACKING_URI`` or MLflow's own default; a resumed run goes on under the same id."""

    name = "mlflow"
    PARAM_CHARS = 500

    def __init__(self, run_dir: Path, project: str, run_name: str | None, config: Any) -> None:
        self._mlflow = require("mlflow", "mlflow")
        self._mlflow.set_experiment(project)
        saved = _saved_id(run_dir, "mlflow")
        run = self._mlflow.start_run(run_id=saved, run_name=None if saved else run_name or run_dir.name)
        if saved is None:
            _save_id(run_dir, "mlflow", str(run.info.run_id))
            params = flatten(config or {})
            for start in range(0, len(params), 100):  # the client takes at most 100 at once
                part = list(params.items())[start : start + 100]
                self._mlflow.log_params({k: str(v)[: self.PARAM_CHARS] for k, v in part})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all metrics of the step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def note(self, text: str) -> None:
        """Notes are not metrics."""

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Phases are told from the metrics' names."""

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TrackioSink:
    """trackio; a resumed run goes on under the same name."""

    name = "trackio"

    def __init__(self, run_dir: Path, project: str, run_name: str | None, config: Any) -> None:
        self._trackio = require("trackio", "trackio")
        name = _saved_id(run_dir, "trackio") or run_name or run_dir.name
        self._trackio.init(project=project, name=name, config=config, resume="allow")
        _save_id(run_dir, "trackio", name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all metrics of the step."""
        self._trackio.log(dict(metrics), step=step)

    def note(self, text: str) -> None:
        """Notes are not metrics."""

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Phases are told from the metrics' names."""

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys.

    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
