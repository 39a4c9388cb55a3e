"""Advantages: from groups with validity to one number per trajectory or per sampled token.

Owns: placing rewards on tokens, the estimator contract and registry, whitening over a step, a critic's targets.
Refuses: formulas (``estimators``), inferring a group from a position, counting an absent member, masks, denominators.

An estimator is a function ``(groups, settings) -> {trajectory id: advantage}`` over ``ScoredGroup`` objects.
It sees *voters* only: failed, cancelled, unscored and zero-length members are absent, never a zero, so no
reward of theirs can matter.  An advantage is a number, or an array ``(S,)`` over the trajectory's sampled tokens.

What an estimator ``needs`` besides rewards (``values``, ``teacher_logprobs``, ``behaviour_logprobs``, or the name of
any token-aligned side channel) comes per sampled token: given to ``compute_advantages``, or read from the spans.

An estimator of your own:

>>> @register_advantage("raw", group_relative=False)
... def raw(groups, settings):
...     return {tid: score for group in groups for tid, score in group.scores().items()}
>>> ADVANTAGES.remove("raw")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.compile import Advantage
from slipstream.algorithms.kl import apply_kl_to_rewards
from slipstream.algorithms.options import Limit, checked
from slipstream.algorithms.recursions import gae_compacted
from slipstream.algorithms.registry import Registry
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError, SettingsError
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


def sampled_array(trajectory: Trajectory, name: str) -> FloatArray | None:
    """``(S,)``: a per-token array that the sampled spans carry; None when one of them does not.

    ``behaviour_logprobs`` are the sampler's own log-probs; any other name is a token-aligned side channel.
    """
    pieces: list[FloatArray] = []
    for span in trajectory.sampled_spans():
        if name == "behaviour_logprobs":
            values: Any = span.logprobs
        else:
            channel = span.side.get(name)
            values = channel.values if channel is not None and channel.align == "token" else None
        if values is None or isinstance(values, Missing):
            return None
        pieces.append(np.asarray(values, dtype=np.float64))
    return np.concatenate(pieces) if pieces else np.zeros(0)


Arrays = Mapping[str, FloatArray]
"""``(S,)`` by trajectory id."""


@dataclass(frozen=True)
class ScoredGroup:
    """One group as estimators see it: its voters, their token rewards ``(S,)`` by trajectory id, further arrays."""

    group: Group
    rewards: Arrays
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    """What the estimator needs besides: by name, then ``(S,)`` by trajectory id."""

    @property
    def voters(self) -> tuple[Trajectory, ...]:
        """Members that count, in order."""
        return self.group.voters

    def voter_rewards(self) -> dict[str, FloatArray]:
        """Token rewards ``(S,)`` of each voter, in order."""
        return {m.trajectory_id: self.rewards[m.trajectory_id] for m in self.voters}

    def scores(self) -> dict[str, float]:
        """Each voter's total reward; summed exactly (``fsum``), so equal rewards give equal scores."""
        return {tid: math.fsum(rewards) for tid, rewards in self.voter_rewards().items()}


EstimatorFunction = Callable[[Sequence[ScoredGroup], Mapping[str, Any]], Mapping[str, Advantage]]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator.

    ``group_relative`` ones give a lone voter no signal and need >= 2 samples; ``whitens`` says whether advantages are
    whitened over the step unless ``algorithm.normalize_batch`` says otherwise; ``uses_rewards`` is False for those
    that learn from elsewhere.  ``formula``, ``source`` and ``use`` are for ``explain`` and the documentation.
    """

    name: str
    function: EstimatorFunction
    group_relative: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    whitens: bool = False
    uses_rewards: bool = True
    by_turn: bool = False
    """Compares turns: equal totals earned in different turns teach something."""
    formula: str = ""
    source: str = ""
    use: str = ""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Which values of its own settings mean something."""

    def settings(self, algorithm: AlgorithmSettings) -> dict[str, Any]:
        """Its defaults under the fields of the same name and ``advantage_settings``.

        Raises ``SettingsError`` on an unknown key and on a value without meaning.
        """
        known = type(algorithm).model_fields
        for key in algorithm.advantage_settings:
            if key in known:
                raise SettingsError(f"{key!r} has a setting of its own: set algorithm.{key}")
        own = {name: value for name, value in self.defaults.items() if name not in known}
        fields = {name: getattr(algorithm, name) for name in self.defaults if name in known}
        return {**fields, **checked(f"estimator {self.name!r}", own, self.limits, algorithm.advantage_settings)}


ADVANTAGES: Registry[Estimator] = Registry("advantage estimator", wrap=Estimator)


def register_advantage(
    name: str,
    *,
    group_relative: bool = True,
    defaults: Mapping[str, Any] | None = None,
    needs: tuple[str, ...] = (),
    whitens: bool = False,
    uses_rewards: bool = True,
    by_turn: bool = False,
    formula: str = "",
    source: str = "",
    use: str = "",
    limits: Mapping[str, Limit] | None = None,
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Decorator that registers an estimator; a default named like a field of ``AlgorithmSettings`` is read there."""

    def add(function: EstimatorFunction) -> EstimatorFunction:
        made = Estimator(
            name,
            function,
            group_relative,
            dict(defaults or {}),
            needs,
            whitens,
            uses_rewards,
            by_turn,
            formula,
            source,
            use,
            dict(limits or {}),
        )
        ADVANTAGES.add(name, made)
        return function

    return add


def compute_advantages(
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    *,
    rewards: Arrays | None = None,
    arrays: Mapping[str, Arrays] | None = None,
) -> dict[str, Advantage]:
    """The advantage of every voter of ``groups``, by trajectory id.

    ``rewards`` replaces the trajectories' own token rewards (``rewards_with_kl``); ``arrays`` holds what the estimator
    needs besides, by name and trajectory id (a critic's ``values``).  Raises ``SettingsError`` on an unknown
    estimator or setting, ``ContractError`` when something needed is absent, and when an estimator leaves a voter out,
    names a stranger, or returns a number that is not finite or an array of the wrong length.
    """
    estimator = ADVANTAGES.get(settings.advantage)
    options = estimator.settings(settings)
    scored: list[ScoredGroup] = []
    for group in groups:
        own: dict[str, FloatArray] = {}
        for member in group.voters:
            if rewards is not None and member.trajectory_id not in rewards:
                raise ContractError(f"{member.trajectory_id} votes but has no entry in the given rewards")
            own[member.trajectory_id] = token_rewards(member) if rewards is None else rewards[member.trajectory_id]
        needed = {name: _needed(name, group.voters, (arrays or {}).get(name)) for name in estimator.needs}
        scored.append(ScoredGroup(group, own, needed))
    found = estimator.function(scored, options)
    if not isinstance(found, Mapping):
        raise ContractError(
            f"advantage estimator {settings.advantage!r} returns {type(found).__name__}; return a dict with the "
            "advantage of every voter, by trajectory id"
        )
    result = dict(found)
    sizes = {member.trajectory_id: member.sampled_tokens for group in groups for member in group.voters}
    _check_result(settings.advantage, result, sizes)
    whitens = estimator.whitens if settings.normalize_batch is None else settings.normalize_batch
    return whitened(result, sizes) if whitens else result


def _needed(name: str, voters: Sequence[Trajectory], given: Arrays | None) -> dict[str, FloatArray]:
    out: dict[str, FloatArray] = {}
    for member in voters:
        tid = member.trajectory_id
        values = sampled_array(member, name) if given is None else given.get(tid)
        if values is None:
            raise ContractError(f"the advantage estimator needs {name}, which {tid} does not have for every token")
        values = np.asarray(values, dtype=np.float64)
        if values.shape != (member.sampled_tokens,) or not np.all(np.isfinite(values)):
            raise ContractError(f"{tid}: {name} must be {member.sampled_tokens} finite numbers, one per sampled token")
        out[tid] = values
    return out


def _check_result(name: str, result: Mapping[str, Advantage], sizes: Mapping[str, int]) -> None:
    for wrong in sorted(set(result) ^ set(sizes)):
        if wrong in sizes:
            raise ContractError(
                f"advantage estimator {name!r} left out voter {wrong}; give each of group.voters one, 0 where there is "
                "nothing to compare"
            )
        raise ContractError(f"advantage estimator {name!r} named a stranger, {wrong}; name group.voters alone")
    for tid, value in result.items():
        array = np.asarray(value, dtype=np.float64)
        if array.shape not in ((), (sizes[tid],)) or not np.all(np.isfinite(array)):
            raise ContractError(
                f"advantage estimator {name!r}: {tid} got {value!r}; want a finite number, or "
                f"{sizes[tid]} of them (one per sampled token); equal rewards have a deviation of 0"
            )


VARIANCE_FLOOR = 1e-8
"""Least variance that whitening divides by."""


def whitened(advantages: Mapping[str, Advantage], sizes: Mapping[str, int]) -> dict[str, Advantage]:
    """``(A - mean) / sqrt(max(var, 1e-8))`` over all sampled tokens of the step (``sizes`` per trajectory).

    Tokens of voters only, so nothing else can enter.  The variance is two-pass with ddof 0, sums are exact, and equal
    advantages everywhere give exactly 0.  A number counts once per token of its trajectory, and stays a number.
    """
    parts = [np.broadcast_to(np.asarray(value, dtype=np.float64), (sizes[tid],)) for tid, value in advantages.items()]
    tokens = np.concatenate(parts) if parts else np.zeros(0)
    if not len(tokens) or tokens.min() == tokens.max():
        return {tid: value * 0.0 for tid, value in advantages.items()}
    mean = math.fsum(tokens) / len(tokens)
    variance = math.fsum((tokens - mean) ** 2) / len(tokens)
    scale = math.sqrt(max(variance, VARIANCE_FLOOR))
    return {tid: (value - mean) / scale for tid, value in advantages.items()}


def critic_targets(
    groups: Sequence[Group], settings: AlgorithmSettings, values: Arrays, *, rewards: Arrays | None = None
) -> dict[str, FloatArray]:
    """What a critic should have said: ``A + V`` per sampled token ``(S,)``, by trajectory id (1506.02438).

    ``values`` are the critic's when advantages are computed; ``A`` is GAE with ``gamma`` and ``gae_lambda``, before
    any whitening.
    """
    out: dict[str, FloatArray] = {}
    for group in groups:
        for tid, own in _needed("values", group.voters, values).items():
            member = next(m for m in group.voters if m.trajectory_id == tid)
            earned = token_rewards(member) if rewards is None else rewards[tid]
            ones = np.ones(len(own))
            out[tid] = own + gae_compacted(earned, own, ones, settings.gamma, settings.gae_lambda)
    return out


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
