"""``slipstream check advantage``, ``check filter`` and ``check reduction``: does a component keep its contract?

Owns: the invariance suites of estimators, filters and reductions, run on one by name or import path, with messages that
say what is wrong and how to mend it; which components of a run are the user's own.  Refuses: losses (``loss_check``).

An estimator and a filter are given a small step of groups: several turns, several group sizes, a lone voter, a group
whose voters earned the same, and members that failed, were cancelled or were not scored.  Whatever they say of a voter
has to stay when groups or members are put in another order, when members without a vote earn anything else or are not
there at all, when observations grow, and when the same is asked twice.

    for finding in check_advantage("my_pkg.mine:estimator"):
        print(finding)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np

from slipstream.algorithms.advantages import ADVANTAGES, Arrays, compute_advantages
from slipstream.algorithms.batch import FloatArray
from slipstream.algorithms.check import loss_options
from slipstream.algorithms.compile import compile_batch
from slipstream.algorithms.filters import BUNDLED, FILTERS, Decision, apply_filters
from slipstream.algorithms.loss_check import Finding, check_loss, random_state
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.reduce import REDUCTIONS, ReductionSpec, token_weights
from slipstream.config.algorithm import OverlongSettings
from slipstream.config.settings import AlgorithmSettings, RolloutSettings
from slipstream.errors import ContractError, SlipstreamError
from slipstream.trajectory import (
    Cancelled,
    Completed,
    Failed,
    Group,
    Missing,
    Outcome,
    Reward,
    Row,
    SamplingSpec,
    Span,
    Trajectory,
    Truncated,
    Turn,
    VersionRun,
)

# ---- a step's groups

_REWARDS: Mapping[str, Sequence[Sequence[float]]] = {
    "a": [[1.0], [0.0, 0.5], [0.25, 0.0, 1.0]],
    "b": [[0.0], [0.0, 0.25]],
    "c": [[1.5, 0.0], [0.0], [0.5], [0.125, 0.125]],
    "constant": [[0.5], [0.5], [0.5]],
    "tenths": [[0.1], [0.1], [0.1]],  # no binary fraction: its mean may differ from each of them
    "far": [[1e6 + 0.7], [1e6 + 0.7], [1e6 + 0.7]],
    "lone": [[1.0]],
}
"""Rewards by turn of the voters of each group, none below 0."""


def _member(group: str, sample: int, rewards: Sequence[float], seen: int, outcome: Outcome) -> Trajectory:
    """Turns of one to three sampled tokens, with ``seen`` observed tokens between them."""
    spans = [Span.prompt([1, 2, 3])]
    for turn in range(len(rewards)):
        if turn:
            spans.append(Span.observation([5] * seen, turn - 1))
        size = 1 + (turn + sample) % 3
        runs = [VersionRun("policy/0/1", 0, size)]
        spans.append(Span.sampled(range(10, 10 + size), [-0.5 - turn] * size, runs, SamplingSpec(), turn))
    values = tuple(Reward(turn, float(value)) for turn, value in enumerate(rewards))
    turns = tuple(Turn(turn, "", (), "stop") for turn in range(len(rewards)))
    name = f"{group}/s{sample}"
    return Trajectory(name, group, f"p-{group}", sample, 0, (Row(tuple(spans)),), turns, values, outcome, 0)


def _absent(group: str, reward: float) -> list[Trajectory]:
    """Members without a vote: failed, cancelled, and one that nobody scored."""
    failed = _member(group, 90, [reward], 1, Failed("env_raised", "ValueError", retryable=True))
    cancelled = _member(group, 91, [reward, reward], 1, Cancelled("stale"))
    unscored = _member(group, 92, [reward], 1, Completed())
    unscored = replace(unscored, rewards=(Reward(0, Missing("the judge is down")),))
    return [failed, cancelled, unscored]


def _step(*, seen: int = 2, absent: float | None = 0.0) -> list[Group]:
    """The groups; ``absent`` is what members without a vote earned, None leaves them out."""
    groups = []
    for name, plan in _REWARDS.items():
        ends: list[Outcome] = [Truncated("max_tokens") if i == 1 else Completed() for i in range(len(plan))]
        members = [_member(name, i, rewards, seen, ends[i]) for i, rewards in enumerate(plan)]
        if absent is not None:
            gone = _absent(name, absent)
            members = [gone[0], *members, *gone[1:]]
        groups.append(Group(name, f"p-{name}", len(members), tuple(members)))
    return groups


def _turned(groups: Sequence[Group]) -> list[Group]:
    """Groups and members in another order."""
    return [replace(group, members=group.members[::-1]) for group in reversed(groups)]


_ORDER = (
    "order",
    "changes when groups or members come in another order; find members by their id or their group, never by their "
    "place, and draw nothing by place",
)
_ABSENT = (
    "validity",
    "changes with what a failed, cancelled or unscored member earned, or with whether it is there; read group.voters, "
    "which are the members that count, instead of group.members",
)
_OBSERVED = (
    "observations",
    "changes with the number of observed tokens; count sampled tokens only (trajectory.sampled_tokens)",
)
_TWICE = ("repeatable", "says something else when it is asked again; keep no state between calls, and draw no numbers")
_GIVEN = (
    "Do not change what is given (groups, members, spans, settings): other parts of a step read the same objects. "
    "Make new ones, or return what you decide"
)


def _differences(
    ask: Callable[[Sequence[Group]], Any], same: Callable[[Any, Any], bool], what: str, plain: Any
) -> Iterator[Finding]:
    """Rules that an estimator and a filter share: what must not matter does not.  ``plain`` is its first answer."""
    groups = _step()
    before, numbers = repr(groups), random_state()
    again = ask(groups)
    if repr(groups) != before:
        yield Finding("error", "in place", f"changes the groups that it is given. {_GIVEN}")
    if random_state() != numbers:
        yield Finding("error", "repeatable", f"{what} comes from a global random generator; draw no numbers")
        return
    if not same(plain, again):
        yield Finding("error", _TWICE[0], f"{what} {_TWICE[1]}")  # nothing after it would mean anything
        return
    trials: tuple[tuple[Sequence[Group], tuple[str, str]], ...] = (
        (_step(absent=1e6), _ABSENT),
        (_step(absent=-1e6), _ABSENT),
        (_step(absent=None), _ABSENT),
        (_turned(_step()), _ORDER),
        (_step(seen=7), _OBSERVED),
    )
    told: set[str] = set()
    for groups, (rule, message) in trials:
        if rule not in told and not same(plain, ask(groups)):
            told.add(rule)
            yield Finding("error", rule, f"{what} {message}")


def _stopped(call: Callable[[], Any]) -> Finding | None:
    """The finding of a component that cannot be used at all."""
    try:
        call()
    except SlipstreamError as error:
        return Finding("error", "contract", str(error))
    # Fault boundary: the component under test may raise anything.
    except Exception as error:  # noqa: BLE001
        text = " ".join(str(error).split())
        if "frozen" in text or "read-only" in text or isinstance(error, FrozenInstanceError):
            return Finding("error", "in place", f"raises {type(error).__name__}: {text}. {_GIVEN}")
        return Finding(
            "error",
            "runs",
            f"raises {type(error).__name__}: {text}. A group may have a single voter or none, and members that failed "
            "or have no score; group.voters are those that count, and only their rewards are sure to be numbers",
        )
    return None


def _first_stop(*calls: Callable[[], Any]) -> list[Finding]:
    """The finding of the first call that cannot be made, an exception before a refusal."""
    found = [finding for call in calls if (finding := _stopped(call)) is not None]
    return sorted(found, key=lambda finding: finding.rule == "contract")[:1]


# ---- estimators


def check_advantage(name: str, settings: AlgorithmSettings | None = None) -> list[Finding]:
    """Every broken rule of the estimator called ``name`` (registered, or ``module:function``).

    ``settings`` holds what it reads besides (``gamma``, ``advantage_settings``).  Raises ``SettingsError`` when there
    is no such estimator.
    """
    estimator = ADVANTAGES.get(name)
    chosen = (settings or AlgorithmSettings()).model_copy(update={"advantage": name, "normalize_batch": False})

    def ask(groups: Sequence[Group]) -> dict[str, FloatArray]:
        arrays = {need: _per_token(groups, need) for need in estimator.needs}
        found = compute_advantages(groups, chosen, arrays=arrays)
        sizes = {m.trajectory_id: m.sampled_tokens for g in groups for m in g.voters}
        return {tid: np.broadcast_to(np.asarray(v, dtype=np.float64), sizes[tid]) for tid, v in found.items()}

    empty = replace(_step(absent=0.0)[0], members=tuple(_absent("a", 0.0)))
    nobody = replace(empty, group_id="none", members=_renamed(empty, "none"))
    first: dict[str, FloatArray] = {}
    if stopped := _first_stop(lambda: first.update(ask(_step())), lambda: ask([*_step(), nobody])):
        return stopped
    findings = list(_differences(ask, _close, "an advantage", first))
    if any(finding.rule == "repeatable" for finding in findings):
        return findings
    findings += _keeps_arrays(chosen)
    found = ask(_step())
    if estimator.uses_rewards:
        findings += _reads_the_rewards_it_is_given(chosen, found)
    if estimator.uses_rewards and not estimator.needs:
        findings += _follows_rewards(found)
    if not any(np.any(values) for values in found.values()):
        findings.append(Finding("warning", "signal", "every advantage is 0, so nothing would be learnt"))
    elif estimator.group_relative and estimator.uses_rewards:
        findings += _says_nothing_of_equals(found)
    return findings


def _renamed(group: Group, name: str) -> tuple[Trajectory, ...]:
    return tuple(replace(member, group_id=name, trajectory_id=f"{name}/s{member.sample}") for member in group.members)


def _per_token(groups: Sequence[Group], need: str) -> dict[str, FloatArray]:
    """Random log-probs keyed by the trajectory's name, so that they follow it."""
    out = {}
    for member in (m for group in groups for m in group.voters):
        digest = hashlib.sha256(f"{need}/{member.trajectory_id}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        out[member.trajectory_id] = -np.abs(rng.normal(size=member.sampled_tokens))
    return out


def _close(a: Mapping[str, FloatArray], b: Mapping[str, FloatArray]) -> bool:
    return a.keys() == b.keys() and all(np.allclose(a[tid], b[tid], rtol=1e-9, atol=1e-12) for tid in a)


def _keeps_arrays(settings: AlgorithmSettings) -> Iterator[Finding]:
    """A critic's targets and the record read the same arrays."""
    groups = _step(absent=None)
    rewards: Arrays = {m.trajectory_id: np.arange(m.sampled_tokens) / 4.0 for g in groups for m in g.voters}
    arrays = {need: _per_token(groups, need) for need in ADVANTAGES.get(settings.advantage).needs}
    given = {"rewards": rewards, **arrays}
    before = {name: {tid: values.copy() for tid, values in array.items()} for name, array in given.items()}
    compute_advantages(groups, settings, rewards=rewards, arrays=arrays)
    for name, old in before.items():
        if any(not np.array_equal(old[tid], given[name][tid]) for tid in old):
            what = f"changes the {name.replace('_', ' ')} in place; other parts of a step read the same arrays"
            yield Finding("error", "in place", what)


def _reads_the_rewards_it_is_given(settings: AlgorithmSettings, plain: Mapping[str, FloatArray]) -> Iterator[Finding]:
    """A KL penalty (``kl_in=reward``) changes rewards on their way to the estimator, not those of the trajectories."""
    groups = _step(absent=None)
    rewards: dict[str, FloatArray] = {}
    for member in (m for group in groups for m in group.voters):
        # The best earns the least now, and none less than 0, which some estimators refuse.
        size = member.sampled_tokens
        rewards[member.trajectory_id] = np.full(size, (1.0 + member.sample) / (1.0 + member.total_reward) / size)
    arrays = {need: _per_token(groups, need) for need in ADVANTAGES.get(settings.advantage).needs}
    found = compute_advantages(groups, settings, rewards=rewards, arrays=arrays)
    if all(np.allclose(values, plain[tid], rtol=1e-9, atol=1e-12) for tid, values in found.items()):
        yield Finding(
            "error",
            "rewards",
            "no advantage changes when other rewards are given than the trajectories hold, so a penalty on rewards "
            "(kl_in=reward, soft overlong) would do nothing; read group.scores() and its like, not "
            "trajectory.total_reward",
        )


def _follows_rewards(found: Mapping[str, FloatArray]) -> Iterator[Finding]:
    """In a group of single outcomes the best member has no lower advantage than the worst, summed over its tokens."""
    totals = {f"{group}/s{i}": sum(turns) for group, plan in _REWARDS.items() for i, turns in enumerate(plan)}
    mean = {tid: float(np.mean(values)) for tid, values in found.items() if tid in totals}
    against = 0
    for group in ("a", "b", "c"):
        own = sorted((totals[tid], tid) for tid in mean if tid.startswith(f"{group}/"))
        if own:
            against += mean[own[-1][1]] < mean[own[0][1]]
    if against == 3:
        yield Finding(
            "warning",
            "direction",
            "in every group the member with the most reward has a lower advantage than the one with the least, so it "
            "is made less likely; check the sign",
        )


_ROUNDING = 1e-6
"""What rounding leaves of equal rewards in a difference, at most; a quotient of two such may be anything."""


def _says_nothing_of_equals(found: Mapping[str, FloatArray]) -> Iterator[Finding]:
    def loud(*groups: str, above: float = 0.0) -> str | None:
        heads = tuple(f"{group}/" for group in groups)
        return min((tid for tid in found if tid.startswith(heads) and np.max(np.abs(found[tid])) > above), default=None)

    if member := loud("constant", "lone"):
        yield Finding(
            "warning",
            "equal rewards",
            f"{member} has an advantage although its group has nothing to compare (a lone voter, or voters that all "
            "earned the same); subtract the group's mean, or register it with group_relative=False",
        )
    elif member := loud("tenths", "far", above=_ROUNDING):
        yield Finding(
            "error",
            "equal rewards",
            f"{member} has an advantage of {found[member].flat[0]:.2g} although its group's voters all earned the "
            "same: a difference of rounding, divided by a deviation that is rounding too. Return exactly 0 where the "
            "scores are all the same, and take a variance around the mean (two passes)",
        )


# ---- filters


def check_filter(name: str, settings: AlgorithmSettings | None = None) -> list[Finding]:
    """Every broken rule of the filter called ``name``; raises ``SettingsError`` when there is none."""
    FILTERS.get(name)
    rules = {"zero_reward_on_non_stop": False, "overlong": OverlongSettings()}  # rules about rewards are no filters
    chosen, rollout = (settings or AlgorithmSettings()).model_copy(update=rules), RolloutSettings()

    def ask(groups: Sequence[Group]) -> dict[str, Decision]:
        return {d.trajectory_id: d for d in apply_filters(groups, chosen, rollout, names=(name,)).decisions}

    nobody = Group("none", "p", 3, _renamed(replace(_step()[0], members=tuple(_absent("a", 0.0))), "none"))
    first: dict[str, Decision] = {}
    if stopped := _first_stop(lambda: first.update(ask(_step())), lambda: ask([*_step(), nobody])):
        return stopped
    findings = list(_differences(ask, dict.__eq__, "a decision", first))
    alone = {tid: d for group in _step() for tid, d in ask([group]).items()}
    if alone != ask(_step()) and not any(finding.rule == "repeatable" for finding in findings):
        findings.append(Finding("error", "state", "a decision changes with the groups that were judged before it"))
    voters = {m.trajectory_id: m for group in _step() for m in group.voters}
    for decision in alone.values():
        member = voters[decision.trajectory_id]
        if (decision.group_id, decision.tokens) != (member.group_id, member.sampled_tokens):
            findings.append(
                Finding(
                    "error",
                    "record",
                    f"the decision on {member.trajectory_id} names group {decision.group_id!r} and {decision.tokens} "
                    f"tokens; it is of group {member.group_id!r} and has {member.sampled_tokens} sampled ones, and the "
                    "account of tokens goes by them",
                )
            )
            break
    return findings


# ---- reductions


def check_reduction(name: str, settings: AlgorithmSettings | None = None) -> list[Finding]:
    """Every broken rule of the reduction called ``name``; raises ``SettingsError`` when there is none."""
    given = {key: getattr(settings or AlgorithmSettings(), key) for key in REDUCTIONS.get(name).defaults}
    # What a run would fill in.
    spec = ReductionSpec(name, {key: 8 if value is None else value for key, value in given.items()})
    rows = list(compile_batch(_step(absent=None), None, "sum").rows)
    if finding := _stopped(lambda: token_weights(rows, spec)):
        return [finding]
    weights = token_weights(rows, spec)
    order = list(range(len(rows)))[::-1]
    findings = []
    if not np.allclose(token_weights([rows[i] for i in order], spec), weights[order], rtol=1e-9):
        findings.append(Finding("error", "order", "the weight of a row changes with its place among the rows"))
    if not np.array_equal(weights, token_weights(rows, spec)):
        findings.append(Finding("error", "repeatable", "two calls give two weights"))
    if np.any(weights < 0) or not np.any(weights):
        findings.append(Finding("error", "sign", "a weight is below 0, or all are 0; advantages carry the sign"))
    return findings


# ---- the components of a run


def own_components(settings: AlgorithmSettings) -> dict[str, Callable[[], list[Finding]]]:
    """The checks of every component that does not come with this package, by setting and name."""
    named: list[tuple[str, str, Any, Callable[[], list[Finding]]]] = [
        ("algorithm.loss", settings.loss, LOSSES, lambda: check_loss(settings.loss, loss_options(settings))),
        ("algorithm.advantage", settings.advantage, ADVANTAGES, lambda: check_advantage(settings.advantage, settings)),
        ("algorithm.reduction", settings.reduction, REDUCTIONS, lambda: check_reduction(settings.reduction, settings)),
    ]
    for name in settings.filters:
        if name not in BUNDLED:
            named.append(("algorithm.filters", name, FILTERS, lambda name=name: check_filter(name, settings)))
    return {
        f"{key}={name}": check
        for key, name, registry, check in named
        if not _function(registry.get(name)).__module__.startswith("slipstream.algorithms")
    }


def _function(component: Any) -> Callable[..., Any]:
    return component if callable(component) else component.function  # type: ignore[no-any-return]


def broken_components(settings: AlgorithmSettings) -> Iterator[tuple[str, Finding]]:
    """Run the checks of a run's own components: ``algorithm.loss=my_pkg:mine`` with each rule that it breaks."""
    for label, check in own_components(settings).items():
        for finding in check():
            if finding.severity == "error":
                yield label, finding


def refuse_broken(settings: AlgorithmSettings) -> None:
    """``ContractError`` for the first broken rule of a run's own components, with its mend."""
    for label, finding in broken_components(settings):
        raise ContractError(f"{label} breaks its contract: {finding.rule}: {finding.message}")
