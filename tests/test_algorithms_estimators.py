"""Golden numbers of each estimator and reduction, and agreement with an independent numpy reference."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from algorithm_builders import batch_row, group, sampled, trajectory
from slipstream.algorithms import compute_advantages
from slipstream.algorithms.advantages import ADVANTAGES, whitened
from slipstream.algorithms.reduce import ReductionSpec, token_weights
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError, SettingsError
from slipstream.trajectory import Group, Missing, Reward, Row, SideChannel, Span


def settings(name: str, **options) -> AlgorithmSettings:
    return AlgorithmSettings(advantage=name, **options)


def turns(tid: str, rewards: list[float], sample: int, tokens: int = 1) -> object:
    """A trajectory of ``tokens`` sampled tokens per turn, rewarded by turn."""
    spans = [Span.prompt([1])]
    for turn, _ in enumerate(rewards):
        spans.append(sampled(range(10, 10 + tokens), turn=turn))
    return trajectory(
        tid, rows=(Row(tuple(spans)),), rewards=[Reward(t, r) for t, r in enumerate(rewards)], sample=sample
    )


def values(groups, case, **options) -> dict[str, list[float] | float]:
    got = compute_advantages(groups, case, **options)
    return {tid: np.asarray(v, dtype=float).tolist() for tid, v in got.items()}


# --- golden numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "want"),
    [
        (settings("grpo"), [1.1547, -0.57735, -0.57735]),
        (settings("grpo", normalize_by_std=False), [2 / 3, -1 / 3, -1 / 3]),
        (settings("grpo", baseline="leave_one_out"), [1.1547 * 1.5, -0.57735 * 1.5, -0.57735 * 1.5]),
        (settings("rloo"), [1.0, -0.5, -0.5]),
        (settings("maxrl"), [2.0, -1.0, -1.0]),
        (settings("maxrl", baseline="leave_one_out"), [3.0, -1.5, -1.5]),
        (settings("turn_credit"), [2 / 3, -1 / 3, -1 / 3]),
        (settings("reinforce_pp_baseline"), [2**0.5, -(0.5**0.5), -(0.5**0.5)]),
    ],
    ids=lambda case: f"{case.advantage}-{case.baseline}" if isinstance(case, AlgorithmSettings) else "",
)
def test_one_right_answer_of_three(case, want):
    got = [float(np.mean(v)) for v in values([group("g", [1, 0, 0])], case).values()]
    assert got == pytest.approx(want, abs=1e-5)


def test_reinforce_pp_whitens_discounted_returns_over_all_tokens():
    # Returns with gamma 0.5: [0.5, 1] and [0, 0]; mean 0.375, variance 0.171875 over four tokens.
    got = values([group("g", [1.0, 0.0], tokens=2)], settings("reinforce_pp", gamma=0.5))
    scale = math.sqrt(0.171875)
    assert got["g-0"] == pytest.approx([0.125 / scale, 0.625 / scale])
    assert got["g-1"] == pytest.approx([-0.375 / scale, -0.375 / scale])


def test_gae_by_hand():
    # delta = [0 + 0.5 - 1, 1 + 0 - 0.5] = [-0.5, 0.5]; A = [-0.5 + 0.5 * 0.5, 0.5] with gamma 1, lambda 0.5.
    case = settings("gae", gae_lambda=0.5, normalize_batch=False)
    member = trajectory("t", 1.0, tokens=2)
    got = values([Group("g", "p", 1, (member,))], case, arrays={"values": {"t": np.array([1.0, 0.5])}})
    assert got["t"] == pytest.approx([-0.25, 0.5])


@pytest.mark.parametrize(("gamma", "want"), [(0.0, [0.5, -1.0]), (1.0, [-0.5, -1.0])])
def test_distill_is_what_the_teacher_thinks_of_each_token(gamma, want):
    side = {"teacher_logprobs": SideChannel("teacher_logprobs", "token", (-0.5, -3.0))}
    span = sampled([7, 8], logprobs=[-1.0, -2.0], side=side)
    member = trajectory("t", 0.0, rows=(Row((Span.prompt([1]), span)),))
    got = values([Group("g", "p", 1, (member,))], settings("distill", gamma=gamma))
    assert got["t"] == pytest.approx(want)


def test_another_turn_is_not_penalised_and_an_absent_one_counts_zero():
    # Both earn 1 in their first turn; "long" goes on and earns nothing more.  A baseline over those that went on
    # would be fine here, but one that averages over all turns would call the second turn bad.
    members = (turns("short", [1.0], 0), turns("long", [1.0, 0.0], 1))
    got = values([Group("g", "p", 2, members)], settings("turn_credit"))
    assert got == {"short": [0.0], "long": [0.0, 0.0]}
    # The second turn earns 1: it is credited with it against an absent turn's 0, over the full group.
    members = (turns("short", [1.0], 0), turns("long", [1.0, 1.0], 1))
    got = values([Group("g", "p", 2, members)], settings("turn_credit"))
    assert got == {"short": [-0.5], "long": [0.5, 0.5]}


def test_turn_credit_discounts_by_turn_and_fills_every_token_of_it():
    members = (turns("a", [0.0, 1.0], 0, tokens=2), turns("b", [0.0, 0.0], 1, tokens=2))
    got = values([Group("g", "p", 2, members)], settings("turn_credit", gamma=0.5))
    assert got == {"a": [0.25, 0.25, 0.5, 0.5], "b": [-0.25, -0.25, -0.5, -0.5]}


def test_batch_normalisation_counts_each_token_and_keeps_numbers_numbers():
    got = whitened({"a": 1.0, "b": np.array([0.0, -1.0])}, {"a": 2, "b": 2})
    mean, scale = 0.25, math.sqrt((2 * 0.75**2 + 0.25**2 + 1.25**2) / 4)
    assert got["a"] == pytest.approx((1 - mean) / scale)
    assert isinstance(got["a"], float)
    assert got["b"].tolist() == pytest.approx([-mean / scale, (-1 - mean) / scale])


def test_variances_are_two_pass():
    # One pass in float64 loses all digits at an offset of 1e8.
    got = compute_advantages([group("g", [1e8 + 1, 1e8, 1e8, 1e8])], settings("reinforce_pp_baseline"))
    assert list(got.values()) == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rel=1e-6)


# --- an exact check of bias ------------------------------------------------------------------------


def expected_gradient(case: AlgorithmSettings, n: int) -> tuple[float, float]:
    """Exact gradient of the expected return of a two-turn policy, and the estimator's expectation over groups of n.

    Turn 0 answers right with probability p and goes on with probability q; turn 1, if taken, is right with
    probability p.  Every way a group can turn out is enumerated.
    """
    p, q = 0.3, 0.6
    paths = []
    for right0, on in itertools.product((0, 1), (0, 1)):
        for right1 in (0, 1) if on else (None,):
            chance = (p if right0 else 1 - p) * (q if on else 1 - q)
            score0 = [(1 - p) if right0 else -p, (1 - q) if on else -q]
            rewards, score1 = [float(right0)], None
            if right1 is not None:
                chance *= p if right1 else 1 - p
                rewards.append(2.0 * right1)
                score1 = (1 - p) if right1 else -p
            # d log prob / d(logit of p, logit of q) of each turn.
            scores = [np.array(score0)] + ([np.array([score1, 0.0])] if score1 is not None else [])
            paths.append((chance, rewards, scores))
    true = sum(c * sum(r) * sum(s) for c, r, s in paths)
    mean = np.zeros(2)
    for combo in itertools.product(paths, repeat=n):
        members = tuple(turns(f"m{i}", rewards, i) for i, (_, rewards, _) in enumerate(combo))
        got = compute_advantages([Group("g", "p", n, members)], case)
        total = sum(
            float(np.broadcast_to(got[f"m{i}"], (len(scores),))[k]) * score
            for i, (_, _, scores) in enumerate(combo)
            for k, score in enumerate(scores)
        )
        mean = mean + math.prod(c for c, _, _ in combo) * total / n
    return true, mean


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        (settings("turn_credit", baseline="leave_one_out"), 1.0),
        (settings("turn_credit"), 0.5),
        (settings("rloo"), 1.0),
        (settings("grpo", normalize_by_std=False), 0.5),
    ],
    ids=["turn_credit-leave_one_out", "turn_credit-mean", "rloo", "dr_grpo"],
)
def test_the_expected_gradient_is_the_true_one_up_to_a_known_factor(case, factor):
    true, mean = expected_gradient(case, 2)
    np.testing.assert_allclose(mean, factor * true, rtol=1e-12)


# --- an independent reference ----------------------------------------------------------------------


def reference(name: str, rewards: list[list[float]], case: AlgorithmSettings, value, teacher, behaviour):
    """float64 numpy, written from the papers over plain lists; ``rewards[i]`` are member i's token rewards."""
    s = np.array([np.sum(r) for r in rewards])
    n = len(s)
    rest = np.array([np.mean(np.delete(s, i)) if n > 1 else s[i] for i in range(n)])
    base = rest if case.baseline == "leave_one_out" else np.full(n, np.mean(s))
    if name == "grpo":
        std = np.std(s, ddof=1) + 1e-6 if case.normalize_by_std and n > 1 else 1.0
        out = (s - base) / std
    elif name == "rloo":
        out = s - rest
    elif name == "maxrl":
        out = (s - base) / (np.mean(s) + 1e-6)
    elif name in ("reinforce_pp_baseline", "turn_credit"):  # one turn each
        out = s - base
    elif name in ("reinforce_pp", "gae", "distill"):
        out = []
        for i in range(n):
            r = np.array(rewards[i])
            if name == "distill":
                r = teacher[i] - behaviour[i]
            lam = case.gae_lambda if name == "gae" else 1.0
            v = np.append(value[i] if name == "gae" else np.zeros(len(r)), 0.0)
            delta = r + case.gamma * v[1:] - v[:-1]
            powers = (case.gamma * lam) ** np.arange(len(r))
            out.append(np.array([np.sum(powers[: len(r) - t] * delta[t:]) for t in range(len(r))]))
    else:
        raise AssertionError(f"{name} has no reference; write one")
    tokens = [np.broadcast_to(a, (len(r),)).astype(float) for a, r in zip(out, rewards, strict=True)]
    if ADVANTAGES.get(name).whitens:
        everything = np.concatenate(tokens)
        tokens = [(t - everything.mean()) / np.sqrt(max(everything.var(), 1e-8)) for t in tokens]
    return tokens


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("size", range(1, 7))
def test_estimators_agree_with_the_reference(name, baseline, size):
    rng = np.random.default_rng(size)
    case = settings(name, baseline=baseline, gamma=0.9 if size % 2 else 1.0, gae_lambda=0.7)
    lengths = rng.integers(1, 6, size=size)
    rewards = [np.round(rng.random(k), 2).tolist() for k in lengths]
    behaviour = [-np.abs(rng.normal(size=k)) for k in lengths]
    arrays = {
        "values": {f"m{i}": rng.normal(size=k) for i, k in enumerate(lengths)},
        "teacher_logprobs": {f"m{i}": -np.abs(rng.normal(size=k)) for i, k in enumerate(lengths)},
    }
    members = tuple(
        trajectory(
            f"m{i}",
            sample=i,
            rows=(Row((Span.prompt([1]), sampled(range(5, 5 + k), logprobs=behaviour[i]))),),
            rewards=[Reward(0, r, "r", position) for position, r in enumerate(rewards[i])],
        )
        for i, k in enumerate(lengths)
    )
    got = compute_advantages([Group("g", "p", size, members)], case, arrays=arrays)
    want = reference(
        name, rewards, case, list(arrays["values"].values()), list(arrays["teacher_logprobs"].values()), behaviour
    )
    for i in range(size):
        np.testing.assert_allclose(np.broadcast_to(got[f"m{i}"], want[i].shape), want[i], atol=1e-6)


def test_scores_agree_with_the_standard_library():
    rewards = [0.3, 0.9, 0.4, 0.4]
    got = list(compute_advantages([group("g", rewards)], settings("grpo")).values())
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert got == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], abs=1e-9)


# --- reductions ------------------------------------------------------------------------------------

SHAPES = [("t0", "g", 3), ("t0", "g", 2), ("t1", "g", 1), ("t2", "h", 4)]
"""Rows: trajectory, group, trained tokens.  ``t0`` has two rows."""


def shape_rows():
    return [batch_row(f"r{i}", [1] * n, trajectory_id=t, group_id=g) for i, (t, g, n) in enumerate(SHAPES)]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("token_mean", [0.1, 0.1, 0.1, 0.1]),
        ("sequence_mean", [1 / 15, 1 / 15, 1 / 3, 1 / 12]),
        ("seq_mean_token_sum_norm", [1 / 24, 1 / 24, 1 / 24, 1 / 24]),
        ("prompt_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 8]),
        ("sum", [1, 1, 1, 1]),
    ],
)
def test_reductions_by_hand(name, want):
    spec = ReductionSpec(name, {"reduction_tokens": 8} if name == "seq_mean_token_sum_norm" else {})
    assert token_weights(shape_rows(), spec).tolist() == pytest.approx(want, abs=1e-12)


def test_the_same_loss_under_every_reduction():
    losses = [8.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    owners = ["a", "b", "b", "b", "c", "c", "c", "c"]
    prompts = {"a": "g", "b": "g", "c": "h"}
    rows = [
        batch_row(t, [1] * owners.count(t), trajectory_id=t, group_id=prompts[t], weight=0.0) for t in ("a", "b", "c")
    ]

    def total(name: str, **options) -> float:
        weights = dict(zip("abc", token_weights(rows, ReductionSpec(name, options)), strict=True))
        return sum(weights[owner] * loss for owner, loss in zip(owners, losses, strict=True))

    assert total("token_mean") == pytest.approx(1.5)
    assert total("sequence_mean") == pytest.approx(3.0)
    assert total("prompt_mean") == pytest.approx((8 / 4 + 1) / 2)
    assert total("seq_mean_token_sum_norm", reduction_tokens=10) == pytest.approx(12 / 30)
    assert total("sum") == pytest.approx(12)


def test_the_constant_must_be_known():
    with pytest.raises(SettingsError, match=r"algorithm\.reduction_tokens"):
        token_weights(shape_rows(), "seq_mean_token_sum_norm")


# --- refusals --------------------------------------------------------------------------------------


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ContractError, match="g-1 scored -1"):
        compute_advantages([group("g", [1, -1])], settings("maxrl"))


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("distill", "teacher_logprobs")])
def test_what_an_estimator_needs_must_be_there(name, missing):
    with pytest.raises(ContractError, match=f"needs {missing}"):
        compute_advantages([group("g", [1, 0])], settings(name))


def test_missing_behaviour_logprobs_are_no_numbers():
    span = sampled([7, 8], logprobs=Missing("the server reports none"))
    member = trajectory("t", 0.0, rows=(Row((Span.prompt([1]), span)),))
    given = {"teacher_logprobs": {"t": np.zeros(2)}}
    with pytest.raises(ContractError, match="needs behaviour_logprobs"):
        compute_advantages([Group("g", "p", 1, (member,))], settings("distill"), arrays=given)


@pytest.mark.parametrize("bad", [np.zeros(3), np.array([0.0, np.nan])])
def test_given_arrays_are_checked(bad):
    with pytest.raises(ContractError, match="2 finite numbers"):
        compute_advantages([group("g", [1.0])], settings("gae"), arrays={"values": {"g-0": bad}})


def test_unknown_settings_of_an_estimator_are_refused():
    with pytest.raises(SettingsError, match="Did you mean 'std_eps'"):
        compute_advantages([group("g", [1, 0])], settings("grpo", advantage_settings={"std_esp": 1e-4}))
    with pytest.raises(SettingsError, match=r"set algorithm\.gamma"):
        compute_advantages([group("g", [1, 0])], settings("grpo", advantage_settings={"gamma": 0.5}))


def test_an_estimators_own_settings_are_used():
    got = compute_advantages([group("g", [1, 0])], settings("grpo", advantage_settings={"std_eps": 1.0}))
    assert got["g-0"] == pytest.approx(0.5 / (0.5**0.5 + 1))
