"""Sinks: what they show, that a broken one ends nothing, and that a missing tracker names its extra."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SettingsError
from slipstream.ledger import ConsoleSink, JsonlSink, MultiSink, Sink, build_sinks
from slipstream.ledger.trackers import MlflowSink, TensorBoardSink, TrackioSink, WandbSink


class Recording:
    name = "recording"

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append((step, dict(metrics)))

    def note(self, text: str) -> None: ...

    def begin(self, phase: str, total_steps: int, done: int = 0) -> None: ...

    def close(self) -> None: ...


class Broken(Recording):
    name = "broken"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no route")


def test_a_failing_sink_warns_once_and_the_others_go_on() -> None:
    warnings: list[str] = []
    good = Recording()
    sinks = MultiSink([Broken(), good], on_failure=warnings.append)
    for step in (1, 2, 3):
        sinks.log({"a": 1.0}, step)
    assert [s for s, _ in good.seen] == [1, 2, 3]
    assert len(warnings) == 1
    assert "broken" in warnings[0]
    assert "no route" in warnings[0]
    assert sinks.active == ("recording",)


def test_values_that_are_not_finite_do_not_reach_a_sink() -> None:
    good = Recording()
    MultiSink([good]).log({"a": float("nan"), "b": float("inf"), "c": 1}, 1)
    assert good.seen == [(1, {"c": 1.0})]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_console_lines_give_step_reward_rate_and_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(10, stream=stream, clock=clock)
    for step in (1, 2):
        clock.now += 30
        sink.log({"reward/avg_raw_reward": 0.25, "generate/num_sampled_tokens": 3000.0}, step)
    sink.close()
    last = stream.getvalue().splitlines()[-1]
    assert last == "step 2/10  reward 0.250  100 tok/s  30.0s/step  4m00s left"
    assert "\x1b" not in stream.getvalue()


def test_the_console_shows_how_far_sampling_ran_ahead() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(10, stream=stream)
    shown = {
        "reward/avg_raw_reward": 0.25, "schedule/lag_mean": 0.5, "schedule/lag_max": 2.0, "schedule/lag_0": 3.0,
        "schedule/lag_2": 1.0, "async/version_lag_0": 0.25, "async/version_lag_1": 0.75, "async/staleness_mean": 0.75,
        "async/mixed_version_share": 0.125, "schedule/queue_seconds_mean": 1.5, "schedule/queue_seconds_max": 6.0,
        "perf/trainer_idle_share": 0.3, "perf/engine_idle_share": 0.04,
    }  # fmt: skip
    sink.log(shown, 1)
    sink.log({**shown, "schedule/lag_max": 0.0}, 2)
    sink.close()
    ahead, level = stream.getvalue().splitlines()
    assert (
        "lag 0.5 steps (0: 75%, 2: 25%)  0.8 versions (0: 25%, 1: 75%), 12% mixed  queued 1.5s (max 6.0s)  "
        "idle: trainer 30%, engine 4%" in ahead
    )
    assert "lag" not in level


def test_a_terminal_gets_one_bar_that_closes_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = ConsoleSink(2, stream=stream)
    sink.log({"reward/avg_raw_reward": 0.5}, 1)
    sink.close()
    sink.close()
    assert "reward 0.500" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")  # the cursor comes back


def test_jsonl_appends_over_restarts(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "log.jsonl", clock=lambda: 5.0)
        sink.log({"x": 0.5}, step)
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "time": 5.0, "x": 0.5}, {"step": 2, "time": 5.0, "x": 0.5}]


def test_tensorboard_files_hold_the_scalars_and_need_no_torch(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sink = TensorBoardSink(tmp_path)
    sink.log({"reward/avg_raw_reward": 0.25}, 3)
    sink.close()
    (file,) = tmp_path.iterdir()
    found = [
        (event.step, value.tag)
        for event in loader.EventFileLoader(str(file)).Load()
        if event.HasField("summary")
        for value in event.summary.value
    ]
    assert found == [(3, "reward/avg_raw_reward")]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_tracker_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # importlib raises ModuleNotFoundError for a None entry
    with pytest.raises(SettingsError, match=rf"slipstream\[{name}\]"):
        build_sinks([name], tmp_path)


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="console, jsonl, tensorboard"):
        build_sinks(["carrier_pigeon"], tmp_path)


class FakeClient(types.ModuleType):
    """Stands in for a tracker's client and writes down its calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.id = "abc123"
        self.info = types.SimpleNamespace(run_id="abc123")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "sink", "id_key"),
    [("wandb", WandbSink, "id"), ("mlflow", MlflowSink, "run_id"), ("trackio", TrackioSink, "name")],
)
def test_trackers_log_steps_and_resume_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sink: Any, id_key: str
) -> None:
    client = FakeClient(name)
    monkeypatch.setitem(sys.modules, name, client)
    first = sink(tmp_path, "project", "run-a", {"model": {"path": "m"}})
    assert isinstance(first, Sink)
    first.log({"reward/avg_raw_reward": 0.5}, 7)
    first.close()
    logged = [c for c in client.calls if c[0] in ("log", "log_metrics")]
    assert logged[0][1][0]["reward/avg_raw_reward"] == 0.5
    assert 7 in (*logged[0][2].values(), *logged[0][1][0].values())
    client.calls.clear()
    sink(tmp_path, "project", "run-b", {})
    starts = [c[2] for c in client.calls if c[0] in ("init", "start_run")]
    assert starts[0][id_key] == ("run-a" if name == "trackio" else "abc123")


def test_a_tracker_that_cannot_start_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient("wandb")

    def no_login(**_: Any) -> None:
        raise RuntimeError("api key not configured")

    client.init = no_login  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", client)
    warnings: list[str] = []
    sinks = build_sinks(["jsonl", "wandb"], tmp_path, on_failure=warnings.append)
    assert sinks.active == ("jsonl",)
    assert "api key" in warnings[0]
    sinks.close()
