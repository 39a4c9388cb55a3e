"""Contradictions of the section ``schedule``: what a kind of schedule does not read, and bounds that cannot work.

Owns: which schedule reads which setting.  Refuses: running a schedule.

>>> from slipstream.config.settings import RunSettings
>>> settings = RunSettings.model_validate({"schedule": {"kind": "sync", "full_batch": True}})
>>> [problem.keys for problem in check_schedule(settings, None)]
[('schedule.full_batch', 'schedule.kind')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slipstream.config.problems import Problem
from slipstream.config.settings import RunSettings, ScheduleSettings

BATCHES = ("sync", "one_step_off")
QUEUES = ("fully_async", "bounded", "windowed")
READ_BY: Mapping[str, tuple[str, ...]] = {
    "generate_prompts_per_step": BATCHES,
    "max_staleness_steps": QUEUES,
    "max_running_groups": QUEUES,
    "full_batch": QUEUES,
    "max_batches_per_step": QUEUES,
    "on_stale": ("bounded",),
    "overtake": ("windowed",),
}
"""The kinds of schedule that read a setting; the others are read by all."""


def outstanding_groups(schedule: ScheduleSettings) -> int:
    """Groups that may be running, ready or in training at once: ``B (S + 1)``; with one step off ``B + draw``."""
    batch, draw = schedule.prompts_per_step, schedule.generate_prompts_per_step or schedule.prompts_per_step
    if schedule.kind == "sync":
        return draw
    return 2 * draw if schedule.kind == "one_step_off" else batch * (schedule.max_staleness_steps + 1)


def samples_ahead(schedule: ScheduleSettings) -> bool:
    """Whether a step may train on tokens of older weights than it updates."""
    return schedule.kind == "one_step_off" or (schedule.kind in QUEUES and schedule.max_staleness_steps > 0)


def check_schedule(settings: RunSettings, n_train_rows: int | None) -> Iterator[Problem]:
    """Every contradiction of the schedule's settings; ``n_train_rows`` None is unknown."""
    schedule = settings.schedule
    for name, kinds in READ_BY.items():
        if schedule.kind not in kinds and getattr(schedule, name) != ScheduleSettings.model_fields[name].default:
            yield Problem(
                (f"schedule.{name}", "schedule.kind"),
                f"the schedule {schedule.kind} does not read it",
                f"leave it out, or set schedule.kind={' or '.join(kinds)}",
            )
    if schedule.full_batch and not settings.algorithm.drop_zero_variance:
        yield Problem(
            ("schedule.full_batch", "algorithm.drop_zero_variance"),
            "refused groups would be replaced, but no group is ever refused",
            "set algorithm.drop_zero_variance=true, or leave full_batch out",
        )
    if schedule.kind in QUEUES:
        yield from _dynamic_sampling(settings)
    running, most = schedule.max_running_groups, outstanding_groups(schedule)
    keys = ("schedule.max_running_groups", "schedule.max_staleness_steps")
    if schedule.kind in QUEUES and running is not None and running > most:
        yield Problem(keys, f"at most {most} groups are outstanding, so {running} never run", "lower it", "warning")
    if schedule.kind in QUEUES and running is not None and running < schedule.prompts_per_step:
        yield Problem(
            (keys[0], "schedule.prompts_per_step"),
            f"only {running} groups run at once, so the {schedule.prompts_per_step} of a step never run together",
            "raise it",
            "warning",
        )
    if schedule.kind != "sync" and n_train_rows and n_train_rows < most:
        yield Problem(
            ("data.train", "schedule.prompts_per_step"),
            f"up to {most} groups are outstanding, but there are {n_train_rows} rows, so one prompt is sampled "
            "in two passes at once",
            "give more rows, or lower schedule.max_staleness_steps",
            "warning",
        )


def _dynamic_sampling(settings: RunSettings) -> Iterator[Problem]:
    """A queue replaces refused groups one by one (``full_batch``); it knows no copies, and one budget."""
    dynamic, kind = settings.algorithm.dynamic_sampling, settings.schedule.kind
    limit = "max_batches_per_step"
    keys = ("algorithm.dynamic_sampling.kind", "schedule.kind")
    if dynamic.kind == "replace":
        yield Problem(
            keys,
            f"the schedule {kind} draws a new group for each that is refused, so none has to stand in for another",
            "use algorithm.dynamic_sampling.kind=filter",
        )
    elif dynamic.kind == "filter" and getattr(settings.schedule, limit) != ScheduleSettings.model_fields[limit].default:
        yield Problem(
            (f"schedule.{limit}", "algorithm.dynamic_sampling.kind"),
            f"with kind=filter a step trains what it has when max_rounds batches were refused, so {limit} is not read",
            "set algorithm.dynamic_sampling.max_rounds instead",
        )
