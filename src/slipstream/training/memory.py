"""Giving freed memory back to the operating system.

Owns: one call into the C library.  Refuses: deciding what is freed.

glibc keeps freed blocks of up to 32 MB for reuse.  Micro-batches differ in size, so the holes they leave rarely fit
the next one, and a process that lives on one machine with its engine grows by gigabytes.  Measured on SmolLM2-135M:
the resident size before an optimiser step falls from 3.7 GB to 3.1 GB, in less than 0.1 s.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Any:
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None


def give_back() -> None:
    """Return freed memory to the system where the C library can (glibc); elsewhere do nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
