"""The objective: policy loss, KL and entropy under one set of weights.

Owns: ``LossSpec``, gathering a batch's arrays for some rows, ``objective`` and the accumulation of metrics.
Refuses: models, reduction rules (weights already contain 1/denominator), rescaling of any kind.

``objective = sum_t w_t loss_t + kl_coef sum_t w_t kl_t - entropy_coef sum_t w_t H_t``

The result is a plain sum over the rows at hand, so that the sums of micro-batches add up to the step's value
whatever the split.  A backend does, for each micro-batch of whole rows::

    inputs = loss_inputs(xp, batch, rows, spec, logprobs, entropy)  # logprobs: (N,), trained tokens, in row order
    loss, metrics = objective(xp, inputs, spec)
    loss.backward()
    accumulator.add(metrics)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.kl import kl_values
from slipstream.algorithms.losses import LOSSES, LossInputs, LossValues, Reducer, Unit
from slipstream.algorithms.ops import Array, Ops
from slipstream.errors import ContractError

__all__ = ["LossInputs", "LossSpec", "Metric", "MetricAccumulator", "loss_inputs", "merge_steps", "objective"]


@dataclass(frozen=True)
class LossSpec:
    """What ``forward_backward`` minimises: registry names and settings, the same on every backend.

    ``policy`` is a registered loss name; ``settings`` are its settings; KL and entropy terms are added by
    the same reducer with the same weights.  ``old_logprobs`` / ``ref_logprobs`` are per row, trained tokens
    only, in the order of ``Batch.rows``; ``old_logprobs=None`` means that the behaviour log-probs of the
    batch are the anchor.
    """

    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    old_logprobs: Sequence[FloatArray] | None = None
    ref_logprobs: Sequence[FloatArray] | None = None

    def take(self, rows: Sequence[int]) -> LossSpec:
        """The same spec for a batch made of these rows of the old one (mini-batches)."""
        old = None if self.old_logprobs is None else [self.old_logprobs[i] for i in rows]
        ref = None if self.ref_logprobs is None else [self.ref_logprobs[i] for i in rows]
        return replace(self, old_logprobs=old, ref_logprobs=ref)

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass has to produce entropies."""
        return self.entropy_coef != 0 or "entropy" in LOSSES.get(self.policy).needs

    @property
    def needs_reference(self) -> bool:
        """Whether ``ref_logprobs`` must be given."""
        return self.kl_coef != 0 or "ref_logprobs" in LOSSES.get(self.policy).needs


@dataclass(frozen=True)
class Metric:
    """A partial result: ``value`` is a sum, maximum or minimum; ``weight`` is a mean's denominator so far."""

    reducer: Reducer
    value: Any
    weight: Any = 0.0


def loss_inputs(
    xp: Ops,
    batch: Batch,
    rows: Sequence[int],
    spec: LossSpec,
    logprobs: Array,
    entropy: Array | None = None,
) -> LossInputs:
    """Gather the trained tokens of ``batch.rows[i] for i in rows`` beside the model's ``logprobs`` ``(N,)``.

    Gathering comes first, so masked slots never meet arithmetic, whatever they hold.  Raises ``ContractError``
    when lengths differ, or when an array that the loss needs is absent or not finite.
    """
    picked = [batch.rows[i] for i in rows]
    counts = np.asarray([row.n_trained for row in picked], dtype=np.int64)
    if int(counts.sum()) != len(logprobs):
        raise ContractError(f"objective: {len(logprobs)} log-probs for {int(counts.sum())} trained tokens")
    loss = LOSSES.get(spec.policy)
    groups = list(dict.fromkeys(row.group_id for row in picked))
    if loss.unit == "group":
        _refuse_cut_groups(batch, rows, spec.policy)

    def flat(name: str, pieces: Sequence[Any], required: bool) -> Array | None:
        for i, piece in zip(rows, pieces, strict=True):
            if required and not np.all(np.isfinite(piece)):
                raise ContractError(f"loss {spec.policy!r} needs finite {name}; row {batch.rows[i].row_id} has not")
        values = np.concatenate(pieces) if len(pieces) else np.zeros(0)
        return xp.asarray(values, like=logprobs) if required or np.all(np.isfinite(values)) else None

    def given(name: str, per_row: Sequence[FloatArray]) -> Array:
        if len(per_row) != len(batch.rows):
            raise ContractError(f"LossSpec.{name} has {len(per_row)} rows for a batch of {len(batch.rows)}")
        for i in rows:
            if len(per_row[i]) != batch.rows[i].n_trained:
                want = batch.rows[i].n_trained
                raise ContractError(f"LossSpec.{name}: row {i} has {len(per_row[i])} values for {want} trained tokens")
        return flat(name, [np.asarray(per_row[i]) for i in rows], True)

    behaviour_needed = "behaviour_logprobs" in loss.needs or (
        "old_logprobs" in loss.needs and spec.old_logprobs is None
    )
    behaviour = flat("behaviour_logprobs", [r.behaviour_logprobs_T[r.trained_T] for r in picked], behaviour_needed)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=behaviour if spec.old_logprobs is None else given("old_logprobs", spec.old_logprobs),
        behaviour_logprobs=behaviour,
        ref_logprobs=None if spec.ref_logprobs is None else given("ref_logprobs", spec.ref_logprobs),
        entropy=entropy,
        advantages=flat("advantages", [r.advantages_T[r.trained_T] for r in picked], True),
        weights=flat("weights", [r.weights_T[r.trained_T] for r in picked], True),
        row_index=xp.index_array(np.repeat(np.arange(len(picked)), counts), like=logprobs),
        n_rows=len(picked),
        group_index=xp.index_array(np.repeat([groups.index(row.group_id) for row in picked], counts), like=logprobs),
        n_groups=len(groups),
    )


def _refuse_cut_groups(batch: Batch, rows: Sequence[int], policy: str) -> None:
    """A loss over groups must see each of its groups whole."""
    here = {batch.rows[i].group_id for i in rows}
    whole = {i for i, row in enumerate(batch.rows) if row.group_id in here}
    if missing := sorted(whole - set(rows)):
        name = batch.rows[missing[0]].row_id
        raise ContractError(f"loss {policy!r} works on whole groups, but row {name} is in another micro-batch")


def objective(xp: Ops, inputs: LossInputs, spec: LossSpec) -> tuple[Array, dict[str, Metric]]:
    """The sum to minimise (a scalar of the namespace) and its metrics, both plain partial sums.

    Metrics: ``final_loss``, ``policy_loss`` (sums, as minimised), ``policy_kl``, ``policy_entropy`` (means),
    ``rollout_train_logprobs_abs_diff_{mean,max}``, and the loss's own under ``loss_metrics/``.
    Raises ``ContractError`` when a needed array is absent.
    """
    loss = LOSSES.get(spec.policy)
    loss.check(inputs)
    weights = xp.stop_gradient(inputs.weights)
    if len(inputs.logprobs) == 0:
        return xp.sum(inputs.logprobs), {}
    out = loss.function(xp, inputs, loss.settings(spec.settings))
    policy = xp.sum(weights * _per_token(out, loss.unit, inputs))
    total = policy
    metrics = {"policy_loss": Metric("sum", xp.stop_gradient(policy))}
    magnitude = xp.abs(weights)

    if spec.kl_coef != 0 and inputs.ref_logprobs is None:
        raise ContractError("objective: kl_coef is set but LossSpec.ref_logprobs is absent; score the reference first")
    if inputs.ref_logprobs is not None:
        kl = kl_values(xp, inputs.logprobs, inputs.ref_logprobs, spec.kl_estimator)
        if spec.kl_coef != 0:
            total = total + spec.kl_coef * xp.sum(weights * kl)
        metrics["policy_kl"] = _reduce(xp, "mean", kl, magnitude)
    if spec.entropy_coef != 0 and inputs.entropy is None:
        raise ContractError("objective: entropy_coef is set but the forward pass gave no entropy")
    if inputs.entropy is not None:
        if spec.entropy_coef != 0:
            total = total - spec.entropy_coef * xp.sum(weights * inputs.entropy)
        metrics["policy_entropy"] = _reduce(xp, "mean", inputs.entropy, magnitude)
    if inputs.behaviour_logprobs is not None:
        gap = xp.abs(inputs.logprobs - inputs.behaviour_logprobs)
        metrics["rollout_train_logprobs_abs_diff_mean"] = _reduce(xp, "mean", gap, magnitude)
        metrics["rollout_train_logprobs_abs_diff_max"] = _reduce(xp, "max", gap, magnitude)
    for name, metric in out.metrics.items():
        scale = inputs.sum(xp, magnitude, metric.unit)
        metrics[f"loss_metrics/{name}"] = _reduce(xp, metric.reducer, metric.values, scale)
    metrics["final_loss"] = Metric("sum", xp.stop_gradient(total))
    return total, metrics


def _per_token(out: LossValues, unit: Unit, inputs: LossInputs) -> Array:
    """Values per token; a wrong shape is the mark of a loss that reduced by itself, and is refused."""
    want = inputs.units(unit)
    shape = tuple(getattr(out.values, "shape", ()))
    if shape != (want,):
        raise ContractError(
            f"a loss of unit {unit!r} must return one value per {unit}, shape ({want},); got {shape}. "
            "Do not take sums or means inside a loss: the reducer does it"
        )
    return inputs.per_token(out.values, unit)


def _reduce(xp: Ops, reducer: Reducer, values: Array, scale: Array) -> Metric:
    """A partial metric; tokens of weight 0 do not count."""
    values = xp.stop_gradient(values)
    live = scale > 0
    if reducer == "mean":
        return Metric("mean", xp.sum(xp.where(live, values, 0.0) * scale), xp.sum(scale))
    if reducer == "sum":
        return Metric("sum", xp.sum(xp.where(live, values, 0.0)))
    if reducer == "max":
        return Metric("max", xp.max(xp.where(live, values, -math.inf)))
    return Metric("min", -xp.max(xp.where(live, -values, -math.inf)))


class MetricAccumulator:
    """Merges partial metrics of micro-batches (and ranks); each metric knows its own reducer.

    Values stay where they are until ``result``, so that adding does not wait for a device.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Metric]] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Take one micro-batch's metrics."""
        for name, metric in metrics.items():
            parts = self._parts.setdefault(name, [])
            if parts and parts[0].reducer != metric.reducer:
                raise ContractError(f"metric {name!r} is reduced by {parts[0].reducer} and by {metric.reducer}")
            parts.append(metric)

    def parts(self) -> dict[str, Metric]:
        """One metric per name, as plain floats and still with its reducer, so that further steps can be merged.

        A metric that no weighed token contributed to is left out.
        """
        out: dict[str, Metric] = {}
        for name, parts in self._parts.items():
            reducer = parts[0].reducer
            values = [float(p.value) for p in parts]
            if reducer == "mean":
                weight = math.fsum(float(p.weight) for p in parts)
                if weight > 0:
                    out[name] = Metric("mean", math.fsum(values), weight)
            elif reducer == "sum":
                out[name] = Metric("sum", math.fsum(values))
            else:
                best = max(values) if reducer == "max" else min(values)
                if not math.isinf(best):
                    out[name] = Metric(reducer, best)
        return out

    def result(self) -> dict[str, float]:
        """Plain floats; see ``parts``."""
        return {name: m.value / m.weight if m.reducer == "mean" else m.value for name, m in self.parts().items()}


def merge_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """One value per metric over several optimiser steps, by each metric's own reducer.

    A ``sum`` is a total of one optimiser step (a loss): it is averaged over steps, each counting the same.
    """
    merged = MetricAccumulator()
    for step in steps:
        merged.add({n: Metric("mean", m.value, 1.0) if m.reducer == "sum" else m for n, m in step.items()})
    return merged.result()
