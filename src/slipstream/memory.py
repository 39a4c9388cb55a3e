"""The C library's heap: where freed memory stays, and when it goes back to the operating system.

Owns: two calls into glibc, and when they are worth it.  Refuses: deciding what is freed.

glibc gives threads heaps ("arenas") of their own.  What one thread frees is no use to another, and with an engine, a
trainer and their helpers in one process each heap keeps the holes of its own busiest moment.  ``one_heap`` lets them
share.

It also keeps freed blocks of up to 32 MB for reuse.  Micro-batches differ in size, so the holes they leave do not
always fit the next one.  But pages that are given back are cleared again by the kernel when they are needed next, which
costs more than the giving.  So ``give_back`` can wait until the process has grown.

>>> one_heap()
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import psutil

_M_ARENA_MAX = -8
_floor = 0
"""Resident bytes after memory was last given back."""


@cache
def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


@cache
def one_heap() -> None:
    """Let threads that start from now on share heaps; without glibc, or where the environment decides, do nothing."""
    decided = "MALLOC_ARENA_MAX" in os.environ or "malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = None if decided else _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back(growth: float = 1.0) -> None:
    """Return freed memory to the system, if resident memory has grown by a factor of ``growth`` since it last did.

    With a factor of 1 always: what was freed since may have been held at the last time.  Without glibc do nothing.
    """
    global _floor
    trim, process = _libc("malloc_trim"), psutil.Process()
    if trim is None or (growth > 1 and process.memory_info().rss < growth * _floor):
        return
    trim(0)
    _floor = process.memory_info().rss
