"""Append-only JSON lines that survive a kill.

Owns: one ``*.jsonl`` file: whole lines only, an fsync policy, repair of a torn last line.
Refuses: meaning.

A process that dies while it writes leaves at most one torn last line.  Opening for append cuts it off (its
bytes go to ``<name>.torn`` beside the file); reading ignores it.  A corrupt line *before* the last is no torn
write but damage, and is an error that names file and line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import LedgerError


def dump_line(value: Mapping[str, Any]) -> str:
    """One line of JSON; key order is kept, text stays readable.  NaN and infinities are written as Python does."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a journal; a torn last line is ignored, damage raises ``LedgerError``."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error}); make it readable, or restore it") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # not ended by a newline: a torn write
                return
            raise LedgerError(
                f"{path}, line {number} is not JSON ({error}); restore the file or cut that line"
            ) from None
        if not isinstance(value, dict):
            raise LedgerError(f"{path}, line {number} is not a JSON object")
        if number == len(lines):  # parses, but its newline was lost: it was never acknowledged
            return
        yield value


class Journal:
    """An open journal.  Lifecycle: construct (repairs) -> ``append``/``sync`` -> ``close``.

    Raises ``LedgerError`` when the file cannot be opened or repaired.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.repaired_bytes = self._repair()
            # Unbuffered: what could not be written must not be written later, by a close or between other lines.
            self._file = path.open("ab", buffering=0)
            self._size = path.stat().st_size
        except OSError as error:
            raise LedgerError(
                f"{path} cannot be opened for writing ({error}); free space and resume the run, or choose another "
                "run_dir"
            ) from error

    def _repair(self) -> int:
        if not self.path.exists():
            return 0
        data = self.path.read_bytes()
        good = data.rfind(b"\n") + 1
        torn = data[good:]
        if torn:
            with self.path.with_name(self.path.name + ".torn").open("ab") as keep:
                keep.write(torn + b"\n")
            os.truncate(self.path, good)
        return len(torn)

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system (a killed process loses nothing).

        Raises ``LedgerError`` (a full disk) and then leaves nothing of the line, so that others may follow.
        """
        line = dump_line(value).encode() + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
            self._size += len(line)
        except OSError as error:
            self._file.truncate(self._size)
            raise LedgerError(f"cannot write {self.path}: {error}; free space and resume the run") from error

    def sync(self) -> None:
        """Force the lines to the disk (a power cut loses nothing); raises ``LedgerError`` when the disk refuses."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LedgerError(f"cannot write {self.path}: {error}; free space and resume the run") from error

    def close(self) -> None:
        """Sync and close; closing twice is harmless."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def write_atomically(path: Path, data: bytes, mend: str = "free space and resume the run") -> None:
    """Write beside ``path``, fsync, rename; readers see the old file or the whole new one.  Its directory is made.

    Raises ``LedgerError`` with the ``mend`` when the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise LedgerError(f"cannot write {path}: {error}; {mend}") from error


def sync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
