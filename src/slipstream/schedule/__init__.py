"""Schedules: one object owns admission, selection, eviction and abort."""

from slipstream.config.settings import ScheduleSettings
from slipstream.errors import SettingsError
from slipstream.schedule.counters import Counters
from slipstream.schedule.protocol import Judge, Schedule, Selection
from slipstream.schedule.sync import SyncSchedule

__all__ = ["Counters", "Judge", "Schedule", "Selection", "SyncSchedule", "build_schedule"]


def build_schedule(settings: ScheduleSettings, judge: Judge | None = None) -> Schedule:
    """The schedule that the settings name."""
    if settings.kind != "sync":
        raise SettingsError(f"schedule.kind={settings.kind!r} is not a schedule of this release; use sync")
    return SyncSchedule(settings.prompts_per_step, settings.generate_prompts_per_step, judge)
