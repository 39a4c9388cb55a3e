"""The one reducer: how much each trained token weighs.

Owns: reductions by name.  Refuses: loss values.  Weights are fixed *before* a step is cut into micro-batches
or ranks, from all rows of one optimiser step, so that no cut can change them; the policy, KL and entropy
terms share them.  Each denominator counts exactly the tokens that are trained.

A reduction maps rows to one number per row: the weight of each of its trained tokens.

>>> from types import SimpleNamespace as Row
>>> rows = [Row(trajectory_id="a", group_id="g", n_trained=1), Row(trajectory_id="b", group_id="g", n_trained=3)]
>>> token_weights(rows, "sequence_mean").tolist()
[0.5, 0.16666666666666666]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from slipstream.algorithms.batch import BatchRow, FloatArray
from slipstream.algorithms.registry import Registry
from slipstream.errors import ContractError


class RowShape(Protocol):
    """What a reduction may know of a row; ``BatchRow`` is one."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def group_id(self) -> str: ...

    @property
    def n_trained(self) -> int: ...


Reduction = Callable[[Sequence[RowShape]], FloatArray]
REDUCTIONS: Registry[Reduction] = Registry("reduction")


def register_reduction(name: str) -> Callable[[Reduction], Reduction]:
    """Decorator: register a function from rows to one per-token weight for each row, shape ``(R,)``."""

    def add(function: Reduction) -> Reduction:
        REDUCTIONS.add(name, function)
        return function

    return add


@register_reduction("token_mean")
def token_mean(rows: Sequence[RowShape]) -> FloatArray:
    """``1 / N``: every trained token of the step weighs the same (DAPO, 2503.14476)."""
    return np.full(len(rows), 1.0 / sum(row.n_trained for row in rows))


@register_reduction("sequence_mean")
def sequence_mean(rows: Sequence[RowShape]) -> FloatArray:
    """``1 / (B n_i)``: every trajectory weighs the same, its tokens share its vote (GRPO, 2402.03300).

    ``B`` counts trajectories with trained tokens and ``n_i`` the trained tokens of trajectory ``i`` over *all*
    of its rows, so a trajectory whose history forked into several rows does not vote several times.
    """
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.trajectory_id] += row.n_trained
    return np.asarray([1.0 / (len(tokens) * tokens[row.trajectory_id]) for row in rows])


def token_weights(rows: Sequence[RowShape], reduction: str) -> FloatArray:
    """The weight of each trained token of each row, shape ``(R,)``; ``rows`` are one whole optimiser step.

    Raises ``SettingsError`` on an unknown reduction, ``ContractError`` on a row without trained tokens and
    on a reduction that returns another shape or a number that is not finite.
    """
    function = REDUCTIONS.get(reduction)
    if not rows:
        return np.zeros(0)
    for row in rows:
        if row.n_trained < 1:
            raise ContractError(f"reduction {reduction!r}: a row of {row.trajectory_id} has no trained token")
    weights = np.asarray(function(rows), dtype=np.float64)
    if weights.shape != (len(rows),) or not np.all(np.isfinite(weights)):
        raise ContractError(
            f"reduction {reduction!r} must return {len(rows)} finite weights, got shape {weights.shape}"
        )
    return weights


def reweigh(rows: Sequence[BatchRow], reduction: str) -> list[BatchRow]:
    """The same rows with the weights of this reduction over exactly these rows."""
    weights = token_weights(rows, reduction)
    return [
        replace(row, weights_T=np.where(row.trained_T, weight, 0.0)) for row, weight in zip(rows, weights, strict=True)
    ]
