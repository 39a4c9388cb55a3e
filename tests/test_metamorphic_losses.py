"""Change something that must not matter, and assert that values and gradients stay where they were.

Parametrised over every registered loss, reduction, estimator and KL estimator, so that a new one is covered
by being registered.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithm_builders import (
    batch_row,
    finite_difference,
    full_spec,
    inputs_of,
    per_row,
    prepared,
    random_batch,
    trajectory,
)
from slipstream.algorithms import (
    Batch,
    LossMetric,
    LossSpec,
    LossValues,
    MetricAccumulator,
    compile_batch,
    log_ratio,
    numpy_ops,
    objective,
    register_loss,
    reweigh,
    torch_ops,
)
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.reduce import REDUCTIONS, reduction_spec
from slipstream.config.settings import AlgorithmSettings
from slipstream.trajectory import Group

ROW_LOSS = "sequence_ratio_for_tests"
"""A sequence-level ratio loss, so that unit ``row`` passes through the suite too."""
LOSS_NAMES = [*LOSSES.names(), ROW_LOSS]
REDUCTION_SPECS = [reduction_spec(AlgorithmSettings(reduction=name, reduction_tokens=8)) for name in REDUCTIONS]
every_loss = pytest.mark.parametrize("name", LOSS_NAMES)
every_reduction = pytest.mark.parametrize("reduction", REDUCTION_SPECS, ids=lambda spec: spec.name)
every_loss_and_every_reduction = pytest.mark.parametrize(
    ("name", "reduction"),
    [pytest.param(name, "sequence_mean", id=name) for name in LOSS_NAMES]
    + [pytest.param("ppo_clip", spec, id=f"ppo_clip-{spec.name}") for spec in REDUCTION_SPECS],
)
"""An objective is linear in its weights, so not every pair is needed."""


@pytest.fixture(autouse=True, scope="module")
def row_loss():
    @register_loss(ROW_LOSS, unit="row")
    def sequence_ratio(xp, inputs, settings):
        gap = inputs.mean(xp, log_ratio(xp, inputs.logprobs, inputs.old_logprobs), "row")
        ratio, advantage = xp.exp(gap), inputs.mean(xp, inputs.advantages, "row")
        values = -xp.minimum(ratio * advantage, xp.clip(ratio, 0.9, 1.1) * advantage)
        return LossValues(values, {"ratio": LossMetric("max", ratio, unit="row")})

    yield
    LOSSES.remove(ROW_LOSS)


def evaluate(batch: Batch, spec: LossSpec, logprobs: list[np.ndarray], parts=None):
    """Loss, gradients by row id, and metrics, accumulated over the given parts (lists of row indices)."""
    xp, accumulator, total = torch_ops(), MetricAccumulator(), 0.0
    spec = prepared(batch, spec, logprobs)
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in logprobs]
    for part in parts or [list(range(len(batch.rows)))]:
        flat = torch.cat([leaves[i] for i in part]) if part else leaves[0][:0]
        loss, metrics = objective(xp, inputs_of(xp, batch, part, spec, flat), spec)
        loss.backward()
        accumulator.add(metrics)
        total += loss.item()
    grads = {row.row_id: leaf.grad.numpy() for row, leaf in zip(batch.rows, leaves, strict=True)}
    return total, grads, accumulator.result()


def assert_same(a, b, rel=1e-12):
    assert a[0] == pytest.approx(b[0], rel=rel)
    assert a[1].keys() == b[1].keys()
    for row, grad in a[1].items():
        np.testing.assert_allclose(grad, b[1][row], rtol=1e-10, atol=1e-14)
    assert a[2] == pytest.approx(b[2], rel=1e-10)


@every_loss
@pytest.mark.parametrize("kl", KL_ESTIMATORS.names())
def test_torch_gradients_equal_differences_of_the_numpy_reference(name, kl):
    batch = random_batch(3)
    spec, logprobs = full_spec(batch, name, kl), per_row(batch, 4)

    spec = prepared(batch, spec, logprobs)

    def reference(xp, flat):
        return objective(xp, inputs_of(xp, batch, range(len(batch.rows)), spec, flat), spec)[0]

    flat = np.concatenate(logprobs)
    loss, grads, _ = evaluate(batch, spec, logprobs)
    assert loss == pytest.approx(float(reference(numpy_ops(), flat)), rel=1e-12)
    np.testing.assert_allclose(np.concatenate(list(grads.values())), finite_difference(reference, flat), atol=1e-7)


@every_loss_and_every_reduction
def test_any_split_into_microbatches_gives_the_same_sum(name, reduction):
    batch = random_batch(5, n_rows=5)
    batch = Batch(reweigh(batch.rows, reduction))
    spec, logprobs = full_spec(batch, name), per_row(batch, 6)
    whole = evaluate(batch, spec, logprobs)
    for split in ([[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[4, 0], [], [3, 1, 2]], [[2], [0, 4, 1, 3]]):
        assert_same(whole, evaluate(batch, spec, logprobs, split))


@every_loss_and_every_reduction
def test_permuting_rows_permutes_gradients_and_nothing_else(name, reduction):
    batch = random_batch(7)
    order = np.random.default_rng(0).permutation(len(batch.rows)).tolist()
    logprobs = per_row(batch, 8)
    spec = full_spec(batch, name)
    moved = Batch(reweigh([batch.rows[i] for i in order], reduction))
    here = evaluate(Batch(reweigh(batch.rows, reduction)), spec, logprobs)
    assert_same(here, evaluate(moved, spec.take(order), [logprobs[i] for i in order]))


@every_loss
@pytest.mark.parametrize("fill", [1e6, -math.inf, math.nan])
def test_what_masked_slots_hold_reaches_neither_value_nor_gradient(name, fill):
    """Model outputs exist for every slot; only trained ones are gathered, in a pre-pass too."""
    clean, xp = random_batch(9), torch_ops()

    def run(batch, filler):
        spec = prepared(batch, full_spec(clean, name), per_row(clean, 10))
        outputs = []
        for row, trained in zip(batch.rows, per_row(clean, 10), strict=True):
            values = np.full(len(row.targets_T), filler)
            values[row.trained_T] = trained
            outputs.append(torch.tensor(values, requires_grad=True))
        flat = torch.cat([o[torch.as_tensor(r.trained_T)] for o, r in zip(outputs, batch.rows, strict=True)])
        loss, metrics = objective(xp, inputs_of(xp, batch, range(len(batch.rows)), spec, flat), spec)
        loss.backward()
        accumulator = MetricAccumulator()
        accumulator.add(metrics)
        return (
            loss.item(),
            {r.row_id: o.grad.numpy() for o, r in zip(outputs, batch.rows, strict=True)},
            accumulator.result(),
        )

    dirty = Batch(
        [
            replace(
                row,
                advantages_T=np.where(row.trained_T, row.advantages_T, fill),
                behaviour_logprobs_T=np.where(row.trained_T, row.behaviour_logprobs_T, fill),
            )
            for row in clean.rows
        ]
    )
    want, got = run(clean, 0.0), run(dirty, fill)
    assert_same(want, got)
    for row in clean.rows:
        assert not got[1][row.row_id][~row.trained_T].any()


def without_second_token(batch: Batch, count: bool = False) -> Batch:
    """As an off-policy mask leaves it: the second trained token of every row weighs nothing."""
    rows = []
    for row in batch.rows:
        dropped = row.trained_T & (np.cumsum(row.trained_T) == 2)
        rows.append(replace(row, dropped_T=dropped, dropped_count=count))
    return Batch(reweigh(rows, "token_mean"))


@every_loss
def test_what_a_mask_dropped_has_no_vote(name):
    batch = without_second_token(random_batch(23))
    gone = [row.dropped_T[row.trained_T] for row in batch.rows]
    assert any(mask.any() and not mask.all() for mask in gone)
    spec, logprobs = full_spec(batch, name), per_row(batch, 24)

    def moved(values):
        return [np.where(mask, own - 1.5, own) for mask, own in zip(gone, values, strict=True)]

    per_token = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values", "returns", "coefficients")
    changed = replace(spec, **{field: moved(getattr(spec, field)) for field in per_token})
    want, got = evaluate(batch, spec, logprobs), evaluate(batch, changed, moved(logprobs))
    assert_same(want, got)
    for row, mask in zip(batch.rows, gone, strict=True):
        assert not want[1][row.row_id][mask].any()


def test_a_sequence_ratio_is_that_of_the_kept_tokens():
    """GSPO's geometric mean over a row without its dropped token is the one of the row that never had it."""
    rows = [batch_row("a", [1, 1, 1], advantage=1.0), batch_row("b", [1, 1], advantage=-1.0)]
    spec = LossSpec("gspo", {"clip_low": 0.5, "clip_high": 0.5})
    masked = without_second_token(Batch(rows))
    short = [batch_row("a", [1, 1], advantage=1.0), batch_row("b", [1], advantage=-1.0)]
    a = evaluate(masked, spec, [np.array([-0.8, -9.0, -1.1]), np.array([-1.2, 3.0])])
    b = evaluate(Batch(reweigh(short, "token_mean")), spec, [np.array([-0.8, -1.1]), np.array([-1.2])])
    assert a[0] == pytest.approx(b[0], rel=1e-12)
    assert a[2]["loss_metrics/sequence_ratio_max"] == pytest.approx(math.exp(0.05))


@every_loss_and_every_reduction
def test_padding_either_side_changes_nothing(name, reduction):
    batch = Batch(reweigh(random_batch(13).rows, reduction))
    spec, logprobs = full_spec(batch, name), per_row(batch, 14)

    def padded(row, left, right):
        def wrap(values, fill):
            return np.concatenate([np.full(left, fill, values.dtype), values, np.full(right, fill, values.dtype)])

        return replace(
            row,
            inputs_T=wrap(row.inputs_T, 0),
            targets_T=wrap(row.targets_T, 0),
            trained_T=wrap(row.trained_T, False),
            weights_T=wrap(row.weights_T, 0.0),
            advantages_T=wrap(row.advantages_T, np.nan),
            behaviour_logprobs_T=wrap(row.behaviour_logprobs_T, np.nan),
            side_T={key: wrap(values, None) for key, values in row.side_T.items()},
        )

    wide = Batch(reweigh([padded(row, i, 3 - i % 3) for i, row in enumerate(batch.rows)], reduction))
    assert_same(evaluate(batch, spec, logprobs), evaluate(wide, spec, logprobs))


def partitions(items):
    """Every way to put items into unordered parts."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        for i, part in enumerate(smaller):
            yield [*smaller[:i], [items[0], *part], *smaller[i + 1 :]]
        yield [[items[0]], *smaller]


@pytest.mark.parametrize(("reduction", "want"), [("token_mean", 1.5), ("sequence_mean", 3.0)])
def test_token_mean_and_sequence_mean_for_every_split(reduction, want):
    token_losses = [[8.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    rows = [batch_row(f"r{i}", [1] * len(x)) for i, x in enumerate(token_losses)]
    batch, spec = Batch(reweigh(rows, reduction)), LossSpec("cross_entropy")
    logprobs = [-np.array(x) for x in token_losses]
    whole = evaluate(batch, spec, logprobs)
    splits = list(partitions([0, 1, 2]))
    assert len(splits) == 5
    for split in splits:
        part = evaluate(batch, spec, logprobs, split)
        assert part[0] == pytest.approx(want)
        assert_same(whole, part)


@every_loss_and_every_reduction
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_ranks_add_their_plain_sums_and_nothing_is_divided_again(name, reduction, ranks):
    """Rows dealt round robin to fake ranks; the seventh rank of seven has nothing to do."""
    batch = Batch(reweigh(random_batch(15, n_rows=6).rows, reduction))
    spec, logprobs = full_spec(batch, name), per_row(batch, 16)
    shares = [list(range(rank, 6, ranks)) for rank in range(ranks)]
    assert_same(evaluate(batch, spec, logprobs), evaluate(batch, spec, logprobs, shares))


def test_a_row_that_is_left_out_leaves_the_denominator():
    members = (trajectory("live", 1.0, tokens=4), trajectory("out", 0.0, sample=1, tokens=4))
    pool = [Group("g", "p", 2, members)]
    batch = compile_batch(pool, None, "token_mean", excluded={"out"})
    loss, _, _ = evaluate(batch, LossSpec("cross_entropy"), [-np.ones(4)])
    assert loss == pytest.approx(1.0)


@every_loss
def test_signed_weights_scale_values_and_gradients(name):
    batch = random_batch(17)
    spec, logprobs = full_spec(batch, name), per_row(batch, 18)
    flipped = Batch([replace(row, weights_T=-2 * row.weights_T) for row in batch.rows])
    a, b = evaluate(batch, spec, logprobs), evaluate(flipped, spec, logprobs)
    assert b[0] == pytest.approx(-2 * a[0])
    for row, grad in a[1].items():
        np.testing.assert_allclose(b[1][row], -2 * grad)
    # Means are weighed by magnitude, so that they stay means.
    means = {key for key in a[2] if key.endswith(("_mean", "policy_kl"))}
    assert means
    assert {key: b[2][key] for key in means} == pytest.approx({key: a[2][key] for key in means})
