"""Losses that learn given targets: text (``cross_entropy``) and returns (``value_clip``).

Owns: the supervised and the critic's loss.  Refuses: advantages; neither reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.algorithms.losses.contract import LossInputs, LossMetric, LossValues, register_loss, share
from slipstream.algorithms.ops import Ops
from slipstream.algorithms.options import Limit


@register_loss(
    "cross_entropy",
    needs=(),
    kind="likelihood",
    formula="-log pi",
    source="maximum likelihood; Tinker API, loss 'cross_entropy' (its weights are the batch's weights)",
    use="The SFT phase and Tinker requests.",
)
def cross_entropy(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-log pi``: supervised fine-tuning.  ``token_nll`` is its weighed mean in nats."""
    return LossValues(-inputs.logprobs, {"token_nll": LossMetric("mean", -inputs.logprobs)})


@register_loss(
    "value_clip",
    needs=("values", "old_values", "returns"),
    kind="value",
    defaults={"clip": 0.2},
    limits={"clip": Limit(above=0, optional=True)},
    formula="max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2",
    source="PPO's reference implementation (OpenAI baselines), discussed in arXiv 2005.12729",
    use="The critic of gae.",
)
def value_clip(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """Half the larger squared error of the value and of the value moved at most ``clip`` from its old one.

    Without ``clip`` (None) half the squared error.

    Metrics: means of values and returns, their squared error, and the share of tokens whose clipped error was larger.
    """
    old = inputs.old_values
    clip = settings["clip"]
    moved = inputs.values if clip is None else old + xp.clip(inputs.values - old, -clip, clip)
    free, bounded = (inputs.values - inputs.returns) ** 2, (moved - inputs.returns) ** 2
    metrics = {
        "value_mean": LossMetric("mean", inputs.values),
        "return_mean": LossMetric("mean", inputs.returns),
        "value_error": LossMetric("mean", free),
        "value_clip_fraction": share(xp, bounded > free, free),
    }
    return LossValues(0.5 * xp.maximum(free, bounded), metrics)
