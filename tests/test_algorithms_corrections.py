from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithm_builders import batch_row, per_row, random_batch
from slipstream.algorithms import Batch, LossSpec, loss_inputs, numpy_ops, objective, torch_ops
from slipstream.algorithms.anchors import interpolated_anchor, token_lags
from slipstream.algorithms.check import check_algorithm
from slipstream.algorithms.compile import split_minibatches
from slipstream.algorithms.corrections import correct, corrects, effective_share
from slipstream.algorithms.kl import AdaptiveKl, FixedKl, kl_controller
from slipstream.algorithms.objective import MetricAccumulator
from slipstream.config.algorithm import OffPolicySettings
from slipstream.config.settings import AlgorithmSettings, SamplingSettings
from slipstream.errors import CheckpointError, ContractError

RATIOS = [[1.0, 3.0], [0.5, 0.5, 1.0], [1.0]]


def stale_batch():
    """Three rows whose policy-over-sampler ratios are ``RATIOS``; each row its own trajectory and group."""
    rows = [batch_row(f"r{i}", [1] * len(r), weight=1.0, group_id=f"g{i}") for i, r in enumerate(RATIOS)]
    return Batch(rows), [-1.0 + np.log(r) for r in RATIOS]


def corrected(**settings):
    batch, old = stale_batch()
    return correct(batch, old, OffPolicySettings(**settings), "token_mean")


def weights(result):
    return [row.weights_T.tolist() for row in result.batch.rows]


def metrics(result):
    accumulator = MetricAccumulator()
    accumulator.add(result.metrics)
    return accumulator.result()


def test_without_a_correction_only_the_mismatch_is_reported():
    batch, old = stale_batch()
    result = correct(batch, old, OffPolicySettings(), "token_mean")
    assert result.batch is batch
    assert result.coefficients is None
    found, flat = metrics(result), np.concatenate([np.asarray(r) for r in RATIOS])
    assert found["off_policy/ratio_mean"] == pytest.approx(flat.mean())
    assert found["off_policy/ratio_std"] == pytest.approx(flat.std())
    assert (found["off_policy/ratio_min"], found["off_policy/ratio_max"]) == pytest.approx((0.5, 3.0))
    assert found["off_policy/kl"] == pytest.approx((flat - 1 - np.log(flat)).mean())
    assert found["off_policy/ess_token"] == pytest.approx(flat.sum() ** 2 / (6 * (flat**2).sum()))
    products = np.array([3.0, 0.25, 1.0])
    assert found["off_policy/ess_sequence"] == pytest.approx(products.sum() ** 2 / (3 * (products**2).sum()))


def test_effective_sample_size_is_one_for_equal_weights_and_scale_free():
    assert effective_share(np.full(5, -700.0)) == pytest.approx(1.0)
    assert effective_share(np.array([0.0, -800.0])) == pytest.approx(0.5)


def test_token_tis_truncates_each_ratio():
    result = corrected(tis="token", tis_token_cap=2.0)
    assert [c.tolist() for c in result.coefficients] == [
        pytest.approx([1.0, 2.0]),
        pytest.approx([0.5, 0.5, 1.0]),
        pytest.approx([1.0]),
    ]
    assert metrics(result)["off_policy/tis_capped_fraction"] == pytest.approx(1 / 6)


def test_sequence_tis_truncates_the_product():
    result = corrected(tis="sequence", tis_sequence_cap=2.0)
    assert [c.tolist() for c in result.coefficients] == [
        pytest.approx([2.0] * 2),
        pytest.approx([0.25] * 3),
        pytest.approx([1.0]),
    ]


@pytest.mark.parametrize(("denominator", "each"), [("all", 1 / 6), ("kept", 1 / 4)])
def test_the_geometric_mask_drops_rows_and_the_rule_says_what_is_counted(denominator, each):
    # Geometric means sqrt 3, cbrt .25 = .63, 1.
    result = corrected(sequence_mask="geometric", geometric_low=0.6, geometric_high=1.7, denominator=denominator)
    assert weights(result) == [[0.0, 0.0], pytest.approx([each] * 3), pytest.approx([each])]
    found = metrics(result)
    assert found["off_policy/geometric_sequence_masked_fraction"] == pytest.approx(1 / 3)
    assert found["off_policy/geometric_sequence_over_fraction"] == pytest.approx(1 / 3)
    assert found["off_policy/geometric_sequence_under_fraction"] == 0
    assert found["off_policy/kept_fraction"] == pytest.approx(4 / 6)


def test_the_product_mask_compares_products():
    assert weights(corrected(sequence_mask="product", product_low=0.5, product_high=2.0)) == [
        [0.0] * 2,
        [0.0] * 3,
        pytest.approx([1 / 6]),
    ]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"token_mask_low": 0.6}, [[1, 1], [0, 0, 1], [1]]),
        ({"token_mask_high": 2.0}, [[1, 0], [1, 1, 1], [1]]),
        ({"token_mask_low": 0.6, "token_mask_high": 2.0}, [[1, 0], [0, 0, 1], [1]]),
        ({"outlier_high": 2.0}, [[0, 0], [1, 1, 1], [1]]),
        ({"outlier_low": 0.6}, [[1, 1], [0, 0, 0], [1]]),
    ],
)
def test_token_and_outlier_masks_take_either_bound(bounds, kept):
    assert [(np.asarray(w) > 0).astype(int).tolist() for w in weights(corrected(**bounds))] == kept


def test_sequence_statistics_are_over_the_tokens_that_are_left():
    result = corrected(token_mask_high=2.0, sequence_mask="product", product_low=0.5, product_high=2.0)
    assert weights(result)[0] == pytest.approx([1 / 6, 0.0])  # without the token of ratio 3 the product is 1


def test_minibatches_keep_the_masks_and_their_rule():
    kept = corrected(token_mask_high=2.0, denominator="kept").batch
    (first, *_) = split_minibatches(kept, 3, "token_mean")
    assert [row.weights_T.tolist() for row in first.batch.rows] == [[1.0, 0.0]]
    counted = corrected(token_mask_high=2.0, denominator="all").batch
    (first, *_) = split_minibatches(counted, 3, "token_mean")
    assert [row.weights_T.tolist() for row in first.batch.rows] == [[0.5, 0.0]]


def test_a_step_of_which_nothing_is_left_weighs_nothing():
    result = corrected(sequence_mask="product", product_low=5.0, product_high=6.0, denominator="kept")
    assert all(not any(row) for row in weights(result))


def test_dropped_tokens_leave_every_term_and_coefficients_only_the_policy_term():
    batch, old = stale_batch()
    result = correct(batch, old, OffPolicySettings(tis="token", token_mask_high=2.5), "token_mean")
    ref = [values - 1.0 for values in old]
    spec = LossSpec("ppo_clip", kl_coef=0.5, kl_estimator="k1", old_logprobs=old, ref_logprobs=ref)
    spec = LossSpec(**{**spec.__dict__, "coefficients": result.coefficients})
    leaf, xp = torch.tensor(np.concatenate(old), requires_grad=True), torch_ops()
    loss, _ = objective(xp, loss_inputs(xp, result.batch, [0, 1, 2], spec, leaf), spec)
    loss.backward()
    rho = np.array([1.0, 0.0, 0.5, 0.5, 1.0, 1.0])  # the token of ratio 3 is dropped
    kept = np.array([1, 0, 1, 1, 1, 1])
    assert loss.item() == pytest.approx((-rho.sum() + 0.5 * kept.sum()) / 6)
    np.testing.assert_allclose(leaf.grad.numpy(), (-rho + 0.5 * kept) / 6, atol=1e-15)


def test_permuting_rows_permutes_corrections():
    batch = random_batch(4)
    old = per_row(batch, 5)
    settings = OffPolicySettings(tis="sequence", sequence_mask="geometric", geometric_low=0.5, geometric_high=1.5)
    order = [3, 0, 5, 1, 4, 2]
    moved = Batch([batch.rows[i] for i in order])
    here = correct(batch, old, settings, "sequence_mean")
    there = correct(moved, [old[i] for i in order], settings, "sequence_mean")
    for place, i in enumerate(order):
        np.testing.assert_allclose(there.batch.rows[place].weights_T, here.batch.rows[i].weights_T)
        np.testing.assert_allclose(there.coefficients[place], here.coefficients[i])
    assert metrics(here) == pytest.approx(metrics(there))


def test_a_gap_of_a_hundred_gives_finite_coefficients():
    row = batch_row("a", [1, 1], behaviour=[-101.0, -1.0])
    result = correct(Batch([row]), [np.array([-1.0, -101.0])], OffPolicySettings(tis="token"), "token_mean")
    assert result.coefficients[0].tolist() == pytest.approx([2.0, math.exp(-20)])


def test_a_missing_sampler_logprob_is_refused():
    row = batch_row("a", [1], behaviour=np.nan)
    with pytest.raises(ContractError, match="lacks finite log-probs"):
        correct(Batch([row]), [np.zeros(1)], OffPolicySettings(tis="token"), "token_mean")


# ---- planning


def problem_keys(**algorithm):
    found = check_algorithm(AlgorithmSettings(**algorithm), SamplingSettings(), samples_per_prompt=8)
    return [p.keys[0] for p in found if p.severity == "error"]


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"off_policy": {"tis": "token"}}, "algorithm.off_policy"),
        ({"off_policy": {"tis": "token"}, "old_logprobs": "approximate"}, "algorithm.off_policy"),
        ({"off_policy": {"tis": "token"}, "loss": "rollout_is"}, "algorithm.off_policy.tis"),
        (
            {"off_policy": {"tis": "token"}, "loss": "decoupled_ppo", "old_logprobs": "recompute"},
            "algorithm.off_policy.tis",
        ),
        ({"loss": "decoupled_ppo"}, "algorithm.old_logprobs"),
        ({"loss": "dppo", "old_logprobs": "recompute"}, "algorithm.old_logprobs"),
        ({"off_policy": {"tis_token_cap": 3.0}}, "algorithm.off_policy.tis_token_cap"),
        ({"off_policy": {"denominator": "kept"}}, "algorithm.off_policy.denominator"),
        (
            {"off_policy": {"token_mask_low": 2.0, "token_mask_high": 0.5}, "old_logprobs": "recompute"},
            "algorithm.off_policy.token_mask_low",
        ),
        ({"loss": "value_clip"}, "algorithm.loss"),
        ({"top_logprobs": 8}, "algorithm.top_logprobs"),
        ({"loss": "score_centering", "off_policy": {"tis": "token"}}, "algorithm.off_policy.tis"),
        ({"kl_controller": {"kind": "adaptive"}}, "algorithm.kl_controller.kind"),
        ({"kl_coef": 0.1, "kl_controller": {"target": 0.5}}, "algorithm.kl_controller.target"),
        ({"loss": "rollout_is", "loss_settings": {"delta_high": 1.0}}, "algorithm.loss_settings"),
    ],
)
def test_settings_that_would_do_nothing_or_count_twice_are_refused(algorithm, key):
    assert key in problem_keys(**algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"off_policy": {"tis": "token", "sequence_mask": "geometric"}, "old_logprobs": "recompute"},
        {"off_policy": {"outlier_low": 1e-4, "outlier_high": 100.0}, "old_logprobs": "recompute", "loss": "gspo"},
        {"loss": "decoupled_ppo", "old_logprobs": "approximate"},
        {"loss": "ppo_clip", "old_logprobs": "approximate"},
        {"loss": "clip_cov", "clip_low": 0.3},
        {"loss": "kl_cov", "loss_settings": {"fraction": 0.01}},
        {"kl_coef": 0.1, "kl_controller": {"kind": "adaptive", "target": 0.5}},
    ],
)
def test_combinations_that_work_are_accepted(algorithm):
    assert problem_keys(**algorithm) == []


def test_defaults_correct_nothing():
    assert not corrects(OffPolicySettings())


# ---- anchors


def test_an_interpolated_anchor_runs_from_the_sampler_to_the_present():
    behaviour, present = np.array([-2.0, -2.0, -2.0]), np.array([-1.0, -1.0, -1.0])
    anchor = interpolated_anchor(numpy_ops(), present, behaviour, np.array([0.0, 1.0, 1e9]))
    assert anchor.tolist() == pytest.approx([-2.0, -1.5, -1.0])


def test_the_interpolated_anchor_carries_no_gradient_and_serves_any_ratio_loss():
    row = batch_row("a", [1, 1], advantage=[1.0, 1.0], behaviour=[-1.0, -1.0])
    spec = LossSpec("decoupled_ppo", {"clip_high": 10.0}, interpolate=True, lags=[np.array([0.0, 1.0])])
    leaf, xp = torch.tensor([-0.9, -0.8], dtype=torch.float64, requires_grad=True), torch_ops()
    loss, _ = objective(xp, loss_inputs(xp, Batch([row]), [0], spec, leaf), spec)
    loss.backward()
    # r w = pi / mu whatever lies between them, as long as nothing is clipped.
    assert loss.item() == pytest.approx(-math.exp(0.1) - math.exp(0.2))
    assert leaf.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.2)])


def test_an_interpolated_anchor_without_lags_is_refused():
    row = batch_row("a", [1])
    with pytest.raises(ContractError, match="needs lags"):
        loss_inputs(numpy_ops(), Batch([row]), [0], LossSpec("ppo_clip", interpolate=True), np.zeros(1))


def test_lags_are_counted_per_token_and_unknown_versions_refused():
    known = batch_row("a", [1, 0, 1], versions=[3, -1, 5])
    assert [lag.tolist() for lag in token_lags(Batch([known]), 5)] == [[2.0, 0.0]]
    with pytest.raises(ContractError, match="newer than the trainer's"):
        token_lags(Batch([known]), 4)
    with pytest.raises(ContractError, match="without a version"):
        token_lags(Batch([batch_row("a", [1], versions=[-1])]), 5)


# ---- the KL coefficient


def test_the_adaptive_controller_moves_towards_its_target():
    controller = AdaptiveKl(0.1, target=1.0, horizon=100)
    controller.update(1.1, trajectories=50)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller = AdaptiveKl(0.1, target=1.0, horizon=100)
    controller.update(50.0, trajectories=50)  # the error is bounded at +-.2
    assert controller.coef == pytest.approx(0.1 * 1.1)
    controller.update(0.0, trajectories=10_000)
    assert controller.coef == 0.0  # never negative
    with pytest.raises(ContractError):
        controller.update(math.nan, 1)


def test_a_controller_continues_from_its_state():
    settings = AlgorithmSettings(kl_coef=0.1, kl_controller={"kind": "adaptive", "target": 0.5, "horizon": 10})
    first = kl_controller(settings)
    first.update(1.0, trajectories=5)
    second = kl_controller(settings)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef == pytest.approx(0.11)
    with pytest.raises(CheckpointError):
        second.load_state_dict({"coef": "much"})


def test_a_fixed_coefficient_follows_its_setting():
    controller = kl_controller(AlgorithmSettings(kl_coef=0.1))
    assert isinstance(controller, FixedKl)
    controller.update(9.0, 100)
    controller.load_state_dict({"coef": 5.0})
    assert controller.coef == 0.1


# ---- against a reference, token by token in plain arithmetic


def by_hand(gaps, settings):
    """``(coefficients, kept)`` as nested lists; ``gaps`` are log-ratios policy / sampler by row."""

    def outside(value, low, high):
        return (low is not None and value < low) or (high is not None and value > high)

    coefficients, kept = [], []
    for gap in gaps:
        ratios = [math.exp(x) for x in gap]
        live = [True] * len(gap)
        if any(outside(r, settings.outlier_low, settings.outlier_high) for r in ratios):
            live = [False] * len(gap)
        live = [
            a and not outside(r, settings.token_mask_low, settings.token_mask_high)
            for a, r in zip(live, ratios, strict=True)
        ]
        total = sum(x for x, a in zip(gap, live, strict=True) if a)
        weight = {"none": ratios, "token": ratios, "sequence": [math.exp(total)] * len(gap)}[settings.tis]
        cap = settings.tis_token_cap if settings.tis == "token" else settings.tis_sequence_cap
        coefficients.append([min(w, cap) for w in weight])
        if settings.sequence_mask == "geometric" and any(live):
            mean = math.exp(total / sum(live))
            live = [] if outside(mean, settings.geometric_low, settings.geometric_high) else live
        elif settings.sequence_mask == "product" and any(live):
            live = [] if outside(math.exp(total), settings.product_low, settings.product_high) else live
        kept.append([bool(live) and live[t] for t in range(len(gap))])
    return coefficients, kept


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("tis", ["none", "token", "sequence"])
@pytest.mark.parametrize("sequence_mask", ["none", "geometric", "product"])
@pytest.mark.parametrize(
    "bounds", [{}, {"token_mask_low": 0.7, "token_mask_high": 1.6}, {"outlier_low": 0.3, "outlier_high": 3.0}]
)
def test_corrections_agree_with_the_reference(bounds, sequence_mask, tis, denominator):
    settings = OffPolicySettings(
        tis=tis, sequence_mask=sequence_mask, geometric_low=0.8, geometric_high=1.2, denominator=denominator, **bounds
    )
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 9, size=12)
    gaps = [rng.normal(0, 0.5, n) for n in lengths]
    behaviour = [-np.abs(rng.normal(size=n)) - 0.1 for n in lengths]
    rows = [
        batch_row(f"r{i}", [1] * int(n), weight=1.0, behaviour=b)
        for i, (n, b) in enumerate(zip(lengths, behaviour, strict=True))
    ]
    old = [b + g for b, g in zip(behaviour, gaps, strict=True)]
    result = correct(Batch(rows), old, settings, "token_mean")
    coefficients, kept = by_hand(gaps, settings)
    if tis != "none":
        for got, want in zip(result.coefficients, coefficients, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
    else:
        assert result.coefficients is None
    masked = sequence_mask != "none" or bool(bounds)
    whole = sum(map(len, kept)) if denominator == "all" else sum(map(sum, kept))
    for row, live in zip(result.batch.rows, kept, strict=True):
        want = [a / whole for a in live] if masked else [1.0] * len(live)
        np.testing.assert_allclose(row.weights_T, want, rtol=1e-12)
