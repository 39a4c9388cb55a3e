"""Large side channels, stored once by content.

Owns: ``side/<hash>.npy`` in a run directory: arrays that several tokens, rows or trajectories may share.
Refuses: knowing what they mean; deleting them.

>>> import tempfile, numpy as np
>>> store = BlobStore(Path(tempfile.mkdtemp()))
>>> name = store.put(np.arange(3))
>>> store.put(np.arange(3)) == name, store.get(name).tolist()
(True, [0, 1, 2])
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import LedgerError
from slipstream.ledger.journal import write_atomically

LARGE_BYTES = 4096
"""Arrays from this size on are stored apart; smaller ones stand in their row."""


class BlobStore:
    """Arrays in ``directory``, by a hash of their type, shape and content."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, array: npt.NDArray[Any]) -> str:
        """Store an array (once) and return its name; raises ``LedgerError`` when the disk refuses."""
        array = np.ascontiguousarray(array)
        digest = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=16)
        digest.update(array.tobytes())
        name = digest.hexdigest()
        path = self._path(name)
        if not path.exists():
            body = io.BytesIO()
            np.save(body, array, allow_pickle=False)
            write_atomically(path, body.getvalue())
        return name

    def get(self, name: str) -> npt.NDArray[Any]:
        """The array of this name; raises ``LedgerError`` when it is missing or damaged."""
        path = self._path(name)
        try:
            array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise LedgerError(f"{path} is missing though a trajectory refers to it; restore it from a backup") from None
        except (OSError, ValueError) as error:
            raise LedgerError(f"{path} is torn or corrupt ({error}); restore it from a backup") from error
        return array

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.npy"
