"""The published counter trace for B = 1, S = 2 event by event, and the other contracts of an asynchronous schedule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from schedule_kit import FLAT, GOOD, PART, UNSCORED, Driver, group, spread
from slipstream.config.settings import ScheduleSettings
from slipstream.errors import CheckpointError, ContractError, DataError
from slipstream.schedule import (
    BatchSchedule,
    BoundedSchedule,
    FullyAsyncSchedule,
    Schedule,
    WindowedSchedule,
    build_schedule,
)
from slipstream.schedule.book import BookedSchedule

GROUPS = ["A", "B", "L", "C"]
"""The data set, in order.  L is long: nothing makes it come back before step 4."""

Row = tuple[int, str, int, int, int, int]


def published_trace(schedule: FullyAsyncSchedule, steps: int = 4) -> list[Row]:
    """``(step, group, lag, accepted, running, outstanding)`` just before each consumption; steps count from 1.

    A and B come back in step 1, C in step 2; L when nothing else is left to come, or when it is waited for.
    """
    data = list(GROUPS)
    rows: list[Row] = []
    for step in range(steps):
        schedule.begin_step(step)
        for group_id, why in schedule.aborts():
            schedule.cancelled(group_id, why)
        for _ in range(schedule.admit()):
            again = schedule.next_requeued()
            if again is None and not data:
                schedule.exhausted()
                break
            schedule.submitted(data.pop(0) if again is None else f"{again}'", again)
        for name in ("A", "B", "C"):
            if name in schedule.running():
                schedule.finished(group(name, [0.0, 1.0]))
        before = (schedule.counters.accepted, schedule.counters.running, schedule.outstanding)
        selection = schedule.select()
        while selection is None:  # the trainer waits, so what runs comes back
            schedule.finished(group(schedule.running()[0], [0.0, 1.0]))
            before = (schedule.counters.accepted, schedule.counters.running, schedule.outstanding)
            selection = schedule.select()
        (name,) = selection.lags
        rows.append((step + 1, name, selection.lags[name], *before))
        schedule.end_step(step)
    return rows


def test_the_published_trace_is_reproduced_event_by_event() -> None:
    rows = published_trace(FullyAsyncSchedule(1, max_staleness=2))
    assert rows == [
        (1, "A", 0, 2, 1, 3),
        (2, "B", 1, 3, 1, 3),
        (3, "C", 1, 3, 1, 2),
        (4, "L", 3, 4, 0, 1),
    ]
    for step, _, _, accepted, running, outstanding in rows:
        assert accepted + running <= (2 + step) * 1
        assert outstanding == accepted - (step - 1) + running


def test_under_the_hard_bound_the_trainer_waits_for_the_long_group() -> None:
    rows = published_trace(BoundedSchedule(1, max_staleness=2, on_stale="wait"))
    assert [(step, name, lag) for step, name, lag, *_ in rows] == [(1, "A", 0), (2, "B", 1), (3, "L", 2), (4, "C", 2)]


def test_under_the_hard_bound_the_long_group_is_dropped_and_the_data_end() -> None:
    schedule = BoundedSchedule(1, max_staleness=2, on_stale="drop")
    rows = published_trace(schedule, steps=3)
    assert [(step, name) for step, name, *_ in rows] == [(1, "A"), (2, "B"), (3, "C")]
    assert schedule.aborts() == [("L", "stale")]
    schedule.begin_step(3)
    schedule.cancelled("L", "stale")
    with pytest.raises(DataError, match=r"3 were trained on.*1 cancelled.*stale 1"):
        schedule.select()


def test_under_the_hard_bound_the_long_group_is_sampled_anew() -> None:
    rows = published_trace(BoundedSchedule(1, max_staleness=2, on_stale="requeue"))
    assert [(step, name, lag) for step, name, lag, *_ in rows] == [(1, "A", 0), (2, "B", 1), (3, "C", 1), (4, "L'", 0)]


def test_a_blocked_producer_is_released_by_filtering() -> None:
    schedule = FullyAsyncSchedule(1, spread, max_staleness=1, full_batch=True)
    schedule.begin_step(0)
    for name in "ab":
        schedule.submitted(name)
    assert schedule.admit() == 0, "blocked"
    schedule.finished(group("a", [1.0, 1.0]))
    assert schedule.admit() == 1, "released"
    assert schedule.counters.state_dict() == {
        "submitted": 2, "accepted": 0, "filtered": 1, "running": 1, "failed": 0, "cancelled": 0,
    }  # fmt: skip
    schedule.finished(group("b", [0.0, 1.0]))
    selection = schedule.select()
    assert selection is not None
    assert [(g.group_id, why) for g, why in selection.left_out] == [("a", "zero_variance")]


def test_without_full_batches_a_refused_group_takes_its_place_in_a_step() -> None:
    schedule = FullyAsyncSchedule(2, spread, max_staleness=0)
    schedule.begin_step(0)
    for name, rewards in {"a": [1.0, 1.0], "b": [0.0, 1.0]}.items():
        schedule.submitted(name)
        schedule.finished(group(name, rewards))
    selection = schedule.select()
    assert selection is not None
    assert selection.short
    assert [g.group_id for g in selection.groups] == ["b"]


def test_refused_groups_never_loosen_the_bound_of_later_steps() -> None:
    schedule = FullyAsyncSchedule(2, spread, max_staleness=1)
    driver = Driver(schedule, lambda prompt, attempt: FLAT if int(prompt[1:]) % 2 else GOOD)
    for _ in range(20):
        driver.step()
        assert schedule.outstanding <= 4


def test_epochs_balance_and_work_runs_across_their_border() -> None:
    """The border of an epoch is no event for a schedule: only its counters tell where one would be."""
    schedule = FullyAsyncSchedule(2, max_staleness=1, steps=5)
    driver = Driver(schedule, prompts=10)
    assert driver.run(3) == "done"
    assert schedule.running() or schedule.buffered(), "the next epoch's groups are out already"
    assert driver.run(2) == "done"
    counters = schedule.counters
    assert counters.running == 0
    assert counters.accepted == 5 * 2
    assert counters.submitted == counters.accepted + counters.filtered


def test_capacity_is_restored_from_a_checkpoint_and_running_prompts_come_first() -> None:
    schedule = FullyAsyncSchedule(1, max_staleness=2)
    schedule.begin_step(0)
    for name in "abc":
        schedule.submitted(name)
    schedule.finished(group("b", [0.0, 1.0]))
    schedule.finished(group("a", [0.0, 1.0]))
    assert schedule.select() is not None
    with pytest.raises(ContractError, match="between steps"):
        schedule.state_dict()
    schedule.end_step(0)
    state = schedule.state_dict()
    fresh = FullyAsyncSchedule(1, max_staleness=2)
    with pytest.raises(CheckpointError, match="disagree about"):
        fresh.load_state_dict(state, [])
    fresh.load_state_dict(state, schedule.buffered())
    assert [g.group_id for g in fresh.buffered()] == ["a"]
    assert fresh.counters.accepted + fresh.counters.running == 2
    assert fresh.admit() == 2, "(S + 1) x B less the buffered one"
    assert (fresh.next_requeued(), fresh.next_requeued()) == ("c", None)
    fresh.submitted("c~1", "c")
    with pytest.raises(ContractError, match="does not fit"):
        BatchSchedule(1).load_state_dict(state, schedule.buffered())


def test_an_exhausted_buffer_ends_in_a_short_batch_and_then_an_error() -> None:
    driver = Driver(FullyAsyncSchedule(2, max_staleness=1), prompts=3)
    assert driver.run(10) == "data"
    assert driver.steps_done == 2
    assert sorted(driver.trained) == ["p0", "p1", "p2"]


def test_at_staleness_zero_the_batches_are_those_of_synchronous_training() -> None:
    def batches(schedule: Schedule, seed: int) -> list[str]:
        driver = Driver(schedule, choose=random.Random(seed).randrange)
        driver.run(5)
        return driver.trained

    wanted = batches(BatchSchedule(4), 0)
    for seed in range(5):
        assert batches(FullyAsyncSchedule(4, max_staleness=0), seed) == wanted
        assert batches(BoundedSchedule(4, max_staleness=0), seed) == wanted
        assert batches(WindowedSchedule(4, max_staleness=0, overtake=0), seed) == wanted


def test_one_step_off_samples_the_next_batch_while_one_is_trained_and_not_before() -> None:
    schedule = BatchSchedule(2, ahead=1, steps=3)
    schedule.begin_step(0)
    for name in "ab":
        schedule.submitted(name)
    assert schedule.admit() == 0, "the first batch has the engines for itself"
    for name in "ba":
        schedule.finished(group(name, [0.0, 1.0]))
    assert schedule.select() is not None
    assert schedule.admit() == 2
    for name in "cd":
        schedule.submitted(name)
    assert schedule.drains_before_publish
    for name in "cd":
        schedule.finished(group(name, [0.0, 1.0]))
    schedule.end_step(0)
    assert schedule.admit() == 0
    schedule.begin_step(1)
    selection = schedule.select()
    assert selection is not None
    assert dict(selection.lags) == {"c": 1, "d": 1}
    assert schedule.admit() == 2
    for name in "ef":
        schedule.submitted(name)
        schedule.finished(group(name, [0.0, 1.0]))
    schedule.end_step(1)
    schedule.begin_step(2)
    assert schedule.select() is not None
    assert schedule.admit() == 0, "no step would consume a fourth batch"


def test_one_failed_rollout_costs_one_member_not_the_group() -> None:
    schedule = FullyAsyncSchedule(1, max_staleness=0)
    schedule.begin_step(0)
    schedule.submitted("a")
    schedule.finished(group("a", [None, 0.0, 1.0]))
    selection = schedule.select()
    assert selection is not None
    assert [len(g.voters) for g in selection.groups] == [2]
    assert schedule.counters.failed == 0


def test_a_lost_group_is_replaced_in_a_queue_and_not_in_a_batch() -> None:
    fate = lambda prompt, attempt: UNSCORED if prompt == "p0" else PART  # noqa: E731
    queue = Driver(FullyAsyncSchedule(2, max_staleness=1, steps=2), fate)
    assert queue.run(2) == "done"
    assert len(queue.trained) == 4
    batch = Driver(BatchSchedule(2, steps=2), fate)
    assert batch.run(2) == "done"
    assert len(batch.trained) == 3


def long_tailed(seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    return {f"p{i}": rng.lognormvariate(0.0, 1.2) for i in range(4000)}


def by_length(lengths: dict[str, float], driver: Driver) -> Callable[[int], int]:
    """Event order by finish time: every running group has one unit of service rate."""
    started: dict[str, float] = {}
    now = 0.0

    def choose(n: int) -> int:
        nonlocal now
        able = driver.returnable()
        if n != len(able) or not able:
            return min(n - 1, 2)
        for name in able:
            started.setdefault(name, now)
        ends = {name: started[name] + lengths[name.split("~")[0]] for name in able}
        first = min(able, key=lambda name: ends[name])
        now = max(now, ends[first])
        return able.index(first)

    return choose


@pytest.mark.parametrize(
    "schedule",
    [
        BatchSchedule(4, steps=60),
        BatchSchedule(4, ahead=1, steps=60),
        FullyAsyncSchedule(4, max_staleness=3, steps=60),
        BoundedSchedule(4, max_staleness=3, on_stale="wait", steps=60),
        WindowedSchedule(4, max_staleness=3, overtake=6, steps=60),
    ],
    ids=lambda s: s.kind,
)
def test_what_drops_nothing_trains_the_lengths_that_it_sampled(schedule: BookedSchedule) -> None:
    lengths = long_tailed(1)
    driver = Driver(schedule)
    driver.choose = by_length(lengths, driver)
    assert driver.run(60) == "done"
    assert Counter(lengths[p] for p in driver.trained) == Counter(lengths[p] for p in driver.submitted)
    assert len(driver.trained) == 240
    assert not any(name.startswith("schedule/evicted") for name in schedule.metrics())


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
def test_what_evicts_is_biased_towards_short_groups_and_reports_it(on_stale: str) -> None:
    clock = [0.0]
    schedule = BoundedSchedule(4, max_staleness=1, on_stale=on_stale, steps=60, clock=lambda: clock[0])  # type: ignore[arg-type]
    lengths = long_tailed(2)
    driver = Driver(schedule)
    inner = by_length(lengths, driver)

    def choose(n: int) -> int:
        clock[0] += 0.05
        return inner(n)

    driver.choose = choose
    assert driver.run(60) == "done"
    metrics = schedule.metrics()
    assert 0.0 < metrics["schedule/evicted_share"] < 1.0
    assert metrics["schedule/evicted_seconds_mean"] > metrics["schedule/trained_seconds_mean"]
    trained = [lengths[p.split("~")[0]] for p in driver.trained]
    drawn = [lengths[p] for p in driver.starts]
    assert sum(trained) / len(trained) < sum(drawn) / len(drawn)


def test_figures_of_a_step_say_lag_age_and_what_is_out() -> None:
    clock = [10.0]
    schedule = FullyAsyncSchedule(1, max_staleness=1, clock=lambda: clock[0])
    schedule.begin_step(0)
    for name in "ab":
        schedule.submitted(name)
    clock[0] = 13.0
    schedule.finished(group("a", [0.0, 1.0]))
    clock[0] = 15.0
    assert schedule.select() is not None
    metrics = schedule.metrics()
    assert metrics["schedule/queue_seconds_max"] == 2.0
    assert metrics["schedule/running_seconds_max"] == 5.0
    assert metrics["schedule/outstanding"] == 2.0
    assert metrics["schedule/lag_0"] == 1.0
    schedule.end_step(0)
    schedule.begin_step(1)
    schedule.finished(group("b", [0.0, 1.0]))
    schedule.select()
    assert schedule.metrics()["schedule/lag_max"] == 1.0


@pytest.mark.parametrize("kind", ["sync", "one_step_off", "fully_async", "bounded", "windowed"])
def test_settings_build_the_schedule_they_name(kind: str) -> None:
    settings = ScheduleSettings.model_validate({"kind": kind, "prompts_per_step": 3, "steps": 2})
    schedule = build_schedule(settings)
    assert schedule.kind == kind  # type: ignore[attr-defined]
    schedule.begin_step(0)
    assert schedule.admit() == (3 if kind in ("sync", "one_step_off") else 6), "two steps consume six groups"
