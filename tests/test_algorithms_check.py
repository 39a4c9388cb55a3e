from __future__ import annotations

import numpy as np
import pytest

from slipstream.algorithms import algorithm_problems, check_algorithm, loss_spec
from slipstream.algorithms.losses import LOSSES, register_loss
from slipstream.config import load_settings
from slipstream.config.presets import PRESETS
from slipstream.config.settings import AlgorithmSettings, SamplingSettings
from slipstream.errors import SettingsError


def keys(algorithm: dict, sampling: dict | None = None, severity: str = "error", **kwargs) -> list[str]:
    settings = AlgorithmSettings(**algorithm)
    kwargs.setdefault("samples_per_prompt", 8)
    problems = check_algorithm(settings, SamplingSettings(**(sampling or {})), **kwargs)
    return [p.keys[0] for p in problems if p.severity == severity]


def test_defaults_are_accepted():
    assert keys({}) == []


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"advantage": "gpro"}, "algorithm.advantage"),
        ({"loss": "ppo_clp"}, "algorithm.loss"),
        ({"reduction": "token_meen"}, "algorithm.reduction"),
        ({"kl_in": "reward"}, "algorithm.kl_in"),
        ({"loss_settings": {"clip_hgih": 0.3}}, "algorithm.loss_settings"),
        ({"loss_settings": {"clip_high": 0.3}}, "algorithm.loss_settings.clip_high"),
        ({"loss": "cross_entropy"}, "algorithm.loss"),
        ({"advantage": "rloo", "normalize_by_std": False}, "algorithm.normalize_by_std"),
        ({"teacher": {"dtype": "float32"}}, "algorithm.teacher.dtype"),
    ],
)
def test_contradictions_are_refused(algorithm, key):
    assert key in keys(algorithm)


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        ("dppo", {"divergence": "js"}, "divergence must be 'tv' or 'kl', got 'js'"),
        ("dppo", {"delta_low": 0}, "delta_low must be a number above 0, got 0"),
        ("dual_clip", {"clip_dual": "abc"}, "clip_dual must be a number above 1, got 'abc'"),
        ("dual_clip", {"clip_dual": 0.5}, "clip_dual must be a number above 1, got 0.5"),
        ("dual_clip", {"clip_dual": None}, "clip_dual must be a number above 1, got None"),
        ("dual_clip", {"clip_dual": True}, "clip_dual must be a number above 1, got True"),
        ("sapo", {"tau_positive": 0}, "tau_positive must be a number above 0, got 0"),
        ("kl_cov", {"fraction": -1}, "fraction must be a number above 0 and at most 1, got -1"),
        ("clip_cov", {"cov_low": 6.0}, "cov_high must be a number above cov_low, got 5.0"),
        ("kl_cov", {"penalty": float("nan")}, "penalty must be a number at least 0, got nan"),
        ("tinker_ppo", {"clip_high_threshold": 0.8}, "clip_high_threshold must be a number above clip_low_threshold"),
        ("score_centering", {"cap": -1}, "cap must be a number above 0, got -1"),
        ("dro", {"beta": -0.1}, "beta must be a number at least 0, got -0.1"),
    ],
)
def test_a_setting_of_a_loss_that_means_nothing_is_refused(loss, settings, words):
    problems = check_algorithm(
        AlgorithmSettings(loss=loss, loss_settings=settings), SamplingSettings(), samples_per_prompt=8
    )
    assert [str(p) for p in problems if words in str(p)]


def test_every_number_of_a_bundled_loss_has_limits():
    """A loss that is added without saying which of its values mean something is not done."""
    free = {"cov_low"}  # a covariance may have any sign
    for name in LOSSES:
        loss = LOSSES.get(name)
        assert set(loss.defaults) - set(loss.limits) <= free, name


def test_a_setting_that_may_be_left_out_may_be_null():
    given = {"loss": "dppo", "loss_settings": {"delta_low": None, "delta_high": 1}}
    assert loss_spec(AlgorithmSettings(**given)).settings == {"divergence": "tv", "delta_low": None, "delta_high": 1}


def test_a_clip_for_a_loss_without_clipping_is_refused():
    assert "algorithm.clip_low" in keys({"loss": "cross_entropy", "clip_low": 0.1})


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"repetition_penalty": 1.2}])
def test_sampling_that_the_trainer_cannot_score_is_refused(sampling):
    (name,) = sampling
    assert keys({}, sampling) == [f"rollout.sampling.{name}"]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_truncated_sampling_is_replayed_and_not_refused(sampling):
    assert keys({}, sampling) == []


def test_one_sample_per_prompt_has_no_baseline():
    assert keys({}, samples_per_prompt=1) == ["algorithm.advantage"]


def test_more_minibatches_than_groups_are_refused():
    assert keys({"minibatches_per_step": 4}, prompts_per_step=2) == ["algorithm.minibatches_per_step"]


def test_no_op_choices_are_warned_about():
    assert keys({"kl_estimator": "k2"}, severity="warning") == ["algorithm.kl_estimator"]
    assert keys({"kl_estimator": "k1", "kl_coef": 0.1}, severity="warning") == ["algorithm.kl_estimator"]
    dapo = {"preset": "dapo", **PRESETS["dapo"].values, "kl_estimator": "k2"}
    assert "algorithm.kl_estimator" in keys(dapo, severity="warning"), "no preset set that"


def test_a_denominator_of_a_plain_sum_is_refused():
    masked = {"old_logprobs": "recompute", "off_policy": {"token_mask_high": 2.0, "denominator": "kept"}}
    assert keys({**masked, "reduction": "sum"}) == ["algorithm.off_policy.denominator"]
    assert keys({**masked, "reduction": "token_mean"}) == []


def test_a_loss_that_clips_by_other_names_says_so():
    found = check_algorithm(
        AlgorithmSettings(loss="tinker_cispo", clip_high=3.0), SamplingSettings(), samples_per_prompt=8
    )
    (message,) = [str(problem) for problem in found if "algorithm.clip_high" in problem.keys]
    assert "clips by clip_low_threshold, clip_high_threshold" in message
    assert "algorithm.loss_settings.clip_high_threshold" in message


def test_problems_name_the_mend_and_suggest():
    (problem,) = check_algorithm(AlgorithmSettings(loss="ppo_clp"), SamplingSettings(), samples_per_prompt=8)
    assert "Did you mean 'ppo_clip'?" in problem.message
    assert problem.mend


def test_settings_become_a_loss_spec():
    spec = loss_spec(AlgorithmSettings(clip_low=0.1, clip_high=0.3, kl_coef=0.01, entropy_coef=0.02))
    assert spec.policy == "ppo_clip"
    assert spec.settings == {"clip_low": 0.1, "clip_high": 0.3}
    assert (spec.kl_coef, spec.kl_estimator, spec.entropy_coef) == (0.01, "k3", 0.02)
    assert spec.needs_reference
    assert spec.needs_entropy


def test_kl_in_the_reward_leaves_the_loss_alone():
    spec = loss_spec(AlgorithmSettings(kl_coef=0.01, kl_in="reward"))
    assert spec.kl_coef == 0
    assert not spec.needs_reference


def test_an_unknown_loss_setting_raises():
    with pytest.raises(SettingsError, match="Did you mean 'clip_high'"):
        loss_spec(AlgorithmSettings(loss_settings={"clip_hihg": 1}))


def test_taking_rows_of_a_spec_keeps_them_aligned():
    spec = loss_spec(AlgorithmSettings(), old_logprobs=[np.zeros(1), np.ones(2), np.zeros(3)])
    assert [len(x) for x in spec.take([2, 1]).old_logprobs] == [3, 2]


def test_a_critic_on_the_policys_backbone_has_no_steps_of_its_own():
    shared = {"preset": "ppo", "critic": {"backbone": "shared", "warmup_steps": 3, "epochs_per_step": 2}}
    assert keys(shared) == ["algorithm.critic.epochs_per_step", "algorithm.critic.warmup_steps"]
    assert keys({"preset": "ppo", "critic": {"value_coef": 0.1}}) == ["algorithm.critic.value_coef"]
    assert keys({"preset": "ppo", "critic": {"backbone": "shared", "value_coef": 0.1}}) == []
    assert keys({"preset": "ppo"}) == []


@pytest.mark.parametrize("need", ["values", "old_values", "returns"])
def test_a_policy_loss_that_wants_what_only_a_critics_loss_gets_is_refused(need):
    register_loss("greedy_for_tests", needs=("old_logprobs", "advantages", need))(lambda xp, inputs, settings: None)
    try:
        assert "algorithm.loss" in keys({"loss": "greedy_for_tests"})
    finally:
        LOSSES.remove("greedy_for_tests")


def test_an_adaptive_coefficient_that_would_switch_itself_off_is_refused():
    adaptive = {"kl_coef": 0.1, "kl_controller": {"kind": "adaptive", "horizon": 20}}
    assert keys(adaptive, prompts_per_step=16) == ["algorithm.kl_controller.horizon"]
    assert keys(adaptive, prompts_per_step=1) == []


def test_a_critic_that_is_warmed_up_longer_than_the_run_is():
    given = ["algorithm.preset=ppo", "algorithm.critic.warmup_steps=10", "schedule.steps=10"]
    problems = algorithm_problems(load_settings([], given).settings)
    assert any("never learn" in problem.message for problem in problems)
    fewer = load_settings([], [*given, "algorithm.critic.warmup_steps=9"]).settings
    assert not any("never learn" in problem.message for problem in algorithm_problems(fewer))


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo"])
def test_an_anchor_by_age_needs_samples_that_age(loss):
    """Where no sample is older than the weights that are updated it is the sampler's log-probs, bit for bit."""

    def refused(*schedule):
        given = ["data.train=builtin:arithmetic?n=16", f"algorithm.loss={loss}", "algorithm.old_logprobs=approximate"]
        problems = algorithm_problems(load_settings((), [*given, *schedule]).settings)
        return [p for p in problems if p.severity == "error"]

    for schedule in (["schedule.kind=sync"], ["schedule.kind=fully_async", "schedule.max_staleness_steps=0"]):
        (problem,) = refused(*schedule)
        assert problem.keys == ("algorithm.old_logprobs", "schedule.kind")
        assert "sampler's own log-probs" in problem.message
    assert not refused("schedule.kind=one_step_off")
    assert not refused("schedule.kind=fully_async", "schedule.max_staleness_steps=2")


def test_gspo_is_told_apart_from_what_weighs_parts_of_a_sequence():
    def warned(**algorithm):
        return keys({"loss": "gspo", "reduction": "sequence_mean", **algorithm}, severity="warning")

    assert warned() == warned(advantage="rloo") == []
    assert "algorithm.advantage" not in warned(advantage="reinforce_pp")
    for algorithm in ({"advantage": "turn_credit"}, {"advantage": "gae"}, {"advantage": "reinforce_pp", "gamma": 0.9}):
        assert "algorithm.advantage" in warned(**algorithm)
    corrected = {"old_logprobs": "recompute", "off_policy": {"tis": "sequence"}}
    assert "algorithm.off_policy.tis" not in warned(**corrected)
    assert "algorithm.off_policy.tis" in warned(**{**corrected, "off_policy": {"tis": "token"}})
