"""Giving freed memory back to the operating system.

Owns: one call into the C library, and when it is worth it.  Refuses: deciding what is freed.

glibc keeps freed blocks of up to 32 MB for reuse.  Micro-batches differ in size, so the holes they leave do not always
fit the next one, and a process that lives on one machine with its engine grows by gigabytes.  But pages that are given
back are cleared again by the kernel when they are needed next, which is most of what giving back costs: a fifth of an
update where batches are alike (SmolLM2-135M).  So memory goes back when the process has grown by a fifth, not always.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any

import psutil


@cache
def _malloc_trim() -> Any:
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None


_GROWTH = 1.2
_floor = 0
"""Resident bytes after memory was last given back."""


def give_back() -> None:
    """Return freed memory to the system, if the process has grown; without glibc do nothing."""
    global _floor
    trim, process = _malloc_trim(), psutil.Process()
    if trim is None or process.memory_info().rss <= _GROWTH * _floor:
        return
    trim(0)
    _floor = process.memory_info().rss
