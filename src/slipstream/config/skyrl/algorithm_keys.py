"""SkyRL's ``trainer.algorithm`` keys and what becomes of each.

Owns: the verdicts.  Refuses: the formulas (``slipstream.algorithms`` has them).
A name that SkyRL does not know is passed through, since losses and estimators may be registered by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipstream.config.skyrl.rules import Convert, Idle, Mapped, Met, Refused, Rule, Unsupported, View
from slipstream.config.skyrl.shared_keys import under

LATER = "is not in this release"
PREFIX = "trainer.algorithm"
CRITIC = f"{PREFIX}.advantage_estimator=gae"


def _registered(kind: str, known: Mapping[str, str], missing: Iterable[str], setting: str) -> Convert:
    """Translate known names, refuse SkyRL's others, pass the user's own through."""
    refused = frozenset(missing)

    def convert(value: Any, view: View) -> Any:
        if value in refused:
            raise Unsupported(
                f"{kind} {value!r} {LATER}", f"use {' or '.join(known)}, or register your own and name it in {setting}"
            )
        return known.get(value, value) if isinstance(value, str) else value

    return convert


_loss = _registered(
    "policy loss",
    {"regular": "ppo_clip", "cross_entropy": "cross_entropy"},
    (
        "dual_clip",
        "gspo",
        "cispo",
        "sapo",
        "rollout_is",
        "dppo",
        "clip_cov",
        "kl_cov",
        "importance_sampling",
    ),
    "algorithm.loss",
)
_advantage = _registered(
    "advantage estimator",
    {"grpo": "grpo", "rloo": "rloo"},
    ("maxrl", "reinforce++", "gae"),
    "algorithm.advantage",
)
_reduction = _registered(
    "reduction",
    {"token_mean": "token_mean", "sequence_mean": "sequence_mean"},
    ("token_mean_legacy", "seq_mean_token_sum_norm", "prompt_mean"),
    "algorithm.reduction",
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


def _recompute(value: Any, view: View) -> Any:
    return "recompute" if value == "regular" else "sampler"


def _temperature(value: Any, view: View) -> None:
    sampled = view.skyrl.get(
        "generator.sampling_params.temperature", view.native.get("rollout.sampling.temperature", 1.0)
    )
    if value is not None and value != sampled:
        raise Unsupported(
            f"tokens are scored at the temperature that sampled them ({sampled})",
            "leave trainer.algorithm.temperature out; set rollout.sampling.temperature",
        )


def _no_discount(name: str) -> Callable[[Any, View], None]:
    def check(value: Any, view: View) -> None:
        estimator = view.skyrl.get(f"{PREFIX}.advantage_estimator", view.native.get("algorithm.advantage", "grpo"))
        if value != 1 and estimator not in ("grpo", "rloo", "maxrl"):
            raise Unsupported(f"{name} needs an estimator with returns, which {LATER}", "leave it at 1")

    return check


def _null_or(value: Any, view: View) -> None:
    if value is None:
        return
    if isinstance(value, str) and value.lower() == "none":
        raise Unsupported("the text 'none' is not null", "write null")
    raise Unsupported(
        f"{value!r} sampling {LATER}",
        "draw more prompts per step (schedule.generate_prompts_per_step) and leave groups without spread out "
        "(algorithm.drop_zero_variance=true)",
    )


def _correction(name: str) -> list[Rule]:
    prefix = f"{PREFIX}.off_policy_correction"
    reason = "off-policy corrections are not in this release; at staleness 0 the sampler is the policy"
    mend = "leave it null"
    return [
        Rule(f"{prefix}.tis_ratio_type", None, Refused(reason, mend)),
        *under(
            prefix,
            {"token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0},
            Idle(f"{name}.tis_ratio_type"),
        ),
        Rule(f"{prefix}.sequence_mask_metric", None, Refused(reason, mend)),
        *under(
            prefix,
            {"geo_mask_high": 1.01, "geo_mask_low": 0.99, "product_mask_high": 2.0, "product_mask_low": 0.5},
            Idle(f"{name}.sequence_mask_metric"),
        ),
        *under(
            prefix,
            {
                "outlier_token_is_threshold_low": None,
                "outlier_token_is_threshold_high": None,
                "token_mask_is_threshold_low": None,
                "token_mask_is_threshold_high": None,
            },
            Refused(reason, mend),
        ),
        Rule(f"{PREFIX}.use_tis", False, Refused(f"use_tis is deprecated in SkyRL; {reason}", "leave it out")),
        Rule(f"{PREFIX}.tis_imp_ratio_cap", -1.0, Idle(f"{PREFIX}.use_tis=true")),
    ]


def _losses() -> list[Rule]:
    """Settings of one loss each, read only when that loss is chosen."""
    details: dict[str, dict[str, Any]] = {
        "sapo": {"sapo.tau_pos": 1.0, "sapo.tau_neg": 1.05},
        "clip_cov": {"clip_cov.clip_ratio": 2e-4, "clip_cov.clip_cov_lb": 1.0, "clip_cov.clip_cov_ub": 5.0},
        "kl_cov": {"kl_cov.kl_cov_frac": 0.2, "kl_cov.ppo_kl_coef": 1.0},
        "cispo": {"cispo.cispo_eps_clip_low": 1.0, "cispo.cispo_eps_clip_high": 4.0, "cispo.cispo_anchor": "old"},
        "dppo": {"dppo.dppo_type": "binary_tv", "dppo.delta_low": 0.2, "dppo.delta_high": 0.2},
        "dual_clip": {"clip_ratio_c": 3.0},
    }
    return [
        rule
        for loss, keys in details.items()
        for rule in under(PREFIX, keys, Idle(f"{PREFIX}.policy_loss_type={loss}"))
    ]


ALGORITHM = [
    Rule(f"{PREFIX}.advantage_estimator", "grpo", Mapped("algorithm.advantage", _advantage)),
    Rule(
        f"{PREFIX}.policy_loss_type",
        "regular",
        Mapped(
            "algorithm.loss",
            _loss,
            "regular is ppo_clip, anchored at log-probs recomputed before the update",
            implied={"algorithm.old_logprobs": _recompute},
        ),
    ),
    Rule(f"{PREFIX}.loss_reduction", "token_mean", Mapped("algorithm.reduction", _reduction)),
    Rule(f"{PREFIX}.grpo_norm_by_std", True, Mapped("algorithm.normalize_by_std")),
    Rule(f"{PREFIX}.gamma", 1.0, Met("group-relative advantages do not discount", _no_discount("gamma"))),
    Rule(f"{PREFIX}.lambd", 1.0, Met("group-relative advantages have no lambda", _no_discount("lambd"))),
    Rule(f"{PREFIX}.eps_clip_low", 0.2, Mapped("algorithm.clip_low")),
    Rule(f"{PREFIX}.eps_clip_high", 0.2, Mapped("algorithm.clip_high")),
    Rule(f"{PREFIX}.value_clip", 0.2, Idle(CRITIC)),
    Rule(f"{PREFIX}.value_head_prefix", "value_head", Idle(CRITIC)),
    Rule(f"{PREFIX}.use_kl_loss", True, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "with kl_loss_coef")),
    Rule(f"{PREFIX}.kl_loss_coef", 0.001, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "if a KL term is on")),
    Rule(f"{PREFIX}.use_kl_in_reward", False, Mapped("algorithm.kl_coef algorithm.kl_in", _kl, "with kl_loss_coef")),
    Rule(f"{PREFIX}.kl_estimator_type", "k3", Mapped("algorithm.kl_estimator")),
    Rule(
        f"{PREFIX}.kl_ctrl.type",
        "fixed",
        Refused(f"the adaptive KL controller {LATER}", "use a fixed trainer.algorithm.kl_loss_coef"),
    ),
    *under(f"{PREFIX}.kl_ctrl", {"kl_target": 0.1, "horizon": 10000}, Idle(f"{PREFIX}.kl_ctrl.type=adaptive")),
    Rule(f"{PREFIX}.use_entropy_loss", False, Mapped("algorithm.entropy_coef", _entropy, "with entropy_loss_coef")),
    Rule(
        f"{PREFIX}.entropy_loss_coef", 0.01, Mapped("algorithm.entropy_coef", _entropy, "if use_entropy_loss is true")
    ),
    Rule(f"{PREFIX}.temperature", None, Met("tokens are scored at the temperature that sampled them", _temperature)),
    Rule(
        f"{PREFIX}.advantage_batch_normalize",
        False,
        Refused(f"whitening advantages over the batch {LATER}", "use algorithm.normalize_by_std (per group)"),
    ),
    Rule(f"{PREFIX}.zero_variance_filter", False, Mapped("algorithm.drop_zero_variance")),
    Rule(f"{PREFIX}.zero_variance_filter_tol", 1e-6, Mapped("algorithm.zero_variance_tol")),
    Rule(f"{PREFIX}.max_seq_len", None, Idle(f"{PREFIX}.loss_reduction=seq_mean_token_sum_norm")),
    *_correction(f"{PREFIX}.off_policy_correction"),
    *_losses(),
    Rule(f"{PREFIX}.dynamic_sampling.type", None, Met("every prompt drawn is judged once", _null_or)),
    *under(
        f"{PREFIX}.dynamic_sampling",
        {"max_sample_batches": 30, "min_replace_ratio": 0.3},
        Idle(f"{PREFIX}.dynamic_sampling.type"),
    ),
]
