"""Metric sinks: where live numbers go, several at once.

Owns: the ``Sink`` protocol, the console, JSON lines, and ``MultiSink``, the fault boundary around all of them.
Refuses: being able to end a run.  A sink that fails warns once, is dropped, and the run goes on.

Lifecycle: ``build_sinks(names, ...)`` -> ``log(metrics, step)`` any number of times -> ``close()``.  The trackers
(TensorBoard, W&B, MLflow, trackio) live in ``slipstream.ledger.trackers`` and are imported only when named.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from slipstream.errors import SettingsError
from slipstream.ledger.records import plain

logger = logging.getLogger("slipstream")


@runtime_checkable
class Sink(Protocol):
    """One destination of metrics.  Any exception it raises is contained by ``MultiSink``."""

    name: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step; may be called several times for a step, with different names."""
        ...

    def note(self, text: str) -> None:
        """One line for people (phase changes, results)."""
        ...

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """A phase (``sft``, ``rl``) starts, or goes on after ``done`` of its steps."""
        ...

    def close(self) -> None:
        """Flush and release; nothing is logged afterwards."""
        ...


class MultiSink:
    """Several sinks as one.  A sink that raises is reported once and left out from then on."""

    name = "multi"

    def __init__(self, sinks: Sequence[Sink], *, on_failure: Callable[[str], None] | None = None) -> None:
        """``on_failure`` hears the one warning too (the trainer records it as an event)."""
        self._sinks = list(sinks)
        self._on_failure = on_failure

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the sinks that still work."""
        return tuple(s.name for s in self._sinks)

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # noqa: BLE001  fault boundary: a tracker must not end a run
                self._sinks.remove(sink)
                message = f"sink {sink.name} failed and is off from now on: {type(error).__name__}: {error}"
                logger.warning(message)
                if self._on_failure is not None:
                    self._on_failure(message)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics to every working sink; values that are not finite are left out."""
        finite = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
        self._each(lambda sink: sink.log(finite, step))

    def note(self, text: str) -> None:
        """Hand the line to every working sink."""
        self._each(lambda sink: sink.note(text))

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Tell every working sink."""
        self._each(lambda sink: sink.begin(phase, total_steps, done))

    def close(self) -> None:
        """Close every working sink."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()


def format_duration(seconds: float) -> str:
    """Seconds for people.

    >>> format_duration(42), format_duration(200), format_duration(7260)
    ('42s', '3m20s', '2h01m')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class ConsoleSink:
    """Live progress: step, reward, tokens per second, time left.

    On a terminal one bar is redrawn in place; elsewhere every step is one plain line.  Time left is the mean
    time of the last steps (its own clock) times the steps to go.
    """

    name = "console"
    WINDOW = 10

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._clock = clock
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._times: list[tuple[int, float]] = [(0, clock())]
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[summary]}"),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("train", total=total_steps, summary="starting")
            self._bar.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show one step (only calls that carry a training reward, a loss or an evaluation are shown)."""
        scores = {k: v for k, v in metrics.items() if k.startswith("eval/all/")}
        if "eval/all/avg_score" in scores:
            self.note(f"evaluation at step {step}: score {scores['eval/all/avg_score']:.3f}")
        if not any(k in metrics for k in ("reward/avg_raw_reward", "policy/final_loss", "sft/loss")):
            return
        self._times = [*self._times[-self.WINDOW :], (step, self._clock())]
        summary = "  ".join(self._parts(metrics, step))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, summary=summary)
            self._bar.refresh()
        else:
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"step {step}{of}  {summary}", markup=False)

    def _parts(self, metrics: Mapping[str, float], step: int) -> list[str]:
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        per_step = (last_time - first_time) / max(1, last_step - first_step)
        rate = metrics.get("trainer/tokens_per_second")
        if rate is None and "generate/num_sampled_tokens" in metrics and len(self._times) > 1:
            rate = metrics["generate/num_sampled_tokens"] / max(1e-9, last_time - self._times[-2][1])
        parts = []
        for key, label in (("reward/avg_raw_reward", "reward"), ("sft/loss", "loss")):
            if key in metrics:
                parts.append(f"{label} {metrics[key]:.3f}")
        if rate is not None:
            parts.append(f"{rate:,.0f} tok/s")
        parts.append(f"{per_step:.1f}s/step")
        if metrics.get("schedule/lag_max", 0) > 0:
            parts += _ahead(metrics)
        if self._total and step < self._total:
            parts.append(f"{format_duration(per_step * (self._total - step))} left")
        return parts

    def note(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False)

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Start counting steps and time anew."""
        self._total, self._times = total_steps, [(done, self._clock())]
        if self._bar is not None:
            self._bar.reset(self._task, total=total_steps, completed=done, summary=phase)
            self._bar.refresh()

    def close(self) -> None:
        """Stop redrawing and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _ahead(metrics: Mapping[str, float]) -> list[str]:
    """Lag by scheduled step and by token version, mixed versions, queue ages and idle time, as short words."""
    parts = [f"lag {metrics['schedule/lag_mean']:.1f} steps ({_shares(metrics, 'schedule/lag_')})"]
    if versions := _shares(metrics, "async/version_lag_"):
        mean = metrics.get("async/staleness_mean", 0.0)
        parts.append(f"{mean:.1f} versions ({versions}), {metrics.get('async/mixed_version_share', 0.0):.0%} mixed")
    queued = [metrics.get(f"schedule/queue_seconds_{which}", 0.0) for which in ("mean", "max")]
    parts.append(f"queued {queued[0]:.1f}s (max {queued[1]:.1f}s)")
    idle = [metrics.get(f"perf/{who}_idle_share", 0.0) for who in ("trainer", "engine")]
    return [*parts, f"idle: trainer {idle[0]:.0%}, engine {idle[1]:.0%}"]


def _shares(metrics: Mapping[str, float], prefix: str) -> str:
    """``0: 75%, 1: 25%`` of the metrics ``prefix0``, ``prefix1``, ..."""
    found = {int(k.removeprefix(prefix)): v for k, v in metrics.items() if k.removeprefix(prefix).isdigit()}
    whole = sum(found.values())
    return ", ".join(f"{lag}: {value / whole:.0%}" for lag, value in sorted(found.items()) if value)


class JsonlSink:
    """One flat JSON object per call: ``{"step": .., "time": .., "<metric>": ..}``."""

    name = "jsonl"

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._clock = clock

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line and flush it."""
        self._file.write(json.dumps({"step": step, "time": self._clock(), **metrics}) + "\n")
        self._file.flush()

    def note(self, text: str) -> None:
        """Notes are not metrics."""

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None:
        """Phases are told from the metrics' names."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build_sinks(
    names: Sequence[str],
    run_dir: Path,
    *,
    project: str = "slipstream",
    run_name: str | None = None,
    config: Any = None,
    total_steps: int | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> MultiSink:
    """Build the named sinks: ``console, jsonl, tensorboard, wandb, mlflow, trackio``.

    ``config`` (settings or a mapping) is shown by the trackers.  JSON lines go to ``run_dir/log.jsonl``.
    Raises ``SettingsError`` for an unknown name, or for a tracker that is not installed, naming the extra.
    A tracker that cannot start (no network, no login) is dropped with a warning like one that fails later.
    """
    from slipstream.ledger import trackers

    makers: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(total_steps),
        "jsonl": lambda: JsonlSink(run_dir / "log.jsonl"),
        "tensorboard": lambda: trackers.TensorBoardSink(run_dir / "tensorboard"),
        "wandb": lambda: trackers.WandbSink(run_dir, project, run_name, plain(config)),
        "mlflow": lambda: trackers.MlflowSink(run_dir, project, run_name, plain(config)),
        "trackio": lambda: trackers.TrackioSink(run_dir, project, run_name, plain(config)),
    }
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        if name not in makers:
            raise SettingsError(f"logging.sinks: {name!r} is unknown; choose from {', '.join(makers)}")
        try:
            sinks.append(makers[name]())
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001  fault boundary: a tracker must not end a run
            message = f"sink {name} could not start and is off: {type(error).__name__}: {error}"
            logger.warning(message)
            if on_failure is not None:
                on_failure(message)
    return MultiSink(sinks, on_failure=on_failure)
