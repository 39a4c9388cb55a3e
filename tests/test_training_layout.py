"""Packing: targets stay with their row, common beginnings are computed once, budgets hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.batch import BatchRow
from slipstream.training import layout as layout_module
from slipstream.training.layout import Run, plan_layouts
from slipstream.trajectory import SamplingSpec

SYSTEM = list(range(100, 120))


def row(ids, trained=None, name="r"):
    ids = np.asarray(ids, dtype=np.int64)
    trained = np.ones(len(ids) - 1, dtype=bool) if trained is None else np.asarray(trained, dtype=bool)
    zeros = np.zeros(len(ids) - 1)
    return BatchRow(name, name, "g", ids[:-1], ids[1:], trained, zeros, zeros, zeros, SamplingSpec())


def question(n):
    return list(range(200 + 100 * n, 220 + 100 * n))


def predictors(layout):
    """(input id, target id) pairs in gather order."""
    return list(zip(layout.ids_T[layout.at_N].tolist(), layout.targets_N.tolist(), strict=True))


def seen_inputs(layout, place):
    """The input ids that a packed place attends to, in packed order."""
    reach = np.concatenate([np.full(run.stop - run.start, run.reach) for run in layout.runs])
    k = np.arange(layout.n_tokens)
    return layout.ids_T[(k <= place) & (place < reach)].tolist()


def check(rows, layouts, budget):
    """Each trained token lies in one layout, behind exactly its own row's inputs and at its own position."""
    found = {}
    for layout in layouts:
        longest = max(len(rows[i].inputs_T) for i in layout.row_ids_R)
        assert layout.n_tokens <= max(budget, longest)
        assert [run.start for run in layout.runs] == [0, *(run.stop for run in layout.runs[:-1])]
        assert layout.runs[-1].stop == layout.n_tokens
        assert list(layout.row_ids_R) == sorted(layout.row_ids_R)
        for place, index in enumerate(layout.row_ids_R):
            pick = layout.row_N == place
            trained = np.flatnonzero(rows[index].trained_T)
            assert index not in found
            found[index] = layout.targets_N[pick].tolist()
            assert layout.positions_T[layout.at_N[pick]].tolist() == trained.tolist()
            for at, t in zip(layout.at_N[pick], trained, strict=True):
                assert seen_inputs(layout, at) == rows[index].inputs_T[: t + 1].tolist()
    assert found == {i: r.targets_T[r.trained_T].tolist() for i, r in enumerate(rows) if r.n_trained}


def test_a_packed_row_never_scores_the_next_rows_first_token():
    (layout,) = plan_layouts([row([1, 2, 3]), row([4, 5, 6])], 64)
    assert predictors(layout) == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert layout.positions_T.tolist() == [0, 1, 0, 1]
    assert layout.row_N.tolist() == [0, 0, 1, 1]


def test_a_shared_prefix_is_laid_out_once_and_its_last_token_predicts_every_first_response_token():
    mask = [False] * 19 + [True] * 2
    (layout,) = plan_layouts([row([*SYSTEM, 1, 2], mask), row([*SYSTEM, 3, 4], mask)], 64)
    assert layout.runs == (Run(0, 20, 22), Run(20, 21, 21), Run(21, 22, 22))
    assert layout.ids_T.tolist() == [*SYSTEM, 1, 3]
    assert layout.positions_T.tolist() == [*range(20), 20, 20]
    assert predictors(layout) == [(119, 1), (1, 2), (119, 3), (3, 4)]


def test_a_batchs_common_beginning_and_each_groups_question_are_laid_out_once():
    # Rows of the two groups alternate; they are packed by group and reported in row order.
    rows = [row([*SYSTEM, *question(i % 2), 1 + i, 9]) for i in range(4)]
    (layout,) = plan_layouts(rows, 1000)
    assert layout.ids_T.tolist() == [*SYSTEM, *question(0), 1, 3, *question(1), 2, 4]
    assert layout.runs == (
        *(Run(0, 20, 64), Run(20, 40, 42), Run(40, 41, 41), Run(41, 42, 42)),
        *(Run(42, 62, 64), Run(62, 63, 63), Run(63, 64, 64)),
    )
    assert layout.row_ids_R == (0, 1, 2, 3)
    check(rows, [layout], 1000)


def test_equal_rows_are_one_run():
    rows = [row([1, 2, 3, 4]), row([5, 6, 7]), row([1, 2, 3, 4])]
    (layout,) = plan_layouts(rows, 64)
    assert layout.ids_T.tolist() == [1, 2, 3, 5, 6]
    assert predictors(layout) == [(1, 2), (2, 3), (3, 4), (5, 6), (6, 7), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("short_first", [True, False])
def test_a_row_that_begins_another_needs_no_fork(short_first):
    rows = [row([1, 2, 3]), row([1, 2, 3, 4, 5])]
    (layout,) = plan_layouts(rows if short_first else rows[::-1], 64)
    assert layout.runs == (Run(0, 4, 4),)
    assert layout.ids_T.tolist() == [1, 2, 3, 4]


def test_a_row_that_ends_where_others_fork_ends_inside_the_shared_run():
    rows = [row([*SYSTEM, 1, 2]), row([*SYSTEM, 3, 4]), row([*SYSTEM, 5])]
    (layout,) = plan_layouts(rows, 64)
    assert layout.n_tokens == 22
    check(rows, [layout], 64)


def test_a_fork_that_saves_less_than_it_costs_is_not_made():
    few = [row([*SYSTEM[:15], 1, 2]), row([*SYSTEM[:15], 3, 4])]
    assert plan_layouts(few, 64)[0].n_tokens == 32
    # One common token saves 63, and would cost 64 * 300 tokens a merge each.
    rng = np.random.default_rng(0)
    long = [row([1, 10 + i, *rng.integers(100, 999, 300)]) for i in range(64)]
    assert plan_layouts(long, 10**6)[0].n_tokens == sum(len(r.inputs_T) for r in long)


def test_sharing_can_be_switched_off():
    rows = [row([*SYSTEM, 1, 2]), row([*SYSTEM, 3, 4]), row([*SYSTEM, 3, 4])]
    (layout,) = plan_layouts(rows, 640, share=False)
    assert layout.n_tokens == 63
    assert [run.reach for run in layout.runs] == [21, 42, 63]


def test_inputs_behind_the_last_trained_target_are_left_out():
    (layout,) = plan_layouts([row([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0]), row([1, 2], [0])], 64)
    assert layout.ids_T.tolist() == [1, 2]
    assert layout.row_ids_R == (0,)
    assert plan_layouts([row([1, 2], [0])], 64) == []
    assert plan_layouts([], 64) == []


def test_a_subtree_that_fits_one_layout_is_not_torn_and_its_ancestors_are_computed_again():
    rows = [row([*SYSTEM, *question(g), 10 * g + s, 9]) for g in range(3) for s in range(3)]
    # A group needs 20 + 20 + 3 tokens, two need 66; 60 hold one group and a part of the next.
    layouts = plan_layouts(rows, 60)
    assert [layout.row_ids_R for layout in layouts] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert [layout.n_tokens for layout in layouts] == [43, 43, 43]
    # Alone in its layout, a group has one stem: the question goes on in the system message's run.
    assert layouts[0].runs[0] == Run(0, 40, 43)
    assert [layout.row_ids_R for layout in plan_layouts(rows, 66)] == [(0, 1, 2, 3, 4, 5), (6, 7, 8)]
    check(rows, layouts, 60)


def test_a_group_larger_than_the_budget_is_torn_at_rows_and_its_stem_computed_again():
    rows = [row([*SYSTEM, *range(s * 100 + 200, s * 100 + 206), 9]) for s in range(5)]
    layouts = plan_layouts(rows, 35)
    assert [layout.row_ids_R for layout in layouts] == [(0, 1), (2, 3), (4,)]
    check(rows, layouts, 35)


@pytest.mark.parametrize("budget", [1, 5, 22, 30, 45, 60, 100, 1000])
def test_every_trained_token_appears_once_behind_its_own_inputs_for_every_budget(budget):
    rng = np.random.default_rng(budget)
    rows = [row([*SYSTEM, *question(n % 3), *rng.integers(0, 9, n)], None, f"a{n}") for n in range(1, 9)]
    rows.insert(1, row(rng.integers(0, 9, 6)))
    check(rows, plan_layouts(rows, budget), budget)


@st.composite
def bushes(draw):
    """Rows over two ids, so that they share, repeat and begin one another in every way."""
    out = []
    for _ in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
        out.append(row(ids, draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))))
    return out


@settings(max_examples=300, deadline=None)
@given(bushes(), st.integers(1, 30), st.sampled_from([1, 2, 4, 16]))
def test_any_rows_under_any_budget_see_their_own_inputs_only(rows, budget, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_LEAST_SAVED", least)
        layouts = plan_layouts(rows, budget)
    check(rows, layouts, budget)
    plain = sum(int(np.flatnonzero(r.trained_T)[-1]) + 1 for r in rows if r.n_trained)
    # Torn layouts may compute a beginning again, but never more often than without sharing.
    assert sum(layout.n_tokens for layout in layouts) <= plain


def test_with_forks_for_free_a_layout_holds_each_distinct_beginning_once(monkeypatch):
    monkeypatch.setattr(layout_module, "_LEAST_SAVED", 1)
    rng = np.random.default_rng(0)
    rows = [row(rng.integers(0, 2, rng.integers(2, 9))) for _ in range(40)]
    (layout,) = plan_layouts(rows, 10**6)
    beginnings = {tuple(r.inputs_T[:n].tolist()) for r in rows for n in range(1, len(r.inputs_T) + 1)}
    assert layout.n_tokens == len(beginnings)
