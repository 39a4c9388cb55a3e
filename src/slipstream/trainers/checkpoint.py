"""Whole-run checkpoints that cannot be half written.

Owns: staging, hashing, fsync, the rename, the pointer, pruning, and finding the newest checkpoint that is whole.
Refuses: knowing what is inside; callers fill a directory and give a JSON state.  No pickle.

Order of events in ``save``: fill ``.staging-*`` -> hash every file into ``manifest.json`` -> fsync files and
directory -> rename to ``rl-000012`` -> write and rename the pointer ``latest`` -> prune.  A kill between any
two of them leaves the previous checkpoint in charge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

_MANIFEST = "manifest.json"
_STATE = "state.json"
_POINTER = "latest"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: its directory and JSON state."""

    directory: Path
    state: dict[str, Any]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name != _MANIFEST)


class CheckpointStore:
    """Checkpoints of one run under ``root``; the ``keep`` newest ones survive pruning, and those in ``named``.

    ``save(name, state, fill)`` calls ``fill(directory)`` to write the heavy parts.
    """

    def __init__(self, root: Path, keep: int = 2, named: Sequence[str] = ()) -> None:
        self.root = root
        self.keep = keep
        self.named = frozenset(named)

    def save(self, name: str, state: dict[str, Any], fill: Callable[[Path], None]) -> Path:
        """Write a checkpoint; raises ``CheckpointError`` (disk full, permissions) and then leaves nothing behind."""
        staging = self.root / f".staging-{name}-{os.getpid()}"
        target = self.root / name
        try:
            self._remove_leftovers()
            staging.mkdir(parents=True)
            fill(staging)
            (staging / _STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
            digests = {str(p.relative_to(staging)): _digest(p) for p in _files(staging)}
            (staging / _MANIFEST).write_text(json.dumps(digests, indent=1, sort_keys=True))
            for path in [*_files(staging), staging / _MANIFEST]:
                _fsync(path)
            _fsync(staging)
            if target.exists():
                # The same step was saved before, perhaps as what the pointer names: ``_put_back`` if this is the end.
                shutil.rmtree(self._aside(name), ignore_errors=True)
                os.rename(target, self._aside(name))
            os.rename(staging, target)
            _fsync(self.root)
            self._point_to(name)
            self._put_back()
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            with contextlib.suppress(OSError):  # ``latest`` tries again
                self._put_back()
            raise CheckpointError(
                f"checkpoint {target} could not be written ({error}); earlier checkpoints are untouched. "
                "Free disk space or change run_dir, then run the same command again"
            ) from error
        self._prune()
        return target

    def point_to(self, name: str) -> None:
        """Make ``name`` the checkpoint that a resume takes; raises ``CheckpointError`` when that cannot be written."""
        try:
            self._point_to(name)
        except OSError as error:
            raise CheckpointError(
                f"{self.root / _POINTER} could not be written ({error}); free disk space, then write {name!r} into it"
            ) from error

    def _point_to(self, name: str) -> None:
        temporary = self.root / f".{_POINTER}-{os.getpid()}"
        with temporary.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.root / _POINTER)
        _fsync(self.root)

    def _remove_leftovers(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for path in self.root.glob(".staging-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _aside(self, name: str) -> Path:
        return self.root / f".replaced-{name}"

    def _put_back(self) -> None:
        """Checkpoints that were being replaced: back in place when nothing came in their place, else removed."""
        for aside in self.root.glob(".replaced-*"):
            target = self.root / aside.name.removeprefix(".replaced-")
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, target)

    def names(self) -> list[str]:
        """Names of all complete-looking checkpoints, oldest first (by modification of the manifest)."""
        if not self.root.is_dir():
            return []
        manifests = [p / _MANIFEST for p in self.root.iterdir() if not p.name.startswith(".") and p.is_dir()]
        present = [m for m in manifests if m.exists()]
        return [m.parent.name for m in sorted(present, key=lambda m: (m.stat().st_mtime_ns, m.parent.name))]

    def _prune(self) -> None:
        latest = self._pointer()
        for name in self.names()[: -self.keep]:
            if name != latest and name not in self.named:
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _pointer(self) -> str | None:
        """What the pointer names; without one, the newest checkpoint (a first save that was killed before it moved)."""
        pointer = self.root / _POINTER
        try:
            name = pointer.read_text().strip()
        except FileNotFoundError:
            return next(reversed(self.names()), None)
        except NotADirectoryError:
            return None  # no store yet; a save says what stands in its place
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pointer} is unreadable or corrupt ({error}){self._older('')}") from error
        if not name or not (self.root / name).is_dir():
            raise CheckpointError(f"{pointer} names {name!r}, which is no checkpoint here{self._older(name)}")
        return name

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from, verified; None when there is none.

        Raises ``CheckpointError`` naming the damaged file and an older checkpoint to go back to, if any: a
        corrupt checkpoint is never skipped in silence.
        """
        try:
            self._put_back()
        except OSError as error:
            raise CheckpointError(
                f"{self.root}: a checkpoint that was being replaced cannot be put back ({error}); make the directory "
                "writable"
            ) from error
        name = self._pointer()
        return None if name is None else self.open(name)

    def open(self, name: str) -> Checkpoint:
        """Verify every hash and return the checkpoint; raises ``CheckpointError`` naming the damaged file."""
        directory = self.root / name
        try:
            digests = json.loads((directory / _MANIFEST).read_text())
            if not isinstance(digests, dict) or _STATE not in digests:
                raise ValueError(f"it is no list of files with {_STATE}")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory}: no readable manifest ({error}){self._older(name)}") from error
        for relative, expected in digests.items():
            path = directory / relative
            try:
                found = _digest(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing from the checkpoint{self._older(name)}") from None
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error}){self._older(name)}") from error
            if found != expected:
                raise CheckpointError(f"{path}: does not match its hash, so it is corrupt{self._older(name)}")
        return Checkpoint(directory, json.loads((directory / _STATE).read_text()))

    def _older(self, name: str) -> str:
        others = [other for other in self.names() if other != name]
        if not others:
            return "; no older checkpoint exists: remove the folder to start again"
        return f"; to go back, write {others[-1]!r} into {self.root / _POINTER}"
