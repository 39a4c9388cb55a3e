"""Conservation, counters and metrics: the sums that must hold and the means that obey votes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger_synthetic import Synth
from slipstream.errors import ContractError
from slipstream.ledger import StepRecord, TokenAccount, TokenFlow, eval_metrics, step_metrics
from slipstream.ledger.metrics import guard_metrics, reward_metrics, staleness_metrics
from slipstream.ledger.records import content, is_clock
from slipstream.trajectory import (
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
    VersionRun,
)


def member(
    sample: int,
    reward: float | Missing | None,
    *,
    outcome: Outcome | None = None,
    ids: tuple[int, ...] = (5, 6),
    version: str = "p/0/1",
    source: str = "",
) -> Trajectory:
    spans = [Span.prompt([1])]
    if ids:
        runs = [VersionRun(version, 0, len(ids))]
        spans.append(Span.sampled(ids, [-0.5] * len(ids), runs, SamplingSpec(), 0))
    return Trajectory(
        trajectory_id=f"t{sample}",
        group_id="g",
        prompt_uid="u",
        sample=sample,
        attempt=0,
        rows=(Row(tuple(spans)),),
        turns=(),
        rewards=() if reward is None else (Reward(0, reward),),
        outcome=outcome or Completed(),
        scheduled_step=1,
        data_source=source,
    )


def group_of(*members: Trajectory, size: int | None = None) -> Group:
    return Group("g", "u", size or len(members), members)


FAILED = Failed("env_raised", "boom", False)


def test_conservation_spells_out_its_terms() -> None:
    account = TokenAccount(sampled=20, trained=8, stale_dropped=2, buffered=4)
    with pytest.raises(
        ContractError, match=r"step 3: .*20 != 14 = trained 8 \+ stale_dropped 2 \+ buffered 4 \(off by \+6\)"
    ):
        account.check("step 3")


def test_every_disposition_has_its_term() -> None:
    settled = {"trained": 1, "filtered": 2, "stale": 3, "failed": 4, "superseded": 5}
    account = TokenAccount().after_step(TokenFlow(28, buffered=6, in_flight=7), settled)
    account.check()
    assert account == TokenAccount(28, 1, 2, 3, 4, 5, 6, 7)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ContractError, match="failed must be a count"):
        TokenAccount(sampled=1, trained=2, failed=-1).check()


def test_reward_means_leave_absent_members_out() -> None:
    group = group_of(
        member(0, 1.0),
        member(1, 0.0),
        member(2, None, outcome=FAILED),
        member(3, Missing("judge")),
        member(4, None, ids=()),
    )
    assert reward_metrics([group]) == {
        "reward/avg_raw_reward": 0.5,
        "reward/mean_positive_reward": 0.5,
        "reward/avg_pass_at_n": 1.0,
    }


def test_a_group_without_voters_gives_no_nan() -> None:
    group = group_of(member(0, None, outcome=FAILED))
    record = StepRecord(1, [group], {"t0": "failed"})
    metrics = step_metrics(record)
    assert "reward/avg_raw_reward" not in metrics
    assert all(value == value for value in metrics.values())


def test_in_evaluation_a_failure_counts_zero_and_is_reported_apart() -> None:
    groups = [group_of(member(0, 1.0), member(1, None, outcome=FAILED), size=4)]
    scores = eval_metrics(groups)
    assert scores["eval/all/avg_score"] == 0.25
    assert scores["eval/all/failed_share"] == 0.75


def test_evaluation_is_reported_by_source() -> None:
    groups = [group_of(member(0, 1.0, source="easy")), group_of(member(0, 0.0, source="hard"))]
    scores = eval_metrics(groups)
    assert (scores["eval/easy/avg_score"], scores["eval/hard/avg_score"], scores["eval/all/avg_score"]) == (1, 0, 0.5)


def test_staleness_is_per_token_and_from_versions() -> None:
    members = [member(0, 1.0, version="p/0/3", ids=(1, 2, 3)), member(1, 1.0, version="p/0/5", ids=(4,))]
    assert staleness_metrics(members, "p/0/5") == {
        "async/staleness_mean": 1.5,
        "async/staleness_max": 2.0,
        "async/staleness_min": 0.0,
        "async/mixed_version_share": 0.0,
        "async/version_lag_0": 0.25,
        "async/version_lag_2": 0.75,
    }


def test_foreign_versions_are_counted_not_guessed() -> None:
    members = [member(0, 1.0, version="elsewhere"), member(1, 1.0, version="p/0/1")]
    assert staleness_metrics(members, "p/0/1")["async/unversioned_share"] == 0.5


def test_guards_see_duplicates_zero_spread_failures_and_truncation() -> None:
    same = group_of(member(0, 1.0), member(1, 1.0), member(2, 1.0, ids=(9,), outcome=Truncated("turn_tokens")))
    broken = group_of(member(0, 1.0, ids=(3,)), member(1, None, outcome=FAILED, ids=()), size=5)
    guards = guard_metrics([same, broken], early_lengths=[1.0])
    assert guards["guard/duplicate_rate"] == 1 / 4
    assert guards["guard/zero_spread_share"] == 1.0  # the second group has one voter and no spread to speak of
    assert guards["guard/failed_share"] == pytest.approx(4 / 8)
    assert guards["guard/truncated_share"] == 1 / 8
    assert guards["guard/length_drift"] == pytest.approx(0.5)


def test_trainer_and_sampler_logprobs_are_compared_token_by_token() -> None:
    record = StepRecord(
        1,
        [group_of(member(0, 1.0))],
        {"t0": "trained"},
        trainer_logprobs={"t0": [[-0.6, -0.5]]},
        advantages={"t0": 2.0},
    )
    metrics = step_metrics(record)
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] == pytest.approx(0.05)
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(0.1)
    assert metrics["loss/avg_raw_advantages"] == 2.0


def test_member_order_changes_no_metric() -> None:
    record = Synth().step(1)
    shuffled = replace(record, groups=[replace(g, members=g.members[::-1]) for g in record.groups[::-1]])
    assert step_metrics(shuffled) == pytest.approx(step_metrics(record))


def test_superseded_attempts_count_in_no_metric() -> None:
    record = Synth().step(1)
    retried = Group("again", "u", 1, (replace(member(7, None, outcome=FAILED), group_id="again"),))
    more = replace(record, groups=[*record.groups, retried], dispositions={**record.dispositions, "t7": "superseded"})
    plain, with_retry = step_metrics(record), step_metrics(more)
    del plain["trainer/tokens_per_second"], with_retry["trainer/tokens_per_second"]  # the clock ran for both
    assert with_retry == plain


def test_metric_names_users_of_skyrl_know() -> None:
    names = set(step_metrics(Synth().step(1)))
    assert names >= {
        "reward/avg_raw_reward", "reward/avg_pass_at_n", "reward/mean_positive_reward",
        "reward/num_zero_variance_filtered", "environment/avg_executed", "generate/min_num_tokens",
        "generate/max_num_tokens", "generate/avg_num_tokens", "generate/std_num_tokens",
        "generate/avg_tokens_zero_rewards", "generate/avg_tokens_non_zero_rewards", "generate/avg_assistant_tokens",
        "generate/tokens_per_turn_mean", "generate/trajectory_time_llm_mean", "generate/trajectory_time_env_p90",
        "generate/group_completion_time_max", "generate/intra_group_completion_time_cv_mean",
        "loss/avg_raw_advantages_abs", "trainer/global_step",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "clock"),
    [
        ("timing/update", True), ("generate/trajectory_time_llm_mean", True), ("trainer/tokens_per_second", True),
        ("peak_memory_gb", True), ("path", True), ("llm_seconds", True), ("reward/avg_raw_reward", False),
        ("environment/avg_timeout", False), ("policy/grad_norm", False), ("generate/avg_num_tokens", False),
    ],
)  # fmt: skip
def test_clocks_are_told_from_content(key: str, clock: bool) -> None:
    assert is_clock(key) is clock


def test_content_keeps_the_counter_and_drops_the_incarnation() -> None:
    assert content({"v": "policy/3/7", "seconds": 1, "deep": [{"path": "x", "n": 1}]}) == {
        "v": "policy/*/7",
        "deep": [{"n": 1}],
    }


def test_the_gap_behind_older_weights_is_told_from_the_gap_without_them() -> None:
    runs = [VersionRun("p/0/1", 0, 2), VersionRun("p/0/2", 2, 4)]
    rows = (Row((Span.prompt([1]), Span.sampled((5, 6, 7, 8), [-0.5] * 4, runs, SamplingSpec(), 0))),)
    mixed = replace(member(0, 1.0), rows=rows)
    record = StepRecord(
        1,
        [group_of(mixed, member(1, 0.0, version="p/1/2"), member(2, 0.0, version="p/0/1"))],
        {"t0": "trained", "t1": "trained", "t2": "trained"},
        trainer_logprobs={"t0": [[-0.9, -0.9, -0.7, -0.6]], "t1": [[-0.51, -0.52]], "t2": [[-2.0, -2.0]]},
        weight_version_before="p/0/2",
    )
    metrics = step_metrics(record)
    assert metrics["async/kept_cache_gap_mean"] == pytest.approx(0.15)  # the last two tokens of t0
    assert metrics["async/same_weights_gap_mean"] == pytest.approx(0.015)  # t1; t2 is of other weights altogether
    alone = replace(
        record,
        groups=[group_of(member(1, 0.0, version="p/0/2"))],
        dispositions={"t1": "trained"},
        trainer_logprobs={"t1": [[-0.51, -0.52]]},
    )
    assert not {"async/kept_cache_gap_mean", "async/same_weights_gap_mean"} & set(step_metrics(alone))
