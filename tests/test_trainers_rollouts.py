"""What a run gives its rollouts, and how groups change hands: from the generator to the schedule at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedule_kit import group
from slipstream.config import load_settings
from slipstream.errors import InferenceError
from slipstream.rollout.types import GroupTask
from slipstream.schedule import FullyAsyncSchedule
from slipstream.trainers import parts, serving
from slipstream.trainers.loop import _sync_metrics
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


# ---- what a run gives its engines and its generator


@pytest.mark.parametrize(
    ("given", "returns"),
    [
        ([], set()),
        (["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20"], {"kept_sets"}),
        (["training.routing_replay=true"], {"routed_experts"}),
    ],
)
async def test_started_engines_are_told_what_the_update_replays(
    given: list[str], returns: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []

    def build(*args: Any, **options: Any) -> Any:
        asked.append(set(options["returns"]))
        raise InferenceError("seen")

    monkeypatch.setattr(serving, "build_pool", build)
    overrides = ["data.train=builtin:text2sql", f"run_dir={tmp_path}", "inference.replicas=2", *given]
    settings = load_settings([], overrides).settings
    with pytest.raises(InferenceError, match="seen"):
        async with serving.open_serving(settings, None, 0, print):
            pass
    assert asked == [returns]


def test_later_turns_take_their_salt_from_what_was_published_last() -> None:
    given: Any = SimpleNamespace(
        settings=SETTINGS, engine=None, renderer=None, tell=None, publisher=SimpleNamespace(last_good="policy/0/3")
    )
    generator = parts._default_generator(given, None, False)
    assert generator._published is not None
    assert generator._published() == "policy/0/3"
    given.publisher.last_good = "policy/0/4"
    assert generator._published() == "policy/0/4"


def test_a_stop_rule_can_watch_publishes() -> None:
    receipts: Any = [SimpleNamespace(published=True, attempts=1), SimpleNamespace(published=False, attempts=3)]
    assert _sync_metrics(receipts) == {"sync/failed_replicas": 1.0, "sync/attempts_max": 3.0}
    assert _sync_metrics([]) == {}
