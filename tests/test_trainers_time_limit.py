"""Runs that make their last step early: by the clock, or because a callback says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_kit import EXACT, tiny_settings
from slipstream.errors import SettingsError
from slipstream.ledger import LedgerReader
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.quickstart import quickstart_settings
from slipstream.trainers.run import check, train
from slipstream.trainers.time_limit import TimeLimit
from test_trainers_run import trained_prompts


class FinishAt(Callback):
    """Makes a step the last; ``interrupted`` stops the run in the same step, as Ctrl-C does."""

    def __init__(self, step: int, interrupted: bool = False) -> None:
        self.step, self.interrupted = step, interrupted

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if info.step == self.step:
            control.finish("solved")
            if self.interrupted:
                control.stop("interrupted")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def steps_of(limit: float | None, took: list[float], evaluation: float, before: float = 0.0) -> list[str | None]:
    """What ``TimeLimit`` says after each of these steps."""
    clock = Clock()
    clock.seconds = before
    keeper = TimeLimit(limit, clock, lambda: evaluation)
    said: list[str | None] = []
    for done, seconds in enumerate(took):
        control = Control()
        keeper.on_step_start(StepInfo("rl", done, len(took) + 1), control)
        clock.seconds += seconds
        keeper.on_step_end(StepInfo("rl", done + 1, len(took) + 1), control)
        said.append(control.finish_reason)
    return said


def test_no_step_is_begun_that_would_leave_no_time_for_the_evaluation() -> None:
    assert steps_of(None, [1e9], 0) == [None]
    assert steps_of(1, [20, 20, 20], 0) == [None, None, "the time limit of 1 minutes, after 3 of 4 steps"]
    assert steps_of(1, [20, 10, 10], 11) == [None, None, "the time limit of 1 minutes, after 3 of 4 steps"]
    assert steps_of(1, [20], 21)[0] is not None, "20 so far, 20 for another step and 21 for the evaluation"
    assert steps_of(1, [20], 20) == [None]
    assert steps_of(1, [20], 0, before=21)[0] is not None, "earlier phases and starts count"


def test_the_last_step_and_the_warm_start_are_not_ended() -> None:
    keeper = TimeLimit(0.001, lambda: 60.0, lambda: 0.0)
    for info in (StepInfo("rl", 3, 3), StepInfo("sft", 1, 3)):
        control = Control()
        keeper.on_step_end(info, control)
        assert control.finish_reason is None


def test_a_run_out_of_time_is_evaluated_and_finished_and_goes_on_when_it_is_given_more(
    tiny_dir: Path, tmp_path: Path
) -> None:
    short = tiny_settings(tiny_dir, tmp_path / "r", "schedule.time_limit_minutes=1e-6", "schedule.steps=3")
    result = train(short)
    assert (result.finished, result.steps) == (True, 1), "one step is made in any case"
    assert result.stop_reason == "the time limit of 1e-06 minutes, after 1 of 3 steps"
    assert result.accuracy.keys() == {"start", "rl"}
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    again = train(short)
    assert (again.finished, again.steps, again.stop_reason) == (True, 1, result.stop_reason)
    starts = len(LedgerReader(tmp_path / "r").events("run_started"))
    assert starts == 1, "nothing was started to say so"
    longer = train(tiny_settings(tiny_dir, tmp_path / "r", "schedule.time_limit_minutes=60", "schedule.steps=3"))
    assert (longer.finished, longer.steps, longer.stop_reason) == (True, 3, None)
    assert set(trained_prompts(tmp_path / "r").values()) == {1}


def test_a_run_stopped_in_its_last_step_is_only_evaluated_when_it_resumes(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=6")
    stopped = train(settings, [FinishAt(3, interrupted=True)])
    assert (stopped.finished, stopped.steps, stopped.stop_reason) == (False, 3, "interrupted")
    assert "rl" not in stopped.accuracy
    resumed = train(settings)
    assert (resumed.finished, resumed.steps, resumed.stop_reason) == (True, 3, "solved")
    assert "rl" in resumed.accuracy
    more = train(tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=8"))
    assert (more.finished, more.steps, more.stop_reason) == (True, 8, None)


def test_exact_mode_does_not_ask_a_clock(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *EXACT, "schedule.time_limit_minutes=10")
    with pytest.raises(SettingsError, match=r"schedule\.time_limit_minutes, training\.determinism"):
        check(settings).raise_if_refused()


def test_the_quickstarts_end_within_what_they_promise() -> None:
    """Ten and twenty-five minutes, with something left for the report."""
    assert [quickstart_settings(full=full).schedule.time_limit_minutes for full in (False, True)] == [9.5, 24]
