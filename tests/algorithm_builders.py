"""Small trajectories, groups and batches for the tests of the algorithms room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.algorithms import Batch, BatchRow
from slipstream.algorithms.ops import NumpyOps
from slipstream.trajectory import (
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
    name: str, trained: Sequence[int], *, weight=1.0, advantage=1.0, behaviour=-1.0, trajectory_id=None, group_id="g"
) -> BatchRow:
    """A row whose per-token arrays are scalars, or arrays over all targets."""
    mask = np.asarray(trained, dtype=bool)
    full = lambda v: np.broadcast_to(np.asarray(v, dtype=np.float64), mask.shape).copy()  # noqa: E731
    ids = np.arange(len(mask), dtype=np.int64)
    weights = np.where(mask, full(weight), 0.0)
    return BatchRow(
        name, trajectory_id or name, group_id, ids, ids + 1, mask, weights, full(advantage), full(behaviour), SPEC
    )


def random_batch(seed: int, n_rows: int = 6) -> Batch:
    """Rows of different lengths in three groups; two rows belong to one trajectory."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n_rows):
        mask = rng.random(rng.integers(3, 9)) < 0.6
        mask[-1] = True
        n = len(mask)
        owner = "t0" if i == 1 else f"t{i}"
        rows.append(
            batch_row(
                f"r{i}",
                mask,
                weight=0.1,
                advantage=rng.normal(size=n),
                behaviour=-np.abs(rng.normal(size=n)),
                trajectory_id=owner,
                group_id=f"g{i * 3 // n_rows}",
            )
        )
    return Batch(rows)


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
