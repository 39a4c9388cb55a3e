"""Threads that run environment calls, each under a deadline.

Owns: a bounded pool of daemon threads; abandoning a thread whose call is past its deadline, and replacing it.
Refuses: knowing what an environment is; killing threads (Python cannot), retrying.

A call's deadline runs from the moment it starts on a thread; waiting for a free thread is not the callee's fault.
A thread that is past its deadline is *abandoned*: its place is given to a fresh thread, so that the pool stays usable,
and it ends by itself if its call ever returns.  ``leaked`` counts those that still hang.  All threads are daemons, so
a hanging environment cannot keep the process alive.

>>> pool = EnvPool(workers=2)
>>> import asyncio
>>> asyncio.run(pool.call(lambda: 1 + 1, seconds=5.0))
2
>>> pool.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.errors import DeadlineError, SlipstreamError

T = TypeVar("T")


class EscapeError(SlipstreamError, RuntimeError):
    """A call raised something that is meant to end a program or a task (``SystemExit``, ``CancelledError``)."""


class PoolClosedError(SlipstreamError, RuntimeError):
    """The pool was closed."""


@dataclass(slots=True)
class _Job:
    """One call and where its result goes."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[Any, BaseException | None]]
    late: Callable[[Any], None] | None
    forgotten: bool = False


class _Worker:
    """A daemon thread with a mailbox."""

    def __init__(self, pool: EnvPool, name: str) -> None:
        self.inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.abandoned = False
        self.job: _Job | None = None
        self._pool = pool
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.inbox.get()) is not None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = job.function()
            except Exception as caught:  # noqa: BLE001 - fault boundary: user code; handed to the caller as it is
                error = caught
            except BaseException as caught:  # noqa: BLE001 - SystemExit and its like must not end the event loop
                error = EscapeError(f"{type(caught).__name__}: {caught}")
            if not self._pool._returned(self, job, value, error):
                return


class EnvPool:
    """See the module's docstring.

    Args:
        workers: how many calls may run at once, abandoned ones not counted.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._names = itertools.count()
        self._closed = False
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.abandoned = 0
        """Threads given up since the start."""
        self.leaked = 0
        """Abandoned threads whose call has still not returned."""

    async def call(self, function: Callable[[], T], *, seconds: float, late: Callable[[T], None] | None = None) -> T:
        """Run ``function`` on a thread and return its result, or raise what it raised.

        Past ``seconds`` raises ``DeadlineError``; ``late`` then receives the result if it ever comes (on that thread).
        When the caller is cancelled the thread finishes its call within the same deadline and is used again; its
        result goes to ``late``.
        """
        slots = self._semaphore()
        await slots.acquire()
        loop = asyncio.get_running_loop()
        job = _Job(function, loop, loop.create_future(), late)
        # The slot is held until the thread is free again, or given up, whatever becomes of the caller.
        job.future.add_done_callback(lambda _: slots.release())
        try:
            worker = self._start(job)
        except PoolClosedError:
            job.future.cancel()
            raise
        until = loop.time() + seconds
        try:
            done, _ = await asyncio.wait({job.future}, timeout=seconds)
        except asyncio.CancelledError:
            job.forgotten = True
            loop.call_at(until, lambda: self._abandon(worker, job) and job.future.cancel())
            raise
        if not done and self._abandon(worker, job):
            job.future.cancel()
            raise DeadlineError(f"a call on {worker.thread.name} has not returned after {seconds:g} s")
        value, error = await job.future
        if error is not None:
            raise error
        result: T = value
        return result

    def close(self) -> None:
        """End idle threads; busy ones end after their call.  Calls after this raise ``PoolClosedError``."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.inbox.put(None)
        for worker in idle:
            worker.thread.join()

    @property
    def threads(self) -> int:
        """Live threads that are not abandoned."""
        with self._lock:
            return len(self._idle) + len(self._busy)

    def _semaphore(self) -> asyncio.Semaphore:
        """One semaphore per event loop: asyncio's are bound to the loop they first waited in."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._workers))
        return self._slots[1]

    def _start(self, job: _Job) -> _Worker:
        with self._lock:
            if self._closed:
                raise PoolClosedError("the environment pool is closed; build a new generator")
            worker = self._idle.pop() if self._idle else _Worker(self, f"slipstream-env-{next(self._names)}")
            self._busy.add(worker)
            worker.job = job
        worker.inbox.put(job)
        return worker

    def _abandon(self, worker: _Worker, job: _Job) -> bool:
        """Give the thread up, unless its call returned just now."""
        with self._lock:
            if worker.job is not job:
                return False
            self._busy.discard(worker)
            worker.abandoned = True
            self.abandoned += 1
            self.leaked += 1
            return True

    def _returned(self, worker: _Worker, job: _Job, value: Any, error: BaseException | None) -> bool:
        """Called on the thread when its call returns; False ends the thread."""
        with self._lock:
            abandoned, closed = worker.abandoned, self._closed
            worker.job = None
            if abandoned:
                self.leaked -= 1
            else:
                self._busy.discard(worker)
                if not closed:
                    self._idle.append(worker)
        if abandoned:
            self._deliver_late(job, value, error)
            return False

        def deliver() -> None:
            if job.forgotten or job.future.cancelled():
                self._deliver_late(job, value, error)
            if not job.future.done():
                job.future.set_result((value, error))

        try:
            job.loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the event loop is gone, and the caller with it
            self._deliver_late(job, value, error)
        return not closed

    @staticmethod
    def _deliver_late(job: _Job, value: Any, error: BaseException | None) -> None:
        if job.late is not None and error is None:
            with contextlib.suppress(Exception):  # nobody is left to tell
                job.late(value)
