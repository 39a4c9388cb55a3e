"""Shared memory without a name: a segment lives exactly as long as someone holds it.

Owns: making a segment, and mapping one of another process of this machine.
Refuses: names in ``/dev/shm``.  A named segment outlives a killed owner; an anonymous file (``memfd_create``) is
reached as ``/proc/PID/fd/N`` while its owner lives, and the kernel frees it with the last process that maps it.  So
nothing has to be cleaned up after ``kill -9``.

Needs Linux, one user and one process namespace on both sides; elsewhere use the disk transport on a RAM disk.

>>> segment = Segment.create(3)
>>> segment.data[:] = 7
>>> attach(segment.path, 3).tolist()
[7, 7, 7]
>>> segment.close()
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re

import numpy as np
import psutil

from slipstream.errors import InferenceError
from slipstream.inference.transfer.raw import Bytes

_NAME = "slipstream-weights"
_PATH = re.compile(r"/proc/\d+/fd/\d+")


class Segment:
    """Memory that this process owns and others may read by ``path``."""

    def __init__(self, descriptor: int, data: Bytes) -> None:
        self._descriptor = descriptor
        self.data = data
        """Writable bytes of shape ``(size,)``."""
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    @classmethod
    def create(cls, size: int) -> Segment:
        """A segment of ``size`` >= 1 bytes, all zero; the memory is reserved now, so that no later write can fail.

        Raises:
            InferenceError: not on this system, or not enough memory.
        """
        if not hasattr(os, "memfd_create"):
            raise InferenceError("shared memory needs Linux; use the disk transport")
        free = psutil.virtual_memory().available
        if size > free:
            # The kernel would hand out pages until it has to kill somebody: an anonymous file has no quota.
            raise InferenceError(f"cannot reserve {size} bytes of shared memory: {free} are available")
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise InferenceError(f"cannot reserve {size} bytes of shared memory: {error.strerror}") from error
        return cls(descriptor, np.frombuffer(mapped, np.uint8))

    def close(self) -> None:
        """No new reader can attach; the memory is freed when the last view of it is gone.  Safe to call twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        self.data = np.empty(0, np.uint8)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def attach(path: str, size: int) -> Bytes:
    """The first ``size`` bytes of another process's segment.

    The pages are shared until written; writing makes a private copy, so a reader never changes the owner's weights.

    Raises:
        InferenceError: the path is no segment of this library, its owner is gone, or it is smaller than ``size``.
    """
    if not _PATH.fullmatch(path):
        raise InferenceError(f"{path}: not a shared-memory segment (want /proc/PID/fd/N)")
    try:
        if _NAME not in os.readlink(path):
            raise InferenceError(f"{path}: this descriptor is not a segment of weights")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InferenceError(
            f"{path}: cannot attach ({error.strerror}); the sender must run on this machine, as the same user, and live"
        ) from error
    try:
        held = os.fstat(descriptor).st_size
        if size < 1 or held < size:
            raise InferenceError(f"{path}: holds {held} bytes, {size} were announced")
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), np.uint8)
    finally:
        os.close(descriptor)
