from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithm_builders import batch_row, full_spec, inputs_of, prepared, random_batch
from slipstream.algorithms import (
    Batch,
    LossMetric,
    LossSpec,
    LossValues,
    MetricAccumulator,
    entropy_from_logits,
    kl_values,
    log_ratio,
    loss_inputs,
    numpy_ops,
    objective,
    register_loss,
    run_prepass,
    torch_ops,
)
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.losses import LOSSES
from slipstream.errors import ContractError, SettingsError


def run(rows, logprobs, spec, entropy=None, dtype=torch.float64):
    """Value, gradient and metrics in torch for log-probs of the trained tokens."""
    xp, batch = torch_ops(), Batch(rows)
    leaf = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    edges = np.cumsum([row.n_trained for row in rows])[:-1]
    spec = run_prepass(batch, spec, lambda: np.split(np.asarray(logprobs), edges))
    loss, metrics = objective(xp, loss_inputs(xp, batch, range(len(rows)), spec, leaf, entropy), spec)
    loss.backward()
    accumulator = MetricAccumulator()
    accumulator.add(metrics)
    return loss.item(), leaf.grad.numpy(), accumulator.result()


def test_ppo_clip_golden_numbers():
    # r = 1.5 and .5, A = +1 and -1, clip .2/.3: min(1.5, 1.3) = 1.3 and min(-.5, -.8) = -.8
    rows = [batch_row("a", [1, 1], weight=[0.5, 0.25], advantage=[1.0, -1.0], behaviour=[-1.0, -1.0])]
    spec = LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.3})
    loss, grad, metrics = run(rows, [-1 + math.log(1.5), -1 + math.log(0.5)], spec)
    assert loss == pytest.approx(-0.5 * 1.3 + 0.25 * 0.8)
    assert grad.tolist() == [0.0, 0.0]
    assert metrics["loss_metrics/clip_fraction"] == 1.0
    assert metrics["loss_metrics/ratio_mean"] == pytest.approx((0.5 * 1.5 + 0.25 * 0.5) / 0.75)
    assert metrics["loss_metrics/ratio_max"] == pytest.approx(1.5)
    assert metrics["loss_metrics/ratio_min"] == pytest.approx(0.5)
    # The other signs are not clipped: the pessimistic branch is the free one.
    rows = [batch_row("a", [1, 1], weight=0.5, advantage=[-1.0, 1.0], behaviour=[-1.0, -1.0])]
    loss, grad, metrics = run(rows, [-1 + math.log(1.5), -1 + math.log(0.5)], spec)
    assert loss == pytest.approx(0.5 * (1.5 - 0.5))
    assert grad.tolist() == pytest.approx([0.75, -0.25])
    assert metrics["loss_metrics/clip_fraction"] == 0.0


def test_a_lag_of_one_is_clipped_against_the_sampler_and_not_against_itself():
    rows = [batch_row("a", [1], advantage=1.0, behaviour=-1.0)]
    loss, grad, metrics = run(rows, [-0.5], LossSpec("ppo_clip"))
    assert metrics["loss_metrics/ratio_mean"] == pytest.approx(1.649, abs=1e-3)
    assert loss == pytest.approx(-1.2)
    assert grad.tolist() == [0.0]
    loss, grad, metrics = run(rows, [-0.5], LossSpec("ppo_clip", old_logprobs=[np.array([-0.5])]))
    assert metrics["loss_metrics/ratio_mean"] == 1.0
    assert loss == -1.0
    assert grad.tolist() == [-1.0]
    assert metrics["rollout_train_logprobs_abs_diff_max"] == pytest.approx(0.5)


def test_masking_comes_before_the_exponential():
    row = batch_row("a", [1, 0], advantage=1.0, behaviour=[-1.0, -100.0])
    new = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    xp, spec = torch_ops(), LossSpec("ppo_clip")
    trained = new[torch.as_tensor(row.trained_T)]
    loss, _ = objective(xp, loss_inputs(xp, Batch([row]), [0], spec, trained), spec)
    loss.backward()
    assert loss.item() == -1.0
    assert new.grad.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("estimator", KL_ESTIMATORS.names())
@pytest.mark.parametrize("gap", [-1000.0, -100.0, -20.0, 20.0, 100.0, 1000.0])
def test_huge_log_ratios_have_finite_values_and_gradients(name, estimator, gap, dtype):
    batch, xp = random_batch(2), torch_ops()
    far = [np.full(row.n_trained, -1001.0) for row in batch.rows]
    batch = Batch([replace(row, behaviour_logprobs_T=np.full(len(row.targets_T), -1001.0)) for row in batch.rows])
    moved = [values + gap for values in far]
    spec = full_spec(batch, name, estimator, old_logprobs=far, ref_logprobs=far, entropy_coef=0.0)
    spec = prepared(batch, spec, moved)
    leaf = torch.tensor(np.concatenate(moved), dtype=dtype, requires_grad=True)
    loss, metrics = objective(xp, inputs_of(xp, batch, range(len(batch.rows)), spec, leaf), spec)
    loss.backward()
    accumulator = MetricAccumulator()
    accumulator.add(metrics)
    assert math.isfinite(loss.item())
    assert np.isfinite(leaf.grad.numpy()).all()
    assert all(math.isfinite(v) for v in accumulator.result().values())


def test_the_anchor_and_the_reference_are_constants_also_when_they_carry_a_graph():
    own = torch.tensor([-1.0], requires_grad=True)
    kl_values(torch_ops(), own, 2 * own, "k1").sum().backward()
    assert own.grad.tolist() == [1.0]
    own.grad = None
    log_ratio(torch_ops(), own, 2 * own).sum().backward()
    assert own.grad.tolist() == [1.0]


def test_a_loss_is_given_what_it_declares_and_the_reducer_applies_the_coefficients():
    """Else a reference that is there for the KL term, or a weight of the reducer's, would change a loss unseen."""
    seen = []

    @register_loss("peeks_for_tests")
    def peeks(xp, inputs, settings):
        seen.append((inputs.ref_logprobs, inputs.coefficient, inputs.noise, inputs.old_logprobs is None))
        return LossValues(-inputs.advantages * inputs.logprobs)

    try:
        rows = [batch_row("a", [1, 1])]
        arrays = {"old_logprobs": [np.array([-1.0, -2.0])], "ref_logprobs": [np.array([-1.5, -1.0])]}
        spec = LossSpec("peeks_for_tests", {}, **arrays, coefficients=[np.array([0.5, 2.0])])
        _, gradient, _ = run(rows, [-1.0, -2.0], spec)
        _, plain, _ = run(rows, [-1.0, -2.0], replace(spec, coefficients=None))
    finally:
        LOSSES.remove("peeks_for_tests")
    assert seen == [(None, None, None, False)] * 2
    np.testing.assert_allclose(gradient, plain * [0.5, 2.0])


def test_kl_estimators_by_hand():
    xp, d = numpy_ops(), math.log(2.0)
    own, ref = np.array([-1.0]), np.array([-1.0 - d])
    want = {"k1": d, "k2": d * d / 2, "k3": 0.5 - 1 + d, "abs": d}
    assert {name: float(kl_values(xp, own, ref, name)[0]) for name in want} == pytest.approx(want)
    assert float(kl_values(xp, ref, own, "abs")[0]) == pytest.approx(d)
    assert float(kl_values(xp, ref, own, "k3")[0]) == pytest.approx(2 - 1 - d)


def test_k3_at_a_gap_of_a_hundred_is_capped_without_a_nan():
    own = torch.tensor([-101.0, -1.0], requires_grad=True)
    value = kl_values(torch_ops(), own, torch.tensor([-1.0, -1.0]), "k3")
    value.sum().backward()
    assert value.tolist() == [10.0, 0.0]
    assert own.grad.tolist() == [0.0, 0.0]


def test_kl_and_entropy_share_the_weights_of_the_policy_loss():
    rows = [batch_row("a", [1], weight=0.25, advantage=0.0), batch_row("b", [1], weight=0.75, advantage=0.0)]
    ref = [np.array([-2.0]), np.array([-3.0])]
    spec = LossSpec("ppo_clip", kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01, ref_logprobs=ref)
    entropy = torch.tensor([1.0, 2.0], dtype=torch.float64)
    loss, _, metrics = run(rows, [-1.0, -1.0], spec, entropy)
    assert loss == pytest.approx(0.1 * (0.25 * 1 + 0.75 * 2) - 0.01 * (0.25 * 1 + 0.75 * 2))
    assert metrics["policy_kl"] == metrics["policy_entropy"] == pytest.approx(1.75)
    assert metrics["final_loss"] == pytest.approx(loss)
    assert metrics["policy_loss"] == 0.0


def test_entropy_with_masked_ids_has_value_and_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(torch_ops(), logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.6931, abs=1e-4)
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_entropy_agrees_with_torch_values_and_gradients(scale):
    logits = (
        torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    ).requires_grad_()
    ours = entropy_from_logits(torch_ops(), logits)
    (own,) = torch.autograd.grad(ours.sum(), logits)
    theirs = torch.distributions.Categorical(logits=logits).entropy()
    (want,) = torch.autograd.grad(theirs.sum(), logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(own, want)
    np.testing.assert_allclose(entropy_from_logits(numpy_ops(), logits.detach().numpy()), theirs.detach().numpy())


def test_cross_entropy_needs_no_behaviour_and_no_advantage_of_interest():
    rows = [batch_row("a", [0, 1, 1], weight=0.5, advantage=1.0, behaviour=np.nan)]
    loss, grad, metrics = run(rows, [-1.0, -3.0], LossSpec("cross_entropy"))
    assert loss == 2.0
    assert grad.tolist() == [-0.5, -0.5]
    assert metrics["loss_metrics/token_nll"] == 2.0


def test_metrics_are_weighed_and_ignore_tokens_without_weight():
    rows = [batch_row("a", [1, 1, 1], weight=[0.25, 0.0, 0.75], behaviour=[-1.0, -9.0, -1.0])]
    _, _, metrics = run(rows, [-1.0, -1.0, -1.0 + math.log(1.1)], LossSpec("ppo_clip"))
    assert metrics["loss_metrics/ratio_mean"] == pytest.approx(0.25 + 0.75 * 1.1)
    assert metrics["loss_metrics/ratio_max"] == pytest.approx(1.1)
    assert metrics["rollout_train_logprobs_abs_diff_max"] == pytest.approx(math.log(1.1))


def test_a_metric_without_weighed_tokens_is_left_out():
    rows = [batch_row("a", [1], weight=0.0)]
    _, _, metrics = run(rows, [-1.0], LossSpec("ppo_clip"))
    assert set(metrics) == {"policy_loss", "final_loss"}


def test_an_empty_microbatch_is_zero():
    xp, spec = torch_ops(), LossSpec("ppo_clip")
    leaf = torch.zeros(0, requires_grad=True)
    loss, metrics = objective(xp, loss_inputs(xp, Batch([]), [], spec, leaf), spec)
    loss.backward()
    assert (loss.item(), metrics) == (0.0, {})


def test_a_loss_of_unit_row_weighs_rows_and_is_differentiable():
    @register_loss("row_mean_nll", unit="row", needs=())
    def row_mean_nll(xp, inputs, settings):
        values = -inputs.mean(xp, inputs.logprobs, "row")
        return LossValues(values, {"nll": LossMetric("mean", values, unit="row")})

    try:
        rows = [batch_row("a", [1, 1], weight=0.25), batch_row("b", [1], weight=0.5)]
        loss, grad, metrics = run(rows, [-1.0, -3.0, -4.0], LossSpec("row_mean_nll"))
    finally:
        LOSSES.remove("row_mean_nll")
    assert loss == pytest.approx(0.5 * 2 + 0.5 * 4)
    assert grad.tolist() == pytest.approx([-0.25, -0.25, -0.5])
    assert metrics["loss_metrics/nll"] == pytest.approx(3.0)


def test_a_loss_of_unit_group_sees_whole_groups_and_refuses_a_cut():
    @register_loss("group_nll", unit="group", needs=())
    def group_nll(xp, inputs, settings):
        return LossValues(-inputs.mean(xp, inputs.logprobs, "group"))

    try:
        names = ["g", "h", "g"]
        rows = [batch_row(str(i), [1], weight=0.25, group_id=name) for i, name in enumerate(names)]
        loss, grad, _ = run(rows, [-1.0, -5.0, -3.0], LossSpec("group_nll"))
        with pytest.raises(ContractError, match="row 2 is in another micro-batch"):
            loss_inputs(numpy_ops(), Batch(rows), [0, 1], LossSpec("group_nll"), np.zeros(2))
    finally:
        LOSSES.remove("group_nll")
    assert loss == pytest.approx(0.5 * 2 + 0.25 * 5)
    assert grad.tolist() == pytest.approx([-0.25, -0.25, -0.25])


@pytest.mark.parametrize("reduced", [lambda xp, x: xp.sum(x), lambda xp, x: xp.sum(x) / len(x)])
def test_a_loss_that_reduces_by_itself_is_refused(reduced):
    register_loss("reduces", needs=())(lambda xp, inputs, settings: LossValues(reduced(xp, inputs.logprobs)))
    try:
        with pytest.raises(ContractError, match="one value per token"):
            run([batch_row("a", [1, 1])], [-1.0, -1.0], LossSpec("reduces"))
    finally:
        LOSSES.remove("reduces")


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (LossSpec("ppo_clip", kl_coef=0.1), "ref_logprobs is absent"),
        (LossSpec("ppo_clip", entropy_coef=0.1), "no entropy"),
        (LossSpec("ppo_clip", old_logprobs=[np.zeros(1)]), "1 values for 2 trained tokens"),
        (LossSpec("ppo_clip", old_logprobs=[]), "0 rows for a batch of 1"),
        (LossSpec("ppo_clip", ref_logprobs=[np.array([-1.0, np.nan])]), "needs finite ref_logprobs"),
    ],
)
def test_absent_or_misaligned_inputs_are_refused(spec, rule):
    with pytest.raises(ContractError, match=rule):
        run([batch_row("a", [1, 1])], [-1.0, -1.0], spec)


def test_a_wrong_number_of_logprobs_is_refused():
    with pytest.raises(ContractError, match="3 log-probs for 2 trained tokens"):
        run([batch_row("a", [1, 1])], [-1.0, -1.0, -1.0], LossSpec("ppo_clip"))


def test_unknown_names_and_settings_are_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="Did you mean 'ppo_clip'"):
        run([batch_row("a", [1])], [-1.0], LossSpec("ppo_clp"))
    with pytest.raises(SettingsError, match="Did you mean 'clip_low'"):
        run([batch_row("a", [1])], [-1.0], LossSpec("ppo_clip", {"clip_lo": 0.1}))
    with pytest.raises(SettingsError, match="registered already"):
        register_loss("ppo_clip")(lambda xp, inputs, settings: LossValues(inputs.logprobs))
