"""Losses that weigh each token's score by a (bounded) importance ratio instead of clipping a surrogate.

Owns: ``importance_sampling``, ``cispo``, ``sapo``, ``rollout_is``, ``dppo``, ``dro``, ``score_centering`` and Tinker's
``cispo``.  Refuses: second corrections: ``rollout_is``, ``dppo`` and ``score_centering`` already compare with the
behaviour policy ``mu``, and planning refuses ``algorithm.off_policy`` beside them.

Notation: ``r = exp(log pi - log anchor)``, ``A`` the advantage, ``sg`` no gradient; log-ratios are clamped to +-20 and
every mask is applied to values that are finite already.

>>> import numpy as np
>>> from slipstream.algorithms.ops import numpy_ops
>>> smooth_gate(numpy_ops(), np.array([1.0]), 1.0).tolist()
[2.0]
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

_TINY = 1e-8
"""Keeps the binary KL finite when a probability is 1."""
_DELTA = {"tv": 0.15, "kl": 0.05}
"""The thresholds of DPPO's authors."""
_LEAST_TAIL = 1e-6
"""Tail mass below which the policy's tail counts as this much."""


@register_loss(
    "importance_sampling",
    formula="-r A",
    source="Tinker API, loss 'importance_sampling'; REINFORCE with importance weights",
    use="On-policy data, or as a baseline: unbiased, unbounded variance.",
)
def importance_sampling(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-r A``, unbiased for the anchor's samples; only log-ratios beyond +-20 are bounded."""
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    return LossValues(-xp.exp(gap) * inputs.advantages, ratio_metrics(xp, gap))


def _cispo(xp: Ops, inputs: LossInputs, low: float, high: float) -> LossValues:
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    ratio = xp.stop_gradient(xp.exp(gap))
    weight = xp.clip(ratio, low, high)
    metrics = {
        **ratio_metrics(xp, gap),
        "clamped_ratio_mean": LossMetric("mean", weight),
        "clip_fraction": share(xp, weight != ratio, gap),
    }
    return LossValues(-weight * inputs.advantages * inputs.logprobs, metrics)


@register_loss(
    "cispo",
    defaults={"clip_low": 1.0, "clip_high": 4.0},
    limits=CLIPS,
    formula="-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
    source="MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786",
    use="Stale data: no token loses its gradient, only its weight is bounded.",
)
def cispo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi``; 2506.13585.  The default ``low = 1`` bounds from above only."""
    return _cispo(xp, inputs, 1.0 - settings["clip_low"], 1.0 + settings["clip_high"])


@register_loss(
    "tinker_cispo",
    defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    limits=CLIP_THRESHOLDS,
    formula="-sg(clip(r, clip_low_threshold, clip_high_threshold)) A log pi",
    source="Tinker API, loss 'cispo': bounds are absolute ratios",
    use="Tinker requests; elsewhere cispo says the same with distances from 1.",
)
def tinker_cispo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``cispo`` whose bounds are absolute ratios, as Tinker's clients send them."""
    return _cispo(xp, inputs, settings["clip_low_threshold"], settings["clip_high_threshold"])


def smooth_gate(xp: Ops, ratio: Array, tau: Any) -> Array:
    """``(4 / tau) sigmoid(tau (r - 1))``: slope 1 at ratio 1, flat far from it; ``(N,)``."""
    return 4.0 / tau * xp.sigmoid(tau * (ratio - 1.0))


@register_loss(
    "sapo",
    defaults={"tau_positive": 1.0, "tau_negative": 1.05},
    limits={"tau_positive": Limit(above=0), "tau_negative": Limit(above=0)},
    formula="-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
    source="SAPO, arXiv 2511.20347",
    use="A smooth trust region in place of a hard clip; use reduction sequence_mean.",
)
def sapo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, tau being ``tau_positive`` where ``A > 0``, else ``tau_negative``."""
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    ratio = xp.exp(gap)
    up, down = (smooth_gate(xp, ratio, settings[key]) for key in ("tau_positive", "tau_negative"))
    return LossValues(-xp.where(inputs.advantages > 0, up, down) * inputs.advantages, ratio_metrics(xp, gap))


@register_loss(
    "rollout_is",
    needs=("behaviour_logprobs", "advantages"),
    defaults={"clip_low": 0.5, "clip_high": 4.0},
    limits=CLIPS,
    formula="-sg(r [1 - clip_low < r < 1 + clip_high]) A log pi, r = pi / mu",
    source="IcePop (Ring-1T, arXiv 2510.18855); GLM-5, arXiv 2602.15763",
    use="Sampler and trainer differ: tokens they disagree on are left out, no second forward pass.",
)
def rollout_is(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-sg(r m) A log pi`` with ``r = pi / mu`` and ``m = 1`` inside ``(1 - low, 1 + high)``, else 0."""
    gap = log_ratio(xp, inputs.logprobs, inputs.behaviour_logprobs)
    ratio = xp.stop_gradient(xp.exp(gap))
    inside = (ratio > 1.0 - settings["clip_low"]) & (ratio < 1.0 + settings["clip_high"])
    weight = xp.where(inside, ratio, 0.0)
    metrics = {**ratio_metrics(xp, gap), "masked_fraction": share(xp, ~inside, gap)}
    return LossValues(-weight * inputs.advantages * inputs.logprobs, metrics)


@register_loss(
    "dppo",
    needs=("behaviour_logprobs", "advantages"),
    defaults={"divergence": "tv", "delta_low": None, "delta_high": None},
    limits={"divergence": Limit(choices=("tv", "kl")), "delta_low": Limit(above=0), "delta_high": Limit(above=0)},
    formula="-r A M, r = pi / mu; M = 0 where the step leads away from mu and the divergence exceeds delta "
    "(null: 0.15 for tv, 0.05 for kl)",
    source="DPPO, arXiv 2602.04879",
    use="Large vocabularies: trusts a change of probability, not of ratio, so rare tokens are not frozen.",
)
def dppo(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-(pi / mu) A M``; 2602.04879.

    The divergence of the sampled token's binary distribution: ``tv``: ``|pi - mu|``; ``kl``:
    ``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))``.  ``M = 0`` where ``A > 0``, ``pi > mu`` and it exceeds
    ``delta_high``, or ``A < 0``, ``pi < mu`` and it exceeds ``delta_low``; None takes the authors' threshold.
    """
    gap = log_ratio(xp, inputs.logprobs, inputs.behaviour_logprobs)
    log_pi = xp.clip(xp.stop_gradient(inputs.logprobs), None, 0.0)
    pi, mu = xp.exp(log_pi), xp.exp(xp.clip(inputs.behaviour_logprobs, None, 0.0))
    if settings["divergence"] == "tv":
        divergence = xp.abs(pi - mu)
    else:
        rest = (1.0 - mu) * (xp.log(1.0 - mu + _TINY) - xp.log(1.0 - pi + _TINY))
        divergence = rest - mu * xp.stop_gradient(gap)
    own = _DELTA[settings["divergence"]]
    low, high = (own if settings[key] is None else settings[key] for key in ("delta_low", "delta_high"))
    away_up = (inputs.advantages > 0) & (pi > mu) & (divergence > high)
    away_down = (inputs.advantages < 0) & (pi < mu) & (divergence > low)
    masked = away_up | away_down
    metrics = {
        **ratio_metrics(xp, gap),
        "masked_fraction": share(xp, masked, gap),
        "divergence_mean": LossMetric("mean", divergence),
    }
    return LossValues(xp.where(masked, 0.0, -xp.exp(gap) * inputs.advantages), metrics)


@register_loss(
    "dro",
    defaults={"beta": 0.05},
    limits={"beta": Limit(least=0)},
    formula="-(A log pi - beta / 2 (log pi - log old)^2)",
    source="Tinker API, loss 'dro'; DRO, arXiv 2405.19107",
    use="Offline data with a quadratic leash instead of ratios.",
)
def dro(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-(A log pi - beta / 2 (log pi - log old)^2)``; no exponential, so the gap is not clamped."""
    gap = inputs.logprobs - xp.stop_gradient(inputs.old_logprobs)
    values = 0.5 * settings["beta"] * gap * gap - inputs.advantages * inputs.logprobs
    return LossValues(values, ratio_metrics(xp, log_ratio(xp, inputs.logprobs, inputs.old_logprobs)))


@register_loss(
    "score_centering",
    needs=("behaviour_logprobs", "advantages", "top_logprobs"),
    defaults={"cap": None},
    limits={"cap": Limit(above=0)},
    formula="-sg(w) A log pi + A sum_head sg(m_v - alpha p_v) log p_v",
    source="Score centering, arXiv 2609.20807",
    use="A sampler that differs persistently (quantised): subtracts the sampler's expected score, which drifts.",
)
def score_centering(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """REINFORCE whose score is centred under the sampler, so that a constant reward moves nothing; 2609.20807.

    The sampler's ``K`` most likely tokens (the head) are known exactly; its tail is the policy's tail scaled by
    ``rho = tail_mu / tail_pi``.  Without ``cap``: ``w = 1``, ``m_v = mu_v``, ``alpha = rho``.  With it the ratio is
    truncated at ``cap``: ``w = min(pi / mu, cap)``, ``m_v = min(p_v, cap mu_v)``, ``alpha = min(1, cap rho)``.
    """
    gap = log_ratio(xp, inputs.logprobs, inputs.behaviour_logprobs)
    known = xp.isfinite(inputs.top_behaviour_logprobs)
    mu = xp.where(known, xp.exp(xp.where(known, inputs.top_behaviour_logprobs, 0.0)), 0.0)
    present = xp.where(known, inputs.top_logprobs, 0.0)
    p = xp.where(known, xp.stop_gradient(xp.exp(xp.clip(present, None, 0.0))), 0.0)
    tail_mu = xp.clip(1.0 - xp.sum(mu, axis=1), 0.0, None)
    tail_pi = xp.clip(1.0 - xp.sum(p, axis=1), _LEAST_TAIL, None)
    rho = tail_mu / tail_pi
    weight: Any = 1.0
    mass, alpha = mu, rho
    if settings["cap"] is not None:
        cap = settings["cap"]
        weight = xp.stop_gradient(xp.minimum(xp.exp(gap), cap))
        mass, alpha = xp.minimum(p, cap * mu), xp.minimum(cap * rho, 1.0)
    centre = xp.sum((mass - alpha[:, None] * p) * present, axis=1)
    metrics = {
        **ratio_metrics(xp, gap),
        "head_mass": LossMetric("mean", xp.sum(mu, axis=1)),
        "tail_scale_mean": LossMetric("mean", rho),
    }
    return LossValues(inputs.advantages * (centre - weight * inputs.logprobs), metrics)
