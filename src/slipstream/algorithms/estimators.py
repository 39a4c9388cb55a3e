"""The bundled advantage estimators.

Owns: their formulas.  Refuses: masks, denominators, absent members (the contract in ``advantages`` keeps them out).

Written over voters only.  ``s`` is a voter's total reward, ``n`` the voters of its group.  Sums are exact (``fsum``),
so the order of members never matters; variances are two-pass; a constant group gives exactly 0 where the estimator
compares within groups, and so does a lone voter, who has nobody to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.algorithms.advantages import Advantage, ScoredGroup, register_advantage, turn_slots
from slipstream.algorithms.batch import FloatArray
from slipstream.algorithms.options import Limit
from slipstream.algorithms.recursions import gae_compacted, returns_compacted
from slipstream.errors import ContractError, SettingsError

BASELINES = {"mean", "leave_one_out"}


def centred(scores: Sequence[float]) -> list[float]:
    """Scores minus their mean; exactly 0 everywhere when all are equal."""
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def compared(scores: Sequence[float], baseline: str) -> list[float]:
    """Scores minus the mean of all of them, or of the others (``leave_one_out``): ``(s - mean) n / (n - 1)``."""
    if baseline not in BASELINES:
        raise SettingsError(f"baseline {baseline!r} is none of {', '.join(sorted(BASELINES))}")
    deviations, n = centred(scores), len(scores)
    if baseline == "mean":
        return deviations
    return [d * n / (n - 1) for d in deviations] if n > 1 else deviations


@register_advantage(
    "grpo",
    defaults={"normalize_by_std": True, "baseline": "mean", "std_eps": 1e-6},
    limits={"std_eps": Limit(above=0)},
    formula="A = (s - mean) / (std + std_eps), std with ddof 1; normalize_by_std=false: A = s - mean",
    source="GRPO, arXiv 2402.03300; without std: Dr. GRPO, arXiv 2503.20783",
    use="The usual choice for groups of samples with one reward each.",
)
def grpo(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Deviation from the group's mean, over its standard deviation.

    With ``baseline=leave_one_out`` the mean is the others'; the standard deviation is the whole group's in both cases
    (that of the others would be 0 where one sample stands out, and the advantage would explode).
    """
    out: dict[str, Advantage] = {}
    for group in groups:
        scores = group.scores()
        values = list(scores.values())
        scale = 1.0
        if settings["normalize_by_std"] and len(values) > 1:
            variance = math.fsum(d * d for d in centred(values)) / (len(values) - 1)
            scale = math.sqrt(variance) + settings["std_eps"]
        out.update(zip(scores, (d / scale for d in compared(values, settings["baseline"])), strict=True))
    return out


@register_advantage(
    "rloo",
    formula="A = s - mean of the other voters' s = (s - mean) n / (n - 1)",
    source="RLOO, arXiv 2402.14740",
    use="An unbiased baseline; matters with few samples per prompt.",
)
def rloo(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Each voter against the mean of the others."""
    out: dict[str, Advantage] = {}
    for group in groups:
        scores = group.scores()
        out.update(zip(scores, compared(list(scores.values()), "leave_one_out"), strict=True))
    return out


@register_advantage(
    "maxrl",
    defaults={"baseline": "mean", "mean_eps": 1e-6},
    limits={"mean_eps": Limit(above=0)},
    formula="A = (s - mean) / (mean + mean_eps), rewards >= 0",
    source="MaxRL, arXiv 2602.02710",
    use="Success rewards with many samples: a prompt counts more the rarer its success.",
)
def maxrl(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Deviation from the group's mean, over that mean.

    Raises ``ContractError`` on a negative score: the mean stands for a probability of success, and dividing by one
    near 0 or below would turn the gradient round.
    """
    out: dict[str, Advantage] = {}
    for group in groups:
        scores = group.scores()
        values = list(scores.values())
        if values and min(values) < 0:
            worst = min(scores, key=lambda tid: scores[tid])
            raise ContractError(
                f"advantage estimator 'maxrl': {worst} scored {scores[worst]:g}, and it needs rewards >= 0; "
                "shift the rewards, or use grpo"
            )
        scale = math.fsum(values) / max(len(values), 1) + settings["mean_eps"]
        out.update(zip(scores, (d / scale for d in compared(values, settings["baseline"])), strict=True))
    return out


@register_advantage(
    "turn_credit",
    by_turn=True,
    defaults={"gamma": 1.0, "baseline": "mean"},
    formula="A_k = G_k - mean over the whole group of G_k, G_k = r_k + gamma G_(k+1), 0 where the turn is absent",
    source="return to go with a baseline over the full group (the unbiased form of per-turn GRPO)",
    use="Rewards by turn: each turn is credited with what came at or after it.",
)
def turn_credit(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Return to go of each turn, compared with the same turn of every voter; ``(S,)``, constant over a turn.

    A voter that stopped before turn ``k`` has a return of 0 from there, and counts as that in the mean.  A mean over
    only those that went on would depend on the choice to go on, and penalise it.  With ``baseline=leave_one_out`` the
    expected gradient is exactly that of the expected return; with ``mean`` it is ``(n - 1) / n`` of it.
    """
    out: dict[str, Advantage] = {}
    for group in groups:
        slots = {member.trajectory_id: turn_slots(member) for member in group.voters}
        returns = {tid: _turn_returns(group.rewards[tid], own, settings["gamma"]) for tid, own in slots.items()}
        arrays = {tid: np.zeros(len(group.rewards[tid])) for tid in slots}
        for turn in sorted({turn for own in slots.values() for turn in own}):
            credit = compared([returns[tid].get(turn, 0.0) for tid in slots], settings["baseline"])
            for tid, value in zip(slots, credit, strict=True):
                arrays[tid][slots[tid].get(turn, [])] = value
        out.update(arrays)
    return out


def _turn_returns(rewards: FloatArray, slots: Mapping[int, Sequence[int]], gamma: float) -> dict[int, float]:
    """Discounted return from each turn on; the discount counts turns that were taken."""
    out: dict[int, float] = {}
    ahead = 0.0
    for turn in sorted(slots, reverse=True):
        ahead = math.fsum(rewards[list(slots[turn])]) + gamma * ahead
        out[turn] = ahead
    return out


@register_advantage(
    "reinforce_pp",
    group_relative=False,
    whitens=True,
    defaults={"gamma": 1.0},
    formula="G_t = r_t + gamma G_(t+1) over sampled tokens, whitened over all tokens of the step",
    source="REINFORCE++, arXiv 2501.03262",
    use="One sample per prompt, without a critic.",
)
def reinforce_pp(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Discounted return of each sampled token; ``(S,)``."""
    return {
        tid: returns_compacted(rewards, np.ones(len(rewards)), settings["gamma"])
        for group in groups
        for tid, rewards in group.voter_rewards().items()
    }


@register_advantage(
    "reinforce_pp_baseline",
    whitens=True,
    defaults={"baseline": "mean"},
    formula="A = s - mean over the group's voters, whitened over all tokens of the step",
    source="REINFORCE++-baseline, arXiv 2501.03262",
    use="Groups whose rewards differ in scale: one scale for the whole step instead of one per group.",
)
def reinforce_pp_baseline(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Deviation from the group's mean; the step's spread is the scale."""
    return grpo(groups, {**settings, "normalize_by_std": False})


@register_advantage(
    "gae",
    group_relative=False,
    whitens=True,
    needs=("values",),
    defaults={"gamma": 1.0, "gae_lambda": 1.0},
    formula="d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma gae_lambda A_(t+1) over sampled tokens, whitened",
    source="GAE, arXiv 1506.02438",
    use="A critic is trained: rewards within long episodes, or one sample per prompt.",
)
def gae(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """Generalised advantage estimation over sampled tokens; observations are no steps; ``(S,)``."""
    return {
        tid: gae_compacted(
            rewards, group.arrays["values"][tid], np.ones(len(rewards)), settings["gamma"], settings["gae_lambda"]
        )
        for group in groups
        for tid, rewards in group.voter_rewards().items()
    }


@register_advantage(
    "distill",
    group_relative=False,
    uses_rewards=False,
    needs=("teacher_logprobs", "behaviour_logprobs"),
    defaults={"gamma": 1.0},
    formula="A_t = d_t + gamma A_(t+1), d_t = log teacher_t - log sampler_t",
    source="on-policy distillation by reverse KL, arXiv 2306.13649",
    use="A stronger model scores the student's own samples; rewards are not read.",
)
def distill(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """How much more the teacher likes each sampled token than the student did; ``(S,)``.

    ``gamma=0`` judges each token by itself; ``gamma=1`` is the gradient of the sequence's reverse KL.
    """
    return {
        tid: returns_compacted(
            group.arrays["teacher_logprobs"][tid] - group.arrays["behaviour_logprobs"][tid],
            np.ones(len(rewards)),
            settings["gamma"],
        )
        for group in groups
        for tid, rewards in group.voter_rewards().items()
    }
