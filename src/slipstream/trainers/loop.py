"""The one loop.

Owns: the order of a step: admit -> roll out -> select -> update -> publish -> record -> save -> evaluate.
Refuses: how any of these is done.  Synchronous, one-step-off and asynchronous training are this loop under different
schedules: rollouts are tasks that the schedule admits, and the loop never asks which schedule it drives.  They run on
while the loop updates and publishes, when the schedule has given them leave to.

Lifecycle: ``Loop(parts, ...)`` -> ``await run(start)`` -> the state of the last step.  Steps count from 1 in records.

Ctrl-C and ``Control.stop`` end the loop at a step border, after a checkpoint.  Exceptions of a rollout task, of the
backend or of the publisher propagate from ``run`` after every other task has been cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.algorithms.filters import FilterResult, apply_filters, dispositions, stand_ins
from slipstream.config.settings import RunSettings
from slipstream.ledger import Ledger, StepRecord
from slipstream.rollout.types import AttemptCancelled, AttemptSuperseded, GroupTask, RolloutEvent
from slipstream.schedule import Schedule, Selection
from slipstream.trainers.account import TokenBooks
from slipstream.trainers.callbacks import Callback, Control, StepInfo, notify
from slipstream.trainers.rollouts import Rollouts
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

    publish: Callable[[], Awaitable[Published]]
    """Export, publish, verify."""
    save: Callable[[int], Awaitable[None]]
    """Write a checkpoint after this step."""
    evaluate: Callable[[int], Awaitable[Any]]
    """Evaluate after this step; the scores as metrics, empty when it was interrupted."""
    progress: Callable[[int, Mapping[str, float]], None]
    """Show one step's metrics."""
    sampled_tokens: Callable[[], Awaitable[int | None]]
    """Tokens the engine says it has sampled so far; the other side of the token account."""


class Watch(Protocol):
    """Something that is told of the loop's decisions (the schedule's recorder)."""

    def selected(self, selection: Selection) -> None: ...


class Loop:
    """Drives ``schedule`` from step ``start`` to ``settings.schedule.steps``."""

    def __init__(
        self,
        settings: RunSettings,
        schedule: Schedule,
        rollouts: Rollouts,
        update: PolicyUpdate,
        ledger: Ledger,
        hooks: Hooks,
        *,
        version: str,
        books: TokenBooks,
        callbacks: Sequence[Callback] = (),
        control: Control | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = schedule
        self.rollouts = rollouts
        self.update = update
        self.ledger = ledger
        self.hooks = hooks
        self.version = version
        self.books = books
        self.callbacks = callbacks
        self.control = control or Control()
        self.watch = watch
        self._returned: list[tuple[GroupTask, Trajectory, str]] = []

    # -- rollout events ----------------------------------------------------------------------------------------

    def on_rollout_event(self, event: RolloutEvent) -> None:
        """Give this to the generator: attempts that ended without a place in a group are part of the account."""
        if isinstance(event, AttemptSuperseded | AttemptCancelled) and not event.task.eval:
            stale = self.rollouts.why(event.task.group_id) == "stale"
            self._returned.append((event.task, event.trajectory, "stale" if stale else "superseded"))

    # -- the loop ----------------------------------------------------------------------------------------------

    async def run(self, start: int = 0) -> int:
        """Run steps ``start + 1 .. steps``; returns the last finished step."""
        total = self.settings.schedule.steps
        done = start
        try:
            while done < total and not self._ends:
                notify(self.callbacks, "on_step_start", StepInfo("rl", done, total), self.control)
                metrics = await self._step(done)
                done += 1
                self.hooks.progress(done, metrics)
                info = StepInfo("rl", done, total, metrics)
                notify(self.callbacks, "on_step_end", info, self.control)
                await self._border(done, info)
        finally:
            await self.rollouts.stop("the loop ended")
        return done

    @property
    def _ends(self) -> bool:
        """Whether the step before this border is the last of this start, or of the run."""
        return self.control.stop_reason is not None or self.control.finish_reason is not None

    async def _border(self, done: int, info: StepInfo) -> None:
        """Evaluation and checkpoint between two steps, by interval or by request."""
        last = done == info.total_steps or self._ends
        every = self.settings.eval.every_steps
        if not last and (self.control.evaluate_requested or (every and done % every == 0)):
            self.control.evaluate_requested = False
            scores = await self.hooks.evaluate(done)
            if scores:
                after = StepInfo(info.phase, done, info.total_steps, {**info.metrics, **scores})
                notify(self.callbacks, "on_eval_end", after, self.control)
            last = self._ends
        if self.control.rollback_to is not None:
            return
        every = self.settings.checkpoint.every_steps
        if last or self.control.save_requested or (every and done % every == 0):
            self.control.save_requested = False
            await self.hooks.save(done)
            notify(self.callbacks, "on_save", info, self.control)

    async def _step(self, index: int) -> dict[str, float]:
        started, idle_before = time.perf_counter(), self.books.idle_seconds
        self.schedule.begin_step(index)
        selection = await self._collect(index)
        collected = time.perf_counter()
        if self.watch is not None:
            self.watch.selected(selection)
        self.rollouts.pump()  # a schedule may sample ahead from here on
        filtered = apply_filters(selection.groups, self.settings.algorithm, self.settings.rollout)
        if self.settings.algorithm.dynamic_sampling.kind == "replace":
            filtered = stand_ins(filtered, self.settings.schedule.prompts_per_step)
        result = await self.update(filtered, index, self.version)
        updated = time.perf_counter()
        if self.schedule.drains_before_publish:
            await self.rollouts.drain(self._deadline(), f"step {index + 1} was not drained")
        drained = time.perf_counter()
        before = self.version
        published = await self.hooks.publish() if result.applied else Published(before)
        self.version = published.version
        finished = time.perf_counter()
        timings = {
            "generate": collected - started,
            "update": updated - collected,
            "publish": finished - drained,
            "step": finished - started,
        }
        idle = {"trainer": collected - started + drained - updated, "engine": self.books.idle_seconds - idle_before}
        engine_tokens = await self.hooks.sampled_tokens()
        extra = {**_idle_metrics(idle, timings["step"]), **_sync_metrics(published.receipts)}
        record = self._record(index + 1, selection, filtered, result, before, published, timings, extra, engine_tokens)
        metrics = await asyncio.to_thread(self.ledger.record_step, record)
        self.rollouts.check()
        self.schedule.end_step(index)
        self.rollouts.pump()
        return metrics

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.schedule.step_deadline_seconds

    async def _collect(self, index: int) -> Selection:
        """Admit and await rollouts until the schedule selects; the step deadline bounds the whole wait."""
        deadline = self._deadline()
        self.rollouts.check()
        self.rollouts.pump()
        while (selection := self.schedule.select()) is None:
            self.rollouts.pump()  # to look may open another round (dynamic sampling), of which nothing runs yet
            await self.rollouts.changed(deadline, f"step {index + 1} did not collect its groups")
        return selection

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
        extra: Mapping[str, float],
        engine_tokens: int | None,
    ) -> StepRecord:
        """The step's record.  No await from here to its end: the account is of one instant."""
        groups = list(filtered.groups)
        fate = dispositions(groups, filtered.excluded)
        if result.applied == 0:
            # Every optimiser step was refused, or nothing was trainable: no token of this step moved a weight.
            reason = "filtered:" + (result.note or ("refused_step" if result.refused else "nothing_to_train"))
            fate = {tid: reason if kind == "trained" else kind for tid, kind in fate.items()}
        selected = [group.group_id for group in groups]
        for group, reason in selection.left_out:
            groups.append(group)
            kind = "stale" if reason == "stale" else f"filtered:{reason}"
            for member in group.members:
                fate[member.trajectory_id] = kind if member.votes else "failed"
        for task, trajectory, kind in self._returned:
            groups.append(Group(task.group_id, task.prompt_uid, 1, (trajectory,)))
            fate[trajectory.trajectory_id] = kind
        self._returned = []
        held = sum(group.sampled_tokens for group in self.schedule.buffered())
        flow = self.books.close(engine_tokens, held, self.rollouts.unclaimed_tokens, f"step {step}")
        self.rollouts.forget([g.group_id for g in selection.groups])
        self.rollouts.forget([g.group_id for g, reason in selection.left_out if reason != "stale"])
        return StepRecord(
            step=step,
            groups=groups,
            selected=selected,
            dispositions=fate,
            advantages={k: v for k, v in result.advantages.items() if k in fate},
            trainer_logprobs=result.trainer_logprobs,
            metrics={**result.metrics, **self.schedule.metrics(), **extra},
            timings=timings,
            receipts=[receipt.to_json() for receipt in published.receipts],
            weight_version_before=before,
            weight_version_after=published.version,
            flow=flow.flow,
            unheld=flow.unheld,
        )


def _sync_metrics(receipts: Sequence[Receipt]) -> dict[str, float]:
    """How the step's publish went: what a stop rule can watch."""
    if not receipts:
        return {}
    return {
        "sync/failed_replicas": float(sum(not receipt.published for receipt in receipts)),
        "sync/attempts_max": float(max(receipt.attempts for receipt in receipts)),
    }


def _idle_metrics(idle: Mapping[str, float], step_seconds: float) -> dict[str, float]:
    """Seconds and shares of the step in which the trainer waited, and in which nothing was asked of the engine."""
    whole = max(step_seconds, 1e-9)
    seconds = {f"perf/{who}_idle_seconds": value for who, value in idle.items()}
    return seconds | {f"perf/{who}_idle_share": min(value / whole, 1.0) for who, value in idle.items()}
