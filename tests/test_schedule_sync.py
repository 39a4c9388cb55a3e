"""The synchronous schedule: capacity, order, over-sampling, counters."""

from __future__ import annotations

import random

import pytest

from schedule_kit import group
from slipstream.errors import ContractError
from slipstream.schedule import BatchSchedule, Counters
from slipstream.trajectory import Group


def constant(candidate: Group) -> str | None:
    return "zero_variance" if len({m.total_reward for m in candidate.voters}) < 2 else None


def run_step(schedule: BatchSchedule, step: int, results: dict[str, Group], seed: int = 0) -> list[str]:
    schedule.begin_step(step)
    names = list(results)
    for name in names:
        assert schedule.select() is None
        assert schedule.admit() > 0
        schedule.submitted(name)
    random.Random(seed).shuffle(names)
    for name in names:
        schedule.finished(results[name])
    selection = schedule.select()
    assert selection is not None
    assert schedule.select() is selection, "selecting twice must not move counters twice"
    schedule.end_step(step)
    return [g.group_id for g in selection.groups]


def test_a_step_takes_all_groups_in_submission_order_whatever_order_they_finish_in() -> None:
    results = {name: group(name, [0.0, 1.0]) for name in "abc"}
    orders = {tuple(run_step(BatchSchedule(3), 0, results, seed)) for seed in range(6)}
    assert orders == {("a", "b", "c")}


def test_oversampling_keeps_the_first_with_spread_and_names_the_rest() -> None:
    schedule = BatchSchedule(2, draw=4, judge=constant)
    rewards = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0], "d": [0.0, 1.0]}
    schedule.begin_step(0)
    for name in rewards:
        schedule.submitted(name)
        schedule.finished(group(name, rewards[name]))
    selection = schedule.select()
    assert selection is not None
    assert [g.group_id for g in selection.groups] == ["b", "c"]
    assert [(g.group_id, why) for g, why in selection.left_out] == [("a", "zero_variance"), ("d", "surplus")]
    assert schedule.counters.state_dict() == {
        "submitted": 4, "accepted": 2, "filtered": 2, "running": 0, "failed": 0, "cancelled": 0,
    }  # fmt: skip


def test_too_few_groups_with_spread_train_the_short_batch_and_say_so() -> None:
    schedule = BatchSchedule(2, draw=3, judge=constant)
    schedule.begin_step(0)
    for name, rewards in {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 0.0]}.items():
        schedule.submitted(name)
        schedule.finished(group(name, rewards))
    selection = schedule.select()
    assert selection is not None
    assert selection.short
    assert [g.group_id for g in selection.groups] == ["b"]


def test_a_group_without_voters_counts_as_failed() -> None:
    schedule = BatchSchedule(2)
    schedule.begin_step(0)
    for name, rewards in {"a": [None, None], "b": [0.0, None]}.items():
        schedule.submitted(name)
        schedule.finished(group(name, rewards))
    selection = schedule.select()
    assert selection is not None
    assert [g.group_id for g in selection.groups] == ["b"]
    assert schedule.counters.failed == 1


def test_capacity_is_refused_beyond_the_draw() -> None:
    schedule = BatchSchedule(1)
    schedule.begin_step(0)
    schedule.submitted("a")
    assert schedule.admit() == 0
    with pytest.raises(ContractError, match="capacity"):
        schedule.submitted("b")


def test_a_stranger_cannot_finish_and_steps_cannot_overlap() -> None:
    schedule = BatchSchedule(1)
    schedule.begin_step(0)
    with pytest.raises(ContractError, match="was not running"):
        schedule.finished(group("x", [1.0]))
    with pytest.raises(ContractError, match="still open"):
        schedule.begin_step(1)


def test_state_survives_a_round_trip_and_refuses_unbalanced_books() -> None:
    schedule = BatchSchedule(2)
    run_step(schedule, 0, {"a": group("a", [0.0, 1.0]), "b": group("b", [0.0, 1.0])})
    other = BatchSchedule(2)
    other.load_state_dict(schedule.state_dict())
    assert other.counters == schedule.counters
    with pytest.raises(ContractError, match="do not balance"):
        Counters.from_state({**schedule.counters.state_dict(), "submitted": 9})
