"""Tensors as bytes with a name for their type: what travels, whatever library made it.

Owns: ``Raw``, its conversions, the layout of several tensors in one buffer, checksums and digests over them.
Refuses: importing torch before a torch tensor is asked for; arithmetic.

>>> import numpy as np
>>> value = Raw.of(np.arange(3, dtype=np.float32))
>>> value.dtype, value.shape, value.checksum()
('float32', (3,), 'float32[3]:30c8bc70')
>>> value.numpy().tolist()
[0.0, 1.0, 2.0]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import InferenceError
from slipstream.inference.checksum import data_checksum, tensor_data

Bytes = npt.NDArray[np.uint8]

ALIGN = 64
"""Offset of every tensor in a shared buffer, in bytes: a cache line, and enough for every dtype."""
THREADS = 2  # hashing, packing and copying release the interpreter lock

_SIZES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # dtypes that numpy does not know


def item_size(dtype: str) -> int:
    """Bytes per element.

    Raises:
        InferenceError: no such dtype.
    """
    if dtype in _SIZES:
        return _SIZES[dtype]
    try:
        return np.dtype(dtype).itemsize
    except TypeError as error:
        raise InferenceError(f"weights of the dtype {dtype!r} cannot travel; cast them before they are sent") from error


@dataclass(frozen=True, slots=True)
class Raw:
    """One tensor: ``data`` holds its elements in row-major order, as bytes of shape ``(n,)``."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @classmethod
    def of(cls, tensor: Any) -> Raw:
        """A view of a numpy array or torch tensor (a copy only where it is not contiguous host memory)."""
        return cls(*tensor_data(tensor))

    def checksum(self) -> str:
        """As ``tensor_checksum`` gives it for the tensor itself."""
        return data_checksum(self.dtype, self.shape, self.data)

    def numpy(self) -> npt.NDArray[Any]:
        """A numpy view.

        Raises:
            InferenceError: numpy does not know the dtype.
        """
        try:
            return self.data.view(np.dtype(self.dtype)).reshape(self.shape)
        except TypeError as error:
            raise InferenceError(
                f"numpy has no dtype {self.dtype}; the receiver needs torch for these weights"
            ) from error

    def torch(self) -> Any:
        """A torch view (of a writable buffer: torch warns of others)."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not self.data.size:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self.data).view(dtype).reshape(self.shape)


class Entry(NamedTuple):
    """Where one tensor lies in a buffer; travels as a JSON list."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * item_size(self.dtype)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[list[Entry], int]:
    """Aligned places for ``(name, dtype, shape)`` one after another, and the size of the whole buffer."""
    table, end = [], 0
    for name, dtype, shape in tensors:
        entry = Entry(name, dtype, tuple(shape), -(-end // ALIGN) * ALIGN)
        table.append(entry)
        end = entry.offset + entry.size
    return table, end


def cut(buffer: Bytes, table: Iterable[Entry]) -> dict[str, Raw]:
    """Views of a buffer by name.

    Raises:
        InferenceError: an entry reaches beyond the buffer, or a name comes twice.
    """
    found: dict[str, Raw] = {}
    for entry in table:
        end = entry.offset + entry.size
        if entry.offset < 0 or entry.offset % ALIGN or end > buffer.size or any(n < 0 for n in entry.shape):
            raise InferenceError(f"{entry.name}: bytes {entry.offset} to {end} do not fit a buffer of {buffer.size}")
        if entry.name in found:
            raise InferenceError(f"{entry.name} comes twice in one table")
        found[entry.name] = Raw(entry.dtype, entry.shape, buffer[entry.offset : end])
    return found


def checksums(tensors: Mapping[str, Raw]) -> dict[str, str]:
    """Checksum by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(Raw.checksum, tensors.values()), strict=True))


def digest(sums: Mapping[str, str]) -> str:
    """One name for a whole set of weights: SHA-256 over its sorted checksums, 32 hex digits."""
    text = "\n".join(f"{name} {sums[name]}" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
