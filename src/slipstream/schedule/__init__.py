"""Schedules: one object owns admission, selection, eviction and abort."""

from __future__ import annotations

import time

from slipstream.config.algorithm import DynamicSamplingSettings
from slipstream.config.settings import ScheduleSettings
from slipstream.schedule.batches import BatchSchedule
from slipstream.schedule.counters import Counters
from slipstream.schedule.protocol import Clock, Judge, Schedule, Selection
from slipstream.schedule.queues import BoundedSchedule, FullyAsyncSchedule, QueueOptions, WindowedSchedule

__all__ = [
    "BatchSchedule",
    "BoundedSchedule",
    "Clock",
    "Counters",
    "FullyAsyncSchedule",
    "Judge",
    "Schedule",
    "Selection",
    "WindowedSchedule",
    "build_schedule",
]


def build_schedule(
    settings: ScheduleSettings,
    judge: Judge | None = None,
    *,
    dynamic: DynamicSamplingSettings | None = None,
    clock: Clock = time.monotonic,
) -> Schedule:
    """The schedule that the settings name, for a run of ``settings.steps`` steps.

    ``dynamic`` says when a step draws more groups than it was given at first (``algorithm.dynamic_sampling``).
    """
    prompts, steps = settings.prompts_per_step, settings.steps
    dynamic = dynamic or DynamicSamplingSettings()
    if settings.kind in ("sync", "one_step_off"):
        share = {"off": 0, "filter": prompts, "replace": int(dynamic.min_good_fraction * prompts) + 1}
        return BatchSchedule(
            prompts,
            settings.generate_prompts_per_step,
            judge,
            ahead=int(settings.kind == "one_step_off"),
            enough=share[dynamic.kind],
            max_rounds=dynamic.max_rounds,
            steps=steps,
            clock=clock,
        )
    redraws = dynamic.kind == "filter"  # its budget trains a short batch, where the other one ends the run
    options = QueueOptions(
        max_running=settings.max_running_groups,
        full_batch=settings.full_batch or redraws,
        max_rounds=dynamic.max_rounds if redraws else None,
        max_batches=None if redraws else settings.max_batches_per_step,
        steps=steps,
        clock=clock,
    )
    staleness = settings.max_staleness_steps
    if settings.kind == "bounded":
        return BoundedSchedule(prompts, judge, max_staleness=staleness, on_stale=settings.on_stale, **options)
    if settings.kind == "windowed":
        overtake = prompts if settings.overtake is None else settings.overtake
        return WindowedSchedule(prompts, judge, max_staleness=staleness, overtake=overtake, **options)
    return FullyAsyncSchedule(prompts, judge, max_staleness=staleness, **options)
