"""Waiting for something to change, without polling.

Owns: ``News`` (waiters that look again at each change) and ``first_of`` (the first of several events).
Refuses: deadlines of its own; the caller sets them with ``asyncio.timeout``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class News:
    """``tell`` makes every waiter look again; it may be called from synchronous code on the event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Something has changed."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds`` is true."""
        while not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)


async def first_of(*what: asyncio.Event | asyncio.Future[None], seconds: float | None = None) -> None:
    """Return when one of the events is set or futures is done, or after ``seconds``; cancels none of the futures."""
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(item.wait()) for item in what if isinstance(item, asyncio.Event)
    ]
    futures: list[asyncio.Future[Any]] = [item for item in what if not isinstance(item, asyncio.Event)]
    try:
        await asyncio.wait([*waits, *futures], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
