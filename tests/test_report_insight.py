"""The headline and the advice follow from the numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.ledger import MetricsRow, TokenAccount
from slipstream.ledger.report_charts import Series, bin_counts, line_chart, smooth, ticks
from slipstream.ledger.report_data import EvalPoint, RunFacts
from slipstream.ledger.report_insight import advice, headline


def facts(metrics: dict[str, list[float]] | None = None, evals: list[EvalPoint] | None = None) -> RunFacts:
    metrics = metrics or {}
    length = max((len(v) for v in metrics.values()), default=0)
    rows = [
        MetricsRow(i + 1, "train", {k: v[i] for k, v in metrics.items() if i < len(v)}, 0, 0.0) for i in range(length)
    ]
    return RunFacts(
        run_dir=Path("x"), name="x", status="finished", started=0.0, minutes=3.0, incarnations=1, version="",
        settings={}, train=rows, sft=[], evals=evals or [], account=TokenAccount(), receipts=[], messages=[],
    )  # fmt: skip


def point(stage: str, step: int, score: float, prompts: int = 100) -> EvalPoint:
    return EvalPoint("held_out", stage, step, prompts, {}, {"eval/all/avg_score": score}, "policy/0/0")


def test_the_gain_of_rl_is_told_apart_from_the_warm_start() -> None:
    result = headline(facts({"x": [1.0]}, [point("start", 0, 0.1), point("sft", 0, 0.2), point("rl", 9, 0.5)]))
    assert result.text == "Held out score rose from 20.0 % to 50.0 %"
    assert "+30.0 points from reinforcement learning alone" in result.detail
    assert "warm start before it: +10.0 points" in result.detail
    assert result.tone == "up"


def test_a_change_within_its_interval_is_no_clear_change() -> None:
    result = headline(facts(evals=[point("start", 0, 0.40, 20), point("rl", 5, 0.45, 20)]))
    assert "no clear change" in result.text
    assert result.tone == "flat"


def test_scores_that_are_no_shares_are_not_shown_as_per_cent() -> None:
    run = facts(evals=[point("start", 0, 0.5), point("rl", 5, 2.5)])
    run.eval_shares = False
    result = headline(run)
    assert result.text == "Held out score rose from 0.5 to 2.5"
    assert "interval" not in result.detail


def test_a_fall_is_called_a_fall() -> None:
    result = headline(facts(evals=[point("start", 0, 0.8), point("rl", 5, 0.2)]))
    assert result.text == "Held out score fell from 80.0 % to 20.0 %"
    assert result.tone == "down"


def test_without_evaluations_the_training_reward_speaks_and_says_so() -> None:
    result = headline(facts({"reward/avg_raw_reward": [0.1, 0.2, 0.4]}))
    assert result.text == "Training reward went from 0.1 to 0.4"
    assert "not a held-out result" in result.detail


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"guard/failed_share": [0.2] * 4}, "why samples fail"),
        ({"guard/zero_spread_share": [0.7] * 4}, "samples_per_prompt"),
        (
            {
                "guard/zero_spread_share": [0.7] * 4,
                "reward/avg_pass_at_n": [0.95] * 4,
                "reward/avg_raw_reward": [0.9] * 4,
            },
            "harder prompts",
        ),
        ({"guard/truncated_share": [0.4] * 4}, "max_tokens_per_turn"),
        ({"guard/duplicate_rate": [0.5] * 4}, "temperature"),
        ({"policy/rollout_train_logprobs_abs_diff_mean": [0.3] * 4}, "sampler and trainer"),
        ({"policy/policy_entropy": [2.0, 1.5, 1.0, 0.6, 0.4, 0.3]}, "collapse"),
        ({"reward/avg_raw_reward": [0.1 * i for i in range(12)]}, "still rising"),
    ],
)
def test_each_guard_gives_its_advice(metrics: dict[str, list[float]], says: str) -> None:
    found = advice(facts(metrics))
    assert says in found[0].action


def test_a_healthy_run_gets_no_invented_problem() -> None:
    healthy = {
        "guard/failed_share": [0.0] * 12,
        "guard/zero_spread_share": [0.1] * 12,
        "reward/avg_raw_reward": [0.5] * 12,
    }
    (only,) = advice(facts({name: values * 12 for name, values in healthy.items()}))
    assert only.action.startswith("Run longer")


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.93), (-3.2, 17.0), (5.0, 5.0), (0.0, 1e-6), (120.0, 98000.0)])
def test_ticks_cover_the_range_in_even_steps(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    gaps = [b - a for a, b in pairwise(found)]
    assert max(gaps) == pytest.approx(min(gaps))
    assert 2 <= len(found) <= 8


def test_bins_hold_every_value() -> None:
    values = [1.0, 1.0, 2.0, 57.0, 300.0]
    bins = bin_counts(values)
    assert sum(count for _, count in bins) == len(values)
    assert len(bins) <= 24


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert smooth([2.0] * 30) == pytest.approx([2.0] * 30)


def test_a_chart_of_one_point_is_drawn_and_names_are_escaped() -> None:
    svg = line_chart([Series('<b>"x"', [1.0], [0.5], kind="marks")], "one & only")
    assert "<b>" not in svg
    assert "<circle" in svg
    assert "nan" not in svg
