"""Planning refuses estimators, reductions, filters, critics and teachers that cannot mean what they say."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.algorithms.check_estimation import check_estimation
from slipstream.config import make_plan
from slipstream.config.settings import AlgorithmSettings, RunSettings


def problems(samples: int = 8, **given: Any) -> dict[str, str]:
    """Severity by first key."""
    found = check_estimation(AlgorithmSettings.model_validate(given), samples_per_prompt=samples)
    return {problem.keys[0]: problem.severity for problem in found}


DISTIL = {"advantage": "distill", "drop_zero_variance": False, "teacher": {"path": "m"}}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"advantage": "rloo", "normalize_by_std": False}, "algorithm.normalize_by_std"),
        ({"advantage": "rloo", "baseline": "leave_one_out"}, "algorithm.baseline"),
        ({"gamma": 0.9}, "algorithm.gamma"),
        ({"advantage": "turn_credit", "gae_lambda": 0.9}, "algorithm.gae_lambda"),
        ({"advantage_settings": {"std_esp": 1.0}}, "algorithm.advantage_settings"),
        ({"advantage_settings": {"gamma": 1.0}}, "algorithm.advantage_settings"),
        ({"advantage": "maxrl", "overlong": {"factor": 1.0}}, "algorithm.advantage"),
        ({"advantage": "maxrl", "kl_in": "reward", "kl_coef": 0.1}, "algorithm.advantage"),
        ({"advantage": "distill", "teacher": {"path": "m"}}, "algorithm.drop_zero_variance"),
        ({"advantage": "distill", "drop_zero_variance": False}, "algorithm.teacher"),
        ({"teacher": {"path": "m"}}, "algorithm.teacher"),
        ({"critic": {"value_clip": 0.1}}, "algorithm.critic"),
        ({**DISTIL, "kl_in": "reward", "kl_coef": 0.1}, "algorithm.kl_in"),
        ({**DISTIL, "overlong": {"factor": 1.0}}, "algorithm.overlong.factor"),
        ({**DISTIL, "zero_reward_on_non_stop": True}, "algorithm.zero_reward_on_non_stop"),
        ({"drop_zero_variance": False, "zero_variance_tol": 0.1}, "algorithm.zero_variance_tol"),
        (
            {**DISTIL, "teacher": {"urls": ["http://a:1"], "dtype": "float32"}},
            "algorithm.teacher.dtype",
        ),
        ({"reduction_tokens": 9}, "algorithm.reduction_tokens"),
        ({"filters": "truncatd"}, "algorithm.filters"),
        ({"filters": "truncated"}, "algorithm.filters"),
        ({"filters": "zero_variance", "drop_zero_variance": False}, "algorithm.filters"),
        (
            {"normalize_by_std": False, "advantage_settings": {"std_eps": 0.1}},
            "algorithm.advantage_settings.std_eps",
        ),
        ({"filters": "no_such_module:f"}, "algorithm.filters"),
        ({"overlong": {"max_tokens": 9}}, "algorithm.overlong.factor"),
        ({"advantage_settings": {"std_eps": 0}}, "algorithm.advantage_settings"),
        ({"advantage_settings": {"std_eps": "small"}}, "algorithm.advantage_settings"),
        ({"dynamic_sampling": {"kind": "filter"}, "drop_zero_variance": False}, "algorithm.dynamic_sampling.kind"),
        ({"dynamic_sampling": {"max_rounds": 3}}, "algorithm.dynamic_sampling.max_rounds"),
        (
            {"dynamic_sampling": {"kind": "filter", "min_good_fraction": 0.5}},
            "algorithm.dynamic_sampling.min_good_fraction",
        ),
    ],
)
def test_contradictions_are_refused(given, key):
    assert problems(**given).get(key) == "error"


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "turn_credit", "reinforce_pp_baseline"])
def test_comparing_needs_two_samples(name):
    assert problems(samples=1, advantage=name) == {"algorithm.advantage": "error"}


def test_an_estimator_without_groups_needs_no_second_sample():
    assert problems(samples=1, advantage="reinforce_pp", drop_zero_variance=False) == {}


def test_leaving_out_groups_that_would_teach_something_warns():
    assert problems(advantage="reinforce_pp") == {"algorithm.drop_zero_variance": "warning"}


@pytest.mark.parametrize(
    "given",
    [
        {"advantage": "grpo", "baseline": "leave_one_out", "normalize_by_std": False},
        {"advantage": "turn_credit", "gamma": 0.9, "baseline": "leave_one_out"},
        {"advantage_settings": {"std_eps": 1e-4}},
        {"reduction": "seq_mean_token_sum_norm", "reduction_tokens": 9},
        {"overlong": {"factor": 0.5, "max_tokens": 100, "buffer_tokens": 20}},
        {"dynamic_sampling": {"kind": "replace", "min_good_fraction": 0.5, "max_rounds": 2}},
        {"normalize_batch": True},
    ],
)
def test_what_means_something_passes(given):
    assert problems(**given) == {}


def test_a_full_dump_is_not_taken_for_explicit_choices():
    """Settings read back from a run's own record hold every default; none of them contradicts anything."""
    given = AlgorithmSettings(advantage="rloo").model_dump()
    assert problems(**given) == {}


def test_a_penalty_that_never_begins_warns_in_the_plan():
    settings = RunSettings.model_validate(
        {
            "data": {"train": "builtin:arithmetic"},
            "algorithm": {"overlong": {"factor": 1.0, "max_tokens": 2000, "buffer_tokens": 10}},
        }
    )
    assert any(p.keys[0] == "algorithm.overlong.max_tokens" for p in make_plan(settings).warnings)


@pytest.mark.parametrize(
    "lengths",
    [{"max_tokens": 9, "buffer_tokens": 10}, {"buffer_tokens": 65}],  # 64 tokens are the most that are sampled
)
def test_a_buffer_longer_than_the_limit_is_refused(lengths):
    settings = RunSettings.model_validate(
        {
            "data": {"train": "builtin:arithmetic"},
            "rollout": {"max_turns": 1, "sampling": {"max_tokens_per_turn": 64}},
            "algorithm": {"overlong": {"factor": 1.0, **lengths}},
        }
    )
    assert any(p.keys[0] == "algorithm.overlong.buffer_tokens" for p in make_plan(settings).errors)
