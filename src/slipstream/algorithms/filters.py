"""Filters: which voters are left out of training, whose reward is changed by a rule, and why.

Owns: zero-variance and overlong filtering, zeroing the reward of cut-off answers, the soft overlong penalty, groups
that stand in for others (dynamic sampling); decisions with reasons, and what became of every member.
Refuses: dropping anything silently, touching baselines: a filtered trajectory keeps its vote.

Reward rules come first, then filters.  Every one of them judges one group at a time by that group alone, so a step's
pool gives the same decisions whether groups arrive together or one by one, in any order.

    result = apply_filters(groups, settings.algorithm, settings.rollout)
    advantages = compute_advantages(result.groups, settings.algorithm)
    batch = compile_batch(result.groups, advantages, reduction, excluded=result.excluded, copies=result.copies)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.registry import Registry
from slipstream.config.algorithm import OverlongSettings
from slipstream.config.resolve import most_sampled_tokens
from slipstream.config.settings import AlgorithmSettings, RolloutSettings
from slipstream.errors import ContractError
from slipstream.trajectory import Group, Missing, Reward, Trajectory, Truncated

OVERLONG = "overlong"
"""The reward component of ``penalise_overlong``."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One trajectory is left out of training, has its reward set to 0, or is penalised (a further, negative reward).

    ``reason`` is a stable short name for the record; ``tokens`` is how many sampled tokens it concerns.
    """

    action: Literal["exclude", "zero_reward", "penalty"]
    reason: str
    group_id: str
    trajectory_id: str
    tokens: int


GroupFilter = Callable[[Group, AlgorithmSettings, RolloutSettings], Iterable[Decision]]
FILTERS: Registry[GroupFilter] = Registry("filter", wrap=lambda path, function: function)

BUNDLED = ("zero_variance", "truncated")
"""Filters that every run applies; each checks its own setting."""


def register_filter(name: str) -> Callable[[GroupFilter], GroupFilter]:
    """Decorator: register a function that yields ``exclude`` decisions about one group's voters."""

    def add(function: GroupFilter) -> GroupFilter:
        FILTERS.add(name, function)
        return function

    return add


def _exclude(member: Trajectory, reason: str) -> Decision:
    return Decision("exclude", reason, member.group_id, member.trajectory_id, member.sampled_tokens)


def has_spread(group: Group, tol: float, *, by_turn: bool = False) -> bool:
    """Whether the voters' total rewards (or those of any turn) differ by more than ``tol``; a lone voter has none."""
    voters = group.voters
    if not by_turn:
        earned = [[member.total_reward for member in voters]]
    else:
        turns = {reward.turn for member in voters for reward in member.rewards}
        earned = [[_earned_in(member, turn) for member in voters] for turn in turns]
    return any(values and max(values) - min(values) > tol for values in earned)


def _earned_in(member: Trajectory, turn: int) -> float:
    return math.fsum(float(r.value) for r in member.rewards if r.turn == turn and not isinstance(r.value, Missing))


@register_filter("zero_variance")
def zero_variance(group: Group, algorithm: AlgorithmSettings, rollout: RolloutSettings) -> Iterable[Decision]:
    """Leave out groups whose voters all earned the same: every group-relative advantage in them is 0.

    Works on totals, so it does not matter whether rewards came per token, per turn or at the end; for an estimator that
    compares turns (``turn_credit``) every turn has to be equal.  A lone voter goes too (reason ``lone_voter``) unless
    the estimator has a baseline from outside of the group.
    """
    estimator = ADVANTAGES.get(algorithm.advantage)
    if not algorithm.drop_zero_variance or has_spread(group, algorithm.zero_variance_tol, by_turn=estimator.by_turn):
        return []
    voters = group.voters
    if len(voters) == 1 and not estimator.group_relative:
        return []
    return [_exclude(member, "zero_variance" if len(voters) > 1 else "lone_voter") for member in voters]


@register_filter("truncated")
def truncated(group: Group, algorithm: AlgorithmSettings, rollout: RolloutSettings) -> Iterable[Decision]:
    """Overlong filtering (DAPO, 2503.14476): cut-off answers vote but are not trained."""
    if not algorithm.drop_truncated:
        return []
    return [_exclude(member, "truncated") for member in group.voters if isinstance(member.outcome, Truncated)]


def cut_off(member: Trajectory) -> bool:
    """Whether the trajectory did not end by itself: a budget ended it, or its last turn did not stop."""
    return isinstance(member.outcome, Truncated) or bool(member.turns and member.turns[-1].finish_reason != "stop")


def zero_rewards_of_cut_off(group: Group) -> tuple[Group, list[Decision]]:
    """A copy of the group in which voters that were cut off earned 0; their components keep their names."""
    decisions: list[Decision] = []
    members: list[Trajectory] = []
    for member in group.members:
        if member.votes and cut_off(member):
            decisions.append(
                Decision("zero_reward", "non_stop", group.group_id, member.trajectory_id, member.sampled_tokens)
            )
            member = replace(member, rewards=tuple(replace(reward, value=0.0) for reward in member.rewards))
        members.append(member)
    return (replace(group, members=tuple(members)) if decisions else group), decisions


def overlong_penalty(tokens: int, limit: int, settings: OverlongSettings) -> float:
    """``factor * clip((n - (L - b)) / b, 0, 1)``: 0 up to ``L - b`` sampled tokens, ``factor`` from ``L`` on."""
    buffer = settings.buffer_tokens or max(1, limit // 5)
    return settings.factor * min(max((tokens - (limit - buffer)) / buffer, 0.0), 1.0)


def penalise_overlong(
    group: Group, algorithm: AlgorithmSettings, rollout: RolloutSettings
) -> tuple[Group, list[Decision]]:
    """A copy of the group in which long answers carry a further reward ``overlong`` below 0 (DAPO, 2503.14476).

    Lengths count the sampled tokens of all turns; the penalty lands on the last turn's last one.
    """
    limit = algorithm.overlong.max_tokens or most_sampled_tokens(rollout)
    decisions: list[Decision] = []
    members: list[Trajectory] = []
    for member in group.members:
        penalty = overlong_penalty(member.sampled_tokens, limit, algorithm.overlong) if member.votes else 0.0
        if penalty > 0:
            last = max(span.turn for span in member.sampled_spans() if span.turn is not None)
            member = replace(member, rewards=(*member.rewards, Reward(last, -penalty, OVERLONG)))
            decisions.append(
                Decision("penalty", "overlong", group.group_id, member.trajectory_id, member.sampled_tokens)
            )
        members.append(member)
    return (replace(group, members=tuple(members)) if decisions else group), decisions


def without_overlong(member: Trajectory) -> Trajectory:
    """The trajectory before ``penalise_overlong``: the ledger's carry what the rules added to their rewards."""
    return replace(member, rewards=tuple(reward for reward in member.rewards if reward.component != OVERLONG))


@dataclass(frozen=True)
class FilterResult:
    """``groups`` to estimate on (all of them, rewards possibly changed by a rule) and who is left out of training.

    ``copies`` says how often a group stands in the step, by id; a group that is not named stands in it once.
    """

    groups: tuple[Group, ...]
    decisions: tuple[Decision, ...]
    copies: Mapping[str, int] = field(default_factory=dict)

    @property
    def excluded(self) -> dict[str, str]:
        """Reason by trajectory id, of those left out; the first filter that spoke wins."""
        out: dict[str, str] = {}
        for decision in self.decisions:
            if decision.action == "exclude":
                out.setdefault(decision.trajectory_id, decision.reason)
        return out

    @property
    def counts(self) -> dict[str, int]:
        """Trajectories by reason, changed rewards included."""
        reasons = [d.reason for d in self.decisions if d.action != "exclude"] + list(self.excluded.values())
        return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def apply_filters(
    groups: Sequence[Group],
    algorithm: AlgorithmSettings,
    rollout: RolloutSettings,
    names: Sequence[str] | None = None,
) -> FilterResult:
    """Run the reward rules, then the filters, over a step's groups.

    ``names`` are registered filters or import paths; None is the bundled ones and ``algorithm.filters``.  Raises
    ``ContractError`` when a filter yields anything but exclusions, or excludes a member that does not vote (those are
    absent already, with their own reason).
    """
    filters = {name: FILTERS.get(name) for name in ((*BUNDLED, *algorithm.filters) if names is None else names)}
    kept: list[Group] = []
    decisions: list[Decision] = []
    for group in groups:
        if algorithm.zero_reward_on_non_stop:
            group, zeroed = zero_rewards_of_cut_off(group)
            decisions.extend(zeroed)
        if algorithm.overlong.factor > 0:
            group, penalised = penalise_overlong(group, algorithm, rollout)
            decisions.extend(penalised)
        voters = {member.trajectory_id for member in group.voters}
        for name, judge in filters.items():
            found = judge(group, algorithm, rollout)
            if not isinstance(found, Iterable):
                raise ContractError(
                    f"filter {name!r} returns {type(found).__name__}; yield a Decision for each voter to leave out, "
                    "or return a list of them, empty for none"
                )
            for decision in found:
                if not isinstance(decision, Decision) or decision.action != "exclude":
                    raise ContractError(
                        f"filter {name!r} yields {decision!r}; a filter leaves voters out: yield "
                        "Decision('exclude', reason, group_id, trajectory_id, tokens)"
                    )
                if decision.trajectory_id not in voters:
                    raise ContractError(
                        f"filter {name!r}: {decision.trajectory_id} is no voter of group {group.group_id}; judge "
                        "group.voters, the others are left out anyway"
                    )
                decisions.append(decision)
        kept.append(group)
    return FilterResult(tuple(kept), tuple(decisions))


def stand_ins(result: FilterResult, prompts: int) -> FilterResult:
    """Dynamic sampling ``replace``: groups that train stand in for missing ones until there are ``prompts`` of them.

    Every good group stands in the step equally often, or once more: which ones is decided by a digest of their ids, so
    neither order nor a random state matters.  A copy is no new sample: its tokens are computed once and weigh double.
    """
    excluded = result.excluded
    good = [g.group_id for g in result.groups if any(m.trajectory_id not in excluded for m in g.voters)]
    if not good or len(good) >= prompts:
        return result
    often, more = divmod(prompts, len(good))
    ranked = sorted(good, key=lambda group_id: hashlib.sha256(group_id.encode()).digest())
    return replace(result, copies={group_id: often + (place < more) for place, group_id in enumerate(ranked)})


def dispositions(groups: Sequence[Group], excluded: Mapping[str, str]) -> dict[str, str]:
    """What became of each member: ``trained``, ``filtered:<reason>`` or ``failed`` (it had no vote)."""
    out: dict[str, str] = {}
    for group in groups:
        for member in group.members:
            tid = member.trajectory_id
            if not member.votes:
                out[tid] = "failed"
            else:
                out[tid] = f"filtered:{excluded[tid]}" if tid in excluded else "trained"
    return out


def token_split(groups: Sequence[Group], excluded: Mapping[str, str]) -> dict[str, int]:
    """Sampled tokens of these groups by what became of them; the parts sum to ``sampled``."""
    fate = dispositions(groups, excluded)
    out = {"sampled": 0, "trained": 0, "filtered": 0, "failed": 0}
    for group in groups:
        for member in group.members:
            out["sampled"] += member.sampled_tokens
            out[fate[member.trajectory_id].partition(":")[0]] += member.sampled_tokens
    return out
