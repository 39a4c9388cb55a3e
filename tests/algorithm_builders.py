"""Small trajectories, groups and batches for the tests of the algorithms room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.algorithms import Batch, BatchRow, LossSpec, loss_inputs, run_prepass
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.ops import NumpyOps
from slipstream.trajectory import (
    TOP_LOGPROBS,
    Completed,
    Group,
    Missing,
    Outcome,
    Reward,
    Row,
    SamplingSpec,
    Span,
    Trajectory,
    VersionRun,
)

SPEC = SamplingSpec()


def sampled(ids: Sequence[int], logprobs=None, turn=0, sampling=SPEC, side=None) -> Span:
    lps = [-0.5 - 0.01 * i for i in range(len(ids))] if logprobs is None else logprobs
    return Span.sampled(ids, lps, [VersionRun("policy/0/0", 0, len(ids))], sampling, turn, side)


def trajectory(
    tid: str,
    reward: float | Missing | None = 0.0,
    *,
    group: str = "g",
    sample: int = 0,
    rows: Sequence[Row] | None = None,
    tokens: int = 2,
    outcome: Outcome | None = None,
    rewards: Sequence[Reward] | None = None,
    turns=(),
) -> Trajectory:
    if rows is None:
        body = (sampled(range(10, 10 + tokens)),) if tokens else ()
        rows = (Row((Span.prompt([1, 2, 3]), *body)),)
    if rewards is None:
        rewards = () if reward is None else (Reward(0, reward),)
    return Trajectory(
        tid, group, "p", sample, 0, tuple(rows), tuple(turns), tuple(rewards), outcome or Completed(), scheduled_step=0
    )


def group(gid: str, rewards: Sequence[float | Missing], **kwargs) -> Group:
    members = tuple(trajectory(f"{gid}-{i}", r, group=gid, sample=i, **kwargs) for i, r in enumerate(rewards))
    return Group(gid, "p", len(members), members)


def batch_row(
    name: str,
    trained: Sequence[int],
    *,
    weight=1.0,
    advantage=1.0,
    behaviour=-1.0,
    trajectory_id=None,
    group_id="g",
    versions=None,
) -> BatchRow:
    """A row whose per-token arrays are scalars, or arrays over all targets."""
    mask = np.asarray(trained, dtype=bool)
    full = lambda v: np.broadcast_to(np.asarray(v, dtype=np.float64), mask.shape).copy()  # noqa: E731
    ids = np.arange(len(mask), dtype=np.int64)
    weights = np.where(mask, full(weight), 0.0)
    own = trajectory_id or name
    return BatchRow(
        name, own, group_id, ids, ids + 1, mask, weights, full(advantage), full(behaviour), SPEC,
        versions_T=None if versions is None else np.asarray(versions, dtype=np.int64),
    )  # fmt: skip


TOP = 3
"""How many of the sampler's likely tokens random rows report; every third token one fewer."""


def _top_side(rng: np.random.Generator, mask: np.ndarray) -> dict:
    entries = np.full(len(mask), None, dtype=object)
    for i in np.flatnonzero(mask):
        known = TOP - (i % 3 == 0)
        mass = rng.dirichlet(np.ones(TOP + 1))[:known]
        entries[i] = (tuple(range(known)), tuple(np.log(mass).tolist()))
    return {TOP_LOGPROBS: entries}


def random_batch(seed: int, n_rows: int = 6) -> Batch:
    """Rows of different lengths in three groups, with every optional input; two rows belong to one trajectory."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n_rows):
        mask = rng.random(rng.integers(3, 9)) < 0.6
        mask[-1] = True
        n = len(mask)
        owner = "t0" if i == 1 else f"t{i}"
        row = batch_row(
            f"r{i}",
            mask,
            weight=0.1,
            advantage=rng.normal(size=n),
            behaviour=-np.abs(rng.normal(size=n)),
            trajectory_id=owner,
            group_id=f"g{i * 3 // n_rows}",
        )
        rows.append(replace(row, side_T=_top_side(rng, mask)))
    return Batch(rows)


def per_row(batch: Batch, seed: int, scale: float = 1.0) -> list[np.ndarray]:
    """Random log-probs (or other constants) of every row's trained tokens."""
    rng = np.random.default_rng(seed)
    return [-np.abs(rng.normal(scale=scale, size=row.n_trained)) for row in batch.rows]


def full_spec(batch: Batch, name: str, kl: str = "k3", settings=None, **changes) -> LossSpec:
    """A spec with every term on, and every per-row array that some loss needs."""
    if settings is None:
        settings = {"clip_cov": {"fraction": 0.3, "cov_low": -5.0}}.get(name, {})  # its defaults choose none of so few
    spec = LossSpec(
        name,
        settings,
        old_logprobs=per_row(batch, 11),
        ref_logprobs=per_row(batch, 12),
        teacher_logprobs=per_row(batch, 13),
        old_values=per_row(batch, 14),
        returns=per_row(batch, 15),
        lags=[np.round(-3 * values) for values in per_row(batch, 16)],
        coefficients=[1 - values for values in per_row(batch, 17)],
    )
    if LOSSES.get(name).kind != "value":
        spec = replace(spec, kl_coef=0.3, kl_estimator=kl, entropy_coef=0.2)
    return replace(spec, **changes)


def inputs_of(xp, batch: Batch, rows, spec: LossSpec, flat, **extra):
    """Loss inputs whose model outputs are all functions of ``flat``, so that every output's gradient is tested."""
    if LOSSES.get(spec.policy).kind == "value":
        return loss_inputs(xp, batch, rows, spec, None, values=flat, **extra)
    scale = xp.asarray(np.linspace(0.5, 1.0, TOP), like=flat)[None, :]
    # Each at most exp(-1.5): the head leaves some mass to the tail.
    top = flat[:, None] * scale - 1.5 if spec.needs_top else None
    return loss_inputs(xp, batch, rows, spec, flat, flat**2, top_logprobs=top, **extra)


def prepared(batch: Batch, spec: LossSpec, logprobs: Sequence[np.ndarray]) -> LossSpec:
    """The spec after the loss's pre-pass over the whole batch."""
    return run_prepass(batch, spec, lambda: logprobs)


class FrozenStopGradient(NumpyOps):
    """numpy whose ``stop_gradient`` replays the values of its first pass.

    Finite differences then differentiate what autograd differentiates: stopped values are constants.
    """

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []
        self.at: int | None = None

    def stop_gradient(self, x):
        if self.at is None:
            self.values.append(np.array(x, copy=True))
            return x
        self.at += 1
        return self.values[self.at - 1]

    def replay(self) -> None:
        self.at = 0


def finite_difference(function, x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Central differences of ``function(xp, x) -> float``."""
    xp = FrozenStopGradient()
    function(xp, x)
    grad = np.zeros_like(x)
    for i in range(len(x)):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * eps
            xp.replay()
            sides.append(float(function(xp, moved)))
        grad[i] = (sides[0] - sides[1]) / (2 * eps)
    return grad
