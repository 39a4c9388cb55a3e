"""How exported weights reach an engine.

Owns: the ``Transport`` protocol, ``Staged`` (one version's weights, frozen), ``InProcessTransport``, and putting the
pieces of an export together.  Refuses: pausing, versions' meaning, verification.
To engines in other processes: ``slipstream.weights.wire``, ``delta``, ``native``.

Copies: an optimiser changes its parameters in place, so ``stage`` copies (and casts) each tensor once.  The copy is
what is sent, checksummed, and kept as the last good version for a roll-back; it is freed when a newer version has been
verified.  Publishing therefore holds at most two copies of the weights besides the trainer's and the engine's.  In this
process a freed copy's memory can be kept for the next version (``Recycled``): fresh pages cost as much as the copying.
Tensors are opaque here: numpy arrays or torch tensors.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slipstream.errors import PublishError
from slipstream.inference.checksum import tensor_bytes
from slipstream.inference.transfer.raw import Bytes, Raw, checksums, cut, lay_out
from slipstream.inference.types import Engine
from slipstream.openmp import end_idle_workers

Export = Mapping[str, Any] | Iterable[tuple[str, tuple[int, ...], tuple[slice, ...], Any]]
"""``{name: tensor}``, or pieces ``(name, global shape, slice, tensor)`` as ``export_weights`` yields them."""


@dataclass(frozen=True)
class Staged:
    """One version's weights, complete and private: nothing changes them any more.

    ``bytes`` is the size of the weights; ``payload_bytes`` what one up-to-date replica has to be sent of it.
    ``payload`` is the transport's own.
    """

    version: str
    tensors: Mapping[str, Any]
    checksums: Mapping[str, str]
    bytes: int
    payload_bytes: int
    payload: Any = field(default=None, repr=False)


class Transport(Protocol):
    """``stage`` once per publish, ``send`` once per replica and attempt, ``release`` when a version is done with."""

    name: str
    """How receipts call it."""
    continues: bool
    """Whether requests that a pause keeps go on under the new weights, so that their tokens' versions stay true."""
    after_finish: bool
    """Whether ``send`` comes after ``finish_weight_update`` and not before it."""

    def stage(self, version: str, export: Export) -> Staged:
        """Make the weights sendable.  Runs in a worker thread, before any replica is paused."""
        ...

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Hand every tensor to one paused engine: before its ``finish_weight_update``, or ``after_finish``."""
        ...

    async def abandon(self, engine: Engine) -> None:
        """End an update that someone else left open on the engine, so that a new one can start."""
        ...

    def release(self, staged: Staged) -> None:
        """Free what ``stage`` made."""
        ...

    def close(self) -> None:
        """Free everything; nothing is left on disk or in memory."""
        ...


def _form(tensor: Any, dtype: str | None) -> str:
    """Name of the dtype that a tensor travels in (None keeps its own)."""
    if isinstance(tensor, np.ndarray):
        return dtype or tensor.dtype.name
    return dtype if dtype is not None and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def pieces_of(export: Export) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], Any]]:
    """Every piece, checked to add up to whole tensors."""
    pieces: list[tuple[str, tuple[int, ...], tuple[slice, ...], Any]]
    if isinstance(export, Mapping):
        pieces = [(name, tuple(t.shape), (), t) for name, t in export.items()]
    else:
        pieces = [(name, tuple(shape), tuple(where), t) for name, shape, where, t in export]
    if not pieces:
        raise PublishError("export: no tensors; there is nothing to publish")
    filled: dict[str, int] = {}
    for name, shape, _, tensor in pieces:
        if filled.get(name, 0) >= math.prod(shape) and name in filled:
            raise PublishError(f"export: {name} comes twice")
        filled[name] = filled.get(name, 0) + math.prod(tensor.shape)
    for name, shape, _, _ in pieces:
        if filled[name] != math.prod(shape):
            raise PublishError(f"export: the pieces of {name} have {filled[name]} elements, its shape is {shape}")
    return pieces


def collect(export: Export, dtype: str | None = None, allocate: Callable[[int], Bytes] | None = None) -> dict[str, Any]:
    """Whole tensors of an export, copied (and cast) once into one buffer, which ``allocate(bytes)`` may provide.

    Raises:
        PublishError: a name comes twice, pieces do not add up to the whole, or the export is empty.
    """
    pieces = pieces_of(export)
    # The first piece of a tensor speaks for all of it.
    first = {name: (shape, tensor) for name, shape, _, tensor in reversed(pieces)}
    names = dict.fromkeys(name for name, *_ in pieces)
    table, size = lay_out((name, _form(first[name][1], dtype), first[name][0]) for name in names)
    buffer = (allocate or (lambda n: np.empty(n, np.uint8)))(max(size, 1))
    raws = cut(buffer, table)
    whole = {name: raw.numpy() if isinstance(first[name][1], np.ndarray) else raw.torch() for name, raw in raws.items()}
    for name, _, where, tensor in pieces:
        target = whole[name]
        if isinstance(target, np.ndarray):
            part = target if tensor.size == target.size else target[where]
            np.copyto(part, tensor.reshape(part.shape), casting="unsafe")
        else:
            part = target if tensor.numel() == target.numel() else target[where]
            part.copy_(tensor.detach().reshape(part.shape))
    end_idle_workers()
    return whole


def stage_tensors(version: str, tensors: dict[str, Any], payload: Any = None) -> Staged:
    """``Staged`` over private tensors, hashed once."""
    raws = {name: Raw.of(tensor) for name, tensor in tensors.items()}
    size = sum(raw.data.size for raw in raws.values())
    return Staged(version, tensors, checksums(raws), size, size, payload)


class Recycled:
    """Buffers whose memory comes back once nothing refers to them, kept for the next of the same size (at most two).

    A buffer is an array over a mapping that this object holds; numpy's views and torch's tensors keep the array alive,
    so it is let go only with the last of them.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __call__(self, size: int) -> Bytes:
        """``size`` bytes, content undefined."""
        memory = next((m for m in self._free if len(m) == size), None)
        if memory is None:
            self._free.clear()
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._free.remove(memory)
        buffer: Bytes = np.frombuffer(memory, np.uint8)
        weakref.finalize(buffer, self._take_back, memory).atexit = False
        return buffer

    def _take_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < 2:
            self._free.append(memory)

    def clear(self) -> None:
        """Free what nobody uses."""
        self._free.clear()


class InProcessTransport:
    """Hands tensors over by reference, in chunks; an HTTP client turns a chunk into a file by itself.

    Args:
        dtype: cast floating-point tensors to what the engine holds (for example ``"bfloat16"`` of float32 masters),
            so that checksums are comparable; None sends them as exported.
        chunk_bytes: largest chunk (a tensor is never split).
        recycle: keep the memory of versions that are done with for the next ones, which is faster.
    """

    name = "in_process"
    continues = True
    after_finish = False

    def __init__(self, dtype: str | None = None, chunk_bytes: int = 1 << 28, recycle: bool = True) -> None:
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._memory = Recycled() if recycle else None

    def stage(self, version: str, export: Export) -> Staged:
        """One private copy."""
        return stage_tensors(version, collect(export, self._dtype, self._memory))

    def _chunks(self, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        chunk: dict[str, Any] = {}
        size = 0
        for name, tensor in tensors.items():
            if chunk and size + tensor_bytes(tensor) > self._chunk_bytes:
                yield chunk
                chunk, size = {}, 0
            chunk[name] = tensor
            size += tensor_bytes(tensor)
        yield chunk

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Chunk by chunk."""
        for chunk in self._chunks(staged.tensors):
            await engine.update_weights(chunk)

    async def abandon(self, engine: Engine) -> None:
        """Nothing: an engine in this process has no other sender."""

    def release(self, staged: Staged) -> None:
        """Nothing but memory, which comes back with the last reference."""

    def close(self) -> None:
        """Nothing but memory."""
        if self._memory is not None:
            self._memory.clear()
