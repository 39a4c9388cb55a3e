"""The objective: policy loss, KL and entropy under one set of weights.

Owns: ``LossSpec``, gathering a batch's arrays for some rows, ``objective`` and the accumulation of metrics.
Refuses: models, reduction rules (weights already contain 1/denominator), rescaling of any kind.

``objective = sum_t w_t c_t loss_t + kl_coef sum_t w_t kl_t - entropy_coef sum_t w_t H_t``, where ``c_t`` is the
off-policy weight (1 without a correction).

The result is a plain sum over the rows at hand, so that the sums of micro-batches add up to the step's value
whatever the split.  A backend does, for each micro-batch of whole rows::

    spec = run_prepass(batch, spec, score_all_rows)  # once per step, for the losses that declare one
    inputs = loss_inputs(xp, batch, rows, spec, logprobs, entropy)  # logprobs: (N,), trained tokens, in row order
    loss, metrics = objective(xp, inputs, spec)
    loss.backward()
    accumulator.add(metrics)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.algorithms.anchors import interpolated_anchor
from slipstream.algorithms.batch import Batch, BatchRow, FloatArray
from slipstream.algorithms.kl import kl_values
from slipstream.algorithms.losses import LOSSES, LossInputs, LossValues, Reducer, Unit
from slipstream.algorithms.ops import Array, Ops, numpy_ops
from slipstream.errors import ContractError
from slipstream.trajectory import TOP_LOGPROBS

__all__ = ["LossInputs", "LossSpec", "Metric", "MetricAccumulator", "loss_inputs", "merge_steps", "objective"]


PerRow = Sequence[FloatArray] | None
"""One array per row of a batch, over the row's trained tokens in order."""

_PER_ROW = {
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "old_values": "old_values",
    "returns": "returns",
    "lags": "lags",
    "prepass": "prepass",
    "coefficients": "coefficient",
}
"""Per-row fields of ``LossSpec`` and where ``LossInputs`` holds them."""


@dataclass(frozen=True)
class LossSpec:
    """What ``forward_backward`` minimises: registry names and settings, the same on every backend.

    ``policy`` is a registered loss name (or ``module:function``); ``settings`` are its settings; KL and entropy terms
    are added by the same reducer with the same weights.  The other arrays are per row, trained tokens only, in the
    order of ``Batch.rows``.
    """

    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    old_logprobs: PerRow = None
    """The ratio's anchor; None takes the behaviour log-probs of the batch, or with ``interpolate`` a mixture."""
    ref_logprobs: PerRow = None
    teacher_logprobs: PerRow = None
    old_values: PerRow = None
    returns: PerRow = None
    lags: PerRow = None
    """Publishes between each token's version and the trainer's."""
    interpolate: bool = False
    """Anchor each token between behaviour and present policy by its lag (``algorithms.anchors``)."""
    coefficients: PerRow = None
    """Off-policy weights of the policy term (``algorithms.corrections``)."""
    prepass: PerRow = None
    """What the loss's pre-pass returned; ``run_prepass`` fills it in."""

    def take(self, rows: Sequence[int]) -> LossSpec:
        """The same spec for a batch made of these rows of the old one (mini-batches)."""
        given = {name: getattr(self, name) for name in _PER_ROW}
        return replace(self, **{k: [v[i] for i in rows] for k, v in given.items() if v is not None})

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass has to produce entropies."""
        return self.entropy_coef != 0 or "entropy" in LOSSES.get(self.policy).needs

    @property
    def needs_reference(self) -> bool:
        """Whether ``ref_logprobs`` must be given."""
        return self.kl_coef != 0 or "ref_logprobs" in LOSSES.get(self.policy).needs

    @property
    def needs_top(self) -> bool:
        """Whether the forward pass has to score the sampler's most likely tokens too."""
        return "top_logprobs" in LOSSES.get(self.policy).needs


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
    logprobs: Array | None,
    entropy: Array | None = None,
    *,
    values: Array | None = None,
    top_logprobs: Array | None = None,
) -> LossInputs:
    """Gather the trained tokens of ``batch.rows[i] for i in rows`` beside the model's outputs, each ``(N,)``.

    A policy gives ``logprobs`` (and ``entropy``, and ``(N, K)`` ``top_logprobs``), a critic ``values`` alone.
    Gathering comes first, so masked slots never meet arithmetic, whatever they hold.  Raises ``ContractError``
    when lengths differ, or when an array that the loss needs is absent or not finite.
    """
    picked = [batch.rows[i] for i in rows]
    counts = np.asarray([row.n_trained for row in picked], dtype=np.int64)
    like = values if logprobs is None else logprobs
    if like is None or int(counts.sum()) != len(like):
        found = "no" if like is None else len(like)
        raise ContractError(f"objective: {found} log-probs for {int(counts.sum())} trained tokens")
    loss = LOSSES.get(spec.policy)
    if loss.unit == "group":
        _refuse_cut_groups(batch, rows, spec.policy)
    gather = _Gather(xp, batch, rows, spec.policy, like)
    anchored = spec.old_logprobs is None and "old_logprobs" in loss.needs
    behaviour = gather.of_rows(
        "behaviour_logprobs",
        [row.behaviour_logprobs_T[row.trained_T] for row in picked],
        required=anchored or "behaviour_logprobs" in loss.needs,
    )
    given = {
        field_: gather.of_spec(name, per_row)
        for name, field_ in _PER_ROW.items()
        if (per_row := getattr(spec, name)) is not None
    }
    if spec.old_logprobs is None and logprobs is not None:
        given["old_logprobs"] = _anchor(xp, spec, logprobs, behaviour, given.get("lags"))
    groups = list(dict.fromkeys(row.group_id for row in picked))
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=given.pop("old_logprobs", None),
        behaviour_logprobs=behaviour,
        ref_logprobs=given.pop("ref_logprobs", None),
        entropy=entropy,
        advantages=gather.of_rows("advantages", [r.advantages_T[r.trained_T] for r in picked], loss.kind == "policy"),
        weights=gather.of_rows("weights", [row.weights_T[row.trained_T] for row in picked]),
        row_index=xp.index_array(np.repeat(np.arange(len(picked)), counts), like=like),
        n_rows=len(picked),
        group_index=xp.index_array(np.repeat([groups.index(row.group_id) for row in picked], counts), like=like),
        n_groups=len(groups),
        values=values,
        top_logprobs=top_logprobs,
        **given,
    )
    if any(row.dropped_T is not None for row in picked):
        inputs.live = xp.asarray(np.concatenate([row.weighed_T[row.trained_T] for row in picked]), like=like)
    if "noise" in loss.needs:
        inputs.noise = gather.of_rows("noise", [token_noise(row) for row in picked])
    if top_logprobs is not None:
        inputs.top_behaviour_logprobs = xp.asarray(_top_behaviour(picked, top_logprobs.shape[1]), like=like)
    return inputs


@dataclass(frozen=True)
class _Gather:
    """Per-row arrays to one flat array of the namespace, checked."""

    xp: Ops
    batch: Batch
    rows: Sequence[int]
    policy: str
    like: Array

    def of_rows(self, name: str, pieces: Sequence[Any], required: bool = True) -> Array | None:
        """None where an array that is not required is not finite."""
        for i, piece in zip(self.rows, pieces, strict=True):
            if required and not np.all(np.isfinite(piece)):
                raise ContractError(
                    f"loss {self.policy!r} needs finite {name}; row {self.batch.rows[i].row_id} has not"
                )
        flat = np.concatenate(pieces) if len(pieces) else np.zeros(0)
        return self.xp.asarray(flat, like=self.like) if required or np.all(np.isfinite(flat)) else None

    def of_spec(self, name: str, per_row: Sequence[FloatArray]) -> Array | None:
        if len(per_row) != len(self.batch.rows):
            raise ContractError(f"LossSpec.{name} has {len(per_row)} rows for a batch of {len(self.batch.rows)}")
        for i in self.rows:
            want = self.batch.rows[i].n_trained
            if len(per_row[i]) != want:
                raise ContractError(f"LossSpec.{name}: row {i} has {len(per_row[i])} values for {want} trained tokens")
        return self.of_rows(name, [np.asarray(per_row[i]) for i in self.rows])


def _anchor(xp: Ops, spec: LossSpec, logprobs: Array, behaviour: Array | None, lags: Array | None) -> Array | None:
    if not spec.interpolate:
        return behaviour
    if behaviour is None or lags is None:
        missing = "lags" if lags is None else "behaviour_logprobs"
        raise ContractError(f"objective: an interpolated anchor needs {missing}, which this batch does not have")
    return interpolated_anchor(xp, logprobs, behaviour, lags)


def token_noise(row: BatchRow) -> FloatArray:
    """``(n_trained,)`` uniform numbers that belong to the row's trained tokens, wherever the row lies."""
    key = int.from_bytes(hashlib.blake2b(row.row_id.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(row.n_trained)


def _top_behaviour(rows: Sequence[BatchRow], width: int) -> FloatArray:
    """``(N, K)`` from the side channel; -inf where a token reported fewer."""
    out = np.full((sum(row.n_trained for row in rows), width), -np.inf)
    at = 0
    for row in rows:
        for _, logprobs in likely_tokens(row):
            out[at, : len(logprobs)] = logprobs
            at += 1
    return out


def likely_tokens(row: BatchRow) -> list[tuple[Sequence[int], Sequence[float]]]:
    """``(ids, log-probs)`` of the sampler's most likely tokens in the place of each trained token.

    Raises ``ContractError`` where the row does not say.
    """
    values = row.side_T.get(TOP_LOGPROBS)
    found = [] if values is None else [values[i] for i in np.flatnonzero(row.trained_T)]
    if values is None or any(entry is None for entry in found):
        raise ContractError(
            f"row {row.row_id} lacks the sampler's most likely tokens (side channel {TOP_LOGPROBS}); ask the engine "
            "for them (GenerateRequest.top_logprobs)"
        )
    return found


def run_prepass(batch: Batch, spec: LossSpec, logprobs: Callable[[], Sequence[FloatArray]]) -> LossSpec:
    """The spec with the loss's pre-pass over the *whole* optimiser step filled in, where it declares one.

    ``logprobs()`` gives the present policy's log-probs per row; it is called only when they are needed.  Raises
    ``ContractError`` when the pre-pass does not return one finite number per trained token.
    """
    loss = LOSSES.get(spec.policy)
    if loss.prepass is None or spec.prepass is not None:
        return spec
    flat = np.concatenate([np.asarray(values, dtype=np.float64) for values in logprobs()] or [np.zeros(0)])
    inputs = loss_inputs(numpy_ops(), batch, range(len(batch.rows)), spec, flat)
    chosen = np.asarray(loss.prepass(loss.view(inputs), loss.settings(spec.settings)), dtype=np.float64)
    if chosen.shape != (batch.n_trained,) or not np.all(np.isfinite(chosen)):
        raise ContractError(
            f"the pre-pass of loss {spec.policy!r} must return {batch.n_trained} finite numbers, one per trained "
            f"token; got shape {chosen.shape}"
        )
    edges = np.cumsum([row.n_trained for row in batch.rows])[:-1]
    return replace(spec, prepass=np.split(chosen, edges))


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
    if inputs.size == 0:
        return xp.sum(inputs.values if inputs.logprobs is None else inputs.logprobs), {}
    out = loss.function(xp, loss.view(inputs), loss.settings(spec.settings))
    scale = weights if inputs.coefficient is None else weights * xp.stop_gradient(inputs.coefficient)
    policy = xp.sum(scale * _per_token(out, loss.unit, inputs))
    total = policy
    metrics = {"policy_loss": Metric("sum", xp.stop_gradient(policy))}
    magnitude = xp.abs(weights)

    if spec.kl_coef != 0 and inputs.ref_logprobs is None:
        raise ContractError("objective: kl_coef is set but LossSpec.ref_logprobs is absent; score the reference first")
    if inputs.ref_logprobs is not None and inputs.logprobs is not None:
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
    if inputs.behaviour_logprobs is not None and inputs.logprobs is not None:
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
