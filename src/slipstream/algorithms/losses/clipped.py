"""Losses that bound the ratio between the present policy and an anchor by clipping.

Owns: ``ppo_clip``, ``dual_clip``, ``gspo``, ``decoupled_ppo`` and Tinker's ``ppo``, all over one clipped surrogate.
Refuses: choosing the anchor.  ``algorithm.old_logprobs`` says whether it is the sampler's log-probs, a forward pass
before the update, or an interpolation of the two.

Notation: ``r = exp(log pi - log old)``, ``A`` the advantage, ``sg`` no gradient.  Log-ratios are clamped to +-20 before
the exponential.  Every loss reports ``ratio_{mean,max,min}``, ``approx_kl`` and ``clip_fraction`` (the share of tokens
whose clipped branch was the larger loss, so that they have no gradient).

>>> import numpy as np
>>> from slipstream.algorithms.ops import numpy_ops
>>> surrogate(numpy_ops(), np.log([1.5, 0.5]), np.array([1.0, -1.0]), 0.8, 1.2)[0].tolist()
[-1.2, 0.8]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.algorithms.losses.contract import (
    CLIP_THRESHOLDS,
    CLIPS,
    LossInputs,
    LossMetric,
    LossValues,
    log_ratio,
    ratio_metrics,
    register_loss,
    share,
)
from slipstream.algorithms.ops import Array, Ops
from slipstream.algorithms.options import Limit


def surrogate(xp: Ops, gap: Array, advantages: Array, low: float, high: float) -> tuple[Array, Array]:
    """``(-min(r A, clip(r, low, high) A), clipped)`` for a clamped log-ratio; both ``(N,)``."""
    ratio = xp.exp(gap)
    free = ratio * advantages
    bounded = xp.clip(ratio, low, high) * advantages
    return -xp.minimum(free, bounded), bounded < free


def _ppo(xp: Ops, inputs: LossInputs, low: float, high: float) -> LossValues:
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    values, clipped = surrogate(xp, gap, inputs.advantages, low, high)
    return LossValues(values, {**ratio_metrics(xp, gap), "clip_fraction": share(xp, clipped, gap)})


@register_loss(
    "ppo_clip",
    defaults={"clip_low": 0.2, "clip_high": 0.2},
    limits=CLIPS,
    formula="-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
    source="PPO, arXiv 1707.06347; two sides: DAPO, arXiv 2503.14476",
    use="The default; raise clip_high (0.28) to keep rare tokens alive.",
)
def ppo_clip(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``; PPO, 1707.06347, with DAPO's two sides, 2503.14476."""
    return _ppo(xp, inputs, 1.0 - settings["clip_low"], 1.0 + settings["clip_high"])


@register_loss(
    "tinker_ppo",
    defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    limits=CLIP_THRESHOLDS,
    formula="-min(r A, clip(r, clip_low_threshold, clip_high_threshold) A)",
    source="Tinker API, loss 'ppo': bounds are absolute ratios",
    use="Tinker requests; elsewhere ppo_clip says the same with distances from 1.",
)
def tinker_ppo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``ppo_clip`` whose bounds are absolute ratios, as Tinker's clients send them."""
    return _ppo(xp, inputs, settings["clip_low_threshold"], settings["clip_high_threshold"])


@register_loss(
    "dual_clip",
    defaults={"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0},
    limits={**CLIPS, "clip_dual": Limit(above=1)},
    formula="ppo_clip, and for A < 0 at most -clip_dual A",
    source="Dual-clip PPO, arXiv 1912.09729",
    use="Off-policy data in which bad actions became far more likely: bounds their pull.",
)
def dual_clip(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``ppo_clip``; where ``A < 0`` the loss is at most ``-c A`` (``c = clip_dual > 1``); 1912.09729."""
    out = _ppo(xp, inputs, 1.0 - settings["clip_low"], 1.0 + settings["clip_high"])
    ceiling = -settings["clip_dual"] * inputs.advantages
    bound = (inputs.advantages < 0) & (out.values > ceiling)
    metrics = {**out.metrics, "dual_clip_fraction": share(xp, bound, inputs.advantages)}
    return LossValues(xp.where(bound, ceiling, out.values), metrics)


@register_loss(
    "gspo",
    defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    limits=CLIPS,
    formula="ppo_clip on s_t = exp(sg(mean_row log r) + log pi - sg(log pi))",
    source="GSPO, arXiv 2507.18071 (the token form, equal to GSPO where A is one number per row)",
    use="Mixture-of-experts models and long answers; use reduction sequence_mean.",
)
def gspo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """Clips the row's geometric-mean ratio, ``exp(mean_t log r_t)``; each token carries its gradient; 2507.18071.

    A row is what is clipped: the trained tokens of that row alone enter the mean, without those that an off-policy mask
    dropped.
    """
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    row_gap = xp.stop_gradient(inputs.mean(xp, gap, "row"))
    carried = inputs.per_token(row_gap, "row") + inputs.logprobs - xp.stop_gradient(inputs.logprobs)
    low, high = 1.0 - settings["clip_low"], 1.0 + settings["clip_high"]
    values, clipped = surrogate(xp, carried, inputs.advantages, low, high)
    metrics = {**ratio_metrics(xp, gap), "clip_fraction": share(xp, clipped, gap)}
    metrics["sequence_ratio_mean"] = LossMetric("mean", xp.exp(row_gap), "row")
    metrics["sequence_ratio_max"] = LossMetric("max", xp.exp(row_gap), "row")
    return LossValues(values, metrics)


@register_loss(
    "decoupled_ppo",
    needs=("old_logprobs", "behaviour_logprobs", "advantages"),
    defaults={"clip_low": 0.2, "clip_high": 0.2, "behaviour_cap": 5.0},
    limits={**CLIPS, "behaviour_cap": Limit(above=0)},
    formula="min(old / mu, behaviour_cap) x ppo_clip, old being the proximal policy and mu the sampler",
    source="Batch size-invariance, arXiv 2110.00641; AReaL, arXiv 2505.24298; interpolated: A-3PO, arXiv 2512.06547",
    use="Stale samples: trust is measured from recent weights, not from those that sampled.",
)
def decoupled_ppo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``w -min(r A, clip(r) A)`` with ``w = sg(min(old / mu, cap))``; behaviour, proximal and current policy apart.

    2110.00641, 2505.24298.  The proximal policy is the anchor: recomputed before the update, or interpolated from
    each token's version lag without a forward pass (``slipstream.algorithms.anchors``).
    """
    out = ppo_clip(xp, inputs, settings)
    gap = xp.stop_gradient(log_ratio(xp, inputs.old_logprobs, inputs.behaviour_logprobs))
    weight = xp.minimum(xp.exp(gap), settings["behaviour_cap"])
    metrics = {
        **out.metrics,
        "behaviour_weight_mean": LossMetric("mean", weight),
        "behaviour_capped_fraction": share(xp, xp.exp(gap) > settings["behaviour_cap"], gap),
    }
    return LossValues(weight * out.values, metrics)
