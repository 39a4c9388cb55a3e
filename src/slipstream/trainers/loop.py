"""The one loop.

Owns: the order of a step: admit -> roll out -> select -> update -> publish -> record -> save -> evaluate.
Refuses: how any of these is done.  Synchronous, one-step-off and asynchronous training are this loop under different
schedules: rollouts are tasks that the schedule admits, and the loop never asks which schedule it drives.

Lifecycle: ``Loop(parts, ...)`` -> ``await run(start)`` -> the state of the last step.  Steps count from 1 in records.

Ctrl-C and ``Control.stop`` end the loop at a step border, after a checkpoint.  Exceptions of a rollout task, of the
backend or of the publisher propagate from ``run`` after every other task has been cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.algorithms.filters import FilterResult, apply_filters, dispositions
from slipstream.config.settings import RunSettings
from slipstream.data.prompts import PromptRow
from slipstream.data.sampler import Sampler
from slipstream.errors import DeadlineError
from slipstream.ledger import Ledger, StepRecord
from slipstream.ledger.conservation import TokenFlow
from slipstream.rollout.types import AttemptSuperseded, Generator, GroupTask, RolloutEvent
from slipstream.schedule import Schedule, Selection
from slipstream.trainers.callbacks import Callback, Control, StepInfo, notify
from slipstream.trainers.update import PolicyUpdate, UpdateResult
from slipstream.trajectory import Group, Trajectory
from slipstream.weights import Receipt


@dataclass
class Published:
    """The live policy version and the receipts of one publish."""

    version: str
    receipts: Sequence[Receipt] = ()


@dataclass
class Hooks:
    """What the loop calls at step borders; the run object supplies them."""

    publish: Callable[[], Any]
    """``async () -> Published``: export, publish, verify."""
    save: Callable[[int], None]
    """Write a checkpoint after this step."""
    evaluate: Callable[[int], Any]
    """``async (step) -> None``."""
    progress: Callable[[int, Mapping[str, float]], None]
    """Show one step's metrics."""
    sampled_tokens: Callable[[], Any]
    """``async () -> int``: tokens the engine says it has sampled so far; the other side of the token account."""


@dataclass
class _InFlight:
    task: GroupTask
    started: float
    handle: asyncio.Task[Group] = field(repr=False)


class Loop:
    """Drives ``schedule`` from step ``start`` to ``settings.schedule.steps``."""

    def __init__(
        self,
        settings: RunSettings,
        schedule: Schedule,
        sampler: Sampler[PromptRow],
        generator: Generator,
        update: PolicyUpdate,
        ledger: Ledger,
        hooks: Hooks,
        *,
        version: str,
        callbacks: Sequence[Callback] = (),
        control: Control | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = schedule
        self.sampler = sampler
        self.generator = generator
        self.update = update
        self.ledger = ledger
        self.hooks = hooks
        self.version = version
        self.callbacks = callbacks
        self.control = control or Control()
        self._running: dict[asyncio.Task[Group], _InFlight] = {}
        self._superseded: list[tuple[GroupTask, Trajectory]] = []
        self._sampled = 0

    # -- rollout events ----------------------------------------------------------------------------------------

    def on_rollout_event(self, event: RolloutEvent) -> None:
        """Give this to the generator: superseded attempts are part of the token account."""
        if isinstance(event, AttemptSuperseded) and not event.task.eval:
            self._superseded.append((event.task, event.trajectory))

    # -- the loop ----------------------------------------------------------------------------------------------

    async def run(self, start: int = 0) -> int:
        """Run steps ``start + 1 .. steps``; returns the last finished step."""
        total = self.settings.schedule.steps
        done = start
        try:
            while done < total and self.control.stop_reason is None:
                notify(self.callbacks, "on_step_start", StepInfo("rl", done, total), self.control)
                metrics = await self._step(done)
                done += 1
                self.hooks.progress(done, metrics)
                info = StepInfo("rl", done, total, metrics)
                notify(self.callbacks, "on_step_end", info, self.control)
                await self._border(done, info)
        finally:
            await self._cancel_running("the loop ended")
        return done

    async def _border(self, done: int, info: StepInfo) -> None:
        """Evaluation and checkpoint between two steps, by interval or by request."""
        last = done == info.total_steps or self.control.stop_reason is not None
        every = self.settings.eval.every_steps
        if not last and (self.control.evaluate_requested or (every and done % every == 0)):
            self.control.evaluate_requested = False
            await self.hooks.evaluate(done)
            notify(self.callbacks, "on_eval_end", info, self.control)
        every = self.settings.checkpoint.every_steps
        if last or self.control.save_requested or (every and done % every == 0):
            self.control.save_requested = False
            self.hooks.save(done)
            notify(self.callbacks, "on_save", info, self.control)

    async def _step(self, index: int) -> dict[str, float]:
        started = time.perf_counter()
        self.schedule.begin_step(index)
        counted = await self.hooks.sampled_tokens()
        selection = await self._collect(index)
        self._sampled = await self.hooks.sampled_tokens() - counted
        collected = time.perf_counter()
        filtered = apply_filters(selection.groups, self.settings.algorithm, self.settings.rollout)
        result = await self.update(filtered, index, self.version)
        updated = time.perf_counter()
        before = self.version
        published = await self.hooks.publish() if result.applied else Published(before)
        self.version = published.version
        finished = time.perf_counter()
        timings = {
            "generate": collected - started,
            "update": updated - collected,
            "publish": finished - updated,
            "step": finished - started,
        }
        metrics = self.ledger.record_step(
            self._record(index + 1, selection, filtered, result, before, published, timings)
        )
        self.schedule.end_step(index)
        return metrics

    # -- collecting --------------------------------------------------------------------------------------------

    async def _collect(self, index: int) -> Selection:
        """Admit and await rollouts until the schedule selects; the step deadline bounds the whole wait."""
        limit = self.settings.schedule.step_deadline_seconds
        deadline = time.perf_counter() + limit
        while (selection := self.schedule.select()) is None:
            for _ in range(self.schedule.admit()):
                self._start(index)
            remaining = deadline - time.perf_counter()
            ready, _ = await asyncio.wait(
                self._running, timeout=max(remaining, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if not ready:
                raise DeadlineError(self._stuck(index, limit))
            for handle in ready:
                self._running.pop(handle)
                self.schedule.finished(handle.result())
        return selection

    def _start(self, index: int) -> None:
        row, pass_index = self.sampler.next()
        task = self._task(row, pass_index, index)
        handle = asyncio.get_running_loop().create_task(self.generator.generate_group(task), name=task.group_id)
        self._running[handle] = _InFlight(task, time.perf_counter(), handle)
        self.schedule.submitted(task.group_id)

    def _task(self, row: PromptRow, pass_index: int, index: int) -> GroupTask:
        return GroupTask(
            group_id=f"{row.uid}@{pass_index}",
            prompt_uid=row.uid,
            messages=tuple(row.messages),
            env_class=row.env_class,
            extras=row.extras,
            n=self.settings.rollout.samples_per_prompt,
            scheduled_step=index + 1,
            pass_index=pass_index,
        )

    def _stuck(self, index: int, limit: float) -> str:
        now = time.perf_counter()
        oldest = min(self._running.values(), key=lambda f: f.started, default=None)
        who = (
            "no rollout is running and the schedule admits none"
            if oldest is None
            else f"{len(self._running)} groups still run, the oldest is {oldest.task.group_id} "
            f"({oldest.task.env_class}), started {now - oldest.started:.0f} s ago"
        )
        return (
            f"step {index + 1} did not collect its groups within {limit:.0f} s: {who}. "
            "Raise schedule.step_deadline_seconds, or lower rollout.env_step_seconds so that a slow episode fails first"
        )

    async def _cancel_running(self, why: str) -> None:
        handles = list(self._running)
        for handle in handles:
            handle.cancel()
        await asyncio.gather(*handles, return_exceptions=True)
        for handle in handles:
            self.schedule.cancelled(self._running.pop(handle).task.group_id, why)

    # -- the record --------------------------------------------------------------------------------------------

    def _record(
        self,
        step: int,
        selection: Selection,
        filtered: FilterResult,
        result: UpdateResult,
        before: str,
        published: Published,
        timings: Mapping[str, float],
    ) -> StepRecord:
        groups = list(filtered.groups)
        fate = dispositions(groups, filtered.excluded)
        if result.applied == 0:
            # Every optimiser step was refused, or nothing was trainable: no token of this step moved a weight.
            reason = "filtered:refused_step" if result.refused else "filtered:nothing_to_train"
            fate = {tid: reason if kind == "trained" else kind for tid, kind in fate.items()}
        for group, reason in selection.left_out:
            groups.append(group)
            for member in group.members:
                fate[member.trajectory_id] = f"filtered:{reason}" if member.votes else "failed"
        for task, trajectory in self._superseded:
            groups.append(Group(task.group_id, task.prompt_uid, 1, (trajectory,)))
            fate[trajectory.trajectory_id] = "superseded"
        self._superseded = []
        held = sum(group.sampled_tokens for group in self.schedule.buffered())
        left_out: dict[str, float] = {}
        for _, reason in selection.left_out:
            left_out[f"schedule/left_out_{reason}"] = left_out.get(f"schedule/left_out_{reason}", 0.0) + 1
        counters = {f"schedule/{k}": float(v) for k, v in self.schedule.counters.state_dict().items()}
        known = set(fate)
        return StepRecord(
            step=step,
            groups=groups,
            dispositions=fate,
            advantages={k: v for k, v in result.advantages.items() if k in known},
            trainer_logprobs=result.trainer_logprobs,
            metrics={**result.metrics, **counters, **left_out, "schedule/short_batch": float(selection.short)},
            timings=timings,
            receipts=[receipt.to_json() for receipt in published.receipts],
            weight_version_before=before,
            weight_version_after=published.version,
            flow=TokenFlow(sampled=self._sampled, buffered=held, in_flight=0),
        )
