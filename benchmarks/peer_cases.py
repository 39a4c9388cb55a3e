"""What ``compare_peers.py`` compares: the cases, and the random batches that every side computes from.

Imported in the project's environment and in the peers', so it needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROWS, LENGTH = 8, 14


@dataclass(frozen=True)
class Case:
    name: str
    peer: str
    """``trl`` or ``verl``."""
    theirs: dict[str, Any]
    """Given to the peer's side; ``what`` says which function."""
    ours: dict[str, Any]
    expect: str = "agree"
    note: str = ""
    scale: dict[str, Any] = field(default_factory=dict)
    """Changes to the random batch."""


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def verl(loss: str, mode: str = "token-mean", **config: Any) -> dict[str, Any]:
    return {"what": "loss", "loss": loss, "mode": mode, "config": {"low": 0.2, "high": 0.28, **config}}


def trl(loss: str, **args: Any) -> dict[str, Any]:
    return {"what": "loss", "loss": loss, **args}


def ours(loss: str, reduction: str = "token_mean", **settings: Any) -> dict[str, Any]:
    return {"what": "loss", "loss": loss, "reduction": reduction, "settings": settings}


WIDE, NEAR, FAR = {"gap": 1.5}, {"gap": 0.1}, {"gap": 100.0}
HALVES = "two unequal micro-batches"
INVERSE = (
    "verl's k1 bounds are on sampler / policy; the bounds here are on policy / sampler, as TIS caps are in both, so "
    "one is the other's inverse"
)

CASES: Sequence[Case] = (
    # ---- verl: losses
    Case("dual-clip PPO", "verl", verl("vanilla"), ours("dual_clip", **CLIP), scale=WIDE),
    Case(
        "PPO without the third clip",
        "verl",
        verl("vanilla"),
        ours("ppo_clip", **CLIP),
        "differ",
        "verl's vanilla loss bounds bad tokens at clip_ratio_c abs(A), 3 by default (dual clip). PPO's paper does not; "
        "here that is dual_clip",
        WIDE,
    ),
    Case(
        "Dr. GRPO's reduction",
        "verl",
        verl("vanilla", "seq-mean-token-sum-norm"),
        ours("dual_clip", "seq_mean_token_sum_norm", **CLIP),
        scale=WIDE,
    ),
    Case("plain sum", "verl", verl("vanilla", "token-sum"), ours("dual_clip", "sum", **CLIP), scale=WIDE),
    Case("GSPO", "verl", verl("gspo", "seq-mean-token-mean"), ours("gspo", "sequence_mean", **CLIP)),
    Case("SAPO", "verl", verl("sapo", "seq-mean-token-mean"), ours("sapo", "sequence_mean"), scale=WIDE),
    Case("CISPO", "verl", verl("cispo"), ours("cispo", **CLIP), scale=WIDE),
    Case("DRO", "verl", verl("dro", dro_beta=0.1), ours("dro", beta=0.1)),
    Case(
        "DPPO, total variation",
        "verl",
        verl("dppo_tv", low=0.15, high=0.15),
        ours("dppo", behaviour="old"),
        "gradient",
        "verl minimises -sg(r) A log pi, this library -r A: one gradient, another value",
    ),
    Case(
        "DPPO, binary KL",
        "verl",
        verl("dppo_kl", low=0.05, high=0.05),
        ours("dppo", behaviour="old", divergence="kl", delta_low=0.05, delta_high=0.05),
        "gradient",
        "as above",
    ),
    Case(
        "DPPO with ratios above 20",
        "verl",
        verl("dppo_tv", low=2.0, high=2.0),
        ours("dppo", behaviour="old", delta_low=2.0, delta_high=2.0),
        "differ",
        "verl truncates the ratio at 20, as the paper recommends by verl's account; here only e^20 bounds it, and "
        "loss=cispo is the method that truncates",
        {"gap": 4.0},
    ),
    Case("Clip-Cov", "verl", verl("clip_cov", ratio=1.0, lb=0.1), ours("clip_cov", fraction=1.0, cov_low=0.1, **CLIP)),
    Case("KL-Cov", "verl", verl("kl_cov", ratio=0.2), ours("kl_cov", fraction=0.2)),
    Case(
        f"KL-Cov in {HALVES}",
        "verl",
        {**verl("kl_cov", ratio=0.2), "halves": True},
        {**ours("kl_cov", fraction=0.2), "halves": True},
        "differ",
        "verl takes means and the top share per micro-batch, so the batch size of a forward pass changes the gradient; "
        "here they are taken once over the optimiser step",
    ),
    Case(
        "KL-Cov at a log-ratio of 100",
        "verl",
        verl("kl_cov", ratio=0.2),
        ours("kl_cov", fraction=0.2),
        "differ",
        "verl does not bound this loss's ratio: exp(100) enters the step, and overflows in float32; here it is at most "
        "exp(20)",
        FAR,
    ),
    Case("clipped value loss", "verl", {"what": "value", "clip": 0.2}, {"what": "value", "clip": 0.2}),
    # ---- verl: KL, entropy, controller
    *(
        Case(f"KL estimator {k}", "verl", {"what": "kl", "k": k}, {"what": "kl", "k": k})
        for k in ("k1", "k2", "k3", "abs")
    ),
    Case("entropy", "verl", {"what": "entropy"}, {"what": "entropy"}),
    Case(
        "entropy with logits of -inf",
        "verl",
        {"what": "entropy", "masked": True},
        {"what": "entropy", "masked": True},
        "differ",
        "verl's entropy is not finite when a head masks ids, since 0 x -inf is NaN; here such ids add 0 to value and "
        "gradient",
    ),
    Case("adaptive KL coefficient", "verl", {"what": "controller"}, {"what": "controller"}),
    # ---- verl: off-policy corrections
    Case("TIS per token", "verl", {"what": "tis", "level": "token"}, {"what": "tis", "level": "token"}, scale=WIDE),
    Case(
        "effective sample size per token",
        "verl",
        {"what": "ess"},
        {"what": "ess"},
        note="of weights below verl's cap: it takes the capped ones, here they are those before any correction",
    ),
    Case("TIS per sequence", "verl", {"what": "tis", "level": "sequence"}, {"what": "tis", "level": "sequence"}),
    Case(
        "geometric sequence mask",
        "verl",
        {"what": "mask", "option": "seq_mean_k1", "bounds": "0.9_1.05"},
        {"what": "mask", "sequence_mask": "geometric", "geometric_low": 1 / 1.05, "geometric_high": 1 / 0.9},
        note=INVERSE,
        scale=NEAR,
    ),
    Case(
        "product sequence mask",
        "verl",
        {"what": "mask", "option": "seq_sum_k1", "bounds": "0.5_4.0"},
        {"what": "mask", "sequence_mask": "product", "product_low": 0.25, "product_high": 2.0},
        note=INVERSE,
        scale=NEAR,
    ),
    Case(
        "token mask",
        "verl",
        {"what": "mask", "option": "token_k1", "bounds": "0.5_1.5"},
        {"what": "mask", "token_mask_low": 1 / 1.5, "token_mask_high": 2.0},
        note=INVERSE,
    ),
    # ---- verl: advantages
    Case("GRPO advantage", "verl", {"what": "advantage", "name": "grpo"}, {"what": "advantage", "advantage": "grpo"}),
    Case(
        "Dr. GRPO advantage",
        "verl",
        {"what": "advantage", "name": "grpo", "std": False},
        {"what": "advantage", "advantage": "grpo", "normalize_by_std": False},
    ),
    Case("RLOO advantage", "verl", {"what": "advantage", "name": "rloo"}, {"what": "advantage", "advantage": "rloo"}),
    Case(
        "REINFORCE++ advantage",
        "verl",
        {"what": "advantage", "name": "reinforce_plus_plus"},
        {"what": "advantage", "advantage": "reinforce_pp", "gamma": 0.9},
        "differ",
        "verl whitens by the deviation with n - 1, here with n: whitening asks for the batch's own spread, so that the "
        "mean square of what is trained is 1. They meet as batches grow",
    ),
    Case(
        "REINFORCE++-baseline advantage",
        "verl",
        {"what": "advantage", "name": "reinforce_plus_plus_baseline", "by_n": True},
        {"what": "advantage", "advantage": "reinforce_pp_baseline"},
        note="after the factor between deviations with n - 1 and n, see above",
    ),
    Case(
        "GAE advantage",
        "verl",
        {"what": "advantage", "name": "gae", "by_n": True},
        {"what": "advantage", "advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8},
        note="as above",
    ),
    Case(
        "GRPO advantage of a lone sample",
        "verl",
        {"what": "advantage", "name": "grpo"},
        {"what": "advantage", "advantage": "grpo"},
        "differ",
        "verl gives a group of one its raw reward, so what it teaches depends on the reward's zero point; a sample "
        "without a comparison has advantage 0 here",
        {"lone": True},
    ),
    Case(
        "GAE targets",
        "verl",
        {"what": "advantage", "name": "gae", "take": "returns"},
        {"what": "gae"},
    ),
    # ---- TRL
    Case("GRPO", "trl", trl("grpo"), ours("ppo_clip", "sequence_mean", **CLIP), scale=WIDE),
    Case("BNPO", "trl", trl("bnpo"), ours("ppo_clip", "token_mean", **CLIP), scale=WIDE),
    Case(
        f"BNPO in {HALVES}",
        "trl",
        {**trl("bnpo"), "halves": True},
        {**ours("ppo_clip", "token_mean", **CLIP), "halves": True},
        "differ",
        "TRL's bnpo divides by each micro-batch's own tokens and averages the quotients, so short micro-batches weigh "
        "more; here the denominator is the step's",
    ),
    Case("DAPO", "trl", trl("dapo"), ours("ppo_clip", "token_mean", **CLIP), scale=WIDE),
    Case(
        f"DAPO in {HALVES}",
        "trl",
        {**trl("dapo"), "halves": True},
        {**ours("ppo_clip", "token_mean", **CLIP), "halves": True},
    ),
    Case("Dr. GRPO", "trl", trl("dr_grpo"), ours("ppo_clip", "seq_mean_token_sum_norm", **CLIP), scale=WIDE),
    Case("GSPO", "trl", trl("grpo", level="sequence"), ours("gspo", "sequence_mean", **CLIP)),
    Case(
        "CISPO",
        "trl",
        trl("cispo", high=2.0),
        ours("tinker_cispo", clip_high_threshold=2.0),
        note="TRL's epsilon_high is the bound itself, as in Tinker; cispo here takes its distance from 1",
        scale=WIDE,
    ),
    Case("soft overlong penalty", "trl", {"what": "overlong"}, {"what": "overlong"}),
    Case("SAPO", "trl", trl("sapo"), ours("sapo", "sequence_mean"), scale=WIDE),
    Case("KL in the loss", "trl", trl("grpo", beta=0.1), {**ours("ppo_clip", "sequence_mean", **CLIP), "kl": 0.1}),
    Case(
        "KL in the loss, reference 100 nats away",
        "trl",
        trl("grpo", beta=0.1),
        {**ours("ppo_clip", "sequence_mean", **CLIP), "kl": 0.1},
        "differ",
        "TRL's k3 has no bound: exp(100) owns the step; here a token's k3 counts at most 10",
        {"ref_gap": 100.0},
    ),
)


# ---- random batches, the same numbers for every side


def draw(seed: int, scale: dict[str, Any]) -> dict[str, np.ndarray]:
    """``(B, T)`` arrays; ``mask`` has rows of unequal lengths with an observation in the middle."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((ROWS, LENGTH))
    for i in range(ROWS):
        stop = int(rng.integers(5, LENGTH + 1)) if i < ROWS // 2 else int(rng.integers(5, 8))
        mask[i, :stop] = 1
        mask[i, 2:4] = 0
    shape = (ROWS, LENGTH)
    logprobs = -np.abs(rng.normal(size=shape)) - 0.05
    gap = rng.normal(size=shape) * scale.get("gap", 0.5)
    if scale.get("gap", 0) >= 100:
        gap = np.where(rng.random(shape) < 0.1, 100.0, 0.1)
    reward = rng.normal(size=ROWS)
    rewards = np.zeros(shape)
    for i in range(ROWS):
        rewards[i, int(np.flatnonzero(mask[i])[-1])] = reward[i]
    return {
        "logprobs": logprobs,
        "old": np.minimum(logprobs - gap, -0.01),
        "ref": logprobs - rng.normal(size=shape) * 0.5 + scale.get("ref_gap", 0.0),
        "mask": mask,
        "advantage": rng.normal(size=ROWS),
        "rewards": rewards,
        "group": np.asarray([0] * 4 + [1] * 3 + [2]) if scale.get("lone") else np.arange(ROWS) // 4,
        "values": rng.normal(size=shape),
        "old_values": rng.normal(size=shape),
        "returns": rng.normal(size=shape),
        "logits": rng.normal(size=(5, 7)),
        "kl": np.abs(rng.normal(size=6)),
    }


def halves(case: dict[str, Any]) -> list[slice]:
    """Rows of each micro-batch."""
    return [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)] if case.get("halves") else [slice(0, ROWS)]
