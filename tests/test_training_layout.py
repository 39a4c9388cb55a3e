"""Packing: targets stay with their row, prefixes are computed once, budgets hold."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.algorithms.batch import BatchRow
from slipstream.errors import ContractError
from slipstream.training.layout import Block, plan_layouts
from slipstream.trajectory import SamplingSpec


def row(ids, trained=None, prefix_key="", shared=0, name="r"):
    ids = np.asarray(ids, dtype=np.int64)
    trained = np.ones(len(ids) - 1, dtype=bool) if trained is None else np.asarray(trained, dtype=bool)
    zeros = np.zeros(len(ids) - 1)
    return BatchRow(
        name, name, "g", ids[:-1], ids[1:], trained, zeros, zeros, zeros, SamplingSpec(), prefix_key, shared
    )


def predictors(layout):
    """(input id, target id) pairs in gather order."""
    return list(zip(layout.ids_T[layout.at_N].tolist(), layout.targets_N.tolist(), strict=True))


def test_a_packed_row_never_scores_the_next_rows_first_token():
    (layout,) = plan_layouts([row([1, 2, 3]), row([4, 5, 6])], 64)
    assert predictors(layout) == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert layout.positions_T.tolist() == [0, 1, 0, 1]
    assert layout.row_N.tolist() == [0, 0, 1, 1]


def test_a_shared_prefix_is_laid_out_once_and_its_last_token_predicts_every_first_response_token():
    mask = [0, 0, 1, 1]
    rows = [row([7, 8, 9, 1, 2], mask, "p", 3), row([7, 8, 9, 3, 4], mask, "p", 3)]
    (layout,) = plan_layouts(rows, 64)
    assert layout.blocks == (Block(0, 3, (1, 1)),)
    assert layout.ids_T.tolist() == [7, 8, 9, 1, 3]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 3]
    assert predictors(layout) == [(9, 1), (1, 2), (9, 3), (3, 4)]


def test_a_prefix_that_is_not_shared_by_all_rows_is_refused():
    rows = [row([7, 8, 9, 1], None, "p", 3), row([7, 8, 5, 1], None, "p", 3)]
    with pytest.raises(ContractError, match="differ in their first 3 inputs"):
        plan_layouts(rows, 64)


def test_sharing_can_be_switched_off():
    rows = [row([7, 8, 9, 1], None, "p", 3), row([7, 8, 9, 2], None, "p", 3)]
    (layout,) = plan_layouts(rows, 64, share=False)
    assert layout.n_tokens == 6


def test_inputs_behind_the_last_trained_target_are_left_out():
    (layout,) = plan_layouts([row([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0]), row([1, 2], [0])], 64)
    assert layout.ids_T.tolist() == [1, 2]
    assert layout.row_ids_R == (0,)


@pytest.mark.parametrize("budget", [1, 5, 8, 11, 14, 100])
def test_every_trained_token_appears_once_for_every_budget(budget):
    rng = np.random.default_rng(budget)
    prefix = [5, 6, 7, 8]
    rows = [row([*prefix, *rng.integers(0, 9, n)], None, "p", 4, f"a{n}") for n in (1, 3, 5)]
    rows.insert(1, row(rng.integers(0, 9, 6)))
    layouts = plan_layouts(rows, budget)
    seen = {}
    for layout in layouts:
        longest = max(len(rows[i].inputs_T) for i in layout.row_ids_R)
        assert layout.n_tokens <= max(budget, longest)
        for place, index in enumerate(layout.row_ids_R):
            pick = layout.row_N == place
            assert index not in seen
            seen[index] = layout.targets_N[pick].tolist()
            positions = layout.positions_T[layout.at_N[pick]]
            assert positions.tolist() == list(range(len(rows[index].inputs_T)))
            assert layout.ids_T[layout.at_N[pick]].tolist() == rows[index].inputs_T.tolist()
    assert seen == {i: r.targets_T.tolist() for i, r in enumerate(rows)}
