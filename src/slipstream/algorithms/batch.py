"""``Batch``: what a training step sees.

Owns: rows compiled to arrays, and the shapes every loss and backend agree on.
Refuses: models, padding, micro-batching (the backend's business).

Shape legend: ``T`` targets of one row (its length minus one), ``N`` trained tokens of a batch,
``R`` rows, ``G`` groups.

A row of ids ``x_0 .. x_T`` has inputs ``x_0 .. x_{T-1}`` and targets ``x_1 .. x_T``; every per-token
array is stored *on targets*, so that no mask is ever shifted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import ContractError
from slipstream.trajectory import SamplingSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BatchRow:
    """One row.  All arrays have length T and lie on targets.

    ``trained_T`` marks targets a loss touches; at other slots the float arrays may hold anything (even NaN):
    trained tokens are gathered *before* any arithmetic, so masked slots cannot reach a loss.
    ``weights_T`` are signed, already contain 1/denominator, and are zero where not trained.
    """

    row_id: str
    trajectory_id: str
    group_id: str
    inputs_T: IntArray
    targets_T: IntArray
    trained_T: BoolArray
    weights_T: FloatArray
    advantages_T: FloatArray
    behaviour_logprobs_T: FloatArray
    sampling: SamplingSpec
    side_T: Mapping[str, Any] = field(default_factory=dict)
    versions_T: IntArray | None = None
    """Counter of the weight version that sampled each trained token; -1 where it is unknown."""
    dropped_T: BoolArray | None = None
    """Trained tokens that an off-policy mask took out: they are scored, and weigh nothing."""
    dropped_count: bool = False
    """Whether dropped tokens still count in denominators."""
    copies: int = 1
    """How often this row stands in the step (dynamic sampling, ``replace``); its weights contain the factor."""

    def __post_init__(self) -> None:
        length = len(self.inputs_T)
        for name in ("targets_T", "trained_T", "weights_T", "advantages_T", "behaviour_logprobs_T"):
            if len(getattr(self, name)) != length:
                raise ContractError(f"row {self.row_id}: {name} has length {len(getattr(self, name))}, want {length}")
        for name in ("versions_T", "dropped_T"):
            if (values := getattr(self, name)) is not None and len(values) != length:
                raise ContractError(f"row {self.row_id}: {name} has length {len(values)}, want {length}")
        for name, values in self.side_T.items():
            if len(values) != length:
                raise ContractError(f"row {self.row_id}: side channel {name} has length {len(values)}, want {length}")
        if np.any(self.weights_T[~self.trained_T] != 0):
            raise ContractError(f"row {self.row_id}: a token that is not trained has a weight")
        if not np.all(np.isfinite(self.weights_T[self.trained_T])):
            raise ContractError(f"row {self.row_id}: weights must be finite")

    @property
    def n_trained(self) -> int:
        """Number of trained tokens."""
        return int(self.trained_T.sum())

    @property
    def weighed_T(self) -> BoolArray:
        """Trained tokens that may have a weight: all but dropped ones."""
        return self.trained_T if self.dropped_T is None else self.trained_T & ~self.dropped_T

    @property
    def n_counted(self) -> int:
        """How many tokens this row puts into denominators."""
        return self.n_trained if self.dropped_count else int(self.weighed_T.sum())


@dataclass(frozen=True)
class Batch:
    """All rows of one optimiser step (or of one scoring call)."""

    rows: Sequence[BatchRow]
    step: int = 0

    @property
    def n_trained(self) -> int:
        """N: trained tokens over all rows."""
        return sum(row.n_trained for row in self.rows)

    @property
    def n_inputs(self) -> int:
        """Input tokens over all rows, common beginnings counted in every row."""
        return sum(len(row.inputs_T) for row in self.rows)
