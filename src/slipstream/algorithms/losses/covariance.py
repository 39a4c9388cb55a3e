"""Losses that restrain the few tokens which drive entropy down, found over the whole optimiser step.

Owns: ``clip_cov`` and ``kl_cov`` and the pre-passes that choose their tokens.  Refuses: choosing inside a micro-batch.

Tokens with a high covariance ``c = (A - mean A)(log pi - mean log pi)`` lower the entropy most (2505.22617).  The means
and the choice are taken over every trained token of the optimiser step, in a declared pre-pass under the weights that
the gradient is about to be taken at; a split into micro-batches or ranks cannot change them.  Random choices and ties
go by ``inputs.noise``, which belongs to the token and not to its place in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.algorithms.batch import BoolArray, FloatArray
from slipstream.algorithms.losses.clipped import surrogate
from slipstream.algorithms.losses.contract import (
    CLIPS,
    LossInputs,
    LossMetric,
    LossValues,
    log_ratio,
    ratio_metrics,
    register_loss,
    share,
)
from slipstream.algorithms.ops import Ops, numpy_ops
from slipstream.algorithms.options import Limit


def _covariance(inputs: LossInputs) -> tuple[FloatArray, BoolArray]:
    """``(c, live)``: the covariance of each token, and which tokens no mask dropped; means are over those alone."""
    live = np.ones(inputs.size, dtype=np.bool_) if inputs.live is None else np.asarray(inputs.live) > 0
    if not live.any():
        return np.zeros(inputs.size), live
    advantages, logprobs = np.asarray(inputs.advantages), np.asarray(inputs.logprobs)
    return (advantages - advantages[live].mean()) * (logprobs - logprobs[live].mean()), live


def _choose_clip(inputs: LossInputs, settings: Mapping[str, Any]) -> FloatArray:
    """1 for tokens that lose their gradient: random ones of those with a covariance in the band, not clipped anyway."""
    covariance, live = _covariance(inputs)
    gap = log_ratio(numpy_ops(), inputs.logprobs, inputs.old_logprobs)
    low, high = 1.0 - settings["clip_low"], 1.0 + settings["clip_high"]
    _, clipped = surrogate(numpy_ops(), gap, inputs.advantages, low, high)
    band = live & (covariance > settings["cov_low"]) & (covariance < settings["cov_high"]) & ~clipped
    count = max(1, int(settings["fraction"] * live.sum()))
    candidates = np.flatnonzero(band)
    order = np.argsort(np.asarray(inputs.noise)[candidates], kind="stable")
    chosen = np.zeros(inputs.size)
    chosen[candidates[order[:count]]] = 1.0
    return chosen


@register_loss(
    "clip_cov",
    needs=("old_logprobs", "advantages", "noise"),
    defaults={"clip_low": 0.2, "clip_high": 0.2, "fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    limits={**CLIPS, "fraction": Limit(above=0, most=1), "cov_high": Limit(over="cov_low")},
    prepass=_choose_clip,
    formula="ppo_clip, and 0 for a random fraction of the tokens with cov_low < c < cov_high",
    source="Clip-Cov, arXiv 2505.22617",
    use="Entropy collapses under ppo_clip.",
)
def clip_cov(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``ppo_clip`` without the chosen tokens: ``max(1, floor(fraction N))`` of those in the band; 2505.22617."""
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    low, high = 1.0 - settings["clip_low"], 1.0 + settings["clip_high"]
    values, clipped = surrogate(xp, gap, inputs.advantages, low, high)
    chosen = inputs.prepass > 0
    metrics = {
        **ratio_metrics(xp, gap),
        "clip_fraction": share(xp, clipped, gap),
        "cov_fraction": share(xp, chosen, gap),
    }
    return LossValues(xp.where(chosen, 0.0, values), metrics)


def _choose_kl(inputs: LossInputs, settings: Mapping[str, Any]) -> FloatArray:
    """1 for the ``max(1, floor(fraction N))`` tokens of the highest covariance; ties go by noise."""
    covariance, live = _covariance(inputs)
    count = max(1, int(settings["fraction"] * live.sum()))
    candidates = np.flatnonzero(live)
    order = np.lexsort((np.asarray(inputs.noise)[candidates], -covariance[candidates]))
    chosen = np.zeros(inputs.size)
    chosen[candidates[order[:count]]] = 1.0
    return chosen


@register_loss(
    "kl_cov",
    needs=("old_logprobs", "advantages", "noise"),
    defaults={"fraction": 2e-3, "penalty": 1.0},
    limits={"fraction": Limit(above=0, most=1), "penalty": Limit(least=0)},
    prepass=_choose_kl,
    formula="-r A, plus penalty |log r| for the fraction of tokens with the highest c",
    source="KL-Cov, arXiv 2505.22617",
    use="Entropy collapses under ppo_clip; smoother than clip_cov.",
)
def kl_cov(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-r A + penalty |log r| [chosen]``; 2505.22617."""
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    chosen = inputs.prepass > 0
    leash = xp.where(chosen, settings["penalty"] * xp.abs(gap), 0.0)
    metrics = {
        **ratio_metrics(xp, gap),
        "cov_fraction": share(xp, chosen, gap),
        "cov_penalty": LossMetric("mean", leash),
    }
    return LossValues(leash - xp.exp(gap) * inputs.advantages, metrics)
