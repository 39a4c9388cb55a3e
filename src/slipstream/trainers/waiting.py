"""Awaiting a backend's future: every wait has an owner and a deadline.

Owns: ``within``.  Refuses: deciding what to do when time is up; the caller gets a ``DeadlineError``.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from slipstream.errors import DeadlineError

T = TypeVar("T")


async def within(future: Future[T], seconds: float, what: str) -> T:
    """Await a backend future; raises ``DeadlineError`` naming ``what``."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not finish within {seconds:.0f} s") from error
