"""Settings of the schedule that contradict each other are refused before anything loads."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config.plan import make_plan
from slipstream.config.settings import RunSettings


def problems(rows: int | None = None, spread: bool = True, **schedule: Any) -> dict[tuple[str, ...], str]:
    settings = RunSettings.model_validate(
        {
            "data": {"train": "builtin:arithmetic"},
            "algorithm": {"drop_zero_variance": spread},
            "schedule": {"prompts_per_step": 4, "steps": 2, **schedule},
        }
    )
    found = make_plan(settings, n_train_rows=rows).problems
    return {problem.keys: problem.severity for problem in found if any("schedule" in key for key in problem.keys)}


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("sync", {"max_staleness_steps": 1}),
        ("sync", {"on_stale": "drop"}),
        ("one_step_off", {"max_running_groups": 4}),
        ("one_step_off", {"max_batches_per_step": 4}),
        ("fully_async", {"generate_prompts_per_step": 8}),
        ("fully_async", {"on_stale": "requeue"}),
        ("bounded", {"overtake": 3}),
        ("windowed", {"on_stale": "drop"}),
    ],
)
def test_a_setting_that_the_schedule_does_not_read_is_refused(kind: str, setting: dict[str, Any]) -> None:
    (name,) = setting
    assert problems(kind=kind, **setting)[(f"schedule.{name}", "schedule.kind")] == "error"


@pytest.mark.parametrize("kind", ["sync", "one_step_off", "fully_async", "bounded", "windowed"])
def test_every_schedule_is_accepted_as_it_comes(kind: str) -> None:
    assert "error" not in problems(kind=kind).values()


def test_full_batches_need_something_that_refuses_groups() -> None:
    keys = ("schedule.full_batch", "algorithm.drop_zero_variance")
    assert problems(kind="fully_async", full_batch=True, spread=False)[keys] == "error"
    assert keys not in problems(kind="fully_async", full_batch=True)


def test_bounds_that_never_bind_are_named() -> None:
    keys = ("schedule.max_running_groups", "schedule.max_staleness_steps")
    assert problems(kind="fully_async", max_staleness_steps=1, max_running_groups=9)[keys] == "warning"
    assert keys not in problems(kind="fully_async", max_staleness_steps=1, max_running_groups=8)
    low = problems(kind="fully_async", max_running_groups=3)
    assert low[("schedule.max_running_groups", "schedule.prompts_per_step")] == "warning"


def test_fewer_rows_than_outstanding_groups_are_named() -> None:
    keys = ("data.train", "schedule.prompts_per_step")
    assert problems(rows=19, kind="fully_async")[keys] == "warning"
    assert keys not in problems(rows=20, kind="fully_async")
