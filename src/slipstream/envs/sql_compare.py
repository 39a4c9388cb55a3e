"""When do two query results count as the same answer?

Owns: the rule.  Column names are ignored; rows are compared as a multiset, unless the gold query has ORDER BY at its
top level, then as a list; numbers within a relative tolerance of 1e-6 are equal and 3 equals 3.0; text, numbers,
blobs and NULL never equal each other.  An error or a truncated result equals nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slipstream.envs.sqldb import SqlResult

_REL_TOL = 1e-6
_ABS_TOL = 1e-9


@lru_cache(maxsize=4096)
def is_ordered(sql: str) -> bool:
    """Whether a (trusted, valid) query has ORDER BY at its top level.

    >>> is_ordered("SELECT a FROM t ORDER BY a"), is_ordered("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    (True, False)
    """
    import sqlglot

    return sqlglot.parse_one(sql, read="sqlite").args.get("order") is not None


def results_match(gold: SqlResult, answer: SqlResult, ordered: bool) -> bool:
    """Whether ``answer`` is the same result as ``gold`` under the module's rule."""
    if not (gold.ok and answer.ok) or gold.truncated or answer.truncated:
        return False
    if len(gold.rows) != len(answer.rows) or len(gold.columns) != len(answer.columns):
        return False
    left: Sequence[tuple[Any, ...]] = gold.rows
    right: Sequence[tuple[Any, ...]] = answer.rows
    if not ordered:
        left, right = sorted(left, key=_row_key), sorted(right, key=_row_key)
    return all(_rows_equal(a, b) for a, b in zip(left, right, strict=True))


def row_overlap(gold: SqlResult, answer: SqlResult) -> float:
    """F1 of the two multisets of rows, in [0, 1] (floats rounded to six significant digits); order is ignored."""
    if not (gold.ok and answer.ok) or not gold.rows or not answer.rows:
        return 0.0
    left = Counter(tuple(_rounded(v) for v in row) for row in gold.rows)
    right = Counter(tuple(_rounded(v) for v in row) for row in answer.rows)
    return 2 * (left & right).total() / (left.total() + right.total())


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.6g}")
    return type(value) is str, value


def _cell_key(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return (2, value) if isinstance(value, str) else (3, value)


def _row_key(row: tuple[Any, ...]) -> tuple[tuple[int, Any], ...]:
    return tuple(_cell_key(value) for value in row)


def _rows_equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(_cells_equal(x, y) for x, y in zip(a, b, strict=True))


def _cells_equal(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or math.isclose(a, b, rel_tol=_REL_TOL, abs_tol=_ABS_TOL)
    return type(a) is type(b) and bool(a == b)
