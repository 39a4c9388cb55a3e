"""Change something that must not matter to advantages and weights, and assert that they stay where they were.

Parametrised over every registered estimator and reduction, so that a new one is covered by being registered.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from algorithm_builders import batch_row, group, sampled, trajectory
from slipstream.algorithms import compile_batch, compute_advantages, critic_targets, reweigh, split_minibatches
from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.recursions import gae_compacted, returns_compacted
from slipstream.algorithms.reduce import REDUCTIONS, reduction_spec, token_weights
from slipstream.config.settings import AlgorithmSettings
from slipstream.trajectory import Cancelled, Completed, Failed, Group, Missing, Outcome, Reward, Row, Span, Trajectory

CASES = [
    AlgorithmSettings(advantage=name, gamma=0.9 if "gamma" in ADVANTAGES.get(name).defaults else 1.0, gae_lambda=0.8)
    for name in ADVANTAGES
]
CASES += [AlgorithmSettings(advantage=name, baseline="leave_one_out") for name in ("grpo", "maxrl", "turn_credit")]
CASES += [AlgorithmSettings(normalize_by_std=False), AlgorithmSettings(advantage="rloo", normalize_batch=True)]


def shown(case: AlgorithmSettings) -> str:
    return "-".join([case.advantage, case.baseline, f"std={case.normalize_by_std:d}", f"batch={case.normalize_batch}"])


def only(keep) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if keep(case)], ids=shown)


every_estimator = only(lambda case: True)
within_groups = only(lambda case: ADVANTAGES.get(case.advantage).group_relative and not case.normalize_batch)
unscaled_by_the_step = only(lambda case: not (ADVANTAGES.get(case.advantage).whitens or case.normalize_batch))
blind_to_a_shift = only(
    lambda case: ADVANTAGES.get(case.advantage).group_relative and case.advantage not in ("maxrl", "turn_credit")
)
every_reduction = pytest.mark.parametrize(
    "reduction",
    [reduction_spec(AlgorithmSettings(reduction=name, reduction_tokens=8)) for name in REDUCTIONS],
    ids=lambda spec: spec.name,
)


def conversation(tid: str, turns: list[float], *, gid: str, sample: int, observation=(), outcome=None) -> Trajectory:
    """One trajectory of several turns of two tokens, each with its reward; ``observation`` lies between turns."""
    spans: list[Span] = [Span.prompt([1, 2])]
    for turn, _ in enumerate(turns):
        if turn and observation:
            spans.append(Span.observation(observation, turn - 1))
        spans.append(sampled([10 + turn, 20 + turn], turn=turn))
    rewards = [Reward(turn, value) for turn, value in enumerate(turns)]
    return trajectory(tid, group=gid, sample=sample, rows=(Row(tuple(spans)),), rewards=rewards, outcome=outcome)


def pool(observation=()) -> list[Group]:
    """Three groups of several sizes, with rewards by turn and different numbers of turns, none below 0."""
    plan = {
        "a": [[1.0], [0.0, 0.5], [0.25, 0.0, 1.0]],
        "b": [[0.0], [0.0, 0.0]],
        "c": [[1.5, 0.0], [0.0], [0.5], [0.125, 0.125]],
    }
    return [
        Group(
            gid,
            "p",
            len(rows),
            tuple(
                conversation(f"{gid}-{i}", turns, gid=gid, sample=i, observation=observation)
                for i, turns in enumerate(rows)
            ),
        )
        for gid, rows in plan.items()
    ]


def arrays(groups: list[Group]) -> dict[str, dict[str, np.ndarray]]:
    """A critic's values and a teacher's scores, keyed by the trajectory's name."""
    out: dict[str, dict[str, np.ndarray]] = {"values": {}, "teacher_logprobs": {}}
    for member in (m for g in groups for m in g.voters):
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(member.trajectory_id.encode()).digest()[:4]))
        out["values"][member.trajectory_id] = rng.normal(size=member.sampled_tokens)
        out["teacher_logprobs"][member.trajectory_id] = -np.abs(rng.normal(size=member.sampled_tokens))
    return out


def advantages(groups: list[Group], case: AlgorithmSettings) -> dict[str, np.ndarray]:
    """Per token, so that numbers and arrays compare."""
    got = compute_advantages(groups, case, arrays=arrays(groups))
    sizes = {m.trajectory_id: m.sampled_tokens for g in groups for m in g.voters}
    return {tid: np.broadcast_to(np.asarray(value, dtype=float), (sizes[tid],)) for tid, value in got.items()}


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for tid, values in want.items():
        np.testing.assert_allclose(got[tid], values, rtol=1e-12, atol=1e-14)


@every_estimator
def test_permuting_groups_and_members_changes_nothing(case):
    want = advantages(pool(), case)
    for order in itertools.permutations(range(3)):
        assert_equal(advantages([replace(g, members=g.members[::-1]) for g in (pool()[i] for i in order)], case), want)


INVALID: list[tuple[float | Missing | None, Outcome, bool]] = [
    (0.0, Failed("env_raised", "x", True), False),
    (1.0, Cancelled("x"), False),
    (1e6, Failed("engine_error", "x", True), False),
    (-1e6, Cancelled("x"), False),
    (Missing("the judge is down"), Completed(), False),
    (None, Completed(), True),
]


@every_estimator
@pytest.mark.parametrize(("reward", "outcome", "empty"), INVALID)
def test_an_invalid_member_changes_nothing_whatever_its_reward(case, reward, outcome, empty):
    groups = pool()
    bad = trajectory("bad", reward, group="a", sample=9, tokens=0 if empty else 7, outcome=outcome)
    groups[0] = Group("a", "p", 4, (*groups[0].members[:1], bad, *groups[0].members[1:]))
    assert_equal(advantages(groups, case), advantages(pool(), case))


@every_estimator
@pytest.mark.parametrize("observation", [(30,), (30, 31, 32, 33)])
def test_observations_are_no_steps(case, observation):
    assert_equal(advantages(pool(observation), case), advantages(pool(), case))


@every_estimator
def test_rows_that_forked_are_one_trajectory(case):
    def forked(member: Trajectory) -> Trajectory:
        """Each turn in a row of its own: what a template does that rewrites history."""
        spans = list(member.sampled_spans())
        rows = [Row((Span.prompt([1, 2]), spans[0]))]
        rows += [Row((Span.observation([5], i), span), parent=0, fork_point=2) for i, span in enumerate(spans[1:])]
        return replace(member, rows=tuple(rows))

    groups = [replace(g, members=tuple(forked(m) for m in g.members)) for g in pool()]
    assert_equal(advantages(groups, case), advantages(pool(), case))


@within_groups
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_constant_group_gives_exactly_zero_where_groups_are_compared(case, value, size):
    members = tuple(conversation(f"m{i}", [value, value], gid="g", sample=i) for i in range(size))
    got = advantages([Group("g", "p", size, members)], case)
    assert all(np.all(values == 0) for values in got.values())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_constant_step_is_exactly_zero_after_whitening(size):
    members = tuple(trajectory(f"m{i}", 0.1, sample=i, tokens=3) for i in range(size))
    got = advantages([Group("g", "p", size, members)], AlgorithmSettings(advantage="reinforce_pp"))
    assert all(np.all(values == 0) for values in got.values())


@every_estimator
@pytest.mark.parametrize("size", range(1, 6))
def test_every_group_size_gives_finite_advantages(case, size):
    rewards = np.random.default_rng(size).random(size)
    members = tuple(conversation(f"m{i}", [r, r / 2], gid="g", sample=i) for i, r in enumerate(rewards))
    got = advantages([Group("g", "p", size, members)], case)
    assert len(got) == size
    if size == 1 and ADVANTAGES.get(case.advantage).group_relative:
        assert np.all(got["m0"] == 0)


@unscaled_by_the_step
def test_other_groups_matter_only_to_what_is_whitened(case):
    alone = {tid: values for g in pool() for tid, values in advantages([g], case).items()}
    assert_equal(alone, advantages(pool(), case))


@blind_to_a_shift
def test_a_shift_of_all_scores_changes_nothing_where_groups_are_compared(case):
    def shifted(member: Trajectory) -> Trajectory:
        return replace(member, rewards=(*member.rewards, Reward(0, 2.0, "shift")))

    groups = [replace(g, members=tuple(shifted(m) for m in g.members)) for g in pool()]
    got, want = advantages(groups, case), advantages(pool(), case)
    for tid, values in want.items():
        np.testing.assert_allclose(got[tid], values, atol=1e-9)


@every_estimator
@every_reduction
def test_a_member_that_is_left_out_keeps_its_vote_and_leaves_the_denominator(case, reduction):
    got = compute_advantages(pool(), case, arrays=arrays(pool()))
    left_out = compile_batch(pool(), got, reduction, excluded={"a-1"})
    kept = [row for row in compile_batch(pool(), got, reduction).rows if row.trajectory_id != "a-1"]
    for a, b in zip(left_out.rows, reweigh(kept, reduction), strict=True):
        assert a.row_id == b.row_id
        np.testing.assert_array_equal(a.weights_T, b.weights_T)
        np.testing.assert_array_equal(a.advantages_T[a.trained_T], b.advantages_T[b.trained_T])


# --- reductions ------------------------------------------------------------------------------------


def rows():
    return [
        batch_row("a0", [1] * 4, trajectory_id="ta", group_id="g"),
        batch_row("a1", [0, 1, 1], trajectory_id="ta", group_id="g"),
        batch_row("b", [1] * 2, trajectory_id="tb", group_id="g"),
        batch_row("c", [0, 1, 1, 1, 0], trajectory_id="tc", group_id="h"),
    ]


@every_reduction
def test_permuting_rows_permutes_weights(reduction):
    want = token_weights(rows(), reduction)
    for order in itertools.permutations(range(4)):
        got = token_weights([rows()[i] for i in order], reduction)
        np.testing.assert_allclose(got, want[list(order)], rtol=1e-15)


@every_reduction
def test_splitting_a_trajectory_into_rows_changes_no_weight(reduction):
    whole = [batch_row("a", [1] * 6, trajectory_id="ta", group_id="g"), *rows()[2:]]
    got, want = token_weights(rows(), reduction), token_weights(whole, reduction)
    np.testing.assert_allclose(got[[0, 2, 3]], want, rtol=1e-15)
    assert got[1] == got[0]


@every_reduction
@pytest.mark.parametrize("fill", [1e6, -math.inf, math.nan])
def test_masked_slots_reach_no_weight(reduction, fill):
    def spoiled(row):
        return replace(row, advantages_T=np.where(row.trained_T, row.advantages_T, fill))

    clean, dirty = reweigh(rows(), reduction), reweigh([spoiled(row) for row in rows()], reduction)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a.weights_T, b.weights_T)


@every_reduction
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_copies_weigh_as_much_as_rows_written_out(reduction, copies):
    def copy(row, k):
        return replace(row, row_id=f"{row.row_id}{k}", trajectory_id=f"{row.trajectory_id}{k}", group_id=f"h{k}")

    short = [*rows()[:3], replace(rows()[3], copies=copies)]
    written = [*rows()[:3], *(copy(rows()[3], k) for k in range(copies))]
    got, want = token_weights(short, reduction), token_weights(written, reduction)
    np.testing.assert_allclose(got[:3], want[:3], rtol=1e-15)
    assert got[3] == pytest.approx(want[3:].sum(), rel=1e-14)


@every_reduction
def test_copies_count_in_the_minibatch_that_they_are_trained_in(reduction):
    groups = [group("x", [1, 0], tokens=2), group("y", [1, 0], tokens=3)]
    batch = compile_batch(groups, None, reduction, copies={"y": 3})
    assert [row.copies for row in batch.rows] == [1, 1, 3, 3]
    for part in split_minibatches(batch, 2, reduction):
        want = token_weights(part.batch.rows, reduction)
        np.testing.assert_allclose([row.weights_T.max() for row in part.batch.rows], want)


@every_reduction
def test_adding_a_masked_token_changes_nothing(reduction):
    longer = [
        batch_row("a0", [0, 1, 1, 1, 1, 0, 0], trajectory_id="ta", group_id="g"),
        *rows()[1:],
    ]
    np.testing.assert_array_equal(token_weights(longer, reduction), token_weights(rows(), reduction))


# --- recursions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [1e6, -math.inf, math.nan])
def test_what_masked_slots_hold_reaches_no_recursion(fill):
    rng = np.random.default_rng(0)
    mask = np.array([1, 0, 1, 1, 0, 0, 1])
    r, v = rng.normal(size=7), rng.normal(size=7)
    dirty_r, dirty_v = np.where(mask, r, fill), np.where(mask, v, fill)
    np.testing.assert_array_equal(returns_compacted(dirty_r, mask, 0.9), returns_compacted(r, mask, 0.9))
    np.testing.assert_array_equal(gae_compacted(dirty_r, dirty_v, mask, 0.9, 0.8), gae_compacted(r, v, mask, 0.9, 0.8))


def test_critic_targets_are_the_discounted_returns_at_lambda_one():
    case = AlgorithmSettings(advantage="gae", gamma=0.9, gae_lambda=1.0)
    groups = pool((30,))
    got = critic_targets(groups, case, arrays(groups)["values"])
    plain = compute_advantages(
        groups, AlgorithmSettings(advantage="reinforce_pp", gamma=0.9, normalize_batch=False), arrays={}
    )
    for tid, values in plain.items():
        np.testing.assert_allclose(got[tid], values, atol=1e-12)
