"""One step's update: advantages, batch, anchors, forward-backward, optimiser steps.

Owns: the order of operations from a step's groups to refused or applied optimiser steps.
Refuses: rollouts, publishing, records, arithmetic (the room ``algorithms`` owns it).

A step's batch is compiled once; anchors, reference log-probs and off-policy corrections are taken before its first
optimiser step.  It is cut into ``minibatches_per_step`` parts of whole groups, each weighed by its own denominator, and
gone through ``epochs_per_step`` times; a part in which an off-policy mask left no weight takes no optimiser step.  The
KL coefficient moves after the step, by its controller, whose state is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.algorithms.advantages import ADVANTAGES, Arrays, compute_advantages, rewards_with_kl, scalar_advantage
from slipstream.algorithms.anchors import token_lags
from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.check import loss_spec
from slipstream.algorithms.compile import Advantage, compile_batch, row_name, split_minibatches
from slipstream.algorithms.corrections import correct, corrects
from slipstream.algorithms.filters import FilterResult
from slipstream.algorithms.kl import kl_controller, kl_values
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.objective import LossSpec, Metric, merge_steps
from slipstream.algorithms.ops import numpy_ops
from slipstream.algorithms.reduce import reduction_spec
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError
from slipstream.trainers.critic import CriticUpdate, Judged, by_trajectory
from slipstream.trainers.distill import build_teacher
from slipstream.trainers.waiting import within
from slipstream.training.protocol import TrainingBackend
from slipstream.trajectory import WeightVersion


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: metrics under ``policy/``, optimiser steps applied, and per-trajectory facts.

    ``trainer_logprobs``: by trajectory id, for each row of the trajectory the log-probs of its own trained tokens, or
    None for a row without any.  ``note`` says why no policy step was meant to be taken (``critic_warmup``), if so.
    """

    metrics: Mapping[str, float]
    applied: int
    refused: int
    advantages: Mapping[str, float] = field(default_factory=dict)
    trainer_logprobs: Mapping[str, list[list[float] | None]] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class _Scored:
    """What is known of a step's groups before its first optimiser step."""

    advantages: Mapping[str, Advantage]
    judged: Judged | None
    teacher: Mapping[str, FloatArray]
    """The teacher's log-probs by row id."""
    metrics: Mapping[str, float]


class PolicyUpdate:
    """Turns a step's groups into optimiser steps on ``backend``; ``deadline`` bounds each verb, in seconds."""

    def __init__(self, backend: TrainingBackend, settings: AlgorithmSettings, deadline: float) -> None:
        self.backend = backend
        self.settings = settings
        self.reduction = reduction_spec(settings)
        self.deadline = deadline
        self.kl = kl_controller(settings)
        needs = {*ADVANTAGES.get(settings.advantage).needs, *LOSSES.get(settings.loss).needs}
        self.critic = CriticUpdate(backend, settings, self.reduction, deadline) if "values" in needs else None
        self.teacher = build_teacher(settings, backend, deadline) if "teacher_logprobs" in needs else None
        self._reward_kl: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.kl.load_state_dict(state.get("kl", {}))

    async def __call__(self, filtered: FilterResult, step: int, version: str | None = None) -> UpdateResult:
        """Run the whole update; a step without trainable tokens applies nothing.

        ``version`` names the weights the backend holds; an approximate anchor measures each token's lag from it.
        """
        settings = self.settings
        scored = await self._advantages(filtered, step)
        batch = compile_batch(
            filtered.groups,
            scored.advantages,
            self.reduction,
            step=step,
            excluded=filtered.excluded,
            copies=filtered.copies,
        )
        shown = {tid: scalar_advantage(value) for tid, value in scored.advantages.items()}
        if batch.n_trained == 0:
            return UpdateResult({"policy/optimizer_steps": 0.0, "policy/refused_steps": 0.0}, 0, 0, shown)
        critic, judged = self.critic, scored.judged
        shared = critic if critic is not None and critic.shared else None
        learnt = await critic.learn(batch, judged) if critic is not None and judged is not None and not shared else {}
        extra = {**scored.metrics, **learnt}
        if critic is not None and critic.warming_up(step):
            none = {"policy/optimizer_steps": 0.0, "policy/refused_steps": 0.0}
            return UpdateResult({**extra, **none}, 0, 0, shown, note="critic_warmup")
        batch, spec, notes = await self._prepare(batch, version)
        if scored.teacher and "teacher_logprobs" in LOSSES.get(settings.loss).needs:
            spec = replace(spec, teacher_logprobs=[scored.teacher[row.row_id] for row in batch.rows])
        collected: list[dict[str, Metric]] = [notes]
        logprobs: dict[str, dict[str, list[float]]] = {}
        applied = refused = trained = empty = 0
        for epoch in range(settings.epochs_per_step):
            for part in split_minibatches(batch, settings.minibatches_per_step, self.reduction):
                if not any(row.weights_T.any() for row in part.batch.rows):
                    empty += 1
                    continue
                call = self.backend.forward_backward("policy", part.batch, spec.take(part.rows))
                out = await within(call, self.deadline, "the update")
                joined = await shared.join(part.batch, judged) if shared is not None and judged is not None else {}
                opt = await within(self.backend.optim_step("policy"), self.deadline, "the optimiser step")
                applied += opt.applied
                refused += not opt.applied
                own = {"grad_norm": Metric("mean", opt.grad_norm, 1.0), "policy_lr": Metric("mean", opt.lr, 1.0)}
                collected.append({**out.parts, **joined, **own})
                trained += part.batch.n_trained
                if epoch == 0:
                    for row, values in zip(part.batch.rows, out.logprobs, strict=True):
                        logprobs.setdefault(row.trajectory_id, {})[row.row_id] = np.asarray(values).tolist()
        counts = {"optimizer_steps": applied, "refused_steps": refused, "trained_tokens": trained}
        if empty:
            counts["off_policy/empty_minibatches"] = empty
        if filtered.copies:
            counts["stand_in_groups"] = sum(filtered.copies.values()) - len(filtered.copies)
        merged = {**merge_steps(collected), **counts}
        for name in _FIRST_PASS:
            merged.pop(name, None)
        trajectories = len({row.trajectory_id for row in batch.rows}) if applied else 0
        merged |= self._steer(merged, trajectories)
        metrics = {name if name.startswith("critic/") else f"policy/{name}": float(v) for name, v in merged.items()}
        metrics |= extra
        return UpdateResult(metrics, applied, refused, shown, _by_row(filtered, logprobs))

    async def _advantages(self, filtered: FilterResult, step: int) -> _Scored:
        """Reference, teacher and critic speak about every voter, filtered out or not; then the estimator does."""
        settings, groups = self.settings, filtered.groups
        everyone = compile_batch(groups, None, self.reduction, step=step)
        rewards: Arrays | None = None
        judged: Judged | None = None
        arrays: dict[str, Arrays] = {}
        teacher: dict[str, FloatArray] = {}
        metrics: dict[str, float] = {}
        if settings.kl_in == "reward" and settings.kl_coef != 0:
            rewards = await self._rewards_with_kl(filtered, everyone)
        if self.teacher is not None:
            scores = await self.teacher.score(everyone)
            teacher = {row.row_id: own for row, own in zip(everyone.rows, scores, strict=True)}
            arrays["teacher_logprobs"] = by_trajectory(everyone, scores)
            metrics |= _teacher_metrics(everyone, scores)
        if self.critic is not None and everyone.rows:
            judged = await self.critic.judge(groups, everyone, rewards)
            arrays["values"] = judged.values
            metrics["critic/explained_variance"] = judged.explained
        advantages = compute_advantages(groups, settings, rewards=rewards, arrays=arrays)
        return _Scored(advantages, judged, teacher, metrics)

    async def _rewards_with_kl(self, filtered: FilterResult, everyone: Batch) -> dict[str, FloatArray]:
        settings = self.settings
        if not everyone.rows:
            self._reward_kl = None
            return {}
        own = await self._score("policy", everyone)
        ref = await self._score("reference", everyone)
        gaps = kl_values(numpy_ops(), np.concatenate(own), np.concatenate(ref), settings.kl_estimator)
        self._reward_kl = float(gaps.mean()) if len(gaps) else None
        return rewards_with_kl(filtered.groups, everyone, own, ref, self.kl.coef, settings.kl_estimator)

    async def _prepare(self, batch: Batch, version: str | None) -> tuple[Batch, LossSpec, dict[str, Metric]]:
        """Everything that is taken before the first optimiser step: anchor, corrections, reference."""
        settings = self.settings
        old = await self._score("policy", batch) if settings.old_logprobs == "recompute" else None
        notes: dict[str, Metric] = {}
        spec = loss_spec(settings, kl_coef=self.kl.coef, old_logprobs=old)
        if spec.interpolate or "lags" in LOSSES.get(settings.loss).needs:
            if version is None:
                raise ContractError("the tokens' lags need the version of the trainer's weights")
            lags = token_lags(batch, WeightVersion.parse(version).counter)
            spec = replace(spec, lags=lags)
            flat = np.concatenate(lags)
            notes["lag_mean"] = Metric("mean", float(flat.sum()), float(len(flat)))
        if old is not None and all(np.isfinite(row.behaviour_logprobs_T[row.trained_T]).all() for row in batch.rows):
            corrected = correct(batch, old, settings.off_policy, self.reduction)
            batch, notes = corrected.batch, notes | corrected.metrics
            spec = replace(spec, coefficients=corrected.coefficients)
        elif corrects(settings.off_policy):
            raise ContractError("off-policy corrections need the sampler's log-prob of every trained token")
        if spec.needs_reference:
            spec = replace(spec, ref_logprobs=await self._score("reference", batch))
        return batch, spec, notes

    def _steer(self, metrics: Mapping[str, float], trajectories: int) -> dict[str, float]:
        """Report the coefficient that this step used, and move it by the KL that was measured.

        A step that was refused moves nothing: what it measured need not be a number.
        """
        if self.settings.kl_coef == 0:
            return {}
        used: dict[str, float] = {"kl_coef": self.kl.coef}
        measured = metrics.get("policy_kl")
        if self.settings.kl_in == "reward":
            measured = self._reward_kl
            used |= {} if measured is None else {"reward_kl": measured}
        if measured is not None and trajectories:
            self.kl.update(measured, trajectories)
        return used

    async def _score(self, handle: str, batch: Batch) -> Sequence[FloatArray]:
        result = await within(self.backend.forward(handle, batch), self.deadline, f"scoring under {handle}")
        return result.logprobs


_FIRST_PASS = ("rollout_train_logprobs_abs_diff_mean", "rollout_train_logprobs_abs_diff_max")
"""The ledger has these over each row's first pass; merged over passes they would speak of the policy's own drift."""


def _teacher_metrics(batch: Batch, scores: Sequence[FloatArray]) -> dict[str, float]:
    """Mean of ``log student - log teacher`` over sampled tokens: an estimate of the reverse KL."""
    student = [row.behaviour_logprobs_T[row.trained_T] for row in batch.rows]
    gaps = np.concatenate([own - theirs for own, theirs in zip(student, scores, strict=True)] or [np.zeros(0)])
    known = gaps[np.isfinite(gaps)]
    return {"policy/teacher_kl": float(known.mean())} if len(known) else {}


def _by_row(
    filtered: FilterResult, logprobs: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, list[list[float] | None]]:
    """Log-probs in the order of each trajectory's rows."""
    sizes = {m.trajectory_id: len(m.rows) for group in filtered.groups for m in group.members}
    return {tid: [rows.get(row_name(tid, i)) for i in range(sizes[tid])] for tid, rows in logprobs.items()}
