"""Golden numbers of every loss on four tokens that can be worked out by hand, and agreement with a plain reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import loss_reference as reference
from algorithm_builders import TOP, batch_row, full_spec, inputs_of, per_row, prepared, random_batch
from slipstream.algorithms import Batch, LossSpec, loss_inputs, objective, run_prepass, torch_ops
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.objective import token_noise
from slipstream.errors import SettingsError
from slipstream.trajectory import TOP_LOGPROBS

# Two rows of two tokens.  Ratios to the anchor 1.5, .5, 1, 4; anchor over sampler 2, 10, 1, .5; so ratios to the
# sampler 3, 5, 1, 2.  Advantages 1, -1, 2, -1; log-probs -1, -2, -.5, -1.5.
LOGPROBS = np.array([-1.0, -2.0, -0.5, -1.5])
OLD = LOGPROBS - np.log([1.5, 0.5, 1.0, 4.0])
BEHAVIOUR = OLD - np.log([2.0, 10.0, 1.0, 0.5])
ADVANTAGES = np.array([1.0, -1.0, 2.0, -1.0])

S = math.sqrt(0.75)
SIG = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
P, Q = np.exp(LOGPROBS), np.exp(BEHAVIOUR)

# name, settings, values, gradients with respect to the log-probs
GOLDEN = [
    ("ppo_clip", {}, [-1.2, 0.8, -2.0, 4.0], [0.0, 0.0, -2.0, 4.0]),
    ("ppo_clip", {"clip_low": 0.6, "clip_high": 0.6}, [-1.5, 0.5, -2.0, 4.0], [-1.5, 0.5, -2.0, 4.0]),
    ("tinker_ppo", {"clip_high_threshold": 1.3}, [-1.3, 0.8, -2.0, 4.0], [0.0, 0.0, -2.0, 4.0]),
    ("dual_clip", {}, [-1.2, 0.8, -2.0, 3.0], [0.0, 0.0, -2.0, 0.0]),
    # Row ratios sqrt(1.5 x .5) = .866 and sqrt(1 x 4) = 2.
    ("gspo", {}, [-S, 0.9997, -2 * 1.0004, 2.0], [-S, 0.0, 0.0, 2.0]),
    ("decoupled_ppo", {}, [-2.4, 4.0, -2.0, 2.0], [0.0, 0.0, -2.0, 2.0]),
    ("importance_sampling", {}, [-1.5, 0.5, -2.0, 4.0], [-1.5, 0.5, -2.0, 4.0]),
    ("cispo", {}, [1.5, -1.0, 1.0, -6.0], [-1.5, 0.5, -2.0, 4.0]),
    ("cispo", {"clip_low": 0.2, "clip_high": 1.0}, [1.5, -1.6, 1.0, -3.0], [-1.5, 0.8, -2.0, 2.0]),
    ("tinker_cispo", {"clip_high_threshold": 2.0}, [1.5, -1.0, 1.0, -3.0], [-1.5, 0.5, -2.0, 2.0]),
    (
        "sapo",
        {"tau_positive": 1.0, "tau_negative": 2.0},
        [-4 * SIG(0.5), 2 * SIG(-1.0), -4.0, 2 * SIG(6.0)],
        [-4 * SIG(0.5) * SIG(-0.5) * 1.5, 4 * SIG(1.0) * SIG(-1.0) * 0.5, -2.0, 4 * SIG(6.0) * SIG(-6.0) * 4],
    ),
    # The sampler's ratio 5 is not inside the open interval (.5, 5).
    ("rollout_is", {}, [3.0, 0.0, 1.0, -3.0], [-3.0, 0.0, -2.0, 2.0]),
    # Only token 0 moves away from the sampler in the direction of its advantage: e^-1 (1 - 1/3) = .245 > .15.
    ("dppo", {}, [0.0, 5.0, -2.0, 2.0], [0.0, 5.0, -2.0, 2.0]),
    ("dppo", {"delta_high": 0.25}, [-3.0, 5.0, -2.0, 2.0], [-3.0, 5.0, -2.0, 2.0]),
    # Its binary KL is .153.
    ("dppo", {"divergence": "kl", "delta_high": 0.15}, [0.0, 5.0, -2.0, 2.0], [0.0, 5.0, -2.0, 2.0]),
    ("dppo", {"divergence": "kl", "delta_high": 0.16}, [-3.0, 5.0, -2.0, 2.0], [-3.0, 5.0, -2.0, 2.0]),
    (
        "dro",
        {"beta": 2.0},
        [1 + math.log(1.5) ** 2, -2 + math.log(0.5) ** 2, 1.0, -1.5 + math.log(4) ** 2],
        [-1 + 2 * math.log(1.5), 1 + 2 * math.log(0.5), -2.0, 1 + 2 * math.log(4)],
    ),
    # mean A = .25, mean log pi = -1.25: covariances .1875, .9375, 1.3125, .3125.
    ("clip_cov", {}, [-1.2, 0.8, 0.0, 4.0], [0.0, 0.0, 0.0, 4.0]),
    ("clip_cov", {"cov_high": 1.3}, [-1.2, 0.8, -2.0, 4.0], [0.0, 0.0, -2.0, 4.0]),
    # The penalty falls on tokens 2 and 1; the gradient of |log .5| is -1.
    ("kl_cov", {"fraction": 0.5}, [-1.5, 0.5 + math.log(2), -2.0, 4.0], [-1.5, 0.5 - 1.0, -2.0, 4.0]),
    ("cross_entropy", {}, [1.0, 2.0, 0.5, 1.5], [-1.0, -1.0, -1.0, -1.0]),
]


def golden_batch(weight=None):
    weights = np.ones(4) if weight is None else weight
    rows = [
        batch_row(name, [1, 1], weight=weights[at], advantage=ADVANTAGES[at], behaviour=BEHAVIOUR[at])
        for name, at in (("a", slice(0, 2)), ("b", slice(2, 4)))
    ]
    return Batch(rows)


def golden_run(name, settings, token):
    """Value and gradient of one token, by giving it all the weight (and its row's other token none)."""
    full = golden_batch()
    spec = LossSpec(name, settings, old_logprobs=np.split(OLD, 2))
    spec = run_prepass(full, spec, lambda: np.split(LOGPROBS, 2))
    leaf = torch.tensor(LOGPROBS, requires_grad=True)
    batch, xp = golden_batch(np.eye(4)[token]), torch_ops()
    loss, _ = objective(xp, loss_inputs(xp, batch, [0, 1], spec, leaf), spec)
    loss.backward()
    return loss.item(), leaf.grad.numpy()


@pytest.mark.parametrize(
    ("name", "settings", "values", "gradients"), GOLDEN, ids=lambda x: x if isinstance(x, str) else ""
)
def test_golden_numbers(name, settings, values, gradients):
    for token in range(4):
        value, gradient = golden_run(name, settings, token)
        assert value == pytest.approx(values[token], abs=1e-12), f"token {token}"
        want = np.zeros(4)
        want[token] = gradients[token]
        np.testing.assert_allclose(gradient, want, atol=1e-12, err_msg=f"token {token}")


def test_the_golden_divergences_are_what_their_comments_say():
    assert P[0] - Q[0] == pytest.approx(0.2453, abs=1e-4)
    kl = Q[0] * math.log(1 / 3) + (1 - Q[0]) * math.log((1 - Q[0]) / (1 - P[0]))
    assert kl == pytest.approx(0.1529, abs=1e-4)


def test_every_loss_has_golden_numbers():
    elsewhere = {"value_clip", "score_centering"}  # below: they read other outputs than one log-prob
    assert {name for name, *_ in GOLDEN} | elsewhere == set(LOSSES.names())


@pytest.mark.parametrize(
    ("clip", "value", "gradient"),
    [
        # V = 1, R = 2: error 1; from V_old = .5 the value may reach .7, whose error 1.69 is larger and has no gradient.
        (0.2, 0.5 * 1.69 + 0.5 * 0.5, [0.0, -0.5]),
        (None, 0.5 * 1.0 + 0.5 * 0.5, [-1.0, -0.5]),
    ],
)
def test_value_clip_golden_numbers(clip, value, gradient):
    spec = LossSpec("value_clip", {"clip": clip}, old_values=[np.array([0.5, 1.1])], returns=[np.array([2.0, 2.0])])
    leaf, xp = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True), torch_ops()
    batch = Batch([batch_row("a", [1, 1], weight=[1.0, 0.5], behaviour=np.nan)])
    loss, _ = objective(xp, loss_inputs(xp, batch, [0], spec, None, values=leaf), spec)
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert leaf.grad.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        # rho = .25 / .3: the head's centre is (.5 - .4 rho) log .4 + (.25 - .3 rho) log .3 = log .4 / 6.
        ({}, 2 * (math.log(0.4) / 6 - math.log(0.4))),
        # w = min(.8, .5), m = (.25, .125), alpha = rho / 2: the centre is (.25 - .4 rho / 2) log .4 = log .4 / 12.
        ({"cap": 0.5}, 2 * (math.log(0.4) / 12 - 0.5 * math.log(0.4))),
    ],
)
def test_score_centering_golden_numbers(settings, value):
    """A = 2; the sampler gave .5 to the sampled token and .25 to another, the policy gives .4 and .3."""
    side = np.full(1, None, dtype=object)
    side[0] = ((3, 7), (math.log(0.5), math.log(0.25)))
    row = batch_row("a", [1], advantage=2.0, behaviour=math.log(0.5))
    batch, xp = Batch([replace(row, side_T={TOP_LOGPROBS: side})]), torch_ops()
    spec = LossSpec("score_centering", settings)
    leaf = torch.tensor([math.log(0.4)], dtype=torch.float64)
    top = torch.tensor([[math.log(0.4), math.log(0.3)]], dtype=torch.float64)
    loss, _ = objective(xp, loss_inputs(xp, batch, [0], spec, leaf, top_logprobs=top), spec)
    assert loss.item() == pytest.approx(value, abs=1e-12)


def centering_gradient(logits, mu, sampled, settings, top, advantage=1.0):
    """Gradient in the logits of one token's score-centred loss."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    log_pi = torch.log_softmax(logits, 0)
    side = np.full(1, None, dtype=object)
    side[0] = (tuple(top), tuple(np.log(mu)[top].tolist()))
    row = batch_row("a", [1], advantage=advantage, behaviour=float(np.log(mu[sampled])))
    batch, xp = Batch([replace(row, side_T={TOP_LOGPROBS: side})]), torch_ops()
    spec = LossSpec("score_centering", settings)
    inputs = loss_inputs(xp, batch, [0], spec, log_pi[sampled][None], top_logprobs=log_pi[list(top)][None])
    objective(xp, inputs, spec)[0].backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("cap", [None, 0.8, 2.0])
@pytest.mark.parametrize("top", [[0, 1, 2, 3], [0, 1, 2]])
def test_a_centred_score_has_no_drift(cap, top):
    """Under a constant reward the sampler's mean gradient is zero: exactly so when at most one token is in the tail."""
    logits, mu = [0.3, -0.2, 1.0, 0.1], np.array([0.4, 0.3, 0.2, 0.1])
    mean = sum(mu[v] * centering_gradient(logits, mu, v, {"cap": cap}, top) for v in range(4))
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)


def test_an_uncentred_loss_drifts_under_the_same_constant_reward():
    logits, mu = [0.3, -0.2, 1.0, 0.1], np.array([0.4, 0.3, 0.2, 0.1])
    # With an empty head nothing is centred: what is left is the mean of grad log pi under the sampler.
    mean = sum(mu[v] * centering_gradient(logits, mu, v, {"cap": None}, []) for v in range(4))
    p = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(mean, p - mu, atol=1e-12)
    assert np.abs(mean).max() > 0.1


# ---- agreement with the plain reference


VARIANTS = [
    *[(name, {}) for name in LOSSES.names()],
    ("dppo", {"divergence": "kl"}),
    ("dppo", {"divergence": "kl", "delta_low": 0.3, "delta_high": 0.01}),
    ("clip_cov", {"fraction": 0.2, "cov_low": 0.1, "cov_high": 2.0}),
    ("kl_cov", {"fraction": 0.3, "penalty": 0.5}),
    ("score_centering", {"cap": 1.5}),
    ("value_clip", {"clip": None}),
    ("dual_clip", {"clip_dual": 1.2}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("seed", range(3))
def test_values_agree_with_the_plain_reference(name, settings, seed):
    batch = random_batch(seed, n_rows=5)
    logprobs = per_row(batch, 100 + seed)
    spec = prepared(batch, full_spec(batch, name, settings=settings, kl_coef=0.0, entropy_coef=0.0), logprobs)
    flat, xp = torch.tensor(np.concatenate(logprobs)), torch_ops()
    inputs = inputs_of(xp, batch, range(len(batch.rows)), spec, flat)
    loss = LOSSES.get(name)
    ours = loss.function(xp, inputs, loss.settings(settings)).values.numpy()
    tokens, at = [], 0
    for i, row in enumerate(batch.rows):
        sides = [s for s, t in zip(row.side_T[TOP_LOGPROBS], row.trained_T, strict=True) if t]
        for k in range(row.n_trained):
            lp = float(flat[at])
            top = tuple(zip((lp * np.linspace(0.5, 1.0, TOP) - 1.5).tolist(), sides[k][1], strict=False))
            tokens.append(
                reference.Token(
                    i,
                    lp,
                    spec.old_logprobs[i][k],
                    row.behaviour_logprobs_T[row.trained_T][k],
                    row.advantages_T[row.trained_T][k],
                    lp,
                    spec.old_values[i][k],
                    spec.returns[i][k],
                    token_noise(row)[k],
                    top,
                )
            )
            at += 1
    want = [getattr(reference, name)(t, tokens, **settings) for t in tokens]
    np.testing.assert_allclose(ours, want, rtol=1e-6, atol=1e-9)


def test_random_choices_belong_to_tokens_and_not_to_places():
    batch = random_batch(1)
    noise = {row.row_id: token_noise(row).tolist() for row in batch.rows}
    assert noise == {row.row_id: token_noise(row).tolist() for row in reversed(batch.rows)}
    flat = [x for values in noise.values() for x in values]
    assert len(set(flat)) == len(flat)


def test_an_unknown_divergence_is_refused():
    batch = golden_batch()
    spec = LossSpec("dppo", {"divergence": "hellinger"})
    with pytest.raises(SettingsError, match="'tv' or 'kl'"):
        objective(torch_ops(), loss_inputs(torch_ops(), batch, [0, 1], spec, torch.tensor(LOGPROBS)), spec)
