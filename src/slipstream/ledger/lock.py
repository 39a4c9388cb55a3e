"""One process at a time writes a run directory.

Owns: the lock.  Refuses: knowing what lies in the directory.

The lock is the process's own (POSIX record lock): it ends with the process, however that ends, and no child holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import LedgerError

LOCK = "run.lock"


@contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Hold the directory, which must exist.

    Raises:
        LedgerError: another process holds it; nothing was touched.  It may be on another machine, where the file system
            passes locks on.
    """
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LedgerError(f"{run_dir} cannot be written ({error.strerror}); choose another run_dir") from error
    try:
        _take(descriptor, run_dir)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system without locks: better a run without one than none
        holder = os.pread(descriptor, 100, 0).decode("ascii", "replace").strip() or "unknown"
        raise LedgerError(
            f"{run_dir} is being written by another process ({holder}); wait for it, stop it, or choose another run_dir"
        ) from None
