"""How exported weights reach an engine.

Owns: the ``Transport`` protocol, ``Staged`` (one version's weights, frozen), ``InProcessTransport``, and putting the
pieces of an export together.  Refuses: pausing, versions' meaning, verification.

Copies: an optimiser changes its parameters in place, so ``stage`` copies (and casts) each tensor once.  The copy is
what is sent, checksummed, and kept as the last good version for a roll-back; it is freed when a newer version has been
verified.  Publishing therefore holds at most two copies of the weights besides the trainer's and the engine's.
Tensors are opaque here: numpy arrays or torch tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.errors import PublishError
from slipstream.inference.checksum import tensor_bytes, tensor_checksum
from slipstream.inference.types import Engine

Export = Mapping[str, Any] | Iterable[tuple[str, tuple[int, ...], tuple[slice, ...], Any]]
"""``{name: tensor}``, or pieces ``(name, global shape, slice, tensor)`` as ``export_weights`` yields them."""


@dataclass(frozen=True)
class Staged:
    """One version's weights, complete and private: nothing changes them any more."""

    version: str
    tensors: Mapping[str, Any]
    checksums: Mapping[str, str]
    bytes: int


class Transport(Protocol):
    """``stage`` once per publish, ``send`` once per replica and attempt, ``release`` when a version is done with."""

    def stage(self, version: str, export: Export) -> Staged:
        """Make the weights sendable.  Runs in a worker thread, before any replica is paused."""
        ...

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Hand every tensor to one engine, between its ``start_weight_update`` and ``finish_weight_update``."""
        ...

    def release(self, staged: Staged) -> None:
        """Free what ``stage`` made."""
        ...


def _copy(tensor: Any, dtype: str | None) -> Any:
    """A private, contiguous copy in ``dtype`` (None keeps the tensor's)."""
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, dtype=dtype, order="C")
    import torch  # only ever reached with a torch tensor in hand

    kind = getattr(torch, dtype) if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype=kind, copy=True, memory_format=torch.contiguous_format)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.detach().new_empty(shape)


def collect(export: Export, dtype: str | None = None) -> dict[str, Any]:
    """Whole tensors of an export, as private copies.

    Raises:
        PublishError: a name comes twice, pieces do not add up to the whole, or the export is empty.
    """
    pieces: Iterable[tuple[str, tuple[int, ...], tuple[slice, ...], Any]]
    if isinstance(export, Mapping):
        pieces = ((name, tuple(t.shape), (), t) for name, t in export.items())
    else:
        pieces = export
    whole: dict[str, Any] = {}
    filled: dict[str, int] = {}
    for name, shape, where, tensor in pieces:
        size, total = math.prod(tensor.shape), math.prod(shape)
        if size == total:
            if name in whole:
                raise PublishError(f"export: {name} comes twice")
            whole[name] = _copy(tensor.reshape(shape), dtype)
        else:
            if name not in whole:
                whole[name] = _empty(_copy(tensor[:0], dtype), shape)
            whole[name][where] = tensor.detach() if hasattr(tensor, "detach") else tensor
        filled[name] = filled.get(name, 0) + size
    if not whole:
        raise PublishError("export: no tensors; there is nothing to publish")
    for name, n in filled.items():
        shape = tuple(whole[name].shape)
        if n != math.prod(shape):
            raise PublishError(f"export: the pieces of {name} have {n} elements, its shape is {shape}")
    return whole


class InProcessTransport:
    """Hands tensors over by reference, in chunks; an HTTP client turns a chunk into a file by itself.

    Args:
        dtype: cast floating-point tensors to what the engine holds (for example ``"bfloat16"`` of float32 masters),
            so that checksums are comparable; None sends them as exported.
        chunk_bytes: largest chunk (a tensor is never split).
    """

    def __init__(self, dtype: str | None = None, chunk_bytes: int = 1 << 28) -> None:
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes

    def stage(self, version: str, export: Export) -> Staged:
        tensors = collect(export, self._dtype)
        checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        return Staged(version, tensors, checksums, sum(map(tensor_bytes, tensors.values())))

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
        for chunk in self._chunks(staged.tensors):
            await engine.update_weights(chunk)

    def release(self, staged: Staged) -> None:
        """Nothing but memory, which goes with the last reference."""
