"""Transports to engines in other processes: disk, shared memory, Gloo broadcast.

Owns: staging weights where a receiver can reach them, and announcing them.
Refuses: engines that are not behind a URL (they are handed tensors by ``InProcessTransport``).

What an engine must offer beyond ``Engine`` is ``WireEngine``; ``HttpEngine`` does.  The receiving end is
``slipstream.inference.transfer.Receiver``, in ``slipstream serve`` and in vLLM's plug-in alike.

=============  ===========================================  ===================================================
transport      needs                                        leaves behind
=============  ===========================================  ===================================================
disk           a directory that both sides see              nothing after ``close``; files after ``kill -9``
memory         one machine, one user                        nothing, ever: the segment has no name
gloo           a TCP connection from the engine to here     nothing
=============  ===========================================  ===================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from slipstream.errors import InferenceError, PublishError
from slipstream.inference.client import write_safetensors
from slipstream.inference.transfer.gloo import GlooLink, open_store
from slipstream.inference.transfer.memory import Segment
from slipstream.inference.transfer.raw import Bytes, lay_out
from slipstream.inference.types import Engine
from slipstream.weights.transport import Export, Staged, collect, stage_tensors


@runtime_checkable
class WireEngine(Protocol):
    """An engine that takes weights which travel by themselves."""

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Prepare a way for weights to travel."""
        ...

    async def transfer(self, info: Mapping[str, Any]) -> None:
        """Announce weights, and wait until they are loaded."""
        ...

    async def world_size(self) -> int:
        """Number of worker processes of the replica."""
        ...


def wired(engine: Engine, transport: str) -> WireEngine:
    """``engine`` as a ``WireEngine``, else ``PublishError``."""
    if not isinstance(engine, WireEngine):
        raise PublishError(
            f"the transport {transport} sends to an engine behind a URL, not to a {type(engine).__name__}; "
            "use the in-process transport"
        )
    return engine


def slug(version: str) -> str:
    """A version as a file name."""
    return version.replace("/", "-")


def table_of(staged: Staged) -> tuple[list[list[Any]], int]:
    """The JSON table of the buffer that ``collect`` filled, and its size in bytes."""
    forms = []
    for name, text in staged.checksums.items():
        dtype, _, rest = text.partition("[")
        shape = tuple(int(n) for n in rest.partition("]")[0].split(",") if n)
        forms.append((name, dtype, shape))
    table, size = lay_out(forms)
    return [[e.name, e.dtype, list(e.shape), e.offset] for e in table], max(size, 1)


async def abandon(engine: Engine, transport: str) -> None:
    """Tell the receiver to drop an open update.  It answers with an error, which is what ends the update in vLLM."""
    with contextlib.suppress(InferenceError):
        await wired(engine, transport).transfer({"kind": "abandon"})


class DiskTransport:
    """One safetensors file per version, in checkpoint names.

    Args:
        directory: below the transfer directory of every engine.  Only files of this transport are touched.
        dtype: as for ``InProcessTransport``.
    """

    name = "disk"
    continues = True
    after_finish = False

    def __init__(self, directory: Path, dtype: str | None = None) -> None:
        self._directory = directory
        self._dtype = dtype
        self._paths: set[Path] = set()

    def stage(self, version: str, export: Export) -> Staged:
        """Write the file; it has its final name only when it is whole.

        Raises:
            PublishError: it cannot be written (a full disk); nothing is left of it.
        """
        path = self._directory / f"weights-{slug(version)}.safetensors"
        part = path.with_suffix(".part")
        staged = stage_tensors(version, collect(export, self._dtype), path)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_safetensors(part, staged.tensors)
            part.replace(path)
        # safetensors raises a class of its own for a failed write.
        except Exception as error:
            raise PublishError(f"cannot write {path}: {error}; free some space, or choose another directory") from error
        finally:
            part.unlink(missing_ok=True)
        self._paths.add(path)
        # The file is the copy for a roll-back; memory need not hold another one.
        return Staged(version, {}, staged.checksums, staged.bytes, path.stat().st_size, path)

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Announce the file."""
        message = {"kind": "file", "version": staged.version, "path": str(staged.payload)}
        await wired(engine, self.name).transfer(message)

    async def abandon(self, engine: Engine) -> None:
        """See ``Transport``."""
        await abandon(engine, self.name)

    def release(self, staged: Staged) -> None:
        """Delete the file."""
        staged.payload.unlink(missing_ok=True)
        self._paths.discard(staged.payload)

    def close(self) -> None:
        """Delete every file that is left."""
        while self._paths:
            self._paths.pop().unlink(missing_ok=True)


class MemoryTransport:
    """Weights in an anonymous shared-memory segment, which receivers map.

    Args:
        dtype: as for ``InProcessTransport``.
    """

    name = "memory"
    continues = True
    after_finish = False

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype = dtype
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()

    def stage(self, version: str, export: Export) -> Staged:
        """One copy, straight into shared memory; raises ``InferenceError`` when there is not enough of it."""
        made: list[Segment] = []

        def allocate(size: int) -> Bytes:
            made.append(Segment.create(size))
            return made[0].data

        try:
            staged = stage_tensors(version, collect(export, self._dtype, allocate), None)
        except BaseException:
            for segment in made:
                segment.close()
            raise
        self._segments.add(made[0])
        return Staged(version, staged.tensors, staged.checksums, staged.bytes, staged.bytes, made[0])

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Announce the segment."""
        table, size = table_of(staged)
        message = {"kind": "memory", "version": staged.version, "path": staged.payload.path, "size": size}
        await wired(engine, self.name).transfer({**message, "table": table})

    async def abandon(self, engine: Engine) -> None:
        """See ``Transport``."""
        await abandon(engine, self.name)

    def release(self, staged: Staged) -> None:
        """No receiver can attach any more; the memory goes with the last mapping."""
        staged.payload.close()

    def close(self) -> None:
        """Close every segment."""
        for segment in list(self._segments):
            segment.close()


class GlooTransport:
    """Broadcasts to the workers of one replica at a time, each replica in a group of its own.

    Args:
        dtype: as for ``InProcessTransport``.
        host: address of this machine that the engines can reach.
        chunk_bytes: largest single broadcast.
        timeout_seconds: longest wait for the others, when joining and per chunk.
    """

    name = "gloo"
    continues = True
    after_finish = False

    def __init__(
        self,
        dtype: str | None = None,
        host: str = "127.0.0.1",
        chunk_bytes: int = 1 << 26,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._dtype = dtype
        self._host = host
        self._chunk = chunk_bytes
        self._timeout = timeout_seconds
        self._links: weakref.WeakKeyDictionary[Engine, GlooLink] = weakref.WeakKeyDictionary()

    def stage(self, version: str, export: Export) -> Staged:
        """One private copy, in one buffer."""
        made: list[Bytes] = []

        def allocate(size: int) -> Bytes:
            import numpy as np

            made.append(np.zeros(size, np.uint8))
            return made[0]

        tensors = collect(export, self._dtype, allocate)
        return stage_tensors(version, tensors, made[0])

    async def _join(self, engine: Engine) -> GlooLink:
        """A fresh group of this process and the replica's workers."""
        target = wired(engine, self.name)
        world = 1 + await target.world_size()
        store = await asyncio.to_thread(open_store, self._host, self._timeout)
        message = {"kind": "gloo", "host": self._host, "port": store.port, "world_size": world}
        invitation = target.init_transfer({**message, "timeout_seconds": self._timeout})
        joining = asyncio.to_thread(GlooLink.join, self._host, store.port, 0, world, self._timeout, store)
        return cast(GlooLink, (await _both(invitation, joining))[1])

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Announce, and broadcast meanwhile.  The group is kept for the next version unless anything failed."""
        target = wired(engine, self.name)
        link = self._links.pop(engine, None) or await self._join(engine)
        table, size = table_of(staged)
        message = {"kind": "gloo", "version": staged.version, "size": size, "chunk_bytes": self._chunk}
        try:
            await _both(
                target.transfer({**message, "table": table}),
                asyncio.to_thread(link.broadcast, staged.payload, self._chunk),
            )
        except BaseException:
            link.close()
            raise
        self._links[engine] = link

    async def abandon(self, engine: Engine) -> None:
        """See ``Transport``."""
        await abandon(engine, self.name)

    def release(self, staged: Staged) -> None:
        """Nothing but memory."""

    def close(self) -> None:
        """Leave every group."""
        for link in self._links.values():
            link.close()
        self._links.clear()


async def _both(call: Any, work: Any) -> list[Any]:
    """Both results; the first failure is raised at once, and the other side is left to its own deadline."""
    tasks = [asyncio.ensure_future(call), asyncio.ensure_future(work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
                task.add_done_callback(lambda t: t.cancelled() or t.exception())
