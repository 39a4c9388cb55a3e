"""Callbacks: code of yours that runs at named moments and may stop, save or evaluate.

Owns: the ``Callback`` base class and ``Control``.  Refuses: changing a step that is under way.

>>> class StopWhenSolved(Callback):
...     def on_step_end(self, info, control):
...         if info.metrics.get("reward/avg_raw_reward", 0) > 0.95:
...             control.stop("solved")
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Control:
    """What callbacks ask of the loop; honoured at the next step border."""

    stop_reason: str | None = None
    finish_reason: str | None = None
    save_requested: bool = False
    evaluate_requested: bool = False
    rollback_to: str | None = None
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: str) -> None:
        """End the run after this step: a checkpoint is written, and an evaluation under way is given up."""
        self.stop_reason = self.stop_reason or reason
        self._stopped.set()

    def finish(self, reason: str) -> None:
        """Make this RL step the last: the run ends as after ``schedule.steps``, evaluated and exported.

        The same command returns its result from then on; more steps, or another time limit, take it up again.
        """
        self.finish_reason = self.finish_reason or reason

    def roll_back(self, checkpoint: str, reason: str) -> None:
        """End this start after this step, without a checkpoint; the next one goes on from ``checkpoint``.

        ``train`` starts it at once, unless the run has gone back ``checkpoint.rollbacks`` times already.
        """
        self.rollback_to = self.rollback_to or checkpoint
        self.stop(reason)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``, or None when ``stop`` was called before it was done (it is cancelled and awaited)."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        finally:
            for future in (task, stopped):
                future.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def save(self) -> None:
        """Write a checkpoint after this step."""
        self.save_requested = True

    def evaluate(self) -> None:
        """Evaluate after this step."""
        self.evaluate_requested = True


@dataclass(frozen=True)
class StepInfo:
    """What callbacks see: phase (``sft``, ``rl``), step (counted from 1 once done), totals and metrics."""

    phase: str
    step: int
    total_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Override what you need; every method does nothing by default."""

    def on_train_start(self, info: StepInfo, control: Control) -> None: ...

    def on_step_start(self, info: StepInfo, control: Control) -> None: ...

    def on_step_end(self, info: StepInfo, control: Control) -> None: ...

    def on_eval_end(self, info: StepInfo, control: Control) -> None: ...

    def on_save(self, info: StepInfo, control: Control) -> None: ...

    def on_train_end(self, info: StepInfo, control: Control) -> None: ...


def notify(callbacks: Sequence[Callback], moment: str, info: StepInfo, control: Control) -> None:
    """Call ``moment`` on each callback, in order; exceptions propagate (a callback is part of the run)."""
    for callback in callbacks:
        getattr(callback, moment)(info, control)
