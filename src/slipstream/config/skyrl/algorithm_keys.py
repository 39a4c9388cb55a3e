"""SkyRL's ``trainer.algorithm`` keys and what becomes of each.

Owns: the verdicts.  Refuses: the formulas (``slipstream.algorithms`` has them).
A name that SkyRL does not know is passed through, since losses and estimators may be registered by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipstream.config.skyrl.rules import Convert, Idle, Mapped, Met, Rule, Unsupported, View, one_of, whole

PREFIX = "trainer.algorithm"
CRITIC = f"{PREFIX}.advantage_estimator=gae"
ESTIMATOR = (f"{PREFIX}.advantage_estimator", "gae")
OFF_POLICY = f"{PREFIX}.off_policy_correction"
DYNAMIC = f"{PREFIX}.dynamic_sampling"

DISCOUNTED = ("reinforce++", "gae")
"""SkyRL's estimators with returns; the others ignore gamma."""
CLIPPED = ("regular", "dual_clip", "gspo", "rollout_is", "clip_cov")
"""SkyRL's losses that read eps_clip_low and eps_clip_high."""
AT_THE_SAMPLER = ("rollout_is", "dppo", "cross_entropy")
"""SkyRL's losses that read no log-probs recomputed before the update."""


def _renamed(kind: str, changed: Mapping[str, str], refused: Mapping[str, str], instead: str) -> Convert:
    """Translate names that differ here, refuse some, pass all others through."""

    def convert(value: Any, view: View) -> Any:
        if value in refused:
            raise Unsupported(f"{kind} {value!r} {refused[value]}", instead)
        return changed.get(value, value) if isinstance(value, str) else value

    return convert


_loss = _renamed("policy loss", {"regular": "ppo_clip"}, {}, "")
_advantage = _renamed("advantage estimator", {"reinforce++": "reinforce_pp"}, {}, "")
_reduction = _renamed(
    "reduction",
    {},
    {"token_mean_legacy": "weighs tokens by the micro-batch that they happen to be in"},
    "use token_mean, which is the same for every split",
)


def _kl(value: Any, view: View) -> dict[str, Any]:
    """Three keys make one term; SkyRL allows it in the loss or in the reward, not in both."""
    in_loss, in_reward = view.get(f"{PREFIX}.use_kl_loss"), view.get(f"{PREFIX}.use_kl_in_reward")
    if in_reward and view.skyrl.get(f"{PREFIX}.use_kl_loss"):
        raise Unsupported("KL cannot be in the loss and in the reward at once", "set use_kl_loss=false")
    if in_reward:
        return {"algorithm.kl_coef": view.get(f"{PREFIX}.kl_loss_coef"), "algorithm.kl_in": "reward"}
    if in_loss:
        return {"algorithm.kl_coef": view.get(f"{PREFIX}.kl_loss_coef"), "algorithm.kl_in": "loss"}
    return {"algorithm.kl_coef": 0.0}


def _entropy(value: Any, view: View) -> Any:
    return view.get(f"{PREFIX}.entropy_loss_coef") if view.get(f"{PREFIX}.use_entropy_loss") else 0.0


_MASKS = (
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)


def _anchor(value: Any, view: View) -> str:
    """What SkyRL's ratio is measured from: the policy before the update, or the sampler.

    Its masks compare the two, so they need the policy's scores beside a loss that does not.
    """
    if any(view.get(f"{OFF_POLICY}.{mask}") is not None for mask in _MASKS):
        return "recompute"
    loss = view.get(f"{PREFIX}.policy_loss_type")
    at_sampler = loss in AT_THE_SAMPLER or (loss == "cispo" and view.get(f"{PREFIX}.cispo.cispo_anchor") == "rollout")
    return "sampler" if at_sampler else "recompute"


def _cispo_anchor(value: Any, view: View) -> str:
    if value not in ("old", "rollout"):
        raise Unsupported(f"the anchor of cispo is 'old' or 'rollout', not {value!r}", "correct the value")
    return _anchor(value, view)


def _temperature(value: Any, view: View) -> None:
    sampled = view.skyrl.get(
        "generator.sampling_params.temperature", view.native.get("rollout.sampling.temperature", 1.0)
    )
    if value is not None and value != sampled:
        raise Unsupported(
            f"tokens are scored at the temperature that sampled them ({sampled})",
            "leave trainer.algorithm.temperature out; set rollout.sampling.temperature",
        )


def _read_by(key: str, names: Iterable[str]) -> Convert:
    """The value, if the chosen component reads it; SkyRL ignores it otherwise."""
    readers = tuple(names)
    return lambda value, view: value if view.get(f"{PREFIX}.{key}") in readers else {}


def _normalize(value: Any, view: View) -> Any:
    return True if value is True else {}


def _zero_variance(value: Any, view: View) -> Any:
    """Dynamic sampling needs the verdict, also where SkyRL's filter of the same name is off."""
    return {} if value is False and view.get(f"{DYNAMIC}.type") is not None else value


def _dynamic(value: Any, view: View) -> Any:
    if isinstance(value, str) and value.lower() == "none":
        raise Unsupported("the text 'none' is not null", "write null")
    if value not in (None, "filter", "replace"):
        raise Unsupported(f"dynamic sampling is 'filter' or 'replace', not {value!r}", "correct the value")
    return "off" if value is None else value


def _rounds(value: Any, view: View) -> Any:
    if view.get(f"{DYNAMIC}.type") is None:
        return {}
    if whole(value, f"{DYNAMIC}.max_sample_batches") < 1:
        raise Unsupported("a step draws no unlimited number of batches", "set the most that it may draw")
    return value


def _null_is(default: Any) -> Convert:
    return lambda value, view: default if value is None else value


def _legacy_tis(value: Any, view: View) -> Any:
    if value is True and view.skyrl.get(f"{OFF_POLICY}.tis_ratio_type") not in (None, "token"):
        raise Unsupported("use_tis means token-level TIS, and tis_ratio_type says something else", "leave use_tis out")
    return "token" if value is True else {}


def _corrections() -> list[Rule]:
    native = "algorithm.off_policy"
    rules = [
        Rule(f"{OFF_POLICY}.tis_ratio_type", None, Mapped(f"{native}.tis", _null_is("none"))),
        Rule(f"{OFF_POLICY}.sequence_mask_metric", None, Mapped(f"{native}.sequence_mask", _null_is("none"))),
        Rule(f"{PREFIX}.use_tis", False, Mapped(f"{native}.tis", _legacy_tis, "SkyRL's older name")),
        Rule(f"{PREFIX}.tis_imp_ratio_cap", -1.0, Mapped(f"{native}.tis_token_cap", gate=(f"{PREFIX}.use_tis", True))),
    ]
    details: tuple[tuple[str, float, str, str, str], ...] = (
        ("token_tis_ratio_clip_high", 2.0, "tis_token_cap", "tis_ratio_type", "token"),
        ("sequence_tis_ratio_clip_high", 5.0, "tis_sequence_cap", "tis_ratio_type", "sequence"),
        ("geo_mask_high", 1.01, "geometric_high", "sequence_mask_metric", "geometric"),
        ("geo_mask_low", 0.99, "geometric_low", "sequence_mask_metric", "geometric"),
        ("product_mask_high", 2.0, "product_high", "sequence_mask_metric", "product"),
        ("product_mask_low", 0.5, "product_low", "sequence_mask_metric", "product"),
    )
    for key, default, name, gate, wanted in details:
        verdict = Mapped(f"{native}.{name}", gate=(f"{OFF_POLICY}.{gate}", wanted))
        rules.append(Rule(f"{OFF_POLICY}.{key}", default, verdict))
    for mask, name in (("outlier_token_is_threshold", "outlier"), ("token_mask_is_threshold", "token_mask")):
        for side in ("low", "high"):
            note = "" if name == "outlier" else "one bound alone is honoured, too"
            rules.append(Rule(f"{OFF_POLICY}.{mask}_{side}", None, Mapped(f"{native}.{name}_{side}", note=note)))
    return rules


def _option(name: str, convert: Callable[[Any, View], Any] | None = None) -> Convert:
    """A setting of the chosen loss alone."""
    return lambda value, view: {"algorithm.loss_settings": {name: convert(value, view) if convert else value}}


def _loss_details() -> list[Rule]:
    """Settings of one loss each, read only when that loss is chosen."""
    divergence = one_of({"binary_tv": "tv", "binary_kl": "kl"}, "no divergence of dppo", "use binary_tv or binary_kl")
    details: tuple[tuple[str, str, Any, str | Convert], ...] = (
        ("sapo", "sapo.tau_pos", 1.0, _option("tau_positive")),
        ("sapo", "sapo.tau_neg", 1.05, _option("tau_negative")),
        ("clip_cov", "clip_cov.clip_ratio", 2e-4, _option("fraction")),
        ("clip_cov", "clip_cov.clip_cov_lb", 1.0, _option("cov_low")),
        ("clip_cov", "clip_cov.clip_cov_ub", 5.0, _option("cov_high")),
        ("kl_cov", "kl_cov.kl_cov_frac", 0.2, _option("fraction")),
        ("kl_cov", "kl_cov.ppo_kl_coef", 1.0, _option("penalty")),
        ("cispo", "cispo.cispo_eps_clip_low", 1.0, "algorithm.clip_low"),
        ("cispo", "cispo.cispo_eps_clip_high", 4.0, "algorithm.clip_high"),
        ("dppo", "dppo.dppo_type", "binary_tv", _option("divergence", divergence)),
        ("dppo", "dppo.delta_low", 0.2, _option("delta_low")),
        ("dppo", "dppo.delta_high", 0.2, _option("delta_high")),
        ("dual_clip", "clip_ratio_c", 3.0, _option("clip_dual")),
    )
    rules: list[Rule] = []
    for loss, key, default, becomes in details:
        gate = (f"{PREFIX}.policy_loss_type", loss)
        verdict = (
            Mapped(becomes, gate=gate)
            if isinstance(becomes, str)
            else Mapped("algorithm.loss_settings", becomes, gate=gate)
        )
        rules.append(Rule(f"{PREFIX}.{key}", default, verdict))
    anchor = Mapped("algorithm.old_logprobs", _cispo_anchor, gate=(f"{PREFIX}.policy_loss_type", "cispo"))
    return [*rules, Rule(f"{PREFIX}.cispo.cispo_anchor", "old", anchor)]


def _kl_controller() -> list[Rule]:
    gate = (f"{PREFIX}.kl_ctrl.type", "adaptive")
    return [
        Rule(f"{PREFIX}.kl_ctrl.type", "fixed", Mapped("algorithm.kl_controller.kind")),
        Rule(f"{PREFIX}.kl_ctrl.kl_target", 0.1, Mapped("algorithm.kl_controller.target", gate=gate)),
        Rule(f"{PREFIX}.kl_ctrl.horizon", 10000, Mapped("algorithm.kl_controller.horizon", gate=gate)),
    ]


ALGORITHM = [
    Rule(f"{PREFIX}.advantage_estimator", "grpo", Mapped("algorithm.advantage", _advantage)),
    Rule(
        f"{PREFIX}.policy_loss_type",
        "regular",
        Mapped(
            "algorithm.loss",
            _loss,
            "regular is ppo_clip; the anchor is recomputed before the update where SkyRL does so",
            implied={"algorithm.old_logprobs": _anchor},
        ),
    ),
    Rule(f"{PREFIX}.loss_reduction", "token_mean", Mapped("algorithm.reduction", _reduction)),
    Rule(
        f"{PREFIX}.grpo_norm_by_std",
        True,
        Mapped("algorithm.normalize_by_std", gate=(f"{PREFIX}.advantage_estimator", "grpo")),
    ),
    Rule(
        f"{PREFIX}.gamma",
        1.0,
        Mapped("algorithm.gamma", _read_by("advantage_estimator", DISCOUNTED), "of reinforce++ and gae"),
    ),
    Rule(f"{PREFIX}.lambd", 1.0, Mapped("algorithm.gae_lambda", gate=ESTIMATOR)),
    Rule(
        f"{PREFIX}.eps_clip_low",
        0.2,
        Mapped("algorithm.clip_low", _read_by("policy_loss_type", CLIPPED), f"of {', '.join(CLIPPED)}"),
    ),
    Rule(
        f"{PREFIX}.eps_clip_high",
        0.2,
        Mapped("algorithm.clip_high", _read_by("policy_loss_type", CLIPPED), f"of {', '.join(CLIPPED)}"),
    ),
    Rule(f"{PREFIX}.value_clip", 0.2, Mapped("algorithm.critic.value_clip", gate=ESTIMATOR)),
    Rule(f"{PREFIX}.value_head_prefix", "value_head", Idle(CRITIC)),
    Rule(f"{PREFIX}.use_kl_loss", True, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "with kl_loss_coef")),
    Rule(f"{PREFIX}.kl_loss_coef", 0.001, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "if a KL term is on")),
    Rule(f"{PREFIX}.use_kl_in_reward", False, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "with kl_loss_coef")),
    Rule(f"{PREFIX}.kl_estimator_type", "k3", Mapped("algorithm.kl_estimator")),
    *_kl_controller(),
    Rule(f"{PREFIX}.use_entropy_loss", False, Mapped("algorithm.entropy_coef", _entropy, "with entropy_loss_coef")),
    Rule(
        f"{PREFIX}.entropy_loss_coef", 0.01, Mapped("algorithm.entropy_coef", _entropy, "if use_entropy_loss is true")
    ),
    Rule(f"{PREFIX}.temperature", None, Met("tokens are scored at the temperature that sampled them", _temperature)),
    Rule(
        f"{PREFIX}.advantage_batch_normalize",
        False,
        Mapped("algorithm.normalize_batch", _normalize, "statistics over sampled tokens only; if true"),
    ),
    Rule(f"{PREFIX}.zero_variance_filter", False, Mapped("algorithm.drop_zero_variance", _zero_variance)),
    Rule(f"{PREFIX}.zero_variance_filter_tol", 1e-6, Mapped("algorithm.zero_variance_tol")),
    Rule(
        f"{PREFIX}.max_seq_len",
        None,
        Mapped("algorithm.reduction_tokens", gate=(f"{PREFIX}.loss_reduction", "seq_mean_token_sum_norm")),
    ),
    *_corrections(),
    *_loss_details(),
    Rule(
        f"{DYNAMIC}.type",
        None,
        Mapped(
            "algorithm.dynamic_sampling.kind",
            _dynamic,
            "a step that has used up its batches trains what it has",
            implied={"algorithm.drop_zero_variance": lambda value, view: True if value is not None else {}},
        ),
    ),
    Rule(f"{DYNAMIC}.max_sample_batches", 30, Mapped("algorithm.dynamic_sampling.max_rounds", _rounds)),
    Rule(
        f"{DYNAMIC}.min_replace_ratio",
        0.3,
        Mapped("algorithm.dynamic_sampling.min_good_fraction", gate=(f"{DYNAMIC}.type", "replace")),
    ),
]
