"""OpenMP workers that wait for nothing.

Owns: one call into the OpenMP runtime.  Refuses: thread counts (torch's business).

Every thread that starts parallel regions keeps a team of workers.  An engine's thread, a trainer's and a copier's
together keep more than there are cores, and then GNU's runtime lets *every* worker sleep between regions instead of
spinning for a moment: each of the thousand small regions of a step begins with a wake-up.  A thread that is about to
wait for work ends its team; the next region starts it again, which takes some 0.1 ms.

>>> end_idle_workers()
"""

from __future__ import annotations

import ctypes
import os

_SOFT = 1  # omp_pause_soft (OpenMP 5.0, 3.7.1): thread counts and other settings are kept


def end_idle_workers() -> None:
    """End the calling thread's team; without an OpenMP 5 runtime in the process do nothing."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if os.name == "posix" else None
    if pause is not None:
        pause(_SOFT)
