from __future__ import annotations

import numpy as np
import pytest

from algorithm_builders import group, sampled, trajectory
from slipstream.algorithms import compile_batch, compute_advantages, loss_inputs, loss_spec, numpy_ops
from slipstream.algorithms.compile import split_minibatches
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError
from slipstream.trajectory import (
    Cancelled,
    Failed,
    Group,
    Missing,
    Reward,
    Row,
    SamplingSpec,
    SideChannel,
    Span,
    Truncated,
    VersionRun,
)


def one(member) -> Group:
    return Group(member.group_id, "p", 1, (member,))


def two_turns() -> tuple[Row, ...]:
    return (
        Row(
            (
                Span.prompt([1, 2]),
                sampled([10, 11], [-0.1, -0.2], turn=0),
                Span.synthetic([9], turn=0),
                Span.observation([20, 21], turn=0),
                sampled([12], [-0.3], turn=1),
            )
        ),
    )


def test_arrays_lie_on_targets_and_only_sampled_tokens_are_trained():
    member = trajectory("a", rows=two_turns(), rewards=[Reward(1, 1.0)])
    (row,) = compile_batch([one(member)], {"a": 2.0}, "token_mean").rows
    assert row.inputs_T.tolist() == [1, 2, 10, 11, 9, 20, 21]
    assert row.targets_T.tolist() == [2, 10, 11, 9, 20, 21, 12]
    assert row.targets_T[row.trained_T].tolist() == [10, 11, 12]
    assert row.behaviour_logprobs_T[row.trained_T].tolist() == [-0.1, -0.2, -0.3]
    assert row.advantages_T[row.trained_T].tolist() == [2.0, 2.0, 2.0]
    assert row.weights_T[row.trained_T].tolist() == pytest.approx([1 / 3] * 3)
    assert np.isnan(row.advantages_T[~row.trained_T]).all()


def test_forked_rows_train_each_sampled_token_once_and_share_one_advantage():
    root = Row((Span.prompt([1, 2]), sampled([10, 11, 12, 13, 14], turn=0)))
    # The template stripped the first two sampled tokens (thinking) from the history of turn 1.
    child = Row((Span.observation([12, 13, 14, 30]), sampled([15, 16, 17, 18], turn=1)), parent=0, fork_point=2)
    member = trajectory("a", rows=(root, child), rewards=[Reward(1, 1.0)])
    batch = compile_batch([one(member)], {"a": 1.5}, "sequence_mean")
    trained = [row.targets_T[row.trained_T].tolist() for row in batch.rows]
    assert trained == [[10, 11, 12, 13, 14], [15, 16, 17, 18]]
    assert batch.rows[1].inputs_T.tolist() == [1, 2, 12, 13, 14, 30, 15, 16, 17]
    assert batch.n_trained == member.sampled_tokens == 9
    assert sum(row.weights_T.sum() for row in batch.rows) == pytest.approx(1.0)
    assert {w for row in batch.rows for w in row.weights_T[row.trained_T]} == {1 / 9}


def test_an_inherited_sampled_prefix_is_context_only():
    root = Row((Span.prompt([1]), sampled([10, 11, 12])))
    child = Row((Span.observation([40]), sampled([13], turn=1)), parent=0, fork_point=3)
    member = trajectory("a", rows=(root, child), rewards=[Reward(1, 1.0)])
    batch = compile_batch([one(member)], {"a": 1.0}, "token_mean")
    assert batch.rows[1].targets_T.tolist() == [10, 11, 40, 13]
    assert batch.rows[1].trained_T.tolist() == [False, False, False, True]


def test_advantages_per_token_follow_the_sampled_tokens_over_rows():
    root = Row((Span.prompt([1]), sampled([10, 11])))
    child = Row((Span.observation([40]), sampled([13], turn=1)), parent=0, fork_point=2)
    member = trajectory("a", rows=(root, child), rewards=[Reward(1, 1.0)])
    batch = compile_batch([one(member)], {"a": np.array([1.0, 2.0, 3.0])}, "token_mean")
    assert [row.advantages_T[row.trained_T].tolist() for row in batch.rows] == [[1.0, 2.0], [3.0]]


def test_members_without_a_vote_give_no_rows():
    members = (
        trajectory("ok", 1.0, sample=0),
        trajectory("failed", 1.0, sample=1, outcome=Failed("env_raised", "boom", True)),
        trajectory("cancelled", 1.0, sample=2, outcome=Cancelled("user")),
        trajectory("unscored", Missing("judge down"), sample=3),
        trajectory("empty", None, sample=4, tokens=0),
        trajectory("unrewarded", None, sample=5),
    )
    batch = compile_batch([Group("g", "p", 6, members)], {"ok": 0.5}, "token_mean")
    assert [row.trajectory_id for row in batch.rows] == ["ok"]
    assert batch.rows[0].weights_T.sum() == pytest.approx(1.0)


def test_excluded_members_leave_the_denominator_too():
    pool = [group("g", [1.0, 0.0], tokens=4)]
    advantages = {"g-0": 1.0, "g-1": -1.0}
    batch = compile_batch(pool, advantages, "sequence_mean", excluded={"g-1": "truncated"})
    assert [row.trajectory_id for row in batch.rows] == ["g-0"]
    assert batch.rows[0].weights_T.sum() == pytest.approx(1.0)


def test_targets_are_trained_by_likelihood_only():
    rows = (Row((Span.prompt([1]), Span.target([5, 6]), Span.observation([7]), Span.target([8]))),)
    member = trajectory("a", None, rows=rows)
    assert compile_batch([one(member)], None, "token_mean").rows == []
    (row,) = compile_batch([one(member)], None, "token_mean", mode="likelihood").rows
    assert row.targets_T[row.trained_T].tolist() == [5, 6, 8]
    assert row.advantages_T[row.trained_T].tolist() == [1, 1, 1]


def test_a_first_target_token_has_no_predictor_and_is_context():
    member = trajectory("a", None, rows=(Row((Span.target([5, 6, 7]),)),))
    (row,) = compile_batch([one(member)], None, "token_mean", mode="likelihood").rows
    assert row.targets_T[row.trained_T].tolist() == [6, 7]


def test_a_first_sampled_token_without_predictor_is_refused():
    member = trajectory("a", rows=(Row((sampled([5, 6]),)),))
    with pytest.raises(ContractError, match="nothing predicts"):
        compile_batch([one(member)], {"a": 1.0}, "token_mean")


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (SamplingSpec(temperature=0.0), "temperature 0"),
        (SamplingSpec(top_p=0.9), "another distribution"),
        (SamplingSpec(top_k=5), "another distribution"),
        (SamplingSpec(repetition_penalty=1.1), "another distribution"),
    ],
)
def test_sampling_that_cannot_be_scored_is_refused(spec, rule):
    member = trajectory("a", 1.0, rows=(Row((Span.prompt([1]), sampled([5], sampling=spec))),))
    with pytest.raises(ContractError, match=rule):
        compile_batch([one(member)], {"a": 1.0}, "token_mean")


def test_truncated_sampling_with_kept_sets_is_accepted_and_the_sets_travel():
    side = {"kept_sets": SideChannel("kept_sets", "token", [(5, 6), (5, 7)])}
    span = sampled([5, 7], sampling=SamplingSpec(top_p=0.9), side=side)
    (row,) = compile_batch([one(trajectory("a", rows=(Row((Span.prompt([1]), span)),)))], None, "token_mean").rows
    assert row.sampling.top_p == 0.9
    assert list(row.side_T["kept_sets"][row.trained_T]) == [(5, 6), (5, 7)]


def test_two_specs_in_one_row_are_refused():
    spans = (Span.prompt([1]), sampled([5]), sampled([6], turn=1, sampling=SamplingSpec(temperature=0.7)))
    member = trajectory("a", rows=(Row(spans),))
    with pytest.raises(ContractError, match="mixes 2 sampling specs"):
        compile_batch([one(member)], {"a": 1.0}, "token_mean")


def test_missing_logprobs_are_refused_by_the_loss_that_needs_them_only():
    span = Span.sampled([5], Missing("foreign"), [VersionRun("policy/0/0", 0, 1)], SamplingSpec(), 0)
    batch = compile_batch([one(trajectory("a", rows=(Row((Span.prompt([1]), span)),)))], None, "token_mean")
    xp, logprobs = numpy_ops(), np.array([-1.0])
    with pytest.raises(ContractError, match="needs finite behaviour_logprobs"):
        loss_inputs(xp, batch, [0], loss_spec(AlgorithmSettings()), logprobs)
    recomputed = loss_spec(AlgorithmSettings(), old_logprobs=[np.array([-1.0])])
    inputs = loss_inputs(xp, batch, [0], recomputed, logprobs)
    assert inputs.old_logprobs.tolist() == [-1.0]
    assert inputs.behaviour_logprobs is None


@pytest.mark.parametrize(
    ("advantages", "rule"),
    [
        ({}, "has no advantage"),
        ({"a": float("nan")}, "not finite"),
        ({"a": np.ones(3)}, "for 2 sampled tokens"),
        ({"a": 1.0, "stranger": 1.0}, "no voter"),
    ],
)
def test_bad_advantages_are_refused(advantages, rule):
    with pytest.raises(ContractError, match=rule):
        compile_batch([one(trajectory("a", 1.0))], advantages, "token_mean")


def test_truncated_members_vote_and_are_trained_unless_excluded():
    members = (trajectory("a", 1.0, outcome=Truncated("turn_tokens")), trajectory("b", 0.0, sample=1))
    pool = [Group("g", "p", 2, members)]
    advantages = compute_advantages(pool, AlgorithmSettings())
    assert len(compile_batch(pool, advantages, "token_mean").rows) == 2
    assert len(compile_batch(pool, advantages, "token_mean", excluded={"a"}).rows) == 1


def test_minibatches_hold_whole_groups_and_weigh_anew():
    pool = [group(f"g{i}", [1.0, 0.0], tokens=2 + i) for i in range(3)]
    batch = compile_batch(pool, compute_advantages(pool, AlgorithmSettings()), "token_mean")
    parts = split_minibatches(batch, 2, "token_mean")
    assert [sorted({row.group_id for row in part.batch.rows}) for part in parts] == [["g0"], ["g1", "g2"]]
    assert [part.rows for part in parts] == [(0, 1), (2, 3, 4, 5)]
    for part in parts:
        assert sum(row.weights_T.sum() for row in part.batch.rows) == pytest.approx(1.0)
    assert len(split_minibatches(batch, 9, "token_mean")) == 3


def test_changing_an_observation_changes_inputs_only():
    def build(ids):
        spans = (Span.prompt([1]), sampled([10]), Span.observation(ids), sampled([11], turn=1))
        return compile_batch([one(trajectory("a", rows=(Row(spans),)))], {"a": 1.0}, "token_mean").rows[0]

    a, b = build([20, 21]), build([30, 31])
    for name in ("trained_T", "weights_T"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert np.array_equal(a.targets_T[a.trained_T], b.targets_T[b.trained_T])
