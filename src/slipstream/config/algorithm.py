"""The section ``algorithm``: advantages, loss, reduction, corrections, KL, entropy, critic, filters, teacher.

Owns: the settings classes and the expansion of ``preset``.  Refuses: formulas (``slipstream.algorithms`` has them)
and rules between settings (``slipstream.algorithms.check`` and ``slipstream.config.checks``).

A preset lies underneath what is given beside it, so every one of its settings can be changed:

>>> chosen = AlgorithmSettings.model_validate({"preset": "dapo", "clip_low": 0.1})
>>> chosen.clip_high, chosen.clip_low, chosen.reduction
(0.28, 0.1, 'token_mean')

An estimator, a loss, a reduction or a filter is a registered name, or the import path of your own
(``my_pkg.module:function``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slipstream.config.base import Dtype, OptimizerSettings, Settings, Strings, Urls, section_defaults
from slipstream.config.presets import PRESETS, overlay

Bound = Annotated[float, Field(gt=0)]


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"there is no such preset; known: {', '.join(PRESETS)}")
    return name


class OffPolicySettings(Settings):
    """Corrections for tokens that were sampled by another policy than the one that the update starts from.

    ``rho`` is (policy before the update) / (policy that sampled), per token.  Order: outlier mask, token mask,
    truncated importance sampling (TIS), sequence mask.
    """

    tis: Literal["none", "token", "sequence"] = Field(
        "none", description="Truncated importance sampling: weigh by rho per token, or by its product per sequence."
    )
    tis_token_cap: Bound = Field(2.0, description="Largest weight with tis=token.")
    tis_sequence_cap: Bound = Field(5.0, description="Largest weight with tis=sequence.")
    sequence_mask: Literal["none", "geometric", "product"] = Field(
        "none", description="Leave out sequences whose geometric mean, or product, of rho is out of bounds."
    )
    geometric_low: Bound = Field(0.99, description="Lower bound with sequence_mask=geometric.")
    geometric_high: Bound = Field(1.01, description="Upper bound with sequence_mask=geometric.")
    product_low: Bound = Field(0.5, description="Lower bound with sequence_mask=product.")
    product_high: Bound = Field(2.0, description="Upper bound with sequence_mask=product.")
    token_mask_low: Bound | None = Field(None, description="Leave out tokens whose rho is below this; null is off.")
    token_mask_high: Bound | None = Field(None, description="Leave out tokens whose rho is above this; null is off.")
    outlier_low: Bound | None = Field(
        None, description="Leave out whole sequences with any rho below this; null is off."
    )
    outlier_high: Bound | None = Field(
        None, description="Leave out whole sequences with any rho above this; null is off."
    )
    denominator: Literal["all", "kept"] = Field(
        "all", description="What the reduction counts: all trained tokens, or those that the masks kept."
    )


class KlControllerSettings(Settings):
    """How ``algorithm.kl_coef`` moves; its state is part of a checkpoint (adaptive: 1909.08593)."""

    kind: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive: raise or lower the coefficient until the KL is near the target."
    )
    target: float = Field(0.1, gt=0, description="Mean KL per token that adaptive aims at.")
    horizon: int = Field(10000, ge=1, description="Trajectories over which adaptive corrects a deviation.")


class CriticSettings(Settings):
    """The value model, trained when the advantage estimator needs values (gae)."""

    path: str | None = Field(None, description="Weights that the critic starts from; null takes model.path.")
    backbone: Literal["own", "shared"] = Field(
        "own", description="own: a model of its own; shared: a value head on the policy's backbone."
    )
    optimizer: Annotated[OptimizerSettings, section_defaults(lr=5e-6)] = Field(
        OptimizerSettings(lr=5e-6), description="Optimiser of the critic (backbone=own)."
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="New values are clipped to old ones +- this in the loss; null is off."
    )
    value_coef: float = Field(0.5, gt=0, description="Weight of the value loss beside the policy's (backbone=shared).")
    minibatches_per_step: int = Field(1, ge=1, description="Optimiser steps of the critic per pass.")
    epochs_per_step: int = Field(1, ge=1, description="Passes of the critic over a step's batch.")
    warmup_steps: int = Field(0, ge=0, description="First steps in which only the critic learns.")


class OverlongSettings(Settings):
    """Soft overlong penalty (DAPO, 2503.14476): long answers earn less before the limit cuts them.

    With ``n`` sampled tokens over all turns, ``L`` the limit and ``b`` the buffer, the reward changes by
    ``-factor * clip((n - (L - b)) / b, 0, 1)``.
    """

    factor: float = Field(0.0, ge=0, description="Penalty at the limit; 0 is off.")
    max_tokens: int | None = Field(
        None, ge=1, description="The limit; null is the most tokens that one trajectory may sample."
    )
    buffer_tokens: int | None = Field(
        None, ge=1, description="Tokens before the limit over which the penalty grows; null is a fifth of it."
    )


_YAML_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML 1.1 reads a bare ``off`` as false."""


class DynamicSamplingSettings(Settings):
    """What happens when some of a step's groups have no spread (they teach a group-relative estimator nothing)."""

    kind: Annotated[Literal["off", "filter", "replace"], _YAML_OFF] = Field(
        "off", description="filter: draw more prompts; replace: train groups with spread again in their place."
    )
    max_rounds: int = Field(
        30, ge=1, description="Draws of a step before it trains what it has, at its true denominator."
    )
    min_good_fraction: float = Field(
        0.3, ge=0, lt=1, description="replace: share of groups with spread that is too small to train on; draw again."
    )


class TeacherSettings(Settings):
    """The model that scores the student's samples in on-policy distillation: local weights, or running servers."""

    path: str | None = Field(None, description="Local directory, hub id or bundled name; null is no local teacher.")
    dtype: Dtype = Field("bfloat16", description="Dtype of a local teacher.")
    urls: Urls = Field((), description="Base URLs of running engines that serve the teacher (vLLM's API).")


class AlgorithmSettings(Settings):
    """Advantages, loss, reduction, corrections, KL, entropy, critic, filters, teacher."""

    preset: Annotated[str, AfterValidator(_known_preset)] | None = Field(
        None, description="A named method: a bundle of the settings below, each of which may be changed."
    )

    advantage: str = Field("grpo", description="Advantage estimator: a registered name or an import path.")
    normalize_by_std: bool = Field(True, description="Divide by the group's standard deviation (grpo).")
    baseline: Literal["mean", "leave_one_out"] = Field(
        "mean", description="What a sample is compared with: all voters, or all the others (grpo, maxrl, turn_credit)."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per sampled token (turn_credit: per turn).")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of gae, per sampled token.")
    normalize_batch: bool | None = Field(
        None, description="Whiten advantages over the step's sampled tokens; null is the estimator's own choice."
    )
    advantage_settings: dict[str, Any] = Field(
        default_factory=dict, description="Extra settings of the chosen estimator."
    )

    loss: str = Field("ppo_clip", description="Policy loss: a registered name or an import path.")
    clip_low: Bound | None = Field(
        None, description="The ratio is clipped from below at 1 - clip_low; null is the loss's own (ppo_clip: 0.2)."
    )
    clip_high: Bound | None = Field(
        None, description="The ratio is clipped from above at 1 + clip_high; null is the loss's own (ppo_clip: 0.2)."
    )
    loss_settings: dict[str, Any] = Field(default_factory=dict, description="Extra settings of the chosen loss.")
    old_logprobs: Literal["sampler", "recompute", "approximate"] = Field(
        "sampler",
        description="Anchor of the ratio: the sampler's log-probs, a forward pass before the update, or a point "
        "between sampler and policy by each token's age in versions.",
    )
    top_logprobs: int = Field(
        16,
        ge=1,
        le=1023,
        description="Most likely tokens of each place that the engine reports, for a loss that reads them "
        "(score_centering).",
    )
    off_policy: OffPolicySettings = Field(OffPolicySettings(), description="Corrections of stale or foreign samples.")

    reduction: str = Field("token_mean", description="Reduction, how tokens are weighed: a name or an import path.")
    reduction_tokens: int | None = Field(
        None,
        ge=1,
        description="Constant of seq_mean_token_sum_norm; null is the most tokens that one trajectory may sample.",
    )

    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL term against the initial policy; 0 leaves it out.")
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="Per-token estimate of the KL term.")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Add the KL term to the loss, or take it off rewards.")
    kl_controller: KlControllerSettings = Field(KlControllerSettings(), description="How kl_coef moves.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus; 0 leaves it out.")

    epochs_per_step: int = Field(1, ge=1, description="Passes over a step's batch.")
    minibatches_per_step: int = Field(1, ge=1, description="Optimiser steps per pass; groups are never split.")
    critic: CriticSettings = Field(CriticSettings(), description="The value model.")

    drop_zero_variance: bool = Field(True, description="Leave out groups whose voters all earned the same.")
    zero_variance_tol: float = Field(1e-6, ge=0, description="Reward spread up to which voters earned the same.")
    drop_truncated: bool = Field(False, description="Overlong filtering: truncated samples vote but are not trained.")
    zero_reward_on_non_stop: bool = Field(
        False, description="A sample that did not end by itself earns 0, whatever the environment said."
    )
    overlong: OverlongSettings = Field(OverlongSettings(), description="Soft overlong penalty.")
    filters: Strings = Field((), description="Further filters, by registered name or import path.")
    dynamic_sampling: DynamicSamplingSettings = Field(DynamicSamplingSettings(), description="Groups without spread.")

    teacher: TeacherSettings = Field(TeacherSettings(), description="Teacher of on-policy distillation.")

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        """A preset's settings under those that were given."""
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return data
        return overlay(PRESETS[name].values, data)
