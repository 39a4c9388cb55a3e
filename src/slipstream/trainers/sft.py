"""Supervised fine-tuning: chat rows through the same spans, compiler, reducer and backend.

Owns: the order of rows (seeded, by pass), one optimiser step at a time, its metrics.
Refuses: a second loss path.  SFT is ``compile_batch(mode="likelihood")`` with the ``cross_entropy`` loss.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from slipstream.algorithms.compile import compile_batch
from slipstream.algorithms.objective import LossSpec
from slipstream.config.settings import SftSettings
from slipstream.errors import DataError, NonFiniteStepError
from slipstream.trainers.callbacks import Callback, Control, StepInfo, notify
from slipstream.trainers.waiting import within
from slipstream.training.protocol import TrainingBackend
from slipstream.trajectory import Group, Trajectory


class SftTrainer:
    """Trains ``settings.steps`` optimiser steps of ``settings.rows_per_step`` conversations.

    ``on_step(step, metrics)`` is called after each step, ``on_border(step)`` after that (checkpoints).
    """

    def __init__(
        self,
        backend: TrainingBackend,
        rows: Sequence[Trajectory],
        settings: SftSettings,
        *,
        seed: int,
        deadline: float,
        on_step: Callable[[int, dict[str, float]], None],
        on_border: Callable[[int], Awaitable[None]],
        callbacks: Sequence[Callback] = (),
        control: Control | None = None,
    ) -> None:
        if not rows:
            raise DataError("supervised fine-tuning has no rows; set data.sft, or sft.steps=0 to skip the phase")
        self.backend = backend
        self.rows = rows
        self.settings = settings
        self.seed = seed
        self.deadline = deadline
        self.on_step = on_step
        self.on_border = on_border
        self.callbacks = callbacks
        self.control = control or Control()

    def rows_of_step(self, step: int) -> list[Trajectory]:
        """The rows of optimiser step ``step`` (from 0): consecutive slices of seeded passes over the data."""
        size = self.settings.rows_per_step
        chosen: list[Trajectory] = []
        for position in range(step * size, (step + 1) * size):
            turn, index = divmod(position, len(self.rows))
            chosen.append(self.rows[_order(len(self.rows), self.seed, turn)[index]])
        return chosen

    async def run(self, start: int = 0) -> int:
        """Run the steps after ``start``; returns the last finished one."""
        total = self.settings.steps
        done = start
        while done < total and self.control.stop_reason is None:
            notify(self.callbacks, "on_step_start", StepInfo("sft", done, total), self.control)
            metrics = await self._step(done)
            done += 1
            self.on_step(done, metrics)
            notify(self.callbacks, "on_step_end", StepInfo("sft", done, total, metrics), self.control)
            await self.on_border(done)
        return done

    async def _step(self, step: int) -> dict[str, float]:
        # A row that comes twice in one step is two examples: groups get the position into their id.
        groups = [
            Group(f"sft/{step}/{i}", row.prompt_uid, 1, (_renamed(row, f"sft/{step}/{i}"),))
            for i, row in enumerate(self.rows_of_step(step))
        ]
        batch = compile_batch(groups, None, "token_mean", step=step, mode="likelihood")
        if batch.n_trained == 0:
            raise DataError(f"sft step {step + 1}: none of its rows has a token to learn (are they cut too short?)")
        call = self.backend.forward_backward("policy", batch, LossSpec("cross_entropy"))
        out = await within(call, self.deadline, "the supervised update")
        opt = await within(self.backend.optim_step("policy"), self.deadline, "the optimiser step")
        if not opt.applied:
            raise NonFiniteStepError(f"sft step {step + 1} was refused: {opt.reason}; lower sft.optimizer.lr")
        own = {"loss": out.loss, "grad_norm": opt.grad_norm, "lr": opt.lr, "trained_tokens": float(batch.n_trained)}
        return {f"sft/{name}": float(value) for name, value in {**out.metrics, **own}.items()}


def _order(n: int, seed: int, turn: int) -> list[int]:
    order = list(range(n))
    random.Random(f"sft:{seed}:{turn}").shuffle(order)
    return order


def _renamed(row: Trajectory, group_id: str) -> Trajectory:
    from dataclasses import replace

    return replace(row, group_id=group_id, trajectory_id=group_id)
