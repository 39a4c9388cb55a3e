"""Every schedule under arbitrary event orders: books, bounds, no deadlock, every prompt at most once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from schedule_kit import FLAT, GOOD, HANGS, PART, RAISES, UNSCORED, Driver, prompt_of, spread
from slipstream.schedule import BatchSchedule, BoundedSchedule, FullyAsyncSchedule, WindowedSchedule
from slipstream.schedule.book import BookedSchedule

KINDS = ("sync", "one_step_off", "fully_async", "wait", "drop", "requeue", "windowed")
DROPS_NOTHING = ("sync", "one_step_off", "fully_async", "wait", "windowed")
quick = settings(
    max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate, Phase.target],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    kind: str
    batch: int
    staleness: int
    overtake: int
    full: bool
    running: int | None
    rounds: int | None = None

    def build(self, steps: int | None = None) -> BookedSchedule:
        if self.kind in ("sync", "one_step_off"):
            return BatchSchedule(self.batch, judge=spread, ahead=int(self.kind == "one_step_off"), steps=steps)
        options = {"max_running": self.running, "full_batch": self.full, "steps": steps}
        options |= {"max_batches": 5} if self.rounds is None else {"max_batches": None, "max_rounds": self.rounds}
        if self.kind == "fully_async":
            return FullyAsyncSchedule(self.batch, spread, max_staleness=self.staleness, **options)
        if self.kind == "windowed":
            return WindowedSchedule(self.batch, spread, max_staleness=self.staleness, overtake=self.overtake, **options)
        return BoundedSchedule(self.batch, spread, max_staleness=self.staleness, on_stale=self.kind, **options)

    @property
    def ahead(self) -> int:
        return {"sync": 0, "one_step_off": 1}.get(self.kind, self.staleness)

    @property
    def lag_bound(self) -> float:
        """What the documentation promises."""
        if self.kind == "fully_async":
            return math.inf if self.staleness else 0
        return self.ahead + (math.ceil(self.overtake / self.batch) if self.kind == "windowed" else 0)

    def check(self, schedule: BookedSchedule) -> None:
        """What must hold at every event."""
        counters, step = schedule.counters, schedule.current
        assert counters.accepted + counters.running <= (self.ahead + step + 1) * self.batch
        assert schedule.outstanding <= (self.ahead + 1) * self.batch
        if self.running is not None and self.kind not in ("sync", "one_step_off"):
            assert counters.running <= self.running
        assert len(schedule.running()) == counters.running


shapes = st.builds(
    Shape,
    st.sampled_from(KINDS),
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    overtake=st.integers(0, 5),
    full=st.booleans(),
    running=st.one_of(st.none(), st.integers(1, 6)),
)


def chooser(data: st.DataObject) -> Callable[[int], int]:
    return lambda n: data.draw(st.integers(0, n - 1))


def run(
    shape: Shape, data: st.DataObject, fates: list[str], steps: int, prompts: int | None = None
) -> tuple[Driver, str]:
    memory: dict[tuple[str, int], str] = {}

    def fate(prompt: str, attempt: int) -> str:
        return memory.setdefault((prompt, attempt), data.draw(st.sampled_from(fates)))

    driver = Driver(shape.build(steps), fate, chooser(data), prompts, shape.check)
    return driver, driver.run(steps)


@quick
@given(shapes, st.data())
def test_books_bounds_and_progress_with_healthy_rollouts(shape: Shape, data: st.DataObject) -> None:
    driver, end = run(shape, data, [GOOD, PART], steps=6)
    assert end == "done"
    assert max(driver.lags) <= shape.lag_bound
    assert Counter(map(prompt_of, driver.trained)).most_common(1)[0][1] == 1, "a prompt was trained on twice"
    assert len(driver.trained) == 6 * shape.batch
    if shape.kind in DROPS_NOTHING:
        assert set(driver.trained) == set(driver.submitted), "after the last step nothing is left behind"
        assert driver.schedule.counters.running == 0


@quick
@given(shapes, st.data())
def test_no_deadlock_whatever_rollouts_do(shape: Shape, data: st.DataObject) -> None:
    driver, end = run(shape, data, [GOOD, FLAT, UNSCORED, PART, RAISES, HANGS], steps=5)
    assert end in ("done", "stuck", "budget")
    if end == "stuck":
        assert driver.schedule.running(), "a loop's deadline can name who does not return"
    assert all(lag <= shape.lag_bound for lag in driver.lags)
    counts = Counter(map(prompt_of, driver.trained))
    assert not counts or max(counts.values()) == 1


@quick
@given(shapes, st.integers(0, 20), st.data())
def test_running_out_of_prompts_trains_what_there_is_and_then_says_so(
    shape: Shape, prompts: int, data: st.DataObject
) -> None:
    driver, end = run(shape, data, [GOOD], steps=30, prompts=prompts)
    assert end == "data"
    assert "no prompt is left" in driver.error
    if shape.kind in DROPS_NOTHING:
        assert sorted(driver.trained) == sorted(driver.starts)
        assert len(driver.trained) == prompts
        assert driver.steps_done == math.ceil(prompts / shape.batch)


@quick
@given(shapes, st.sampled_from([FLAT, UNSCORED, RAISES]), st.data())
def test_when_every_group_is_rejected_the_run_ends_with_the_reason_or_takes_empty_steps(
    shape: Shape, fate: str, data: st.DataObject
) -> None:
    driver, end = run(shape, data, [fate], steps=4)
    assert driver.trained == []
    whole_batches = shape.kind in ("sync", "one_step_off")
    replaced = not whole_batches and (shape.full or fate != FLAT)
    assert end == ("budget" if replaced else "done")
    if replaced:
        assert {FLAT: "zero_variance", UNSCORED: "no_voters", RAISES: "rollout_raised"}[fate] in driver.error
    if end == "done" and fate != RAISES:
        reasons = {why for _, why in driver.left_out}
        assert reasons - ({"stale"} if shape.kind in ("drop", "requeue") else set()) == {
            "zero_variance" if fate == FLAT else "no_voters"
        }


@quick
@given(shapes, st.integers(1, 5), st.data())
def test_a_resume_at_any_border_trains_every_prompt_once(shape: Shape, border: int, data: st.DataObject) -> None:
    steps = 6
    driver = Driver(shape.build(steps), choose=chooser(data), check=shape.check)
    assert driver.run(border) == "done"
    driver.resume_into(shape.build(steps))
    assert driver.run(steps - border) == "done"
    counts = Counter(map(prompt_of, driver.trained))
    assert max(counts.values()) == 1
    assert len(driver.trained) == steps * shape.batch
    if shape.kind in DROPS_NOTHING:
        assert set(counts) == set(driver.starts), "each prompt that was ever drawn is trained on exactly once"
    assert max(driver.lags) <= shape.lag_bound


@quick
@given(shapes, st.data())
def test_full_batches_are_full_whatever_is_refused(shape: Shape, data: st.DataObject) -> None:
    shape = Shape(**{**vars(shape), "full": True})
    driver, end = run(shape, data, [GOOD, GOOD, FLAT], steps=4)
    if shape.kind not in ("sync", "one_step_off") and end == "done":
        assert len(driver.trained) == 4 * shape.batch


@quick
@given(shapes, st.data())
def test_a_budget_of_refusals_never_ends_a_run(shape: Shape, data: st.DataObject) -> None:
    """Whatever is refused or fails: each step ends, in its bound, after a limited number of groups."""
    shape = Shape(**{**vars(shape), "full": True, "rounds": data.draw(st.integers(1, 3))})
    driver, end = run(shape, data, [GOOD, FLAT, FLAT, UNSCORED, RAISES], steps=5)
    assert end == "done", driver.error
    assert max(driver.lags, default=0) <= shape.lag_bound
    if shape.kind not in ("sync", "one_step_off", "requeue"):  # what is taken back is started anew beside these
        assert len(driver.submitted) <= (shape.staleness + 1 + 5 * (shape.rounds + shape.staleness + 2)) * shape.batch


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_a_windowed_group_is_never_overtaken_more_often_than_allowed(staleness: int) -> None:
    schedule = WindowedSchedule(2, max_staleness=staleness, overtake=3, steps=8)
    driver = Driver(schedule, choose=lambda n: n - 1)  # the newest always comes back first
    assert driver.run(8) == "done"
    for index, name in enumerate(driver.trained):
        later = sum(driver.submitted.index(other) > driver.submitted.index(name) for other in driver.trained[:index])
        assert later <= 3 + 1, "three before its own batch, and one that shares it"
