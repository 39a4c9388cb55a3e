"""Dynamic sampling: a step that draws again, its budget, and groups that stand in for others."""

from __future__ import annotations

import itertools

import pytest

from algorithm_builders import group
from slipstream.algorithms import apply_filters, compile_batch, compute_advantages, stand_ins
from slipstream.config.algorithm import DynamicSamplingSettings
from slipstream.config.settings import AlgorithmSettings, RolloutSettings, ScheduleSettings
from slipstream.schedule import build_schedule
from slipstream.trajectory import Group

ALGORITHM, ROLLOUT = AlgorithmSettings(), RolloutSettings()


def judge(candidate: Group) -> str | None:
    excluded = apply_filters([candidate], ALGORITHM, ROLLOUT).excluded
    return next(iter(excluded.values()), None)


def play(dynamic: DynamicSamplingSettings, spreads: list[bool], *, prompts: int = 2, kind: str = "sync"):
    """One step over groups that have spread or not, in order; returns the selection and how many were drawn."""
    schedule = build_schedule(ScheduleSettings(kind=kind, prompts_per_step=prompts), judge, dynamic=dynamic)
    source, drawn = iter(spreads), 0
    schedule.begin_step(0)
    while (selection := schedule.select()) is None:
        ids = []
        for _ in range(schedule.admit()):
            schedule.submitted(f"g{drawn}")
            ids.append(f"g{drawn}")
            drawn += 1
        for gid in ids:
            schedule.finished(group(gid, [1, 0] if next(source) else [1, 1]))
    return selection, drawn


def kept(selection) -> list[str]:
    return [g.group_id for g in selection.groups]


def test_off_trains_the_short_batch_at_once():
    selection, drawn = play(DynamicSamplingSettings(), [True, False])
    assert (kept(selection), drawn, selection.short) == (["g0"], 2, True)


@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
def test_filter_draws_until_the_batch_is_full(kind):
    selection, drawn = play(DynamicSamplingSettings(kind="filter"), [False, False, True, False, True, True], kind=kind)
    assert (kept(selection), drawn, selection.short) == (["g2", "g4"], 6, False)
    reasons = {g.group_id: reason for g, reason in selection.left_out}
    assert reasons == {"g0": "zero_variance", "g1": "zero_variance", "g3": "zero_variance", "g5": "surplus"}


def test_an_exhausted_budget_trains_the_short_batch_at_its_true_denominator():
    dynamic = DynamicSamplingSettings(kind="filter", max_rounds=3)
    selection, drawn = play(dynamic, [False, False, False, True, False, False])
    assert (kept(selection), drawn, selection.short) == (["g3"], 6, True)
    batch = compile_batch(selection.groups, compute_advantages(selection.groups, ALGORITHM), "token_mean")
    assert sum(row.weights_T.sum() for row in batch.rows) == pytest.approx(1.0)


QUEUES = [("fully_async", 0), ("fully_async", 1), ("bounded", 1), ("windowed", 1)]


@pytest.mark.parametrize(("kind", "staleness"), QUEUES)
def test_a_queue_whose_budget_is_spent_trains_the_short_batch(kind, staleness):
    """Nothing more starts, what runs comes back, and what is ready is trained at its true denominator."""
    settings = ScheduleSettings(kind=kind, prompts_per_step=2, max_staleness_steps=staleness, max_batches_per_step=1)
    schedule = build_schedule(settings, judge, dynamic=DynamicSamplingSettings(kind="filter", max_rounds=3))
    schedule.begin_step(0)
    names = [f"g{n}" for n in range(2 * (staleness + 1))]
    for name in names:
        schedule.submitted(name)
    for n in range(6):  # each refused group makes room for one more, until six are
        schedule.finished(group(names.pop(0), [1, 1]))
        assert schedule.select() is None
        assert schedule.admit() == (1 if n < 5 else 0)
        if n < 5:
            names.append(f"g{10 + n}")
            schedule.submitted(names[-1])
    last = names.pop()
    for name in names:
        schedule.finished(group(name, [1, 1]))
        assert schedule.select() is None
        assert schedule.admit() == 0
    schedule.finished(group(last, [1, 0]))
    selection = schedule.select()
    assert selection is not None
    assert (kept(selection), selection.short) == ([last], True)
    assert schedule.admit() == 2 * staleness  # the short batch holds the places of a whole one while it is trained
    batch = compile_batch(selection.groups, compute_advantages(selection.groups, ALGORITHM), "token_mean")
    assert sum(row.weights_T.sum() for row in batch.rows) == pytest.approx(1.0)


@pytest.mark.parametrize(("kind", "staleness"), QUEUES)
def test_a_step_of_a_queue_may_end_up_with_nothing(kind, staleness):
    """As in a schedule of whole batches: the step records what was refused, and the next one draws again."""
    settings = ScheduleSettings(kind=kind, prompts_per_step=1, max_staleness_steps=staleness)
    schedule = build_schedule(settings, judge, dynamic=DynamicSamplingSettings(kind="filter", max_rounds=2))
    names = itertools.count()
    for step in range(3):
        schedule.begin_step(step)
        seen: list[str] = []
        while (selection := schedule.select()) is None:
            for _ in range(schedule.admit()):
                schedule.submitted(f"g{next(names)}")
            seen.append(schedule.running()[0])
            schedule.finished(group(seen[-1], [1, 1]))
        assert (kept(selection), selection.short, len(seen)) == ([], True, 2 + staleness)
        assert {g.group_id for g, _ in selection.left_out} == set(seen)
        schedule.end_step(step)


def test_rounds_start_anew_with_each_step():
    dynamic = DynamicSamplingSettings(kind="filter", max_rounds=2)
    schedule = build_schedule(ScheduleSettings(prompts_per_step=1), judge, dynamic=dynamic)
    names = itertools.count()
    for step in range(3):
        schedule.begin_step(step)
        drawn = 0
        while (selection := schedule.select()) is None:
            for _ in range(schedule.admit()):
                gid = f"g{next(names)}"
                schedule.submitted(gid)
                schedule.finished(group(gid, [1, 1]))
                drawn += 1
        assert (drawn, selection.short) == (2, True)
        schedule.end_step(step)


@pytest.mark.parametrize(
    ("spreads", "good", "drawn"),
    [([True, True, False, False], ["g0", "g1"], 4), ([True] + [False] * 3 + [True] * 4, ["g0", "g4", "g5", "g6"], 8)],
)
def test_replace_draws_again_only_when_too_few_are_good(spreads, good, drawn):
    dynamic = DynamicSamplingSettings(kind="replace", min_good_fraction=0.3)
    selection, n = play(dynamic, spreads, prompts=4)
    assert (kept(selection), n) == (good, drawn)


def test_the_data_may_end_before_the_budget():
    schedule = build_schedule(
        ScheduleSettings(prompts_per_step=2), judge, dynamic=DynamicSamplingSettings(kind="filter")
    )
    schedule.begin_step(0)
    for gid in ("g0", "g1"):
        schedule.submitted(gid)
        schedule.finished(group(gid, [1, 0] if gid == "g0" else [1, 1]))
    schedule.exhausted()
    selection = schedule.select()
    assert selection is not None
    assert (kept(selection), selection.short) == (["g0"], True)


# --- stand-ins -------------------------------------------------------------------------------------


def result(*names: str, constant: tuple[str, ...] = ()):
    groups = [group(n, [1, 0]) for n in names] + [group(n, [1, 1]) for n in constant]
    return apply_filters(groups, ALGORITHM, ROLLOUT)


def test_good_groups_stand_in_for_missing_ones_evenly():
    copies = stand_ins(result("a", "b", "c"), 8).copies
    assert sorted(copies.values()) == [2, 3, 3]
    assert sum(copies.values()) == 8


def test_groups_that_do_not_train_never_stand_in():
    assert set(stand_ins(result("a", constant=("x", "y")), 3).copies) == {"a"}


def test_who_stands_in_does_not_depend_on_order():
    assert stand_ins(result("a", "b", "c"), 4).copies == stand_ins(result("c", "a", "b"), 4).copies


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_nothing_stands_in_when_nothing_is_missing_or_nothing_is_good(names):
    assert not stand_ins(result(*names), 2).copies


def test_a_stand_in_weighs_double_and_is_one_row():
    filtered = stand_ins(result("a", "b"), 3)
    batch = compile_batch(
        filtered.groups, compute_advantages(filtered.groups, ALGORITHM), "token_mean", copies=filtered.copies
    )
    weights = {row.group_id: float(row.weights_T.max()) for row in batch.rows}
    twice, once = sorted(filtered.copies, key=lambda gid: -filtered.copies[gid])
    assert len(batch.rows) == 4
    assert weights[twice] == pytest.approx(2 * weights[once])
    assert sum(row.weights_T.sum() for row in batch.rows) == pytest.approx(1.0)
