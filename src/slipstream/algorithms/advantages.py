"""Advantages: from groups with validity to one number per trajectory or per sampled token.

Owns: placing rewards on tokens, the estimator contract and registry, ``grpo`` and ``rloo``.
Refuses: inferring a group from a position, counting an absent member, masks, denominators.

An estimator is a function ``(groups, settings) -> {trajectory id: advantage}`` over ``ScoredGroup`` objects.
It sees *voters* only: failed, cancelled, unscored and zero-length members are absent, never a zero, so no
reward of theirs can matter.  An advantage is a number, or an array ``(S,)`` over the trajectory's sampled tokens.

An estimator of your own:

>>> @register_advantage("raw", group_relative=False)
... def raw(groups, settings):
...     return {tid: score for group in groups for tid, score in group.scores().items()}
>>> ADVANTAGES.remove("raw")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.compile import Advantage
from slipstream.algorithms.kl import apply_kl_to_rewards
from slipstream.algorithms.registry import Registry
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError
from slipstream.trajectory import Group, Missing, Trajectory


def turn_slots(trajectory: Trajectory) -> dict[int, list[int]]:
    """Sampled-token indices (``0 .. S-1``, row order) of each turn, in order."""
    slots: dict[int, list[int]] = {}
    at = 0
    for span in trajectory.sampled_spans():
        if span.turn is not None:
            slots.setdefault(span.turn, []).extend(range(at, at + len(span)))
        at += len(span)
    return slots


def token_rewards(trajectory: Trajectory) -> FloatArray:
    """Rewards placed on sampled tokens, ``(S,)``: at their position, else on the last sampled token of their turn.

    Raises ``ContractError`` on a Missing reward and on a position outside the turn's sampled tokens.
    """
    out = np.zeros(trajectory.sampled_tokens)
    slots = turn_slots(trajectory)
    for reward in trajectory.rewards:
        name = f"{trajectory.trajectory_id}: reward {reward.component!r} of turn {reward.turn}"
        if isinstance(reward.value, Missing):
            raise ContractError(f"{name} is missing ({reward.value.reason})")
        own = slots.get(reward.turn, [])
        position = len(own) - 1 if reward.position is None else reward.position
        if not 0 <= position < len(own):
            raise ContractError(f"{name} is at position {position} of {len(own)} sampled tokens")
        out[own[position]] += float(reward.value)
    return out


@dataclass(frozen=True)
class ScoredGroup:
    """One group as estimators see it: its voters, and their token rewards ``(S,)`` by trajectory id."""

    group: Group
    rewards: Mapping[str, FloatArray]

    @property
    def voters(self) -> tuple[Trajectory, ...]:
        """Members that count, in order."""
        return self.group.voters

    def scores(self) -> dict[str, float]:
        """Each voter's total reward; summed exactly (``fsum``), so equal rewards give equal scores."""
        return {m.trajectory_id: math.fsum(self.rewards[m.trajectory_id]) for m in self.voters}


EstimatorFunction = Callable[[Sequence[ScoredGroup], Mapping[str, Any]], Mapping[str, Advantage]]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator; ``group_relative`` ones give a lone voter no signal and need >= 2 samples."""

    name: str
    function: EstimatorFunction
    group_relative: bool
    defaults: Mapping[str, Any]


ADVANTAGES: Registry[Estimator] = Registry("advantage estimator")


def register_advantage(
    name: str, *, group_relative: bool = True, defaults: Mapping[str, Any] | None = None
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Decorator that registers an estimator; a default named like a field of ``AlgorithmSettings`` is read there."""

    def add(function: EstimatorFunction) -> EstimatorFunction:
        ADVANTAGES.add(name, Estimator(name, function, group_relative, dict(defaults or {})))
        return function

    return add


def centred(scores: Sequence[float]) -> list[float]:
    """Scores minus their mean; exactly 0 everywhere when all are equal."""
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


@register_advantage("grpo", defaults={"normalize_by_std": True, "std_eps": 1e-6})
def grpo(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """``(s - mean) / (std + eps)`` over the group's voters, ``std`` with ddof 1 (GRPO, 2402.03300).

    Without ``normalize_by_std`` only the mean is taken off (Dr. GRPO, 2503.20783).  The variance is two-pass;
    a constant group gives exactly 0, and so does a lone voter, which has no baseline.
    """
    out: dict[str, Advantage] = {}
    for group in groups:
        scores = group.scores()
        deviations = centred(list(scores.values()))
        scale = 1.0
        if settings["normalize_by_std"] and len(deviations) > 1:
            variance = math.fsum(d * d for d in deviations) / (len(deviations) - 1)
            scale = math.sqrt(variance) + settings["std_eps"]
        out.update(zip(scores, (d / scale for d in deviations), strict=True))
    return out


@register_advantage("rloo")
def rloo(groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> dict[str, Advantage]:
    """``s_i - mean of the other voters' s``, which is ``(s_i - mean) n / (n - 1)`` (RLOO, 2402.14740).

    A lone voter has nobody to be compared with and gets 0.
    """
    out: dict[str, Advantage] = {}
    for group in groups:
        scores = group.scores()
        n = len(scores)
        scale = n / (n - 1) if n > 1 else 0.0
        out.update(zip(scores, (d * scale for d in centred(list(scores.values()))), strict=True))
    return out


def compute_advantages(
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    *,
    rewards: Mapping[str, FloatArray] | None = None,
) -> dict[str, Advantage]:
    """The advantage of every voter of ``groups``, by trajectory id.

    ``rewards`` replaces the trajectories' own token rewards (``rewards_with_kl``).  Raises ``SettingsError``
    on an unknown estimator, ``ContractError`` when an estimator leaves a voter out, names a stranger, or
    returns a number that is not finite or an array of the wrong length.
    """
    estimator = ADVANTAGES.get(settings.advantage)
    known = type(settings).model_fields
    options = {
        name: getattr(settings, name) if name in known else default for name, default in estimator.defaults.items()
    }
    scored: list[ScoredGroup] = []
    for group in groups:
        own: dict[str, FloatArray] = {}
        for member in group.voters:
            if rewards is not None and member.trajectory_id not in rewards:
                raise ContractError(f"{member.trajectory_id} votes but has no entry in the given rewards")
            own[member.trajectory_id] = token_rewards(member) if rewards is None else rewards[member.trajectory_id]
        scored.append(ScoredGroup(group, own))
    result = dict(estimator.function(scored, options))
    sizes = {member.trajectory_id: member.sampled_tokens for group in groups for member in group.voters}
    for wrong in sorted(set(result) ^ set(sizes)):
        what = "left out voter" if wrong in sizes else "named a stranger,"
        raise ContractError(f"advantage estimator {settings.advantage!r} {what} {wrong}")
    for tid, value in result.items():
        array = np.asarray(value, dtype=np.float64)
        if array.shape not in ((), (sizes[tid],)) or not np.all(np.isfinite(array)):
            raise ContractError(
                f"advantage estimator {settings.advantage!r}: {tid} got {value!r}; want a finite number, or "
                f"{sizes[tid]} of them (one per sampled token)"
            )
    return result


def scalar_advantage(value: Advantage) -> float:
    """One number for the record: the advantage itself, or the mean over sampled tokens."""
    return float(np.mean(np.asarray(value, dtype=np.float64)))


def rewards_with_kl(
    groups: Sequence[Group],
    batch: Batch,
    logprobs: Sequence[FloatArray],
    ref_logprobs: Sequence[FloatArray],
    coef: float,
    estimator: str,
) -> dict[str, FloatArray]:
    """Token rewards of every voter with the KL penalty taken off (``algorithm.kl_in=reward``).

    ``batch`` is ``compile_batch(groups, None, ...)`` without exclusions, so that every voter is in it;
    ``logprobs`` and ``ref_logprobs`` are per row of it, trained tokens only.  Shapes out: ``(S,)`` by trajectory.
    """
    policy: dict[str, list[FloatArray]] = {}
    reference: dict[str, list[FloatArray]] = {}
    for row, own, ref in zip(batch.rows, logprobs, ref_logprobs, strict=True):
        policy.setdefault(row.trajectory_id, []).append(own)
        reference.setdefault(row.trajectory_id, []).append(ref)
    out: dict[str, FloatArray] = {}
    for group in groups:
        for member in group.voters:
            tid = member.trajectory_id
            if tid not in policy:
                raise ContractError(f"KL in reward: {tid} votes but was not scored; score before filters exclude")
            pieces = np.concatenate(policy[tid]), np.concatenate(reference[tid])
            out[tid] = apply_kl_to_rewards(token_rewards(member), *pieces, coef, estimator)
    return out
