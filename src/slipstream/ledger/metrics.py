"""Metrics of a step and of an evaluation, under SkyRL's names where they mean the same.

Owns: what can be computed from groups, dispositions and advantages.  Refuses: what only a backend knows
(``policy/*`` arrives ready) and NaN: a metric without data is left out.

Means obey votes: a failed, cancelled, unscored or zero-length member is absent from every reward mean, never a
zero.  In evaluation a failure counts 0 and its share is reported beside the score.

Words: *assistant tokens* are sampled tokens; *num_tokens* is everything after the first prompt (sampled,
observation and synthetic tokens of all rows).  ``guard/*`` are shares in [0, 1] that should stay low.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.envs.metrics import own_rule
from slipstream.errors import ContractError
from slipstream.ledger.records import StepRecord, disposition_kind
from slipstream.trajectory import Cancelled, Group, Missing, Origin, Span, Trajectory, WeightVersion

_LOG = logging.getLogger(__name__)

Metrics = dict[str, float]
SPREAD_TOLERANCE = 1e-6


def _stats(prefix: str, values: Sequence[float], names: Iterable[str], suffix: str = "") -> Metrics:
    """``{prefix}{name}{suffix}`` for each of mean, avg, min, max, std, p90 that is asked for; empty without data."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    table: dict[str, Callable[[], Any]] = {
        "mean": array.mean,
        "avg": array.mean,
        "min": array.min,
        "max": array.max,
        "std": array.std,
        "p90": lambda: np.percentile(array, 90),
    }
    return {f"{prefix}{name}{suffix}": float(table[name]()) for name in names}


def _mean(name: str, values: Sequence[float]) -> Metrics:
    return {name: float(np.mean(values))} if values else {}


def response_tokens(trajectory: Trajectory) -> int:
    """Tokens after the prompt: own spans of every row that are not PROMPT."""
    return sum(len(s) for row in trajectory.rows for s in row.spans if s.origin is not Origin.PROMPT)


def positive_reward(trajectory: Trajectory) -> float:
    """Sum of the positive rewards of one trajectory."""
    return float(sum(r.value for r in trajectory.rewards if not isinstance(r.value, Missing) and r.value > 0))


def reward_metrics(groups: Sequence[Group]) -> Metrics:
    """``reward/*``: means over voters; pass@n is the share of groups (with a voter) in which one earned > 0."""
    voters = [m for g in groups for m in g.voters]
    out = {
        **_mean("reward/avg_raw_reward", [m.total_reward for m in voters]),
        **_mean("reward/mean_positive_reward", [positive_reward(m) for m in voters]),
        **_mean("reward/avg_pass_at_n", [float(any(m.total_reward > 0 for m in g.voters)) for g in groups if g.voters]),
    }
    components: dict[str, list[float]] = defaultdict(list)
    for member in voters:
        sums: dict[str, float] = defaultdict(float)
        for reward in member.rewards:
            if not isinstance(reward.value, Missing):
                sums[reward.component] += reward.value
        for name, value in sums.items():
            components[name].append(value)
    if set(components) - {"reward"}:
        for name, values in sorted(components.items()):
            out |= _mean(f"reward/component/{name}", values)
    return out


def environment_metrics(members: Sequence[Trajectory]) -> Metrics:
    """``environment/avg_<name>``: the mean over the members that report it.

    An environment with an ``aggregate_metrics`` of its own gives ``environment/<name>`` by that; a rule that fails is
    logged, and means are taken.
    """
    values: dict[str, list[float]] = defaultdict(list)
    by_class: dict[str, list[Trajectory]] = defaultdict(list)
    for member in members:
        by_class[member.env_class].append(member)
    out: Metrics = {}
    for env_class, own in by_class.items():
        reported = [dict(member.env_metrics) for member in own if member.env_metrics]
        aggregated = _by_own_rule(env_class, reported) if reported else None
        if aggregated is not None:
            out |= aggregated
            continue
        for episode in reported:
            for name, value in episode.items():
                values[name].append(float(value))
    for name, found in sorted(values.items()):
        out |= _mean(f"environment/{name if name.startswith('avg_') else 'avg_' + name}", found)
    return out


def _by_own_rule(env_class: str, reported: list[dict[str, Any]]) -> Metrics | None:
    rule = own_rule(env_class)
    if rule is None:
        return None
    try:
        found = {name: float(value) for name, value in rule(reported).items() if isinstance(value, bool | int | float)}
    # Fault boundary: a user's rule may raise anything, and a step is not lost for a metric.
    except Exception:  # noqa: BLE001
        _LOG.exception("aggregate_metrics of environment %r failed; means are taken", env_class)
        return None
    return {f"environment/{name}": value for name, value in found.items() if math.isfinite(value)}


def generation_metrics(groups: Sequence[Group]) -> Metrics:
    """``generate/*``: lengths in tokens and times in seconds, over every member that sampled something."""
    members = [m for g in groups for m in g.members if m.sampled_tokens]
    responses = [float(response_tokens(m)) for m in members]
    sampled = [float(m.sampled_tokens) for m in members]
    zero = [float(response_tokens(m)) for m in members if m.votes and m.total_reward == 0]
    some = [float(response_tokens(m)) for m in members if m.votes and m.total_reward != 0]
    per_turn = [float(len(s)) for m in members for s in m.sampled_spans()]
    shapes = ("mean", "p90", "max")
    out = {
        **_stats("generate/", responses, ("min", "max", "avg", "std"), "_num_tokens"),
        **_stats("generate/", sampled, ("avg", "min", "max", "std"), "_assistant_tokens"),
        **_mean("generate/avg_tokens_zero_rewards", zero),
        **_mean("generate/avg_tokens_non_zero_rewards", some),
        **_stats("generate/tokens_per_turn_", per_turn, ("mean", "std", "max")),
        **_stats("generate/turns_", [float(len(m.turns)) for m in members], ("mean", "max")),
        "generate/batch_num_seq": float(len(members)),
        "generate/num_sampled_tokens": float(sum(sampled)),
    }
    llm = [sum(t.llm_seconds for t in m.turns) for m in members]
    env = [sum(t.env_seconds for t in m.turns) for m in members]
    total = [m.seconds for m in members]
    other = [max(0.0, t - a - b) for t, a, b in zip(total, llm, env, strict=True)]
    for name, times in (("completion", total), ("llm", llm), ("env", env), ("other", other)):
        out |= _stats(f"generate/trajectory_time_{name}_", times, shapes)
    by_group = [[m.seconds for m in g.members if m.sampled_tokens] for g in groups]
    by_group = [times for times in by_group if times]
    out |= _stats("generate/group_completion_time_", [max(times) for times in by_group], shapes)
    spreads = [float(np.std(times)) for times in by_group]
    means = [float(np.mean(times)) for times in by_group]
    out |= _mean("generate/intra_group_completion_time_std_mean", spreads)
    out |= _mean(
        "generate/intra_group_completion_time_cv_mean", [s / m for s, m in zip(spreads, means, strict=True) if m > 0]
    )
    return out


def staleness_metrics(members: Sequence[Trajectory], current_version: str) -> Metrics:
    """``async/staleness_{mean,max,min}``: versions between a token's sampler and the trained weights, per token.

    The difference of publish counters; tokens without a known version are left out and counted in
    ``async/unversioned_share``.  ``async/version_lag_<n>`` are the shares of tokens ``n`` versions behind, and
    ``async/mixed_version_share`` is that of trajectories whose tokens are of more than one version.
    """
    try:
        now = WeightVersion.parse(current_version).counter
    except ContractError:
        return {}
    lags: dict[int, int] = defaultdict(int)
    unknown = total = 0
    for member in members:
        for version, tokens in member.versions().items():
            total += tokens
            try:
                lags[now - WeightVersion.parse(version).counter] += tokens
            except ContractError:
                unknown += tokens
    if not lags:
        return {}
    known = sum(lags.values())
    out = {
        "async/staleness_mean": sum(lag * n for lag, n in lags.items()) / known,
        "async/staleness_max": float(max(lags)),
        "async/staleness_min": float(min(lags)),
    }
    out |= {f"async/version_lag_{lag}": n / known for lag, n in sorted(lags.items())}
    mixed = [float(len({_counter(v) for v in m.versions()}) > 1) for m in members if m.versions()]
    out |= _mean("async/mixed_version_share", mixed)
    if unknown:
        out["async/unversioned_share"] = unknown / total
    return out


def _counter(version: str) -> str:
    """A version without its incarnation: a resumed run goes on with the same weights under the same counter."""
    try:
        return str(WeightVersion.parse(version).counter)
    except ContractError:
        return version


def guard_metrics(groups: Sequence[Group], early_lengths: Sequence[float] = ()) -> Metrics:
    """``guard/*``: what silently ruins a run.

    ``duplicate_rate``: members whose sampled tokens repeat an earlier member of their group;
    ``zero_spread_share``: groups whose voters (two or more) all earned the same;
    ``failed_share``, ``truncated_share``, ``unscored_share``: of the samples asked for (absent ones count as failed);
    ``length_drift``: mean sampled length over that of the first recorded steps, minus 1.
    """
    duplicates = sampled = 0
    for group in groups:
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for member in group.members:
            key = tuple(span.token_ids for span in member.sampled_spans())
            if not key:
                continue
            sampled += 1
            duplicates += key in seen
            seen.add(key)
    asked = sum(g.size for g in groups)
    members = [m for g in groups for m in g.members]
    out: Metrics = {}
    if sampled:
        out["guard/duplicate_rate"] = duplicates / sampled
    spreads = [_spread(g) for g in groups if len(g.voters) > 1]
    out |= _mean("guard/zero_spread_share", [float(s <= SPREAD_TOLERANCE) for s in spreads])
    if asked:
        ended = sum(m.outcome.votes for m in members)
        out["guard/failed_share"] = 1 - ended / asked
        out["guard/truncated_share"] = sum(m.outcome.kind == "truncated" for m in members) / asked
        out["guard/unscored_share"] = sum(m.outcome.votes and not m.votes for m in members) / asked
    lengths = [float(m.sampled_tokens) for m in members if m.sampled_tokens]
    if lengths and early_lengths:
        out["guard/length_drift"] = float(np.mean(lengths) / np.mean(early_lengths) - 1)
    return out


def _spread(group: Group) -> float:
    rewards = [m.total_reward for m in group.voters]
    return max(rewards) - min(rewards)


def gap_metrics(record: StepRecord) -> Metrics:
    """``policy/rollout_train_logprobs_abs_diff_{mean,std,max}``: trainer against sampler, over scored tokens.

    Two parts of it, over tokens that the trained weights sampled themselves, so that staleness has no share in it, are
    reported when both exist: ``async/kept_cache_gap_mean`` behind tokens of other weights, whose cached keys and values
    the sampler may have kept and the trainer computes anew, and ``async/same_weights_gap_mean`` where there are none.
    With several optimiser steps per step, scores are those of a row's own first pass, after the steps before it.
    """
    gaps: list[float] = []
    by_context: dict[bool, list[float]] = {False: [], True: []}
    now = _counter(record.weight_version_before)
    for member in record.members():
        scores = record.trainer_logprobs.get(member.trajectory_id)
        if scores is None:
            continue
        for row, scored in zip(member.rows, scores, strict=False):
            spans = [s for s in row.spans if s.origin is Origin.SAMPLED]
            if scored is None or any(s.logprobs is None or isinstance(s.logprobs, Missing) for s in spans):
                continue
            mine = [x for s in spans for x in s.logprobs]  # type: ignore[union-attr]
            row_gaps = [abs(a - b) for a, b in zip(scored, mine, strict=False)]
            gaps.extend(row_gaps)
            mixed, versions = False, _versions(spans)
            for gap, version in zip(row_gaps, versions, strict=False):
                mixed = mixed or version != now
                if version == now:
                    by_context[mixed].append(gap)
    out = _stats("policy/rollout_train_logprobs_abs_diff_", gaps, ("mean", "std", "max"))
    if by_context[True] and by_context[False]:
        out |= _mean("async/kept_cache_gap_mean", by_context[True])
        out |= _mean("async/same_weights_gap_mean", by_context[False])
    return out


def _versions(spans: Sequence[Span]) -> list[str]:
    """The version of every token; empty when some are not known."""
    out: list[str] = []
    for span in spans:
        if span.versions is None or isinstance(span.versions, Missing):
            return []
        out += [_counter(run.version) for run in span.versions for _ in range(run.start, run.end)]
    return out


def step_metrics(record: StepRecord, *, early_lengths: Sequence[float] = ()) -> Metrics:
    """Everything that one step's record tells by itself.

    Superseded members (retried attempts, work of a dead incarnation) and episodes that were taken back count in no
    metric, only in the account.
    """
    groups = [g for g in record.groups if any(_counts(m, record) for m in g.members)]
    members = [m for g in groups for m in g.members]
    trained = [m for m in members if record.dispositions[m.trajectory_id] == "trained"]
    fates = [{record.dispositions[m.trajectory_id] for m in g.members} for g in groups]
    advantages = [record.advantages[m.trajectory_id] for m in trained if m.trajectory_id in record.advantages]
    kinds = [disposition_kind(text) for text in record.dispositions.values()]
    settled = record.settled()
    seconds = record.timings.get("step", 0.0)
    return {
        "trainer/global_step": float(record.step),
        **reward_metrics(groups),
        "reward/num_zero_variance_filtered": float(sum("filtered:zero_variance" in f for f in fates)),
        **environment_metrics(members),
        **generation_metrics(groups),
        **_mean("loss/avg_final_rewards", [m.total_reward for m in trained if m.votes]),
        **_mean("loss/avg_raw_advantages", advantages),
        **_mean("loss/avg_raw_advantages_abs", [abs(a) for a in advantages]),
        **staleness_metrics(trained, record.weight_version_before),
        **gap_metrics(record),
        **guard_metrics(groups, early_lengths),
        "trainer/num_trained_trajectories": float(kinds.count("trained")),
        "trainer/num_trained_tokens": float(settled.get("trained", 0)),
        **({"trainer/tokens_per_second": sum(settled.values()) / seconds} if seconds > 0 else {}),
    }


def _counts(member: Trajectory, record: StepRecord) -> bool:
    return record.dispositions[member.trajectory_id] != "superseded" and not isinstance(member.outcome, Cancelled)


def eval_metrics(groups: Sequence[Group]) -> Metrics:
    """``eval/{source|all}/{avg_score, pass_at_n, mean_positive_reward, failed_share, truncated_share, num_prompts}``.

    A sample that failed, is unscored or is absent counts 0; ``failed_share`` says how many did.
    """
    by_source: Mapping[str, list[Group]] = defaultdict(list)
    for group in groups:
        source = next((m.data_source for m in group.members if m.data_source), "default")
        by_source[source].append(group)
    out: Metrics = {}
    if len(by_source) != 1 or "default" not in by_source:
        for source, part in sorted(by_source.items()):
            out |= _eval_part(source, part)
    return out | (_eval_part("all", groups) if groups else {})


def _eval_part(source: str, groups: Sequence[Group]) -> Metrics:
    asked = sum(g.size for g in groups)
    voters = [m for g in groups for m in g.voters]
    return {
        f"eval/{source}/avg_score": sum(m.total_reward for m in voters) / asked,
        f"eval/{source}/pass_at_n": float(np.mean([any(m.total_reward > 0 for m in g.voters) for g in groups])),
        f"eval/{source}/mean_positive_reward": sum(positive_reward(m) for m in voters) / asked,
        f"eval/{source}/failed_share": 1 - len(voters) / asked,
        f"eval/{source}/truncated_share": sum(m.outcome.kind == "truncated" for g in groups for m in g.members) / asked,
        f"eval/{source}/num_prompts": float(len(groups)),
    }
