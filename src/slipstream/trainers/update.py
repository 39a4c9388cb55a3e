"""One step's update: advantages, batch, anchors, forward-backward, optimiser steps.

Owns: the order of operations from a step's groups to refused or applied optimiser steps.
Refuses: rollouts, publishing, records, arithmetic (the room ``algorithms`` owns it).

A step's batch is compiled once; anchors and reference log-probs are taken before its first optimiser step.  It is
cut into ``minibatches_per_step`` parts of whole groups, each weighed by its own denominator, and gone through
``epochs_per_step`` times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from slipstream.algorithms.advantages import compute_advantages, rewards_with_kl, scalar_advantage
from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.check import loss_spec
from slipstream.algorithms.compile import Advantage, compile_batch, row_name, split_minibatches
from slipstream.algorithms.filters import FilterResult
from slipstream.algorithms.objective import LossSpec, Metric, merge_steps
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import DeadlineError
from slipstream.training.protocol import TrainingBackend

T = TypeVar("T")


async def within(future: Future[T], seconds: float, what: str) -> T:
    """Await a backend future with an owner and a deadline; raises ``DeadlineError`` naming ``what``."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not finish within {seconds:.0f} s") from error


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: metrics under ``policy/``, optimiser steps applied, and per-trajectory facts.

    ``trainer_logprobs``: by trajectory id, for each row of the trajectory the log-probs of its own trained tokens, or
    None for a row without any.
    """

    metrics: Mapping[str, float]
    applied: int
    refused: int
    advantages: Mapping[str, float] = field(default_factory=dict)
    trainer_logprobs: Mapping[str, list[list[float] | None]] = field(default_factory=dict)


class PolicyUpdate:
    """Turns a step's groups into optimiser steps on ``backend``; ``deadline`` bounds each verb, in seconds."""

    def __init__(self, backend: TrainingBackend, settings: AlgorithmSettings, deadline: float) -> None:
        self.backend = backend
        self.settings = settings
        self.deadline = deadline

    async def __call__(self, filtered: FilterResult, step: int) -> UpdateResult:
        """Run the whole update; a step without trainable tokens applies nothing."""
        settings = self.settings
        advantages = await self._advantages(filtered, step)
        batch = compile_batch(filtered.groups, advantages, settings.reduction, step=step, excluded=filtered.excluded)
        shown = {tid: scalar_advantage(value) for tid, value in advantages.items()}
        if batch.n_trained == 0:
            return UpdateResult({"policy/optimizer_steps": 0.0, "policy/refused_steps": 0.0}, 0, 0, shown)
        spec = await self._spec(batch)
        collected: list[dict[str, Metric]] = []
        logprobs: dict[str, dict[str, list[float]]] = {}
        applied = refused = trained = 0
        for epoch in range(settings.epochs_per_step):
            for part in split_minibatches(batch, settings.minibatches_per_step, settings.reduction):
                call = self.backend.forward_backward("policy", part.batch, spec.take(part.rows))
                out = await within(call, self.deadline, "the update")
                opt = await within(self.backend.optim_step("policy"), self.deadline, "the optimiser step")
                applied += opt.applied
                refused += not opt.applied
                own = {"grad_norm": Metric("mean", opt.grad_norm, 1.0), "policy_lr": Metric("mean", opt.lr, 1.0)}
                collected.append({**out.parts, **own})
                trained += part.batch.n_trained
                if epoch == 0:
                    for row, values in zip(part.batch.rows, out.logprobs, strict=True):
                        logprobs.setdefault(row.trajectory_id, {})[row.row_id] = np.asarray(values).tolist()
        counts = {"optimizer_steps": applied, "refused_steps": refused, "trained_tokens": trained}
        merged = {**merge_steps(collected), **counts}
        metrics = {f"policy/{name}": float(value) for name, value in merged.items()}
        return UpdateResult(metrics, applied, refused, shown, _by_row(filtered, logprobs))

    async def _advantages(self, filtered: FilterResult, step: int) -> dict[str, Advantage]:
        settings = self.settings
        if settings.kl_in == "loss" or settings.kl_coef == 0:
            return compute_advantages(filtered.groups, settings)
        everyone = compile_batch(filtered.groups, None, settings.reduction, step=step)
        own = await self._score("policy", everyone)
        ref = await self._score("reference", everyone)
        rewards = rewards_with_kl(filtered.groups, everyone, own, ref, settings.kl_coef, settings.kl_estimator)
        return compute_advantages(filtered.groups, settings, rewards=rewards)

    async def _spec(self, batch: Batch) -> LossSpec:
        settings = self.settings
        old = await self._score("policy", batch) if settings.old_logprobs == "recompute" else None
        spec = loss_spec(settings, old_logprobs=old)
        if not spec.needs_reference:
            return spec
        return loss_spec(settings, old_logprobs=old, ref_logprobs=await self._score("reference", batch))

    async def _score(self, handle: str, batch: Batch) -> Sequence[FloatArray]:
        result = await within(self.backend.forward(handle, batch), self.deadline, f"scoring under {handle}")
        return result.logprobs


def _by_row(
    filtered: FilterResult, logprobs: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, list[list[float] | None]]:
    """Log-probs in the order of each trajectory's rows."""
    sizes = {m.trajectory_id: len(m.rows) for group in filtered.groups for m in group.members}
    return {tid: [rows.get(row_name(tid, i)) for i in range(sizes[tid])] for tid, rows in logprobs.items()}
