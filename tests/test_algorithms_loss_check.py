"""``slipstream check loss`` passes every bundled loss and says what is wrong with a flawed one."""

from __future__ import annotations

import random
import sys
import textwrap

import numpy as np
import pytest

from slipstream.algorithms import LossMetric, LossValues, log_ratio, register_loss
from slipstream.algorithms.loss_check import check_loss
from slipstream.algorithms.losses import LOSSES
from slipstream.errors import SettingsError

FLAWED = "flawed_for_tests"


def findings(function, settings=None, **options):
    register_loss(FLAWED, **options)(function)
    try:
        return check_loss(FLAWED, settings)
    finally:
        LOSSES.remove(FLAWED)


def only(found, rule, severity="error"):
    assert [(f.severity, f.rule) for f in found] == [(severity, rule)], [str(f) for f in found]
    return found[0].message


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_bundled_loss_passes(name):
    assert check_loss(name) == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dppo", {"divergence": "kl"}),
        ("score_centering", {"cap": 2.0}),
        ("clip_cov", {"fraction": 0.3, "cov_low": -5.0}),
        ("kl_cov", {"fraction": 0.3}),
    ],
)
def test_other_settings_pass_too(name, settings):
    assert check_loss(name, settings) == []


def ratio(xp, inputs):
    return xp.exp(log_ratio(xp, inputs.logprobs, inputs.old_logprobs))


@pytest.mark.parametrize("reduce", [lambda xp, x: xp.sum(x) / len(x), lambda xp, x: xp.sum(x)])
def test_a_mean_or_a_sum_instead_of_values_per_token(reduce):
    found = findings(lambda xp, i, s: LossValues(reduce(xp, -ratio(xp, i) * i.advantages)))
    assert "one number for 21 tokens" in only(found, "per-unit values")


def test_a_mean_that_is_spread_over_the_tokens_again():
    def hidden_mean(xp, inputs, settings):
        values = -ratio(xp, inputs) * inputs.advantages
        return LossValues(values * 0 + xp.sum(values) / inputs.size)

    assert any(f.rule == "split" for f in findings(hidden_mean))


def test_advantages_normalised_inside_the_micro_batch():
    def normalised(xp, inputs, settings):
        centred = inputs.advantages - xp.sum(inputs.advantages) / inputs.size
        return LossValues(-ratio(xp, inputs) * centred)

    found = findings(normalised)
    assert "split" in {f.rule for f in found}
    assert "pre-pass" in next(f.message for f in found if f.rule == "split")


def test_a_row_statistic_that_counts_masked_tokens():
    def ignores_masks(xp, inputs, settings):
        gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
        mean = xp.segment_mean(gap, inputs.row_index, inputs.n_rows)[inputs.row_index]
        return LossValues(-xp.exp(mean) * inputs.advantages)

    assert "off-policy mask dropped" in only(findings(ignores_masks), "masked tokens")


def test_a_prepass_that_counts_masked_tokens():
    def centred(inputs, settings):
        return inputs.logprobs - inputs.logprobs.mean()

    found = findings(lambda xp, i, s: LossValues(-ratio(xp, i) * i.advantages * xp.abs(i.prepass)), prepass=centred)
    assert "inputs.live" in only(found, "masked tokens")


def test_an_exponential_that_nothing_bounds():
    message = only(
        findings(lambda xp, i, s: LossValues(-xp.exp(i.logprobs - i.old_logprobs) * i.advantages)), "exponential"
    )
    assert "log-ratio of 100" in message
    assert "Clamp the log-ratio before the exponential" in message


def test_an_exponential_before_its_mask():
    def masked(xp, inputs, settings):
        gap = inputs.logprobs - inputs.old_logprobs
        return LossValues(-xp.where(xp.abs(gap) < 5, xp.exp(gap), 0.0) * inputs.advantages)

    message = only(findings(masked), "exponential before mask")
    assert "the gradient is 0 * inf" in message


def test_an_infinite_exponential_times_a_mask():
    def masked(xp, inputs, settings):
        gap = inputs.logprobs - inputs.old_logprobs
        return LossValues(-xp.exp(gap) * xp.as_float(gap < 5, gap) * inputs.advantages)

    assert "met a mask of 0" in only(findings(masked), "exponential")


def test_a_gradient_that_is_lost_where_policy_and_anchor_agree():
    def rooted(xp, inputs, settings):
        gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
        return LossValues(-xp.exp(gap) * inputs.advantages + 0.1 * (gap * gap) ** 0.5)

    assert "a gradient is not finite where policy and anchor agree" in only(findings(rooted), "finite")


def test_a_division_by_an_advantage_of_zero():
    def by_sign(xp, inputs, settings):
        return LossValues(-ratio(xp, inputs) * inputs.advantages * (inputs.advantages / xp.abs(inputs.advantages)) ** 2)

    assert "a value is not finite where an advantage is 0" in only(findings(by_sign), "finite")


def test_a_logarithm_that_a_certain_token_makes_infinite():
    """The complement of a probability of 1; sharp policies are certain at most places."""

    def loss(xp, inputs, settings):
        other = xp.log(1 - xp.exp(inputs.behaviour_logprobs)) - xp.log(1 - xp.exp(inputs.logprobs))
        ratio = xp.exp(log_ratio(xp, inputs.logprobs, inputs.behaviour_logprobs))
        return LossValues(-ratio * inputs.advantages + 0.01 * xp.clip(other, -5, 5))

    found = findings(loss, needs=("behaviour_logprobs", "advantages"))
    assert {finding.rule for finding in found} == {"finite"}
    assert "was certain" in found[0].message


def test_weights_applied_twice():
    found = findings(lambda xp, i, s: LossValues(-i.weights * ratio(xp, i) * i.advantages))
    assert "count twice" in only(found, "weights")


def test_a_missing_minus():
    assert "a minus is missing" in only(findings(lambda xp, i, s: LossValues(ratio(xp, i) * i.advantages)), "direction")


def test_an_undeclared_input_is_named():
    def reads_reference(xp, inputs, settings):
        gap = log_ratio(xp, inputs.logprobs, inputs.ref_logprobs)
        return LossValues(-xp.exp(gap) * inputs.advantages + inputs.entropy * 0)

    message = only(findings(reads_reference), "needs")
    assert "reads ref_logprobs, entropy without declaring" in message
    assert "needs=('old_logprobs', 'advantages', 'ref_logprobs', 'entropy',)" in message


def test_a_stopped_gradient():
    found = findings(lambda xp, i, s: LossValues(-xp.stop_gradient(ratio(xp, i)) * i.advantages))
    assert "no gradient reaches" in only(found, "gradient")


def test_torch_functions_instead_of_the_namespace():
    import torch

    def torch_only(xp, inputs, settings):
        return LossValues(-torch.exp(torch.clamp(inputs.logprobs - inputs.old_logprobs, -20, 20)) * inputs.advantages)

    assert "use xp and operators alone" in only(findings(torch_only), "runs")


def test_its_own_random_numbers():
    rng = np.random.default_rng(0)

    def dropout(xp, inputs, settings):
        keep = xp.asarray(rng.random(inputs.size) < 0.5, like=inputs.logprobs)
        return LossValues(-ratio(xp, inputs) * inputs.advantages * keep)

    assert "inputs.noise" in only(findings(dropout), "repeatable")


def test_a_prepass_that_goes_by_place_and_not_by_token():
    def every_second(inputs, settings):
        return np.arange(inputs.size) % 2.0

    found = findings(lambda xp, i, s: LossValues(-ratio(xp, i) * i.advantages * i.prepass), prepass=every_second)
    assert "inputs.noise" in only(found, "order")


def test_inputs_changed_in_place():
    def clobbers(xp, inputs, settings):
        inputs.advantages[inputs.advantages < 0] = 0.0
        return LossValues(-ratio(xp, inputs) * inputs.advantages)

    assert "changes advantages in place" in only(findings(clobbers), "in place")

    def shifts(xp, inputs, settings):
        logprobs = inputs.logprobs
        logprobs -= 1.0
        return LossValues(-ratio(xp, inputs) * inputs.advantages)

    assert "make a new array" in only(findings(shifts), "runs")


def test_a_bare_array_and_a_bare_metric():
    assert "return LossValues" in only(findings(lambda xp, i, s: -ratio(xp, i) * i.advantages), "returns")
    found = findings(lambda xp, i, s: LossValues(-ratio(xp, i) * i.advantages, {"r": xp.sum(i.advantages)}))
    assert "wrap it in LossMetric" in only(found, "metrics")


def test_a_metric_of_the_wrong_unit():
    def wrong(xp, inputs, settings):
        return LossValues(-ratio(xp, inputs) * inputs.advantages, {"r": LossMetric("mean", inputs.advantages, "row")})

    assert "want one per row" in only(findings(wrong), "metrics")


def test_losses_over_rows_and_groups_pass():
    def per(unit):
        def loss(xp, inputs, settings):
            gap = inputs.mean(xp, log_ratio(xp, inputs.logprobs, inputs.old_logprobs), unit)
            return LossValues(-xp.exp(gap) * inputs.mean(xp, inputs.advantages, unit))

        return loss

    assert findings(per("row"), unit="row") == []
    # Two trajectories of a group share one value, so a worse one may be pushed with a better one.
    assert {f.severity for f in findings(per("group"), unit="group")} <= {"warning"}


OWN = """
from slipstream.algorithms import LossMetric, LossValues, log_ratio, register_loss


@register_loss("my_capped", defaults={"cap": 2.0})
def capped(xp, inputs, settings):
    ratio = xp.stop_gradient(xp.exp(log_ratio(xp, inputs.logprobs, inputs.old_logprobs)))
    weight = xp.minimum(ratio, settings["cap"])
    return LossValues(-weight * inputs.advantages * inputs.logprobs, {"weight": LossMetric("mean", weight)})


def bare(xp, inputs, settings):
    return LossValues(-xp.exp(log_ratio(xp, inputs.logprobs, inputs.old_logprobs)) * inputs.advantages)


def mean(xp, inputs, settings):
    return LossValues(-xp.sum(inputs.advantages * inputs.logprobs) / inputs.size)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_losses", None)
    LOSSES.remove("my_capped")
    for path in [p for p in LOSSES._imported if p.startswith("own_losses")]:
        LOSSES._imported.pop(path)


def test_a_loss_by_import_path_with_its_settings(own_module):
    assert check_loss("own_losses:capped", {"cap": 3.0}) == []
    assert LOSSES.get("own_losses:capped") is LOSSES.get("my_capped")
    assert check_loss("own_losses:bare") == []
    with pytest.raises(SettingsError, match="Did you mean 'cap'"):
        check_loss("own_losses:capped", {"capp": 3.0})


def test_the_command_names_what_is_wrong(own_module):
    from typer.testing import CliRunner

    from slipstream.cli.main import app

    good = CliRunner().invoke(app, ["check", "loss", "own_losses:capped", "--setting", "cap=1.5"])
    assert (good.exit_code, good.output.strip()) == (0, "own_losses:capped: nothing found")
    bad = CliRunner().invoke(app, ["check", "loss", "own_losses:mean"])
    assert bad.exit_code == 1
    assert "Return one value per token" in bad.output
    assert bad.output.strip().endswith("own_losses:mean: 1 errors, 0 warnings")


def test_rare_numbers_from_a_global_generator():
    """A coin that seldom falls the other way: seen by the generator's state, not by what came of it."""

    def coin(xp, inputs, settings):
        return LossValues(-inputs.logprobs * (2.0 if random.random() < 1e-12 else 1.0))

    assert "global random generator" in only(findings(coin, needs=()), "repeatable")


def test_a_constant_that_goes_by_the_size_of_the_batch():
    def threshold(xp, inputs, settings):
        return LossValues(-inputs.logprobs * inputs.advantages * (0.5 if inputs.size > 64 else 1.0))

    assert "the reducer divides" in only(findings(threshold), "size")


def test_a_gradient_that_depends_on_the_neighbours_though_the_value_does_not():
    def coupled(xp, inputs, settings):
        gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
        mean = xp.sum(gap) / inputs.size
        return LossValues(-xp.exp(xp.stop_gradient(gap) + mean - xp.stop_gradient(mean)) * inputs.advantages)

    found = {f.rule: f.message for f in findings(coupled)}
    assert "a row's gradients change" in found["split"]
    assert "gradients" in found["size"]


def test_a_gradient_in_which_dropped_tokens_have_a_vote_though_the_value_does_not():
    def through_the_mean(xp, inputs, settings):
        gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
        mean = xp.segment_mean(gap, inputs.row_index, inputs.n_rows)[inputs.row_index]
        return LossValues(-xp.exp(xp.stop_gradient(gap) + mean - xp.stop_gradient(mean)) * inputs.advantages)

    assert "the gradients of others" in only(
        [f for f in findings(through_the_mean) if f.severity == "error"], "masked tokens"
    )


def test_a_row_that_a_mask_dropped_as_a_whole():
    def per_row(xp, inputs, settings):
        one = xp.as_float(inputs.logprobs < 1e9, inputs.logprobs)
        count = inputs.sum(xp, one, "row")
        gap = inputs.sum(xp, log_ratio(xp, inputs.logprobs, inputs.old_logprobs), "row") / count
        return LossValues(-xp.exp(gap) * inputs.sum(xp, inputs.advantages, "row") / count)

    message = only([f for f in findings(per_row, unit="row") if f.severity == "error"], "masked tokens")
    assert "whole row" in message
