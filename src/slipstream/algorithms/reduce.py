"""The one reducer: how much each trained token weighs.

Owns: reductions by name.  Refuses: loss values.  Weights are fixed *before* a step is cut into micro-batches
or ranks, from all rows of one optimiser step, so that no cut can change them; the policy, KL and entropy
terms share them.  Each denominator counts exactly the tokens that are trained.

A reduction maps rows, and its settings, to one number per row: the weight of each of its trained tokens.  A row with
``copies`` above 1 (dynamic sampling, ``replace``) is weighed as if it stood in the step that often.

>>> from types import SimpleNamespace as Row
>>> rows = [Row(trajectory_id="a", group_id="g", n_trained=1), Row(trajectory_id="b", group_id="g", n_trained=3)]
>>> token_weights(rows, "sequence_mean").tolist()
[0.5, 0.16666666666666666]
>>> token_weights(rows, ReductionSpec("seq_mean_token_sum_norm", {"reduction_tokens": 5})).tolist()
[0.1, 0.1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from slipstream.algorithms.batch import BatchRow, FloatArray
from slipstream.algorithms.registry import Registry
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError, SettingsError


class RowShape(Protocol):
    """What a reduction may know of a row.  ``n_trained`` is what the row puts into denominators."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def group_id(self) -> str: ...

    @property
    def n_trained(self) -> int: ...


@dataclass(frozen=True)
class _Counted:
    """A row as a reduction sees it; each of several copies is a trajectory and a group of its own."""

    trajectory_id: str
    group_id: str
    n_trained: int


ReductionFunction = Callable[[Sequence[RowShape], Mapping[str, Any]], FloatArray]


@dataclass(frozen=True)
class Reduction:
    """A registered reduction and its settings with defaults (fields of ``AlgorithmSettings``)."""

    name: str
    function: ReductionFunction
    defaults: Mapping[str, Any] = field(default_factory=dict)
    formula: str = ""
    """One line, for the documentation."""
    source: str = ""
    """The paper or specification of the formula."""
    use: str = ""
    """When to choose it, in a sentence."""


@dataclass(frozen=True)
class ReductionSpec:
    """A reduction by name (or import path) with the settings of one run."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


REDUCTIONS: Registry[Reduction] = Registry("reduction", wrap=lambda path, function: Reduction(path, function))


def register_reduction(
    name: str, *, defaults: Mapping[str, Any] | None = None, formula: str = "", source: str = "", use: str = ""
) -> Callable[[ReductionFunction], ReductionFunction]:
    """Decorator: register a function from rows and settings to one per-token weight for each row, shape ``(R,)``."""

    def add(function: ReductionFunction) -> ReductionFunction:
        REDUCTIONS.add(name, Reduction(name, function, dict(defaults or {}), formula, source, use))
        return function

    return add


def reduction_spec(settings: AlgorithmSettings) -> ReductionSpec:
    """The reduction that these settings mean; raises ``SettingsError`` on an unknown name."""
    reduction = REDUCTIONS.get(settings.reduction)
    return ReductionSpec(settings.reduction, {name: getattr(settings, name) for name in reduction.defaults})


@register_reduction(
    "token_mean",
    formula="1 / N",
    source="DAPO, arXiv 2503.14476",
    use="The default: long answers count as much as they have tokens.",
)
def token_mean(rows: Sequence[RowShape], settings: Mapping[str, Any]) -> FloatArray:
    """``1 / N``: every trained token of the step weighs the same (DAPO, 2503.14476)."""
    return np.full(len(rows), 1.0 / sum(row.n_trained for row in rows))


@register_reduction(
    "sequence_mean",
    formula="1 / (B n_i)",
    source="GRPO, arXiv 2402.03300",
    use="Every trajectory has one vote, whatever its length.",
)
def sequence_mean(rows: Sequence[RowShape], settings: Mapping[str, Any]) -> FloatArray:
    """``1 / (B n_i)``: every trajectory weighs the same, its tokens share its vote (GRPO, 2402.03300).

    ``B`` counts trajectories with trained tokens and ``n_i`` the trained tokens of trajectory ``i`` over *all*
    of its rows, so a trajectory whose history forked into several rows does not vote several times.
    """
    tokens = _count(rows, "trajectory_id")
    return np.asarray([1.0 / (len(tokens) * tokens[row.trajectory_id]) for row in rows])


@register_reduction(
    "seq_mean_token_sum_norm",
    defaults={"reduction_tokens": None},
    formula="1 / (B L)",
    source="Dr. GRPO, arXiv 2503.20783",
    use="No answer's gradient depends on its length.",
)
def seq_mean_token_sum_norm(rows: Sequence[RowShape], settings: Mapping[str, Any]) -> FloatArray:
    """``1 / (B L)`` with a constant ``L``: no answer's gradient depends on its length (Dr. GRPO, 2503.20783).

    ``L`` is ``algorithm.reduction_tokens``; a run fills it in with the most tokens one trajectory may sample.
    """
    constant = settings["reduction_tokens"]
    if constant is None:
        raise SettingsError("reduction seq_mean_token_sum_norm divides by algorithm.reduction_tokens, which is null")
    return np.full(len(rows), 1.0 / (len(_count(rows, "trajectory_id")) * constant))


@register_reduction(
    "prompt_mean",
    formula="1 / (P n_g)",
    source="SkyRL's prompt_mean",
    use="Every prompt has one vote, also when groups are of different size.",
)
def prompt_mean(rows: Sequence[RowShape], settings: Mapping[str, Any]) -> FloatArray:
    """``1 / (P n_g)``: every prompt weighs the same, the tokens of its group share its vote.

    ``P`` counts groups with trained tokens and ``n_g`` the trained tokens of group ``g``.
    """
    tokens = _count(rows, "group_id")
    return np.asarray([1.0 / (len(tokens) * tokens[row.group_id]) for row in rows])


@register_reduction("sum", formula="1", source="Tinker's API", use="Rates and weights that were tuned for plain sums.")
def plain_sum(rows: Sequence[RowShape], settings: Mapping[str, Any]) -> FloatArray:
    """``1``: nothing is divided, as the Tinker service does; the learning rate has to fit the number of tokens."""
    return np.ones(len(rows))


def _count(rows: Sequence[RowShape], owner: str) -> Counter[str]:
    """Trained tokens by trajectory or by group."""
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[getattr(row, owner)] += row.n_trained
    return tokens


def token_weights(rows: Sequence[RowShape], reduction: str | ReductionSpec) -> FloatArray:
    """The weight of each trained token of each row, shape ``(R,)``; ``rows`` are one whole optimiser step.

    A row of which no token counts (off-policy masks took all of them) weighs nothing.  Raises ``SettingsError`` on an
    unknown reduction, ``ContractError`` on a row without trained tokens and on a reduction that returns another
    shape or a number that is not finite.
    """
    spec = ReductionSpec(reduction) if isinstance(reduction, str) else reduction
    chosen = REDUCTIONS.get(spec.name)
    for row in rows:
        if row.n_trained < 1:
            raise ContractError(f"reduction {spec.name!r}: a row of {row.trajectory_id} has no trained token")
    counted, origin = _counted(rows)
    if not counted:
        return np.zeros(len(rows))
    weights = np.asarray(chosen.function(counted, {**chosen.defaults, **spec.settings}), dtype=np.float64)
    if weights.shape != (len(counted),) or not np.all(np.isfinite(weights)):
        raise ContractError(
            f"reduction {spec.name!r} must return {len(counted)} finite weights, got "
            + (f"shape {weights.shape}" if weights.shape != (len(counted),) else "some that are not finite")
        )
    return np.bincount(origin, weights, minlength=len(rows))


def _counted(rows: Sequence[RowShape]) -> tuple[list[RowShape], list[int]]:
    """What the denominators count, copies included, and the index of the row that each entry stands for."""
    counted: list[RowShape] = []
    origin: list[int] = []
    for i, row in enumerate(rows):
        tokens = getattr(row, "n_counted", row.n_trained)
        for copy in range(getattr(row, "copies", 1) if tokens else 0):
            suffix = f"#{copy}" if copy else ""
            counted.append(_Counted(f"{row.trajectory_id}{suffix}", f"{row.group_id}{suffix}", tokens))
            origin.append(i)
    return counted, origin


def reweigh(rows: Sequence[BatchRow], reduction: str | ReductionSpec) -> list[BatchRow]:
    """The same rows with the weights of this reduction over exactly these rows."""
    weights = token_weights(rows, reduction)
    return [
        replace(row, weights_T=np.where(row.weighed_T, weight, 0.0)) for row, weight in zip(rows, weights, strict=True)
    ]
