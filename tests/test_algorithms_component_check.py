"""``slipstream check advantage|filter|reduction`` pass what is bundled and say what is wrong with a flawed one."""

from __future__ import annotations

import itertools
import random
import sys
import textwrap

import numpy as np
import pytest

from slipstream.algorithms import (
    Decision,
    LossValues,
    register_advantage,
    register_filter,
    register_loss,
    register_reduction,
)
from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.component_check import (
    check_advantage,
    check_filter,
    check_reduction,
    own_components,
    refuse_broken,
)
from slipstream.algorithms.filters import FILTERS
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.reduce import REDUCTIONS
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError

NAME = "flawed_for_tests"


@pytest.fixture(autouse=True)
def clean():
    yield
    for registry in (ADVANTAGES, FILTERS, REDUCTIONS, LOSSES):
        registry.remove(NAME)


def rules(found):
    return {(finding.severity, finding.rule) for finding in found}


def estimator(function, **options):
    register_advantage(NAME, **options)(function)
    return check_advantage(NAME)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_bundled_estimator_passes(name):
    assert check_advantage(name) == []


def test_a_division_of_what_rounding_left_of_equal_rewards():
    def naive(groups, settings):
        out = {}
        for group in groups:
            scores = np.array(list(group.scores().values()))
            out |= {tid: (v - scores.mean()) / (scores.std() + 1e-12) for tid, v in group.scores().items()}
        return out

    found = estimator(naive)
    assert rules(found) == {("error", "equal rewards")}
    assert "rounding" in found[0].message


def test_a_difference_that_rounding_left_is_no_fault():
    def centred(groups, settings):
        out = {}
        for group in groups:
            scores = group.scores()
            out |= {tid: v - sum(scores.values()) / len(scores) for tid, v in scores.items()}
        return out

    assert estimator(centred) == []


def test_rewards_that_are_read_past_those_that_are_given():
    def own(groups, settings):
        out = {}
        for group in groups:
            totals = {m.trajectory_id: m.total_reward for m in group.voters}
            out |= {tid: v - sum(totals.values()) / len(totals) for tid, v in totals.items()}
        return out

    found = estimator(own)
    assert rules(found) == {("error", "rewards")}
    assert "kl_in=reward" in found[0].message


@pytest.mark.parametrize("name", REDUCTIONS.names())
def test_every_bundled_reduction_passes(name):
    assert check_reduction(name) == []


@pytest.mark.parametrize("name", FILTERS.names())
@pytest.mark.parametrize(
    "settings", [AlgorithmSettings(), AlgorithmSettings(drop_truncated=True)], ids=["", "overlong"]
)
def test_every_bundled_filter_passes(name, settings):
    assert check_filter(name, settings) == []


def earned(member):
    return sum(reward.value for reward in member.rewards if isinstance(reward.value, float))


def test_an_estimator_that_counts_members_without_a_vote():
    def ignores_validity(groups, settings):
        out = {}
        for group in groups:
            everyone = [
                sum(float(r.value) for r in m.rewards if isinstance(r.value, float)) for m in group.group.members
            ]
            out.update({tid: score - float(np.mean(everyone)) for tid, score in group.scores().items()})
        return out

    found = estimator(ignores_validity)
    assert ("error", "validity") in rules(found)
    assert "group.voters" in next(f.message for f in found if f.rule == "validity")


def test_an_estimator_that_goes_by_the_order_of_members():
    def first_is_the_baseline(groups, settings):
        out = {}
        for group in groups:
            scores = group.scores()
            base = next(iter(scores.values()), 0.0)
            out.update({tid: score - base for tid, score in scores.items()})
        return out

    assert ("error", "order") in rules(estimator(first_is_the_baseline))


def test_an_estimator_that_counts_observed_tokens():
    def by_length(groups, settings):
        out = {}
        for group in groups:
            lengths = {m.trajectory_id: float(sum(len(s) for r in m.rows for s in r.spans)) for m in group.voters}
            mean = np.mean(list(lengths.values()) or [0.0])
            out.update({tid: mean - length for tid, length in lengths.items()})
        return out

    assert ("error", "observations") in rules(estimator(by_length))


def test_an_estimator_with_a_memory():
    counter = itertools.count()
    found = estimator(lambda groups, s: {tid: float(next(counter)) for g in groups for tid in g.scores()})
    assert rules(found) == {("error", "repeatable")}


def test_an_estimator_that_leaves_a_voter_out_or_breaks_on_a_lone_one():
    found = estimator(lambda groups, s: {tid: 0.0 for g in groups if len(g.voters) > 1 for tid in g.scores()})
    assert "left out voter lone/s0" in str(found[0])
    ADVANTAGES.remove(NAME)
    found = estimator(lambda groups, s: {tid: 1 / len(g.scores()) for g in groups for tid in [next(iter(g.scores()))]})
    assert "raises StopIteration" in str(found[0])
    assert rules(found) == {("error", "runs")}


def test_an_estimator_that_is_not_finite_on_equal_rewards():
    def divides(groups, settings):
        out = {}
        for group in groups:
            scores = np.array(list(group.scores().values()))
            with np.errstate(invalid="ignore", divide="ignore"):
                out.update(
                    zip(group.scores(), (scores - scores.mean()) / scores.std() if len(scores) else [], strict=True)
                )
        return out

    assert "finite number" in str(estimator(divides)[0])


def test_an_estimator_that_changes_rewards_and_one_that_rewards_equals():
    def in_place(groups, settings):
        out = {}
        for group in groups:
            rewards = group.voter_rewards()
            for values in rewards.values():
                values -= 1.0
            out.update({tid: float(values.sum()) for tid, values in rewards.items()})
        return out

    assert ("error", "in place") in rules(estimator(in_place))
    ADVANTAGES.remove(NAME)
    raw = estimator(lambda groups, s: {tid: score for g in groups for tid, score in g.scores().items()})
    assert rules(raw) == {("warning", "equal rewards")}
    ADVANTAGES.remove(NAME)
    free = lambda groups, s: {tid: score for g in groups for tid, score in g.scores().items()}  # noqa: E731
    assert estimator(free, group_relative=False) == []


def test_components_that_return_nothing():
    assert "returns NoneType; return a dict" in str(estimator(lambda groups, settings: None)[0])
    assert "returns NoneType; yield a Decision" in str(flawed_filter(lambda group, algorithm, rollout: None)[0])


def test_an_estimator_that_reads_rewards_of_members_without_one():
    greedy = lambda groups, s: {m.trajectory_id: m.total_reward + 0.0 for g in groups for m in g.members}  # noqa: E731
    assert "group.voters are those that count" in str(estimator(greedy)[0])


def exclude(member, tokens=None, group_id=None):
    tokens = member.sampled_tokens if tokens is None else tokens
    return Decision("exclude", "mine", group_id or member.group_id, member.trajectory_id, tokens)


def flawed_filter(function):
    register_filter(NAME)(function)
    return check_filter(NAME)


def test_a_filter_that_judges_by_members_without_a_vote():
    def loud(group, algorithm, rollout):
        best = max((float(r.value) for m in group.members for r in m.rewards if isinstance(r.value, float)), default=0)
        return [exclude(m) for m in group.voters if m.total_reward < best]

    assert ("error", "validity") in rules(flawed_filter(loud))
    FILTERS.remove(NAME)
    found = flawed_filter(lambda group, a, r: [exclude(m) for m in group.members])
    assert "is no voter of group" in str(found[0])


def test_a_filter_that_goes_by_place_by_state_or_by_observations():
    assert ("error", "order") in rules(flawed_filter(lambda g, a, r: [exclude(m) for m in g.voters[:1]]))
    FILTERS.remove(NAME)
    counter = itertools.count()
    every_second = lambda g, a, r: [exclude(m) for m in g.voters] if next(counter) % 4 == 3 else []  # noqa: E731
    assert ("error", "repeatable") in rules(flawed_filter(every_second))
    FILTERS.remove(NAME)
    long = lambda m: sum(len(s) for row in m.rows for s in row.spans) > 12  # noqa: E731
    assert ("error", "observations") in rules(flawed_filter(lambda g, a, r: [exclude(m) for m in g.voters if long(m)]))


def test_a_filter_that_records_wrong_numbers_or_does_what_no_filter_does():
    assert ("error", "record") in rules(flawed_filter(lambda g, a, r: [exclude(m, tokens=999) for m in g.voters]))
    FILTERS.remove(NAME)
    zero = lambda m: Decision("zero_reward", "mine", m.group_id, m.trajectory_id, m.sampled_tokens)  # noqa: E731
    assert "leaves voters out" in str(flawed_filter(lambda g, a, r: [zero(m) for m in g.voters])[0])
    FILTERS.remove(NAME)
    assert "leaves voters out" in str(flawed_filter(lambda g, a, r: [m.trajectory_id for m in g.voters])[0])


def test_a_reduction_that_goes_by_place_or_by_sign():
    register_reduction(NAME)(lambda rows, s: np.arange(1.0, len(rows) + 1))
    assert ("error", "order") in rules(check_reduction(NAME))
    REDUCTIONS.remove(NAME)
    register_reduction(NAME)(lambda rows, s: -np.ones(len(rows)))
    assert rules(check_reduction(NAME)) == {("error", "sign")}
    REDUCTIONS.remove(NAME)
    register_reduction(NAME)(lambda rows, s: 1.0)
    assert "must return" in str(check_reduction(NAME)[0])


def test_a_run_checks_what_is_its_own_and_nothing_else():
    assert own_components(AlgorithmSettings(filters=("zero_variance",))) == {}
    register_loss(NAME)(lambda xp, i, s: LossValues(xp.sum(i.logprobs)))
    with pytest.raises(ContractError, match=rf"algorithm.loss={NAME} breaks its contract: per-unit values"):
        refuse_broken(AlgorithmSettings(loss=NAME))
    register_filter(NAME)(lambda g, a, r: [exclude(m) for m in g.voters[:1]])
    with pytest.raises(ContractError, match=r"algorithm\.filters.*order"):
        refuse_broken(AlgorithmSettings(filters=(NAME,)))


OWN = """
from slipstream.algorithms.filters import Decision


def centred(groups, settings):
    out = {}
    for group in groups:
        scores = group.scores()
        mean = sum(scores.values()) / max(len(scores), 1)
        out.update({name: score - mean for name, score in scores.items()})
    return out


def short(group, algorithm, rollout):
    for voter in group.voters:
        if voter.sampled_tokens < 3:
            yield Decision("exclude", "short", group.group_id, voter.trajectory_id, voter.sampled_tokens)


def first(group, algorithm, rollout):
    for voter in group.voters[:1]:
        yield Decision("exclude", "first", group.group_id, voter.trajectory_id, voter.sampled_tokens)


def flat(rows, settings):
    return [1 / sum(row.n_trained for row in rows)] * len(rows)
"""


def test_the_commands_take_import_paths(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from slipstream.cli.main import app

    (tmp_path / "own_parts.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for kind, name in (("advantage", "centred"), ("filter", "short"), ("reduction", "flat")):
            good = CliRunner().invoke(app, ["check", kind, f"own_parts:{name}"])
            assert (good.exit_code, good.output.strip()) == (0, f"own_parts:{name}: nothing found")
        bad = CliRunner().invoke(app, ["check", "filter", "own_parts:first", "--setting", "drop_truncated=true"])
        assert bad.exit_code == 1
        assert "never by their place" in " ".join(bad.output.split())
    finally:
        sys.modules.pop("own_parts", None)
        for registry in (ADVANTAGES, FILTERS, REDUCTIONS):
            for path in [p for p in registry._imported if p.startswith("own_parts")]:
                registry._imported.pop(path)


def test_a_filter_whose_first_answer_is_another():
    """What is judged anew each time the whole check runs must not hide in the first call."""
    seen = set()

    def new_ones(groups, algorithm, rollout):
        fresh = [m for m in groups.voters if m.trajectory_id not in seen]
        seen.update(m.trajectory_id for m in fresh)
        return [exclude(m) for m in groups.voters if m not in fresh]

    assert ("error", "repeatable") in rules(flawed_filter(new_ones))


def test_what_changes_the_given_is_told_so():
    def frozen(group, algorithm, rollout):
        group.voters[0].outcome = None
        return []

    assert "Do not change what is given" in str(flawed_filter(frozen)[0])
    FILTERS.remove(NAME)

    def forced(group, algorithm, rollout):
        for member in group.voters:
            object.__setattr__(member, "sample", 7)
        return []

    assert ("error", "in place") in rules(flawed_filter(forced))


def test_an_estimator_that_changes_the_arrays_that_it_needs():
    @register_advantage(NAME, needs=("values",))
    def shifts(groups, settings):
        out = {}
        for group in groups:
            for tid, values in group.arrays["values"].items():
                values -= 1.0
                out[tid] = values
        return out

    found = check_advantage(NAME)
    assert {"in place", "repeatable"} & {f.rule for f in found if f.severity == "error"}


def test_a_sign_error_and_numbers_from_a_global_generator():
    found = estimator(lambda groups, s: {t: -v for g in groups for t, v in g.scores().items()})
    assert ("warning", "direction") in rules(found)
    ADVANTAGES.remove(NAME)
    found = estimator(lambda groups, s: {t: v * (random.random() < 2) for g in groups for t, v in g.scores().items()})
    assert rules(found) == {("error", "repeatable")}
