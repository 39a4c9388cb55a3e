from __future__ import annotations

import itertools

import numpy as np
import pytest

from algorithm_builders import group, sampled, trajectory
from slipstream.algorithms import apply_filters, compile_batch, compute_advantages, dispositions, token_split
from slipstream.algorithms.filters import Decision, overlong_penalty
from slipstream.config.algorithm import OverlongSettings
from slipstream.config.settings import AlgorithmSettings, RolloutSettings
from slipstream.trajectory import Failed, Group, Missing, Reward, Row, Span, Truncated, Turn

ALGORITHM, ROLLOUT = AlgorithmSettings(), RolloutSettings()


def pool() -> list[Group]:
    return [group("same", [1, 1, 1]), group("mixed", [1, 0, 1]), group("zeros", [0, 0]), group("pair", [0, 1])]


def test_constant_groups_go_and_mixed_ones_stay():
    result = apply_filters(pool(), ALGORITHM, ROLLOUT)
    assert {tid.split("-")[0] for tid in result.excluded} == {"same", "zeros"}
    assert result.counts == {"zero_variance": 5}


def test_groups_may_arrive_one_at_a_time_and_in_any_order():
    want = apply_filters(pool(), ALGORITHM, ROLLOUT).excluded
    for order in itertools.permutations(pool()):
        got: dict[str, str] = {}
        for arrived in order:
            got |= apply_filters([arrived], ALGORITHM, ROLLOUT).excluded
        assert got == want


def test_a_lone_constant_group_goes_too():
    assert apply_filters([group("same", [1, 1])], ALGORITHM, ROLLOUT).excluded.keys() == {"same-0", "same-1"}


def test_rewards_per_turn_are_judged_by_their_total():
    def member(tid, sample, first, second):
        rows = (Row((Span.prompt([1]), sampled([5]), Span.observation([6]), sampled([7], turn=1))),)
        return trajectory(tid, rows=rows, sample=sample, rewards=[Reward(0, first), Reward(1, second)])

    flat = Group("g", "p", 2, (member("a", 0, 1.0, 0.0), member("b", 1, 0.0, 1.0)))
    assert len(apply_filters([flat], ALGORITHM, ROLLOUT).excluded) == 2
    spread = Group("g", "p", 2, (member("a", 0, 1.0, 1.0), member("b", 1, 0.0, 1.0)))
    assert not apply_filters([spread], ALGORITHM, ROLLOUT).excluded
    # Equal totals of different turns teach an estimator that compares turns.
    by_turn = ALGORITHM.model_copy(update={"advantage": "turn_credit"})
    assert any(np.any(a) for a in compute_advantages([flat], by_turn).values())
    assert not apply_filters([flat], by_turn, ROLLOUT).excluded
    same = Group("g", "p", 2, (member("a", 0, 1.0, 0.0), member("b", 1, 1.0, 0.0)))
    assert len(apply_filters([same], by_turn, ROLLOUT).excluded) == 2


def test_an_invalid_member_neither_makes_nor_hides_spread():
    bad = trajectory("bad", 5.0, group="g", sample=9, outcome=Failed("env_raised", "x", True))
    unscored = trajectory("unscored", Missing("x"), group="g", sample=8)
    members = group("g", [1, 1]).members
    result = apply_filters([Group("g", "p", 4, (*members, bad, unscored))], ALGORITHM, ROLLOUT)
    assert result.excluded.keys() == {"g-0", "g-1"}


def test_the_tolerance_is_in_reward_units():
    close = group("g", [1.0, 1.0 + 1e-7])
    assert apply_filters([close], ALGORITHM, ROLLOUT).excluded
    assert not apply_filters([close], AlgorithmSettings(zero_variance_tol=1e-8), ROLLOUT).excluded


def test_a_lone_voter_is_named_as_such():
    assert apply_filters([group("g", [1.0])], ALGORITHM, ROLLOUT).excluded == {"g-0": "lone_voter"}


def test_truncated_members_keep_their_vote():
    members = (
        trajectory("cut", 0.0, sample=0, outcome=Truncated("turn_tokens")),
        trajectory("a", 1.0, sample=1),
        trajectory("b", 1.0, sample=2),
    )
    result = apply_filters([Group("g", "p", 3, members)], AlgorithmSettings(drop_truncated=True), ROLLOUT)
    assert result.excluded == {"cut": "truncated"}
    advantages = compute_advantages(result.groups, AlgorithmSettings(normalize_by_std=False))
    assert advantages["a"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "ending", [{"outcome": Truncated("total_tokens")}, {"turns": [Turn(0, "x", finish_reason="length")]}]
)
def test_cut_off_answers_earn_zero_when_asked(ending):
    members = (
        trajectory("cut", sample=0, rewards=[Reward(0, 1.0, "right"), Reward(0, 0.5, "style")], **ending),
        trajectory("a", 1.0, sample=1),
    )
    result = apply_filters([Group("g", "p", 2, members)], AlgorithmSettings(zero_reward_on_non_stop=True), ROLLOUT)
    assert [m.total_reward for m in result.groups[0].members] == [0.0, 1.0]
    assert [r.component for r in result.groups[0].members[0].rewards] == ["right", "style"]
    assert result.counts == {"non_stop": 1}
    assert not result.excluded


def test_every_sampled_token_has_a_fate():
    failed = trajectory("bad", 5.0, group="mixed", sample=9, tokens=5, outcome=Failed("env_raised", "x", True))
    mixed = group("mixed", [1, 0, 1])
    groups = [group("same", [1, 1, 1]), Group("mixed", "p", 4, (*mixed.members, failed))]
    result = apply_filters(groups, ALGORITHM, ROLLOUT)
    batch = compile_batch(
        result.groups, compute_advantages(result.groups, ALGORITHM), "token_mean", excluded=result.excluded
    )
    assert token_split(groups, result.excluded) == {"sampled": 17, "trained": 6, "filtered": 6, "failed": 5}
    assert batch.n_trained == 6
    fates = dispositions(groups, result.excluded)
    assert fates["bad"] == "failed"
    assert fates["same-0"] == "filtered:zero_variance"
    assert fates["mixed-0"] == "trained"


def test_zeroing_never_gives_an_unscored_member_a_vote():
    unscored = trajectory("unscored", Missing("judge down"), outcome=Truncated("total_tokens"))
    result = apply_filters([Group("g", "p", 1, (unscored,))], AlgorithmSettings(zero_reward_on_non_stop=True), ROLLOUT)
    assert result.groups[0].voters == ()
    assert result.decisions == ()


# --- the soft overlong penalty ---------------------------------------------------------------------

OVERLONG = AlgorithmSettings(overlong=OverlongSettings(factor=1.0, max_tokens=10, buffer_tokens=4))


@pytest.mark.parametrize(("tokens", "want"), [(1, 0.0), (6, 0.0), (7, 0.25), (8, 0.5), (10, 1.0), (30, 1.0)])
def test_the_penalty_grows_over_the_buffer(tokens, want):
    assert overlong_penalty(tokens, 10, OVERLONG.overlong) == pytest.approx(want)


def test_the_buffer_is_a_fifth_of_the_limit_unless_set():
    assert overlong_penalty(90, 100, OverlongSettings(factor=0.5)) == pytest.approx(0.25)


def test_long_answers_carry_a_reward_of_their_own():
    members = (trajectory("long", 1.0, sample=0, tokens=8), trajectory("short", 1.0, sample=1, tokens=2))
    result = apply_filters([Group("g", "p", 2, members)], OVERLONG, ROLLOUT)
    long, short = result.groups[0].members
    assert [(r.component, r.value) for r in long.rewards] == [("reward", 1.0), ("overlong", -0.5)]
    assert short.rewards == members[1].rewards
    assert result.counts == {"overlong": 1}
    assert not result.excluded, "they differ in reward now"


def test_all_turns_count_and_the_last_one_carries_the_penalty():
    spans = [Span.prompt([1])]
    for turn in range(3):
        spans += [sampled([5, 6, 7], turn=turn), Span.observation([9] * 50, turn)]
    member = trajectory("a", rows=(Row(tuple(spans)),), rewards=[Reward(1, 1.0)])
    result = apply_filters([Group("g", "p", 1, (member,))], OVERLONG, ROLLOUT)
    assert [(r.turn, r.value) for r in result.groups[0].members[0].rewards] == [(1, 1.0), (2, -0.75)]


def test_absent_members_are_not_penalised():
    failed = trajectory("bad", 1.0, tokens=30, outcome=Failed("env_raised", "x", True))
    result = apply_filters([Group("g", "p", 1, (failed,))], OVERLONG, ROLLOUT)
    assert result.groups[0].members == (failed,)
    assert result.decisions == ()


def test_the_limit_is_what_a_trajectory_may_sample_unless_set():
    rollout = RolloutSettings.model_validate({"max_turns": 2, "sampling": {"max_tokens_per_turn": 5}})
    member = trajectory("a", 1.0, tokens=9)
    settings = AlgorithmSettings(overlong=OverlongSettings(factor=1.0))
    result = apply_filters([Group("g", "p", 1, (member,))], settings, rollout)
    assert result.groups[0].members[0].total_reward == pytest.approx(0.5)  # buffer 2, limit 10


# --- filters of one's own --------------------------------------------------------------------------


def short_answers(group, algorithm, rollout):
    """Found by its import path below."""
    for voter in group.voters:
        if voter.sampled_tokens < 3:
            yield Decision("exclude", "short", group.group_id, voter.trajectory_id, voter.sampled_tokens)


def test_a_filter_is_named_by_its_import_path():
    settings = AlgorithmSettings(filters=(f"{__name__}:short_answers",), drop_zero_variance=False)
    pool = [group("a", [1, 1], tokens=2), group("b", [1, 0], tokens=4)]
    assert apply_filters(pool, settings, ROLLOUT).excluded == {"a-0": "short", "a-1": "short"}


def test_the_bundled_filters_come_first():
    settings = AlgorithmSettings(filters=(f"{__name__}:short_answers",))
    assert apply_filters([group("a", [1, 1], tokens=2)], settings, ROLLOUT).counts == {"zero_variance": 2}
