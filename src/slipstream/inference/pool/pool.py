"""``ReplicaPool``: engines that are started, watched, restarted and brought up to date.

Owns: the members' lives, the router process, and who is routed to.
Refuses: knowing weights.  A member that came back holds old ones: ``resync`` (given by whoever publishes) loads and
verifies them before the member is routed to again.

Lifecycle: ``await start()`` (all members side by side, then the router) -> use ``engine`` -> ``await close()``, after
which no process or port is left.  Each member has a watcher.  A process that ends is noticed at once; one that hangs
is noticed by its health checks and ended.  What was in flight there comes back to its callers as ``InferenceError``,
which is worth another try; nothing is sampled again behind their back.

    pool = ReplicaPool([Member("engine-0", HttpEngine(...), spec), ...], policy="sticky_least_loaded")
    async with pool:
        result = await pool.engine.generate(request)

A restart is bounded by ``restarts`` per member; a member beyond it is ``failed``.  When every member has failed, all
calls raise ``InferenceError`` with each one's reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import InferenceError
from slipstream.inference.client import HttpEngine
from slipstream.inference.launch.router import RouterProcess
from slipstream.inference.pool.engine import PoolEngine
from slipstream.inference.pool.member import Member, State
from slipstream.inference.pool.news import News, first_of
from slipstream.inference.routing import RoutingPolicy, build_policy

logger = logging.getLogger(__name__)

OnDown = Callable[[Member, str], None]
Resync = Callable[[Member], Awaitable[None]]

_BACKOFF_SECONDS, _LONGEST_BACKOFF = 0.5, 30.0
_SUSPECT_SECONDS = 15.0
_ABORT_SECONDS = 10.0
_DRAINS, _DRAIN_SECONDS = 5, 1.0
"""How often a withdrawn member is told to abort what it has, and the pause between."""
_CLOSE_SECONDS = 60.0
_DEAF_AFTER = 3
"""Changes of workers, or starts, that the router refuses in a row before it is replaced."""


async def _first_cause(member: Member, reason: str) -> str:
    """Why a member could not be brought back: the end of its process, where that is what broke the call."""
    if member.child is None:
        return reason
    await first_of(member.child.exited, seconds=0.2)  # a broken connection may be known before the process's end
    ended = member.child.why_ended if member.child.exited.is_set() else ""
    return reason if ended.split("\n")[0] in reason else f"{ended}\nand so: {reason}"


class ReplicaPool:
    """See the module.

    Args:
        members: names must differ.
        policy: how requests are routed, one of ``inference.routing.POLICIES``.
        router_log: where ``vllm-router`` logs; None routes in the client, by the same policy.
        restarts: per member, and of the router.
        health_seconds: between two checks of a member.
        health_failures: failed checks in a row after which it is down.
        recover_seconds: longest that a request waits for a member to come back when none is routed to.
        request_seconds: longest that one request may take.
        adapter: name of the LoRA adapter that requests run with.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        policy: str = "sticky_least_loaded",
        router_log: Path | None = None,
        restarts: int = 3,
        health_seconds: float = 10.0,
        health_failures: int = 3,
        recover_seconds: float = 600.0,
        request_seconds: float = 600.0,
        adapter: str | None = None,
    ) -> None:
        names = [member.name for member in members]
        if not names or len(set(names)) != len(names):
            raise InferenceError(f"a pool needs members with different names, got {names}")
        self.members = tuple(members)
        self.policy: RoutingPolicy = build_policy(policy)
        self.on_down: OnDown | None = None
        """Told when a member is lost, before anything else is done about it."""
        self.on_change: Callable[[Member], object] | None = None
        """Told of every change of a member's state once the pool runs, for the record."""
        self.on_router: Callable[[str], object] | None = None
        """Told when the router is lost and when it is back, for the record."""
        self.resync: Resync | None = None
        """Brings a member that came back up to date; until it returns the member is not routed to."""
        self.router: RouterProcess | None = None
        self.data: HttpEngine | None = None
        """The line to the router; None when the client routes."""
        if router_log is not None:
            self.router = RouterProcess(policy, router_log, request_seconds=request_seconds)
        self._restarts, self._health_seconds, self._health_failures = restarts, health_seconds, health_failures
        self._recover_seconds, self._request_seconds = recover_seconds, request_seconds
        self._adapter = adapter
        self._tasks: list[asyncio.Task[None]] = []
        self._drains: set[asyncio.Task[None]] = set()
        self._untold: Exception | None = None
        self._news = News()
        self._closing = False
        self._router_fault = ""
        # Routing is brought up to date by one task; a change is in force once ``_routed`` has reached its number.
        self._wanted = self._routed = 0
        self.engine = PoolEngine(self)

    # ---- lifecycle

    async def start(self) -> None:
        """Start every member, then the router; on an error nothing is left running.

        Raises:
            InferenceError: a member or the router did not come up.
        """
        try:
            async with asyncio.TaskGroup() as starting:
                starts = [starting.create_task(self._first_start(m), name=f"start {m.name}") for m in self.members]
                await asyncio.wait(starts)
            if self.router is not None:
                await self._start_router(self.router)
        except BaseExceptionGroup as group:
            await self.close()
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        except BaseException:
            await self.close()
            raise
        if self.router is not None:
            self._tasks.append(asyncio.create_task(self._route(self.router), name="route"))
        self._tasks += [asyncio.create_task(self._watch(m), name=f"watch {m.name}") for m in self.members]

    async def _first_start(self, member: Member) -> None:
        await member.launch()
        member.state = "up"

    async def close(self) -> None:
        """End the router and every process; callers in flight get an ``InferenceError``."""
        self._closing = True
        tasks = [*self._tasks, *self._drains]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self.data is not None:
            await self.data.close()
        ends = [member.end() for member in self.members]
        if self.router is not None:
            ends.append(self.router.stop())
        async with asyncio.timeout(_CLOSE_SECONDS):
            await asyncio.gather(*ends)
        self._news.tell()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- state

    @property
    def routable(self) -> list[Member]:
        """Members that requests go to now."""
        return [member for member in self.members if member.routable]

    def _set(self, member: Member, state: State, reason: str) -> None:
        member.state, member.reason = state, reason
        self._tell(self.on_change, member)
        self._changed()

    def _tell(self, listener: Callable[..., object] | None, *what: object) -> None:
        """Tell a listener; what it fails with waits for ``raise_untold``, since it must not end a watcher."""
        if listener is None:
            return
        try:
            listener(*what)
        except Exception as error:  # noqa: BLE001 - fault boundary: the ledger's disk may be full
            logger.error("the pool's news could not be told: %s: %s", type(error).__name__, error)
            self.remember(error)

    def remember(self, error: Exception) -> None:
        """Keep an error of a listener for ``raise_untold``; the first one stays."""
        self._untold = self._untold or error

    def raise_untold(self) -> None:
        """Raise, once, what a listener has failed with."""
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    def _changed(self) -> None:
        """Routing has to follow the members' states."""
        self._wanted += 1
        if self.router is None:
            self._routed = self._wanted
        self._news.tell()

    def _why_none(self) -> str:
        if self._closing:
            return "the pool is closed"
        if self._router_fault:
            return self._router_fault
        if self.router is not None and self.router.exited.is_set():
            return "the router is being restarted"
        told = [f"{m.name} is {m.state if m.state != 'up' else 'withdrawn'} ({m.reason})" for m in self.members]
        return "; ".join(told)

    def _hopeless(self) -> bool:
        return self._closing or bool(self._router_fault) or all(m.state == "failed" for m in self.members)

    def _reachable(self) -> bool:
        """Whether a request that is sent now finds a member."""
        return bool(self.routable) and (self.router is None or not self.router.exited.is_set())

    async def wait_routable(self) -> None:
        """Return when some member is routed to, by a router that lives; raises as ``wait_until`` does."""
        await self.wait_until(self._reachable)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds`` is true; it is asked again at every change of a member.

        Raises:
            InferenceError: every member has failed, or it did not come true in time; the message has each one's reason.
        """
        try:
            async with asyncio.timeout(self._recover_seconds):
                await self._news.until(lambda: self._hopeless() or holds())
        except TimeoutError as error:
            raise InferenceError(
                f"no replica came back within {self._recover_seconds:g} s: {self._why_none()}"
            ) from error
        if self._hopeless():
            raise InferenceError(f"no replica can answer: {self._why_none()}")

    # ---- the gate: whoever is responsible for weights

    def hold(self, member: Member) -> None:
        """A weight update is open there: answers that arrive are withheld until ``admit`` or ``withdraw``."""
        member.held = True

    def admit(self, member: Member, version: str | None = None) -> None:
        """Its weights are known and current: it is routed to while it is up, and answers as ``version``."""
        member.held, member.admitted, member.reason = False, True, ""
        if version is not None and member.versions[-1:] != [version]:
            member.versions.append(version)
        self._changed()

    def withdraw(self, member: Member, reason: str, *, drain: bool) -> None:
        """Out of routing; with ``drain`` what is in flight there is aborted."""
        member.held, member.admitted, member.reason = False, False, reason
        self._changed()
        if drain:
            task = asyncio.create_task(self._drain(member, self._wanted), name=f"drain {member.name}")
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)

    async def _drain(self, member: Member, wanted: int) -> None:
        """Abort what is in flight on a withdrawn member, which would wait for a resume that never comes.

        More than once: the router sends requests there until it has been told, and some are on their way.
        """
        left = _DRAINS
        while left and member.state == "up" and not (member.admitted or member.held or self._hopeless()):
            with contextlib.suppress(InferenceError, TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await member.engine.abort(None)
            left -= self._routed >= wanted
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await self._news.until(lambda: self._routed >= wanted and not member.running)
                return

    def done_with(self, members: Sequence[Member]) -> None:
        """A request that one of these had is over."""
        for member in members:
            member.running -= 1
        if not all(member.admitted for member in members):
            self._news.tell()

    def taint(self, member: Member) -> None:
        """Answers that are under way may hold tokens of wrong weights: they are discarded."""
        member.tainted += 1

    async def wait_settled(self, members: Sequence[Member]) -> None:
        """Return when none of them has an open update (the publisher's deadlines bound the wait)."""
        await self._news.until(lambda: self._closing or not any(member.held for member in members))

    # ---- watching

    async def suspect(self) -> None:
        """A request has failed: look at every member now, and return when routing follows what was found."""
        looks = [self._look(member) for member in self.members if member.state == "up"]
        await asyncio.gather(*looks, self._look_at_router())
        await self._followed()

    async def _followed(self) -> None:
        """Return when routing follows what is known now."""
        wanted = self._wanted
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUSPECT_SECONDS):
                await self._news.until(lambda: self._routed >= wanted or self._hopeless())

    async def compare_versions(self, members: Sequence[Member]) -> None:
        """Take out whoever does not hold what was published to it, as after a restart that nobody told of.

        Returns when routing follows; the watcher of whoever was taken out brings it back, up to date.
        """
        await asyncio.gather(*(self._compare_version(member) for member in members if member.versions))
        await self._followed()

    async def _compare_version(self, member: Member) -> None:
        want, life = member.versions[-1], member.tainted
        try:
            held = await member.engine.weight_version()
        except InferenceError:
            return  # a dead one is the health checks' business
        # Not in the middle of a publish, whose end says what it holds, nor when it has been brought back meanwhile.
        settled = member.routable and not member.held and (member.versions[-1], member.tainted) == (want, life)
        if held == want or not settled:
            return
        member.wrong = f"it answers as version {held}, published was {want}: was it restarted?"
        member.doubted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUSPECT_SECONDS):
                await self._news.until(lambda: member.state != "up" or self._hopeless())

    async def _look(self, member: Member) -> None:
        if member.child is not None:
            # A killed server's end is known a moment after its broken connections.
            await first_of(member.child.exited, seconds=0.2)
        gone = member.child is not None and member.child.exited.is_set()
        if gone or not await member.engine.health():
            member.doubted.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SUSPECT_SECONDS):
                    await self._news.until(lambda: member.state != "up" or not member.doubted.is_set())

    async def _look_at_router(self) -> None:
        if self.router is not None:
            await first_of(self.router.exited, seconds=0.2)
            if self.router.exited.is_set():
                self._changed()  # its restart is what routing has to follow

    async def _watch(self, member: Member) -> None:
        """One member's life: check, and when it is lost, bring it back, until it has failed for good."""
        while member.state != "failed":
            reason = await self._until_lost(member)
            logger.warning("replica %s is down: %s", member.name, reason)
            self.policy.forget(member.url)
            self._set(member, "down", reason)
            self._tell(self.on_down, member, reason)
            await self._bring_back(member)

    async def _until_lost(self, member: Member) -> str:
        failures = 0
        while True:
            ends = [member.doubted, *([member.child.exited] if member.child is not None else [])]
            await first_of(*ends, seconds=self._health_seconds)
            while True:
                if member.child is not None and member.child.exited.is_set():
                    return member.child.why_ended
                if member.wrong:
                    return member.wrong
                failures = 0 if await member.engine.health() else failures + 1
                if failures >= self._health_failures:
                    return f"{failures} health checks in a row failed"
                if not failures or not member.doubted.is_set():
                    break  # a doubted member is asked again at once
            member.doubted.clear()
            self._news.tell()

    async def _bring_back(self, member: Member) -> None:
        """Restart (or wait for) a member that was lost, bring its weights up to date, and route to it again."""
        pause = _BACKOFF_SECONDS
        while True:
            if member.spec is not None and member.restarts >= self._restarts:
                self._set(member, "failed", f"given up after {member.restarts} restarts; last: {member.reason}")
                if member.child is not None:
                    await member.child.stop()
                return
            try:
                await self._restart(member)
                return
            except InferenceError as error:
                member.reason = str(error)
            except Exception as error:  # noqa: BLE001 - fault boundary: resync is the owner's code; it is tried again
                member.reason = f"{type(error).__name__}: {error}"
            member.reason = await _first_cause(member, member.reason)
            logger.warning("replica %s did not come back: %s", member.name, member.reason)
            self._set(member, "down", member.reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_BACKOFF)

    async def _restart(self, member: Member) -> None:
        if member.spec is not None:
            member.restarts += 1
            if member.child is not None:
                await member.child.stop()
            await member.launch()
        elif not await member.engine.health():
            raise InferenceError(f"{member.name} does not answer, and is not ours to restart")
        member.wrong = ""
        member.doubted.clear()
        if self.resync is not None:
            await self.resync(member)
        self._set(member, "up", "")

    # ---- the router

    async def _start_router(self, router: RouterProcess) -> None:
        await router.start([member.url for member in self.members if member.routable])
        if self.data is None:
            spec, engine = self.members[0].spec, self.members[0].engine
            model = spec.model if spec is not None else (await engine.info()).model
            seconds = self._request_seconds
            self.data = HttpEngine(router.url, model=model, adapter=self._adapter, timeout_seconds=seconds)
        else:
            await self.data.reconnect(router.url)

    async def _route(self, router: RouterProcess) -> None:
        """Keep the router alive and its workers as the members' states say, until it is given up."""
        restarts, faults, reason = 0, 0, ""
        while True:
            kicked = asyncio.ensure_future(self._news.until(lambda: self._routed < self._wanted))
            try:
                await first_of(router.exited, kicked)
            finally:
                kicked.cancel()
            try:
                if router.exited.is_set():
                    reason = router.why_ended or reason
                    if restarts == self._restarts:
                        break
                    restarts += 1
                    self._tell_of_router(f"the router is down: {reason}")
                    await self._news.until(lambda: bool(self.routable))  # it does not start without workers
                    wanted = self._wanted
                    await self._start_router(router)
                    self._tell_of_router("the router is up")
                else:
                    wanted = self._wanted
                    await router.set_workers([member.url for member in self.members if member.routable])
                faults = 0
            except InferenceError as error:
                faults, reason = faults + 1, str(error)
                # A worker that died just now is refused, too; a router that follows nobody is of no use.
                if faults == _DEAF_AFTER:
                    faults = 0
                    await router.stop()
                await asyncio.sleep(_BACKOFF_SECONDS)
                continue
            self._routed = max(self._routed, wanted)
            self._news.tell()
        self._router_fault = f"the router was given up after {restarts} restarts; last: {reason}"
        self._tell_of_router(self._router_fault)
        self._news.tell()

    def _tell_of_router(self, text: str) -> None:
        logger.warning(text)
        self._tell(self.on_router, text)
