"""Corrections, anchors and the KL controller in a step's update, on a backend whose policy is a constant gap away."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from algorithm_builders import SPEC
from slipstream.algorithms import MetricAccumulator, apply_filters, loss_inputs, numpy_ops, objective, run_prepass
from slipstream.config.settings import AlgorithmSettings, RolloutSettings
from slipstream.errors import ContractError
from slipstream.trainers.update import PolicyUpdate
from slipstream.training.protocol import ForwardResult, OptimResult, StepOutput
from slipstream.trajectory import Completed, Group, Missing, Reward, Row, Span, Trajectory, VersionRun


def done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class ShiftedBackend:
    """A policy whose log-probs are the sampler's plus ``gap(row)``; it records every verb and every spec."""

    handles = ("policy", "reference")

    def __init__(self, gap, reference=-0.25):
        self.gap, self.reference = gap, reference
        self.calls: list[str] = []
        self.steps: list[tuple] = []

    def _logprobs(self, batch, handle):
        shift = (lambda row: self.reference) if handle == "reference" else self.gap
        return [row.behaviour_logprobs_T[row.trained_T] + shift(row) for row in batch.rows]

    def forward(self, handle, batch, *, entropy=False):
        self.calls.append(f"forward {handle}")
        return done(ForwardResult(self._logprobs(batch, handle)))

    def forward_backward(self, handle, batch, loss):
        self.calls.append("forward_backward")
        outputs = self._logprobs(batch, "policy")
        loss = run_prepass(batch, loss, lambda: outputs)
        inputs = loss_inputs(numpy_ops(), batch, range(len(batch.rows)), loss, np.concatenate(outputs))
        value, parts = objective(numpy_ops(), inputs, loss)
        accumulator = MetricAccumulator()
        accumulator.add(parts)
        self.steps.append((batch, loss, float(value)))
        return done(StepOutput(float(value), outputs, accumulator.result(), accumulator.parts()))

    def optim_step(self, handle):
        self.calls.append("optim_step")
        return done(OptimResult(True, 1.0, 1e-6))


def member(group, sample, reward, versions=(0, 0)):
    """Two sampled tokens, each by its own version."""
    runs = [VersionRun(f"policy/0/{v}", i, i + 1) for i, v in enumerate(versions)]
    span = Span.sampled([10 + sample, 20], [-1.0, -2.0], runs, SPEC, 0)
    rows = (Row((Span.prompt([1, 2]), span)),)
    rewards = (Reward(0, reward),)
    return Trajectory(f"{group}-{sample}", group, "p", sample, 0, rows, (), rewards, Completed(), scheduled_step=0)


def filtered(settings, versions=(0, 0)):
    groups = [
        Group(name, "p", 2, (member(name, 0, 1.0, versions), member(name, 1, 0.0, versions))) for name in ("a", "b")
    ]
    return apply_filters(groups, settings, RolloutSettings())


async def update(backend, version="policy/0/0", versions=(0, 0), **algorithm):
    settings = AlgorithmSettings(normalize_by_std=False, **algorithm)
    policy = PolicyUpdate(backend, settings, 10.0)
    return policy, await policy(filtered(settings, versions), 0, version)


def weights(backend, step=0):
    return {row.row_id: row.weights_T[row.trained_T].tolist() for row in backend.steps[step][0].rows}


async def test_token_tis_weighs_the_policy_term():
    backend = ShiftedBackend(lambda row: np.log(3.0))
    _, result = await update(backend, old_logprobs="recompute", off_policy={"tis": "token"})
    (_, spec, value), metrics = backend.steps[0], result.metrics
    assert all(c == pytest.approx([2.0, 2.0]) for c in spec.coefficients)
    # Every ratio to the recomputed anchor is 1; advantages are +-.5, so the sum is 0 whatever the weight.
    assert value == pytest.approx(0.0, abs=1e-12)
    assert metrics["policy/off_policy/ratio_mean"] == pytest.approx(3.0)
    assert metrics["policy/off_policy/tis_capped_fraction"] == 1.0
    assert metrics["policy/off_policy/ess_token"] == pytest.approx(1.0)
    assert backend.calls.count("forward policy") == 1


async def test_the_mismatch_is_reported_whenever_the_anchor_is_recomputed():
    backend = ShiftedBackend(lambda row: np.log(1.5))
    _, result = await update(backend, old_logprobs="recompute")
    assert result.metrics["policy/off_policy/ratio_max"] == pytest.approx(1.5)
    assert backend.steps[0][1].coefficients is None


@pytest.mark.parametrize(("denominator", "each"), [("all", 1 / 8), ("kept", 1 / 4)])
async def test_a_geometric_mask_drops_whole_rows(denominator, each):
    stale = {"a-0/0", "b-1/0"}
    backend = ShiftedBackend(lambda row: 0.5 if row.row_id in stale else 0.0)
    off_policy = {"sequence_mask": "geometric", "denominator": denominator}
    _, result = await update(backend, old_logprobs="recompute", off_policy=off_policy)
    assert weights(backend) == {
        name: [0.0, 0.0] if name in stale else pytest.approx([each] * 2)
        for name in ("a-0/0", "a-1/0", "b-0/0", "b-1/0")
    }
    assert result.metrics["policy/off_policy/geometric_sequence_masked_fraction"] == 0.5
    assert set(result.trainer_logprobs) == {"a-0", "a-1", "b-0", "b-1"}


async def test_a_minibatch_of_which_nothing_is_left_takes_no_optimiser_step():
    backend = ShiftedBackend(lambda row: 0.5 if row.group_id == "a" else 0.0)
    off_policy = {"sequence_mask": "geometric"}
    _, result = await update(backend, old_logprobs="recompute", off_policy=off_policy, minibatches_per_step=2)
    assert (result.applied, len(backend.steps)) == (1, 1)
    assert result.metrics["policy/off_policy/empty_minibatches"] == 1
    assert {row.group_id for row in backend.steps[0][0].rows} == {"b"}


async def test_an_approximate_anchor_takes_each_tokens_own_lag_and_no_forward_pass():
    backend = ShiftedBackend(lambda row: 0.6)
    _, result = await update(backend, "policy/2/3", (3, 1), loss="decoupled_ppo", old_logprobs="approximate")
    _, spec, _ = backend.steps[0]
    assert "forward policy" not in backend.calls
    assert [lag.tolist() for lag in spec.lags] == [[0.0, 2.0]] * 4
    assert result.metrics["policy/lag_mean"] == 1.0
    # log r = gap / (lag + 1): .6 at lag 0 and .2 at lag 2.
    assert result.metrics["policy/loss_metrics/ratio_max"] == pytest.approx(np.exp(0.6))
    assert result.metrics["policy/loss_metrics/ratio_min"] == pytest.approx(np.exp(0.2))
    assert result.metrics["policy/loss_metrics/behaviour_weight_mean"] == pytest.approx((1 + np.exp(0.4)) / 2)


async def test_an_approximate_anchor_refuses_to_guess_a_version():
    with pytest.raises(ContractError, match="need the version"):
        await update(ShiftedBackend(lambda row: 0.0), version=None, old_logprobs="approximate")
    with pytest.raises(ContractError, match="newer than the trainer's"):
        await update(ShiftedBackend(lambda row: 0.0), "policy/0/1", (2, 2), old_logprobs="approximate")


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
async def test_an_adaptive_coefficient_moves_by_the_measured_kl_and_is_saved(kl_in):
    backend = ShiftedBackend(lambda row: 0.0, reference=-0.5)
    controller = {"kind": "adaptive", "target": 0.1, "horizon": 8}
    policy, result = await update(backend, kl_coef=0.1, kl_in=kl_in, kl_estimator="k1", kl_controller=controller)
    assert result.metrics["policy/kl_coef"] == 0.1
    # k1 is .5 per token, far above .1: the error is bounded at .2, and 4 of 8 trajectories have passed.
    assert policy.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 8))
    again = PolicyUpdate(backend, policy.settings, 10.0)
    again.load_state_dict(policy.state_dict())
    assert again.kl.coef == policy.kl.coef
    used = await again(filtered(policy.settings), 1, "policy/0/1")
    assert used.metrics["policy/kl_coef"] == policy.kl.coef
    if kl_in == "loss":
        assert backend.steps[-1][1].kl_coef == pytest.approx(0.11)
    else:
        assert result.metrics["policy/reward_kl"] == pytest.approx(0.5)


async def test_a_step_wide_loss_runs_its_prepass_on_each_minibatch_as_a_whole():
    backend = ShiftedBackend(lambda row: 0.1)
    settings = {"loss": "kl_cov", "loss_settings": {"fraction": 0.25}, "minibatches_per_step": 2}
    _, result = await update(backend, **settings)
    assert len(backend.steps) == 2
    assert result.metrics["policy/loss_metrics/cov_fraction"] == pytest.approx(0.25)


async def test_a_missing_sampler_logprob_is_an_error_and_not_a_silent_no_op():
    settings = AlgorithmSettings(old_logprobs="recompute", off_policy={"tis": "token"})

    class Blind(ShiftedBackend):
        def forward(self, handle, batch, *, entropy=False):
            return done(ForwardResult([np.zeros(row.n_trained) for row in batch.rows]))

    policy = PolicyUpdate(Blind(lambda row: 0.0), settings, 10.0)
    pool = filtered(settings)
    blind = []
    for group in pool.groups:
        members = []
        for m in group.members:
            prompt, span = m.rows[0].spans
            members.append(replace(m, rows=(Row((prompt, replace(span, logprobs=Missing("foreign")))),)))
        blind.append(replace(group, members=tuple(members)))
    with pytest.raises(ContractError, match="sampler's log-prob"):
        await policy(replace(pool, groups=blind), 0, "policy/0/0")
