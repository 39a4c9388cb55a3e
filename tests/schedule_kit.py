"""Groups, and a driver that puts a schedule through arbitrary event orders without a clock or an event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import BudgetExceededError, DataError
from slipstream.schedule import Schedule
from slipstream.trajectory import Completed, Failed, Group, Reward, Row, SamplingSpec, Span, Trajectory, VersionRun

GOOD, FLAT, UNSCORED, PART, RAISES, HANGS = "good", "flat", "unscored", "part", "raises", "hangs"


def group(name: str, rewards: list[float | None]) -> Group:
    """A group whose members earned these rewards; None is a failed member."""
    members = []
    for i, reward in enumerate(rewards):
        sampled = Span.sampled([5], [-1.0], [VersionRun("policy/0/0", 0, 1)], SamplingSpec(), turn=0)
        members.append(
            Trajectory(
                trajectory_id=f"{name}/{i}",
                group_id=name,
                prompt_uid=name,
                sample=i,
                attempt=0,
                rows=(Row((Span.prompt([1, 2]), sampled)),),
                turns=(),
                rewards=() if reward is None else (Reward(0, reward),),
                outcome=Completed() if reward is not None else Failed("env_raised", "boom", False),
                scheduled_step=1,
            )
        )
    return Group(name, name, len(rewards), tuple(members))


REWARDS: dict[str, list[float | None]] = {
    GOOD: [0.0, 1.0],
    FLAT: [1.0, 1.0],
    UNSCORED: [None, None],
    PART: [None, 1.0, 0.0],
}


def spread(candidate: Group) -> str | None:
    """The judge of these tests: without spread there is nothing to learn."""
    return "zero_variance" if len({m.total_reward for m in candidate.voters}) < 2 else None


def prompt_of(group_id: str) -> str:
    return group_id.split("~")[0]


class Stuck(Exception):
    """Only groups that never return are left: a loop's deadline would fire now, naming them."""


@dataclass
class Driver:
    """Drives a schedule as the loop does; ``choose(n)`` picks one of ``n`` possible next events.

    ``fate(prompt, attempt)`` says how a rollout ends.  ``prompts`` limits the data set.  ``check`` runs after every
    event.
    """

    schedule: Schedule
    fate: Callable[[str, int], str] = lambda prompt, attempt: GOOD
    choose: Callable[[int], int] = lambda n: 0
    prompts: int | None = None
    check: Callable[[Schedule], None] = lambda schedule: None
    trained: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    steps_done: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def event(self) -> None:
        self.schedule.counters.check()
        self.check(self.schedule)

    def pump(self) -> None:
        """Abort what must be aborted, start what may start."""
        for group_id, why in self.schedule.aborts():
            if self.choose(2):  # it comes back in the moment it is taken back
                self.finish(group_id)
            else:
                self.schedule.cancelled(group_id, why)
            self.event()
        for _ in range(self.schedule.admit()):
            again = self.schedule.next_requeued()
            if again is None and self.prompts is not None and len(self.starts) >= self.prompts:
                self.schedule.exhausted()
                break
            prompt = f"p{len(self.starts)}" if again is None else prompt_of(again)
            attempt = self.starts.get(prompt, 0)
            self.starts[prompt] = attempt + 1
            group_id = prompt if attempt == 0 else f"{prompt}~{attempt}"
            self.scheduled[group_id] = self.schedule.current
            self.schedule.submitted(group_id, again)
            self.submitted.append(group_id)
            self.event()

    def _fate(self, group_id: str) -> str:
        return self.fate(prompt_of(group_id), int(group_id.partition("~")[2] or 0))

    def finish(self, group_id: str) -> None:
        fate = self._fate(group_id)
        if fate == RAISES:
            self.schedule.failed(group_id, "rollout_raised")
        else:
            self.schedule.finished(group(group_id, REWARDS.get(fate, REWARDS[GOOD])))

    def returnable(self) -> list[str]:
        return [g for g in self.schedule.running() if self._fate(g) != HANGS]

    def something_returns(self) -> bool:
        able = self.returnable()
        if able:
            self.finish(able[self.choose(len(able))])
            self.event()
        return bool(able)

    def step(self) -> None:
        schedule = self.schedule
        step = schedule.current
        schedule.begin_step(step)
        self.event()
        self.pump()
        while (selection := schedule.select()) is None:
            assert schedule.running() or schedule.admit(), "deadlock: it waits, nothing runs, nothing may start"
            if not self.something_returns() and not schedule.admit():
                raise Stuck(schedule.running())
            self.pump()
        assert schedule.select() is selection, "selecting twice must not change anything"
        self.event()
        self.pump()
        for _ in range(self.choose(4)):  # rollouts come back while the update runs
            if self.something_returns():
                self.pump()
        if schedule.drains_before_publish:
            while schedule.running():
                if not self.something_returns():
                    raise Stuck(schedule.running())
                self.pump()
        for trained in selection.groups:
            self.trained.append(trained.group_id)
            lag = step - self.scheduled[trained.group_id]
            assert selection.lags[trained.group_id] == lag
            self.lags.append(lag)
        self.left_out += [(g.group_id, why) for g, why in selection.left_out]
        schedule.end_step(step)
        self.event()
        self.steps_done += 1

    def run(self, steps: int) -> str:
        """``done`` or how it ended: ``stuck``, ``data`` or ``budget``."""
        try:
            for _ in range(steps):
                self.step()
        except Stuck:
            return "stuck"
        except DataError as error:
            self.error = str(error)
            return "data"
        except BudgetExceededError as error:
            self.error = str(error)
            return "budget"
        return "done"

    def resume_into(self, fresh: Schedule) -> None:
        """Save, throw everything away that a checkpoint does not hold, and go on with another schedule object."""
        state: dict[str, Any] = self.schedule.state_dict()
        fresh.load_state_dict(state, list(self.schedule.buffered()))
        assert not fresh.running()
        self.schedule = fresh
        self.event()
