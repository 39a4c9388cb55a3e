"""The C library's heap: where freed memory stays, and when it goes back to the operating system.

Owns: two calls into glibc and one into the kernel, and when they are worth it.  Refuses: deciding what is freed.

glibc gives threads heaps ("arenas") of their own.  What one thread frees is no use to another, and with an engine, a
trainer and their helpers in one process each heap keeps the holes of its own busiest moment.  ``one_heap`` lets them
share.

It also keeps freed blocks of up to 32 MB for reuse.  Micro-batches differ in size, so the holes they leave do not
always fit the next one.  But pages that are given back are cleared again by the kernel when they are needed next, which
costs more than the giving.  So ``give_back`` can wait until the process has grown.

What is read over and over, and stays where it is, reads faster from huge pages: ``collapse`` asks for them.

>>> one_heap()
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import psutil

_M_ARENA_MAX = -8
_MADV_COLLAPSE = 25  # Linux 6.1 and later
_HUGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with pages of 4 KB, on ARM64."""
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


def collapse(ranges: Iterable[tuple[int, int]]) -> int:
    """Move ``(address, bytes)`` ranges of this process to huge pages where the kernel can; returns how many it made.

    Contents and addresses stay.  Costs about 3 s for each GB, once; a page that cannot be moved stays as it is.
    """
    madvise = _libc("madvise")
    if madvise is None:
        return 0
    pages = {page for begin, size in ranges for page in range(begin // _HUGE, -(-(begin + size) // _HUGE))}
    size, advice = ctypes.c_size_t(_HUGE), ctypes.c_int(_MADV_COLLAPSE)
    return sum(madvise(ctypes.c_void_p(page * _HUGE), size, advice) == 0 for page in sorted(pages))
