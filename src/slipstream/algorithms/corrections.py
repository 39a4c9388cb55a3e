"""Off-policy corrections: what a token is worth that another policy sampled.

Owns: truncated importance sampling, sequence, token and outlier masks, effective sample sizes, and what masks do to the
denominator.  Refuses: forward passes (it is given the log-probs), and guessing: without the policy's log-probs before
the update there is nothing to compare with, and planning says so.

``rho_t = exp(log old_t - log mu_t)``, with ``old`` the policy before the update and ``mu`` the sampler as it reported;
log-ratios are clamped to +-20 before the exponential.  Both are constants, so a step's corrections are computed once,
over all of its rows, before it is cut into mini-batches.  In this order:

1. outlier mask: a row with any ``rho_t`` outside of ``[outlier_low, outlier_high]`` is dropped;
2. token mask: tokens outside of ``[token_mask_low, token_mask_high]`` are dropped;
3. TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"):
   the policy term of a token is multiplied by ``min(rho_t, cap)``, or by ``min(prod_row rho, cap)``;
4. sequence mask: rows whose geometric mean, or product, of ``rho`` is out of bounds are dropped.

Sequences are rows; their means and products are over tokens that are still kept.  A dropped token is scored and weighs
nothing, in every term.  ``off_policy.denominator=all`` leaves it in the reduction's count, so that a mask lessens the
step; ``kept`` takes it out, so that the rest is weighed as if it had been the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.algorithms.batch import Batch, BatchRow, BoolArray, FloatArray
from slipstream.algorithms.kl import MAX_LOG_GAP
from slipstream.algorithms.objective import Metric
from slipstream.algorithms.reduce import ReductionSpec, reweigh
from slipstream.config.algorithm import OffPolicySettings
from slipstream.errors import ContractError


@dataclass(frozen=True)
class Corrected:
    """A step's batch without dropped tokens, the policy term's coefficients per row (None: all 1), and metrics."""

    batch: Batch
    coefficients: list[FloatArray] | None
    metrics: dict[str, Metric] = field(default_factory=dict)


def masks(settings: OffPolicySettings) -> bool:
    """Whether these settings can drop a token."""
    bounds = (settings.token_mask_low, settings.token_mask_high, settings.outlier_low, settings.outlier_high)
    return settings.sequence_mask != "none" or any(bound is not None for bound in bounds)


def corrects(settings: OffPolicySettings) -> bool:
    """Whether these settings change anything, so that the policy has to be scored before the update."""
    return settings.tis != "none" or masks(settings)


def correct(
    batch: Batch, old_logprobs: Sequence[FloatArray], settings: OffPolicySettings, reduction: str | ReductionSpec
) -> Corrected:
    """Apply the settings to one step; ``old_logprobs`` are per row, trained tokens only.

    Metrics, over all trained tokens before any mask: ``off_policy/ratio_{mean,std,min,max}``, ``off_policy/kl``
    (``rho - 1 - log rho``), ``off_policy/ess_token`` and ``off_policy/ess_sequence`` (effective sample size as a
    share); of the corrections that are on: shares capped, masked, above and below.  Raises ``ContractError`` when a
    behaviour log-prob is missing or shapes differ.
    """
    gaps = [_gap(row, old) for row, old in zip(batch.rows, old_logprobs, strict=True)]
    if not gaps:
        return Corrected(batch, None)
    metrics = _ratio_metrics(gaps)
    if not corrects(settings):
        return Corrected(batch, None, metrics)
    kept = [np.ones(len(gap), dtype=np.bool_) for gap in gaps]
    _mask_outliers(gaps, kept, settings, metrics)
    _mask_tokens(gaps, kept, settings, metrics)
    coefficients = _truncated_weights(gaps, kept, settings, metrics)
    _mask_sequences(gaps, kept, settings, metrics)
    if not masks(settings):
        return Corrected(batch, coefficients, metrics)
    metrics["off_policy/kept_fraction"] = _share([mask.sum() for mask in kept], [len(mask) for mask in kept])
    rows = [_drop(row, mask, settings) for row, mask in zip(batch.rows, kept, strict=True)]
    return Corrected(replace(batch, rows=reweigh(rows, reduction)), coefficients, metrics)


def _gap(row: BatchRow, old: FloatArray) -> FloatArray:
    behaviour = row.behaviour_logprobs_T[row.trained_T]
    if len(old) != len(behaviour):
        raise ContractError(f"off-policy correction: {len(old)} log-probs for {len(behaviour)} tokens ({row.row_id})")
    if not (np.all(np.isfinite(behaviour)) and np.all(np.isfinite(old))):
        raise ContractError(
            f"off-policy correction: row {row.row_id} lacks finite log-probs of the sampler or of the policy"
        )
    return np.clip(np.asarray(old, dtype=np.float64) - behaviour, -MAX_LOG_GAP, MAX_LOG_GAP)


def _ratio_metrics(gaps: Sequence[FloatArray]) -> dict[str, Metric]:
    gap = np.concatenate(gaps)
    ratio = np.exp(gap)
    totals = np.asarray([values.sum() for values in gaps])
    n = float(len(gap))

    def mean(value: float) -> Metric:
        return Metric("mean", value * n, n)

    return {
        "off_policy/ratio_mean": mean(ratio.mean()),
        "off_policy/ratio_std": mean(ratio.std()),
        "off_policy/ratio_min": Metric("min", ratio.min()),
        "off_policy/ratio_max": Metric("max", ratio.max()),
        "off_policy/kl": mean((ratio - 1.0 - gap).mean()),
        "off_policy/ess_token": mean(effective_share(gap)),
        "off_policy/ess_sequence": mean(effective_share(totals)),
    }


def effective_share(log_weights: FloatArray) -> float:
    """``(sum w)^2 / (n sum w^2)`` in (0, 1]: which share of the samples the weights leave; 1 when all are equal."""
    weights = np.exp(log_weights - np.max(log_weights))
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def _share(part: Sequence[float], whole: Sequence[float]) -> Metric:
    return Metric("mean", float(np.sum(part)), float(np.sum(whole)))


def _outside(values: FloatArray, low: float | None, high: float | None) -> tuple[BoolArray, BoolArray]:
    none = np.zeros(len(values), dtype=np.bool_)
    return (none if low is None else values < low), (none if high is None else values > high)


def _mask_outliers(
    gaps: Sequence[FloatArray], kept: list[BoolArray], settings: OffPolicySettings, metrics: dict[str, Metric]
) -> None:
    if settings.outlier_low is None and settings.outlier_high is None:
        return
    found = [_outside(np.exp(gap), settings.outlier_low, settings.outlier_high) for gap in gaps]
    under, over = (np.asarray([side[i].any() for side in found]) for i in (0, 1))
    _drop_rows(under, over, kept, "outlier", metrics)


def _drop_rows(under: BoolArray, over: BoolArray, kept: list[BoolArray], name: str, metrics: dict[str, Metric]) -> None:
    for i in np.flatnonzero(under | over):
        kept[i][:] = False
    count = float(len(kept))
    metrics[f"off_policy/{name}_masked_fraction"] = Metric("mean", float((under | over).sum()), count)
    metrics[f"off_policy/{name}_under_fraction"] = Metric("mean", float(under.sum()), count)
    metrics[f"off_policy/{name}_over_fraction"] = Metric("mean", float(over.sum()), count)


def _mask_tokens(
    gaps: Sequence[FloatArray], kept: list[BoolArray], settings: OffPolicySettings, metrics: dict[str, Metric]
) -> None:
    if settings.token_mask_low is None and settings.token_mask_high is None:
        return
    masked = 0
    for gap, mask in zip(gaps, kept, strict=True):
        under, over = _outside(np.exp(gap), settings.token_mask_low, settings.token_mask_high)
        masked += int((under | over).sum())
        mask &= ~(under | over)
    metrics["off_policy/token_masked_fraction"] = _share([masked], [len(gap) for gap in gaps])


def _truncated_weights(
    gaps: Sequence[FloatArray], kept: Sequence[BoolArray], settings: OffPolicySettings, metrics: dict[str, Metric]
) -> list[FloatArray] | None:
    if settings.tis == "none":
        return None
    if settings.tis == "token":
        ratios = [np.exp(gap) for gap in gaps]
        cap = settings.tis_token_cap
    else:
        ratios = [np.full(len(gap), np.exp(_total(gap, mask))) for gap, mask in zip(gaps, kept, strict=True)]
        cap = settings.tis_sequence_cap
    metrics["off_policy/tis_capped_fraction"] = _share([(r > cap).sum() for r in ratios], [len(r) for r in ratios])
    return [np.minimum(ratio, cap) for ratio in ratios]


def _total(gap: FloatArray, mask: BoolArray) -> float:
    return float(np.clip(gap[mask].sum(), -MAX_LOG_GAP, MAX_LOG_GAP))


def _mask_sequences(
    gaps: Sequence[FloatArray], kept: list[BoolArray], settings: OffPolicySettings, metrics: dict[str, Metric]
) -> None:
    if settings.sequence_mask == "none":
        return
    totals = [float(gap[mask].sum()) for gap, mask in zip(gaps, kept, strict=True)]
    if settings.sequence_mask == "geometric":
        logs = [total / max(1, int(mask.sum())) for total, mask in zip(totals, kept, strict=True)]
        low, high = settings.geometric_low, settings.geometric_high
    else:
        logs, low, high = totals, settings.product_low, settings.product_high
    values = np.exp(np.clip(logs, -MAX_LOG_GAP, MAX_LOG_GAP))
    # A row that an earlier mask emptied has no ratio to judge.
    live = np.asarray([mask.any() for mask in kept])
    under, over = _outside(values, low, high)
    _drop_rows(under & live, over & live, kept, f"{settings.sequence_mask}_sequence", metrics)


def _drop(row: BatchRow, kept: BoolArray, settings: OffPolicySettings) -> BatchRow:
    if kept.all():
        return row
    dropped = np.zeros(len(row.trained_T), dtype=np.bool_)
    dropped[row.trained_T] = ~kept
    return replace(row, dropped_T=dropped, dropped_count=settings.denominator == "all")
