"""When two results are the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.envs.sql_compare import is_ordered, results_match, row_overlap
from slipstream.envs.sqldb import SqlResult


def result(*rows, columns=None, **kwargs):
    width = len(rows[0]) if rows else 1
    return SqlResult(columns=columns or tuple("abcdefgh"[:width]), rows=tuple(rows), **kwargs)


@pytest.mark.parametrize(
    ("left", "right", "ordered", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(3,)], [(3.0,)], False, True),
        ([(0.1 + 0.2,)], [(0.3,)], False, True),
        ([(100.0,)], [(100.01,)], False, False),
        ([(3,)], [("3",)], False, False),
        ([(None,)], [(0,)], False, False),
        ([(None,)], [("",)], False, False),
        ([(b"a",)], [("a",)], False, False),
        ([(None, 1), ("x", 2)], [("x", 2), (None, 1)], False, True),
        ([(1, 2)], [(2, 1)], False, False),
        ([(1, 2)], [(1,)], False, False),
        ([], [], False, True),
    ],
)
def test_rule(left, right, ordered, same):
    assert results_match(result(*left), result(*right), ordered) is same


def test_column_names_do_not_count():
    assert results_match(result((1,), columns=("count",)), result((1,), columns=("n",)), False)


def test_errors_and_truncated_results_equal_nothing():
    good = result((1,))
    assert not results_match(good, SqlResult(error="x", kind="sql"), False)
    assert not results_match(SqlResult(error="x"), SqlResult(error="x"), False)
    assert not results_match(good, result((1,), truncated=True), False)


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False)))),
    st.randoms(),
)
@settings(max_examples=50, deadline=None)
def test_any_result_equals_its_own_shuffle(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert results_match(result(*rows), result(*shuffled), False)


def test_overlap_is_the_f1_of_the_multisets():
    assert row_overlap(result((1,), (2,)), result((1,), (3,))) == 0.5
    assert row_overlap(result((1,)), result((1,), (1,), (1,))) == 0.5
    assert row_overlap(result((1,)), SqlResult(error="x")) == 0.0
    assert row_overlap(result(("1",)), result((1,))) == 0.0


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a LIMIT 3", True),
        ("SELECT a FROM t WHERE a IN (SELECT b FROM u ORDER BY b LIMIT 1)", False),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x", False),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT 'order by'", False),
    ],
)
def test_only_a_top_level_order_by_orders(sql, ordered):
    assert is_ordered(sql) is ordered
