"""Presets: named methods, each a documented bundle of ``algorithm`` settings.

Owns: the bundles with their formulas, and laying one under given settings.
Refuses: settings outside of the section ``algorithm``, and anything computed.

In the formulas ``s`` is a trajectory's total reward, ``A`` its advantage, ``r`` the ratio of the policy to its anchor,
``N`` the trained tokens of an optimiser step, ``B`` its trajectories, ``n_i`` the trained tokens of trajectory i.

>>> PRESETS["dr_grpo"].values["reduction"]
'seq_mean_token_sum_norm'
>>> overlay({"clip_high": 0.28, "overlong": {"factor": 1.0}}, {"overlong": {"max_tokens": 9}})
{'clip_high': 0.28, 'overlong': {'factor': 1.0, 'max_tokens': 9}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One method: what it sets, what that computes, when to use it, where it comes from."""

    name: str
    title: str
    formula: tuple[str, ...]
    """One line per part: advantage, loss, reduction, further terms."""
    when: str
    source: str
    values: Mapping[str, Any]
    """Settings below ``algorithm``."""
    figures: str
    """Which numbers are the source's, and which are not."""
    needs: str = ""
    """What the user has to set besides."""


_CLIP = "loss_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)"
_GROUP = "A = (s - mean s) / (std s + 1e-6) over the group's voters"
_TOKENS = "weight of a token = 1 / N"
_SEQUENCES = "weight of a token = 1 / (B n_i)"

_ALL = (
    Preset(
        "grpo",
        "Group relative policy optimisation",
        (_GROUP, _CLIP, _SEQUENCES, "+ 0.04 k3(pi, initial policy), weighed like the loss"),
        "The common starting point for verifiable rewards, when answers have similar lengths and the policy should "
        "stay near its initial weights.",
        "arXiv 2402.03300",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "sequence_mean",
            "kl_coef": 0.04,
            "kl_estimator": "k3",
            "drop_zero_variance": False,
        },
        figures="0.04 is the paper's weight of the KL. It names no clip range: 0.2 is PPO's.",
    ),
    Preset(
        "dr_grpo",
        "GRPO done right",
        ("A = s - mean s over the group's voters", _CLIP, "weight of a token = 1 / (B L), L a constant"),
        "When grpo makes wrong answers longer: neither an answer's length nor a prompt's difficulty changes the scale "
        "of its gradient.",
        "arXiv 2503.20783",
        {
            "advantage": "grpo",
            "normalize_by_std": False,
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "seq_mean_token_sum_norm",
            "drop_zero_variance": False,
        },
        figures="No KL and a clip range of 0.2, as in the paper.",
    ),
    Preset(
        "dapo",
        "Decoupled clip and dynamic sampling",
        (
            _GROUP,
            _CLIP + " with clip_high > clip_low",
            _TOKENS,
            "groups without spread are drawn anew; long answers earn less before the limit cuts them",
        ),
        "Long chains of thought from a base model: keeps entropy up, wastes no batch on prompts that are solved or "
        "hopeless.",
        "arXiv 2503.14476",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "reduction": "token_mean",
            "drop_zero_variance": True,
            "dynamic_sampling": {"kind": "filter"},
            "overlong": {"factor": 1.0},
        },
        figures="Both clip bounds are the paper's, and so is a penalty of at most 1 that grows over the last fifth "
        "before the limit (4,096 of 20,480 tokens). The budget of 30 draws is SkyRL's; the paper names none.",
    ),
    Preset(
        "gspo",
        "Group sequence policy optimisation",
        (
            _GROUP,
            "loss_t = -min(q_t A, clip(q_t, 1 - clip_low, 1 + clip_high) A)",
            "with q_t = exp(mean of log r over the row), and the gradient of token t",
            _SEQUENCES,
        ),
        "Mixture-of-experts policies and long answers, where single tokens' ratios are noise.",
        "arXiv 2507.18071",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "reduction": "sequence_mean",
            "drop_zero_variance": True,
        },
        figures="Both clip bounds are the paper's (its models, its four mini-batches per step).",
    ),
    Preset(
        "cispo",
        "Clipped importance weights",
        (_GROUP, "loss_t = -stop(clip(r_t, 1 - clip_low, 1 + clip_high)) A log pi_t", _TOKENS),
        "Several optimiser steps per batch: a clipped token still has a gradient, so rare decisive tokens keep "
        "learning.",
        "arXiv 2506.13585",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "reduction": "token_mean",
            "drop_zero_variance": True,
        },
        figures="The paper bounds ratios from above only, and does not print the bound: the cap of 5 (clip_high=4) is "
        "SkyRL's, which takes it from ScaleRL (arXiv 2510.13786).",
    ),
    Preset(
        "sapo",
        "Soft adaptive policy optimisation",
        (_GROUP, "loss_t = -A (4 / tau) sigmoid(tau (r_t - 1)), tau larger where A < 0", _SEQUENCES),
        "When hard clipping makes training jumpy: tokens far from the anchor fade out instead of being cut off.",
        "arXiv 2511.20347",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "sapo",
            "reduction": "sequence_mean",
            "drop_zero_variance": True,
        },
        figures="Both temperatures (loss_settings tau_positive 1.0 and tau_negative 1.05) are the paper's.",
    ),
    Preset(
        "rloo",
        "REINFORCE, leave one out",
        (
            "A = s - mean of the other voters' s",
            _CLIP,
            _TOKENS,
            "rewards are lessened by 0.03 k1(pi, initial policy) per token",
        ),
        "An unbiased baseline with few samples per prompt, and a KL penalty that is part of the goal.",
        "arXiv 2402.14740",
        {
            "advantage": "rloo",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "token_mean",
            "kl_coef": 0.03,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "drop_zero_variance": False,
        },
        figures="The paper takes plain REINFORCE steps on whole answers, two per batch, without a clip range. The KL "
        "weight of 0.03 is its value for summaries (0.10 for Anthropic-HH). Clip range and token mean are ours.",
    ),
    Preset(
        "reinforce_pp",
        "REINFORCE++",
        (
            "G_t = r_t + gamma G_(t+1) over sampled tokens; A_t = (G_t - mean) / std over all tokens of the step",
            _CLIP,
            _TOKENS,
            "rewards are lessened by 0.01 k1(pi, initial policy) per token",
        ),
        "One sample per prompt, or prompts that should be compared with each other: needs no groups and no critic.",
        "arXiv 2501.03262",
        {
            "advantage": "reinforce_pp",
            "gamma": 1.0,
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "token_mean",
            "kl_coef": 0.01,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "drop_zero_variance": False,
        },
        figures="Clip range 0.2, gamma=1 and the KL weight of 0.01 are those of the paper's first version for general "
        "tasks (0.001 for mathematics, and in its second version). The token mean is ours.",
    ),
    Preset(
        "maxrl",
        "Maximum-likelihood RL",
        ("A = (s - mean s) / (mean s + 1e-6) over the group's voters, rewards >= 0", _CLIP, _TOKENS),
        "Success or failure rewards with many samples: hard prompts count more, as they do in maximum likelihood.",
        "arXiv 2602.02710",
        {
            "advantage": "maxrl",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "token_mean",
            "drop_zero_variance": True,
        },
        figures="The estimator is the paper's; clip range and token mean are those of the authors' published runs.",
    ),
    Preset(
        "ppo",
        "Proximal policy optimisation with a critic",
        (
            "d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1) over sampled tokens, then whitened",
            _CLIP,
            _TOKENS,
            "critic: 1/2 max((clip(V, V_old +- value_clip) - R)^2, (V - R)^2) with R = A + V_old",
        ),
        "Rewards within long episodes, where a critic can say which part earned them.",
        "arXiv 1707.06347; GAE: arXiv 1506.02438",
        {
            "advantage": "gae",
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "token_mean",
            "drop_zero_variance": False,
        },
        figures="Clip range 0.2 and lambda 0.95 are the papers'. gamma=1 is ours, as is usual where a whole answer "
        "is judged (the paper: 0.99). The value clip of 0.2 is that of OpenAI's implementation.",
    ),
    Preset(
        "dppo",
        "Divergence PPO",
        (
            _GROUP,
            "loss_t = -r_t A, r against the sampler, except where a token leaves a trust region of probability "
            "(not of ratio) in A's direction",
            _TOKENS,
        ),
        "Large vocabularies: rare tokens may move freely, likely ones are held back.",
        "arXiv 2602.04879",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "dppo",
            "reduction": "token_mean",
            "drop_zero_variance": True,
        },
        figures="The thresholds are those of the paper's stability runs and of the authors' recipe: 0.15 for "
        "divergence=tv, 0.05 for divergence=kl. Its larger runs take 0.2 for tv, as SkyRL does (for kl too). The "
        "division by the standard deviation and the token mean are ours.",
    ),
    Preset(
        "rollout_is",
        "Masked importance weights against the sampler",
        (_GROUP, "loss_t = -stop(r_t [1 - clip_low < r_t < 1 + clip_high]) A log pi_t, r against the sampler", _TOKENS),
        "Sampler and trainer that disagree (mixed precision, mixture of experts): tokens on which they do are left "
        "out.",
        "IcePop (Ring-1T), arXiv 2510.18855; arXiv 2602.15763",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "rollout_is",
            "clip_low": 0.5,
            "clip_high": 4.0,
            "reduction": "token_mean",
            "drop_zero_variance": True,
        },
        figures="The bounds, ratios of 0.5 to 5, are those published for IcePop; GLM-5 takes 0.5 to 2.",
    ),
    Preset(
        "decoupled_ppo",
        "Decoupled PPO",
        (
            _GROUP,
            "loss_t = -min(prox_t / sampler_t, behaviour_cap) "
            "min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), "
            "r_t = pi_t / prox_t, prox the policy before the update",
            _TOKENS,
        ),
        "Asynchronous training: samples of several versions are weighed against the policy before the update, which "
        "is what clipping should be measured from.",
        "arXiv 2110.00641; arXiv 2505.24298",
        {
            "advantage": "grpo",
            "normalize_by_std": True,
            "loss": "decoupled_ppo",
            "old_logprobs": "recompute",
            "reduction": "token_mean",
            "drop_zero_variance": True,
        },
        figures="The clip range of 0.2 and the number 5 are AReaL's (its recipes clip at 0.4). AReaL leaves out tokens "
        "whose weight exceeds 5; here the weight is cut to 5. The first paper's code bounds the whole ratio at 100.",
    ),
    Preset(
        "distill",
        "On-policy distillation",
        (
            "A_t = log teacher_t - log sampler_t, each token on its own (gamma = 0)",
            "loss_t = -r_t A_t",
            _TOKENS,
        ),
        "A stronger model is at hand: a dense signal on the student's own samples; rewards are not needed.",
        "arXiv 2306.13649",
        {
            "advantage": "distill",
            "gamma": 0.0,
            "loss": "importance_sampling",
            "reduction": "token_mean",
            "drop_zero_variance": False,
        },
        figures="There is nothing to tune: the loss has no bounds and no weight.",
        needs="algorithm.teacher.path or algorithm.teacher.urls",
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
"""Every preset by name."""


def overlay(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``under``; sections are merged key by key."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return out


def preset_leaves(name: str) -> dict[str, Any]:
    """What a preset sets, by dotted path (``algorithm.clip_high``)."""
    found: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    walk(PRESETS[name].values, "algorithm.")
    return found
