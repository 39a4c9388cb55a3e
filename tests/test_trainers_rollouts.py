"""Groups change hands in one instant: they are with the generator or with the schedule."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from schedule_kit import group
from slipstream.config import load_settings
from slipstream.rollout.types import GroupTask
from slipstream.schedule import FullyAsyncSchedule
from slipstream.trainers.rollouts import Rollouts
from slipstream.trajectory import Group

SETTINGS = load_settings([], ["data.train=builtin:text2sql", "rollout.samples_per_prompt=2"]).settings


class Held:
    """A generator that holds a group until it is let go, and knows what it holds."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.held: set[str] = set()
        self.fault: BaseException | None = None

    async def generate_group(self, task: GroupTask) -> Group:
        self.held.add(task.group_id)
        try:
            await self.go.wait()
            if self.fault is not None:
                raise self.fault
        finally:
            self.held.remove(task.group_id)
        return group(task.group_id, [0.0, 1.0])


def flying(generator: Any) -> tuple[Rollouts, FullyAsyncSchedule]:
    schedule = FullyAsyncSchedule(1, max_staleness=1)
    schedule.begin_step(0)
    rows = (
        (SimpleNamespace(uid=f"p{i}", messages=({"role": "user", "content": "?"},), env_class="e", extras={}), 0)
        for i in itertools.count()
    )
    sampler: Any = SimpleNamespace(next=lambda: next(rows))
    return Rollouts(SETTINGS, schedule, sampler, generator), schedule


async def test_a_group_that_the_generator_lets_go_of_is_with_the_schedule_at_once() -> None:
    generator = Held()
    rollouts, schedule = flying(generator)
    rollouts.pump()
    await asyncio.sleep(0)
    assert generator.held == {"p0@0", "p1@0"}
    seen: list[tuple[set[str], set[str]]] = []

    async def bystander() -> None:
        """Runs right behind the groups in the same turn of the event loop, before any callback of theirs."""
        await generator.go.wait()
        seen.append((set(generator.held), {g.group_id for g in schedule.buffered()}))

    watching = asyncio.create_task(bystander())
    await asyncio.sleep(0)
    generator.go.set()
    await watching
    ((held, buffered),) = seen
    assert held | buffered == {"p0@0", "p1@0"}
    await rollouts.stop("done")


async def test_what_a_group_raises_is_raised_by_the_next_wait_and_counted_once() -> None:
    generator = Held()
    generator.fault = RuntimeError("no more")
    rollouts, schedule = flying(generator)
    rollouts.pump()
    await asyncio.sleep(0)
    generator.go.set()
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="no more"):
        await rollouts.changed(time.monotonic() + 60, "a step")
    assert schedule.counters.failed == 2
    await rollouts.stop("done")


async def test_a_group_that_is_taken_back_is_cancelled_in_the_books() -> None:
    generator = Held()
    rollouts, schedule = flying(generator)
    rollouts.pump()
    await asyncio.sleep(0)
    await rollouts.stop("the run ends")
    await asyncio.sleep(0)
    assert generator.held == set()
    assert (schedule.counters.cancelled, schedule.counters.running) == (2, 0)
