"""The critic's part of an update: what it said, what it should have said, and its optimiser steps.

Owns: asking the handle ``critic`` for values, its targets, when and on what it learns.
Refuses: advantages and recursions (``algorithms``), the value model (``training.critic``).

A step: ``judge`` before the first optimiser step gives values for the estimator and targets ``A + V`` for the critic.
Then the critic takes ``epochs_per_step`` times ``minibatches_per_step`` steps of its own (``learn``), or, on the
policy's backbone, adds its gradient to each of the policy's (``join``).

    judged = await critic.judge(groups, everyone, rewards)
    advantages = compute_advantages(groups, settings, arrays={"values": judged.values})
    metrics = await critic.learn(batch, judged)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.algorithms.advantages import Arrays, critic_targets
from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.compile import split_minibatches
from slipstream.algorithms.objective import LossSpec, Metric, merge_steps
from slipstream.algorithms.reduce import ReductionSpec
from slipstream.config.settings import AlgorithmSettings
from slipstream.trainers.waiting import within
from slipstream.training.protocol import StepOutput, TrainingBackend
from slipstream.trajectory import Group


def by_trajectory(batch: Batch, per_row: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """Arrays over each row's trained tokens, put together in row order: ``(S,)`` by trajectory id."""
    pieces: dict[str, list[FloatArray]] = {}
    for row, values in zip(batch.rows, per_row, strict=True):
        pieces.setdefault(row.trajectory_id, []).append(values)
    return {tid: np.concatenate(own) for tid, own in pieces.items()}


def by_row(batch: Batch, per_trajectory: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """The inverse of ``by_trajectory``, by row id; ``batch`` holds all rows of each trajectory, in order."""
    used: dict[str, int] = {}
    out: dict[str, FloatArray] = {}
    for row in batch.rows:
        at = used.get(row.trajectory_id, 0)
        used[row.trajectory_id] = at + row.n_trained
        out[row.row_id] = per_trajectory[row.trajectory_id][at : at + row.n_trained]
    return out


@dataclass(frozen=True)
class Judged:
    """``values`` by trajectory, for the estimator; old values and targets by row, for the value loss."""

    values: Mapping[str, FloatArray]
    old: Mapping[str, FloatArray]
    targets: Mapping[str, FloatArray]

    @property
    def explained(self) -> float:
        """``1 - Var(R - V) / Var(R)`` over all tokens; 0 where the targets do not vary."""
        targets, old = np.concatenate(list(self.targets.values())), np.concatenate(list(self.old.values()))
        spread = float(targets.var())
        return 1 - float((targets - old).var()) / spread if spread > 0 else 0.0


class CriticUpdate:
    """See the module's docstring; ``deadline`` bounds each verb, in seconds."""

    def __init__(
        self, backend: TrainingBackend, settings: AlgorithmSettings, reduction: ReductionSpec, deadline: float
    ) -> None:
        self.backend, self.settings, self.reduction, self.deadline = backend, settings, reduction, deadline
        self.shared = settings.critic.backbone == "shared"

    def warming_up(self, step: int) -> bool:
        """Whether step ``step`` (from 0) trains the critic alone."""
        return step < self.settings.critic.warmup_steps

    async def judge(self, groups: Sequence[Group], everyone: Batch, rewards: Arrays | None) -> Judged:
        """Values and targets of every voter; ``everyone`` is ``compile_batch(groups, None, ...)``."""
        result = await within(self.backend.forward("critic", everyone), self.deadline, "the critic's values")
        assert result.values is not None
        values = by_trajectory(everyone, result.values)
        targets = critic_targets(groups, self.settings, values, rewards=rewards)
        old = {row.row_id: own for row, own in zip(everyone.rows, result.values, strict=True)}
        return Judged(values, old, by_row(everyone, targets))

    async def learn(self, batch: Batch, judged: Judged) -> dict[str, float]:
        """All optimiser steps of a critic of its own; their metrics."""
        settings = self.settings.critic
        collected, refused = [], 0
        for _ in range(settings.epochs_per_step):
            for part in split_minibatches(batch, settings.minibatches_per_step, self.reduction):
                out = await self._backward(part.batch, judged)
                step = await within(self.backend.optim_step("critic"), self.deadline, "the critic's optimiser step")
                own = {
                    "critic/grad_norm": Metric("mean", step.grad_norm, 1.0),
                    "critic/lr": Metric("mean", step.lr, 1.0),
                }
                refused += not step.applied
                collected.append({**_named(out), **own})
        return {**merge_steps(collected), "critic/refused_steps": float(refused)}

    async def join(self, batch: Batch, judged: Judged) -> dict[str, Metric]:
        """Add ``value_coef`` times the value loss to the policy's pending gradient (a shared backbone)."""
        coef = self.settings.critic.value_coef
        scaled = [replace(row, weights_T=row.weights_T * coef) for row in batch.rows]
        return _named(await self._backward(Batch(scaled, batch.step), judged))

    async def _backward(self, batch: Batch, judged: Judged) -> StepOutput:
        spec = LossSpec(
            "value_clip",
            {"clip": self.settings.critic.value_clip},
            old_values=[judged.old[row.row_id] for row in batch.rows],
            returns=[judged.targets[row.row_id] for row in batch.rows],
        )
        return await within(self.backend.forward_backward("critic", batch, spec), self.deadline, "the critic's update")


def _named(out: StepOutput) -> dict[str, Metric]:
    """The value loss's metrics under ``critic/``."""
    named = {f"critic/{name.removeprefix('loss_metrics/')}": metric for name, metric in out.parts.items()}
    named["critic/loss"] = named.pop("critic/final_loss")
    named.pop("critic/policy_loss")
    return named
