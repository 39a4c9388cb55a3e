from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from algorithm_builders import group, sampled, trajectory
from slipstream.algorithms import (
    compile_batch,
    compute_advantages,
    register_advantage,
    rewards_with_kl,
    token_rewards,
)
from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError, SettingsError
from slipstream.trajectory import Cancelled, Completed, Failed, Group, Missing, Reward, Row, Span

CENTRED = AlgorithmSettings(normalize_by_std=False)
SCALED = AlgorithmSettings(normalize_by_std=True)
RLOO = AlgorithmSettings(advantage="rloo")


def test_uneven_groups_are_found_by_id():
    pool = [group("a", [1, 0, 1]), group("b", [0, 0]), group("c", [1, 0, 1])]
    result = compute_advantages(pool, CENTRED)
    third = 1 / 3
    assert list(result.values()) == pytest.approx([third, -2 * third, third, 0, 0, third, -2 * third, third])
    assert compute_advantages(pool[::-1], CENTRED) == result


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (CENTRED, [2 / 3, -1 / 3, -1 / 3]),
        (SCALED, [1.1547, -0.57735, -0.57735]),
        (RLOO, [1.0, -0.5, -0.5]),
    ],
)
@pytest.mark.parametrize("reward", [0.0, 1.0, 1e6, Missing("NaN from the judge")])
@pytest.mark.parametrize("fate", ["failed", "cancelled", "unscored", "zero_length"])
def test_an_invalid_member_is_absent_whatever_its_reward(settings, want, reward, fate):
    outcome = {"failed": Failed("env_raised", "x", True), "cancelled": Cancelled("x")}.get(fate, Completed())
    if fate == "unscored":
        reward = Missing("no score")
    empty = fate == "zero_length"
    bad = trajectory("bad", None if empty else reward, sample=9, outcome=outcome, tokens=0 if empty else 2)
    good = group("g", [1.0, 0.0, 0.0]).members
    pool = [Group("g", "p", 4, (good[0], bad, *good[1:]))]
    result = compute_advantages(pool, settings)
    assert "bad" not in result
    assert list(result.values()) == pytest.approx(want, abs=5e-6)


@pytest.mark.parametrize("settings", [CENTRED, SCALED, RLOO])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.9, 1 / 3, 1e9, -7.3])
@pytest.mark.parametrize("size", [2, 3, 9])  # fsum([0.1] * 3) / 3 is not 0.1
def test_a_constant_group_gives_exactly_zero(settings, value, size):
    assert set(compute_advantages([group("g", [value] * size)], settings).values()) == {0.0}


@pytest.mark.parametrize("name", sorted(ADVANTAGES.names()))
def test_a_lone_voter_gets_zero_from_group_relative_estimators(name):
    if ADVANTAGES.get(name).group_relative:
        result = compute_advantages([group("g", [5.0])], AlgorithmSettings(advantage=name))
        assert np.all(np.asarray(result["g-0"]) == 0)


def test_nearly_constant_rewards_stay_bounded():
    rewards = [1e6, 1e6 + 1e-9, 1e6, 1e6]
    values = np.array(list(compute_advantages([group("g", rewards)], SCALED).values()))
    assert np.abs(values).max() < 2


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("seed", range(3))
def test_estimators_agree_with_a_plain_reference_for_every_group_size(size, seed):
    rewards = np.random.default_rng(seed).normal(size=size).round(1).tolist()
    got = list(compute_advantages([group("g", rewards)], SCALED).values())
    mean = statistics.fmean(rewards)
    std = statistics.stdev(rewards) if size > 1 else 1.0
    want = [(r - mean) / (std + 1e-6) for r in rewards]
    assert got == pytest.approx(want, abs=1e-9)
    got = list(compute_advantages([group("g", rewards)], RLOO).values())
    want = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) if size > 1 else 0.0 for i, r in enumerate(rewards)]
    assert got == pytest.approx(want, abs=1e-12)


def test_a_binary_pair_is_plus_and_minus_a_half():
    assert list(compute_advantages([group("g", [1, 0])], CENTRED).values()) == [0.5, -0.5]


def test_rewards_land_on_their_position_or_on_the_last_sampled_token_of_their_turn():
    rows = (Row((Span.prompt([1]), sampled([10, 11]), Span.observation([30]), sampled([12, 13, 14], turn=1))),)
    rewards = [Reward(0, 0.5), Reward(1, 1.0), Reward(1, 0.25, "style", position=0), Reward(1, 2.0, "more")]
    member = trajectory("a", rows=rows, rewards=rewards)
    assert token_rewards(member).tolist() == [0, 0.5, 0.25, 0, 3.0]
    assert math.fsum(token_rewards(member)) == member.total_reward


def test_a_position_outside_the_turn_is_refused():
    member = trajectory("a", rewards=[Reward(0, 1.0, position=2)])
    with pytest.raises(ContractError, match="position 2 of 2"):
        token_rewards(member)


def test_unknown_estimators_are_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="Did you mean 'grpo'"):
        compute_advantages([group("g", [1, 0])], AlgorithmSettings(advantage="grop"))


@pytest.mark.parametrize(
    ("returned", "rule"),
    [
        ({"g-0": 1.0}, "left out voter g-1"),
        ({"g-0": 1.0, "g-1": 0.0, "x": 0.0}, "named a stranger, x"),
        ({"g-0": 1.0, "g-1": float("inf")}, "want a finite number"),
        ({"g-0": 1.0, "g-1": np.ones(5)}, "or 2 of them"),
    ],
)
def test_what_an_estimator_returns_is_checked(returned, rule):
    register_advantage("planted")(lambda groups, settings: returned)
    try:
        with pytest.raises(ContractError, match=rule):
            compute_advantages([group("g", [1, 0])], AlgorithmSettings(advantage="planted"))
    finally:
        ADVANTAGES.remove("planted")


def test_kl_in_the_reward_moves_the_score_of_every_voter():
    pool = [group("g", [1.0, 0.0], tokens=2)]
    batch = compile_batch(pool, None, "token_mean")
    policy = [np.array([-1.0, -1.0]), np.array([-1.0, -2.0])]
    reference = [np.array([-1.5, -1.0]), np.array([-1.0, -2.0])]
    rewards = rewards_with_kl(pool, batch, policy, reference, coef=0.2, estimator="k1")
    assert rewards["g-0"].tolist() == pytest.approx([-0.1, 1.0])
    assert rewards["g-1"].tolist() == [0.0, 0.0]
    assert list(compute_advantages(pool, CENTRED, rewards=rewards).values()) == pytest.approx([0.45, -0.45])


def test_kl_in_the_reward_refuses_a_voter_that_was_not_scored():
    pool = [group("g", [1.0, 0.0])]
    batch = compile_batch(pool, None, "token_mean", excluded={"g-1"})
    with pytest.raises(ContractError, match="g-1 votes but was not scored"):
        rewards_with_kl(pool, batch, [np.zeros(2)], [np.zeros(2)], 0.1, "k1")
