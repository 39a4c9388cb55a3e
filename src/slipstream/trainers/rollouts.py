"""The rollouts that run: started, finished and taken back as the schedule says.

Owns: one task per group, prompts for the groups that the schedule admits, what an earlier start of the run had done of
them.  Refuses: deciding anything (the schedule does), how a group is made (the generator does).

``pump`` does what the schedule asks for now.  It runs by itself whenever a rollout ends, so work goes on while the loop
updates or publishes; the loop calls it where a step begins.  An exception of a rollout, or of the schedule when it is
told of one, is kept and raised by the next ``changed``.

A group's id is ``UID@PASS``.  A prompt that is sampled anew (its group was evicted) gets ``UID@PASS~N``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config.settings import RunSettings
from slipstream.data.prompts import PromptRow
from slipstream.data.sampler import Sampler
from slipstream.errors import DeadlineError
from slipstream.rollout.progress import GroupProgress
from slipstream.rollout.types import Generator, GroupTask
from slipstream.schedule import Schedule


@dataclass(frozen=True)
class Ticket:
    """Which prompt a group answers; ``ended`` once its rollout came back or was taken back."""

    uid: str
    pass_index: int
    tries: int = 0
    ended: bool = False

    @property
    def group_id(self) -> str:
        """The group's name."""
        return f"{self.uid}@{self.pass_index}" + (f"~{self.tries}" if self.tries else "")


@dataclass
class Flight:
    """A rollout that runs."""

    task: GroupTask
    started: float
    handle: asyncio.Task[None] = field(repr=False)
    why: str = ""
    """Why it is being taken back."""


class Rollouts:
    """See the module's docstring.

    Args:
        recovered: what an earlier start completed, by group id; used when the group is started (again).
        on_start: told of each task that starts.
    """

    def __init__(
        self,
        settings: RunSettings,
        schedule: Schedule,
        sampler: Sampler[PromptRow],
        generator: Generator,
        *,
        recovered: Mapping[str, GroupProgress] | None = None,
        on_start: Callable[[GroupTask], None] | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = schedule
        self.sampler = sampler
        self.generator = generator
        self.recovered = dict(recovered or {})
        self._on_start = on_start
        self._flights: dict[str, Flight] = {}
        self._tickets: dict[str, Ticket] = {}
        self._event = asyncio.Event()
        self._error: BaseException | None = None
        self._stopped = False

    # -- what the schedule asks for ----------------------------------------------------------------------------

    def pump(self) -> None:
        """Take back what has to be, start what may start."""
        if self._stopped:
            return
        for group_id, why in self.schedule.aborts():
            self._take_back(self._flights[group_id], why)
        for _ in range(self.schedule.admit()):
            self._start(self.schedule.next_requeued())

    def _start(self, again: str | None) -> None:
        ticket, row = self._ticket(again)
        task = self._task(ticket, row)
        handle = asyncio.get_running_loop().create_task(self._fly(task), name=task.group_id)
        self._flights[task.group_id] = Flight(task, time.monotonic(), handle)
        handle.add_done_callback(lambda _: self._ended(task.group_id))
        self.schedule.submitted(task.group_id, again)
        if self._on_start is not None:
            self._on_start(task)

    def _ticket(self, again: str | None) -> tuple[Ticket, PromptRow]:
        """The next prompt: one that must come first, or a new one."""
        if again is None:
            row, pass_index = self.sampler.next()
            ticket = Ticket(row.uid, pass_index)
        else:
            ticket = self._tickets.pop(again)
            row = self.sampler.row(ticket.uid)
            if ticket.ended:  # it was evicted; otherwise it was running when the run ended, and goes on
                ticket = replace(ticket, tries=ticket.tries + 1, ended=False)
        self._tickets[ticket.group_id] = ticket
        return ticket, row

    def _task(self, ticket: Ticket, row: PromptRow) -> GroupTask:
        return GroupTask(
            group_id=ticket.group_id,
            prompt_uid=row.uid,
            messages=tuple(row.messages),
            env_class=row.env_class,
            extras=row.extras,
            n=self.settings.rollout.samples_per_prompt,
            scheduled_step=self.schedule.current + 1,
            pass_index=ticket.pass_index,
            progress=self.recovered.pop(ticket.group_id, {}),
            first_attempt=ticket.tries * self.settings.rollout.failures.attempts,
        )

    @staticmethod
    def _take_back(flight: Flight, why: str) -> None:
        if not flight.why:
            flight.why = why
            flight.handle.cancel(why)

    async def _fly(self, task: GroupTask) -> None:
        group = await self.generator.generate_group(task)
        # No await from here to its end, and no callback, which would run later: whoever counts tokens or writes a
        # checkpoint finds the group with the generator or with the schedule, never with neither.
        self._settle(task.group_id, lambda flight: self.schedule.finished(group))

    def _ended(self, group_id: str) -> None:
        flight = self._flights.get(group_id)
        if flight is None:  # it has been told as finished
            return
        if flight.handle.cancelled():
            self._settle(group_id, lambda flight: self.schedule.cancelled(group_id, flight.why or "cancelled"))
        elif (error := flight.handle.exception()) is not None:
            self._error = self._error or error
            self._settle(group_id, lambda _: self.schedule.failed(group_id, f"{type(error).__name__}: {error}"))

    def _settle(self, group_id: str, tell: Callable[[Flight], object]) -> None:
        """Let go of a group that has ended, tell the schedule, and start what may start now."""
        flight = self._flights.pop(group_id)
        self._tickets[group_id] = replace(self._tickets[group_id], ended=True)
        try:
            tell(flight)
            self.pump()
        except Exception as error:  # noqa: BLE001 - a callback has no caller: ``changed`` raises it
            self._error = self._error or error
        self._event.set()

    # -- waiting -----------------------------------------------------------------------------------------------

    async def changed(self, deadline: float, what: str) -> None:
        """Wait until a rollout has ended since the last call; ``deadline`` is a ``time.monotonic`` value.

        Raises ``DeadlineError`` naming the oldest rollout, or what a rollout raised.
        """
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._event.wait()
        except TimeoutError as error:
            raise DeadlineError(self._stuck(what)) from error
        self._event.clear()
        self.check()

    def check(self) -> None:
        """Raise what a rollout raised."""
        if self._error is not None:
            raise self._error

    async def drain(self, deadline: float, what: str) -> None:
        """Wait until none runs."""
        while self._flights:
            await self.changed(deadline, what)

    async def stop(self, why: str) -> None:
        """Take back all rollouts and wait for their ends; none starts afterwards."""
        self._stopped = True
        flights = list(self._flights.values())
        for flight in flights:
            self._take_back(flight, why)
        await asyncio.gather(*(flight.handle for flight in flights), return_exceptions=True)

    def _stuck(self, what: str) -> str:
        limit = self.settings.schedule.step_deadline_seconds
        oldest = min(self._flights.values(), key=lambda f: f.started, default=None)
        who = (
            "no rollout is running and the schedule admits none"
            if oldest is None
            else f"{len(self._flights)} groups still run, the oldest is {oldest.task.group_id} "
            f"({oldest.task.env_class}), started {time.monotonic() - oldest.started:.0f} s ago"
        )
        return (
            f"{what} within {limit:.0f} s: {who}. Raise schedule.step_deadline_seconds, "
            "or lower rollout.env_step_seconds so that a slow episode fails first"
        )

    # -- figures and state -------------------------------------------------------------------------------------

    def why(self, group_id: str) -> str:
        """Why a running group is being taken back; empty when it is not."""
        flight = self._flights.get(group_id)
        return flight.why if flight is not None else ""

    @property
    def unclaimed_tokens(self) -> int:
        """Tokens of an earlier start whose groups have not been started again yet."""
        return sum(member.tokens for group in self.recovered.values() for member in group.values())

    def forget(self, group_ids: list[str]) -> None:
        """These groups are recorded and will not be asked for again."""
        for group_id in group_ids:
            self._tickets.pop(group_id, None)

    def state_dict(self) -> dict[str, Any]:
        """JSON: the prompts of groups that may be started again."""
        return {
            group_id: [ticket.uid, ticket.pass_index, ticket.tries, ticket.ended]
            for group_id, ticket in self._tickets.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._tickets = {
            group_id: Ticket(str(uid), int(pass_index), int(tries), bool(ended))
            for group_id, (uid, pass_index, tries, ended) in state.items()
        }
