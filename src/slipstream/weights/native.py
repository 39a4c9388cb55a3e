"""vLLM's own GPU transfer engines, NCCL and CUDA IPC, behind the transport protocol.

Owns: driving vLLM's trainer-side engine between our start and finish.
Refuses: moving bytes itself; a trainer's environment without vLLM (these engines need both ends to be vLLM's).

Their trainer side wants to run a whole update (start, update, finish) through a client; ours is run by the publisher,
which also pauses, verifies and rolls back.  So the client that it is given forwards ``update_weights`` alone.

Launch vLLM with ``--weight-transfer-config '{"backend": "nccl"}'`` (or ``ipc``, which also needs
``VLLM_ALLOW_INSECURE_SERIALIZATION=1``: the handles are pickled).
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import PublishError
from slipstream.inference.types import Engine
from slipstream.weights.transport import Export, Staged, pieces_of, stage_tensors
from slipstream.weights.wire import WireEngine, wired

Kind = Literal["nccl", "ipc"]


@dataclass
class _Meta:
    """vLLM's ``ParamMeta``, by its attributes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class Source:
    """vLLM's ``WeightSource``, structurally: declared and yielded in the same order."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Any] = {}

    def metadata(self) -> list[_Meta]:
        """What iteration will yield."""
        return [_Meta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


class Client:
    """vLLM's ``VLLMWeightSyncClient``: called from the thread that sends, answered on the event loop.

    ``start_weight_update`` and ``finish_weight_update`` do nothing: the publisher has called the one and will call
    the other, after it has verified what arrived.
    """

    def __init__(self, engine: WireEngine, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._engine = engine
        self._loop = loop
        self._seconds = seconds

    def _run(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(self._seconds)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Forwarded."""
        self._run(self._engine.init_transfer(init_info))

    def start_weight_update(self) -> None:
        """The publisher has."""

    def update_weights(self, update_info: Any) -> None:
        """Forwarded, with CUDA IPC handles made fit for JSON by vLLM's own helper."""
        clients = importlib.import_module("vllm.distributed.weight_transfer.clients")
        self._run(self._engine.transfer(clients._json_safe_update_payload(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The publisher will."""


class NativeTransport:
    """NCCL broadcast or CUDA IPC through vLLM.

    Args:
        kind: ``nccl`` (any machine that NCCL reaches) or ``ipc`` (the same GPU).
        dtype: as for ``InProcessTransport``; tensors stay on their device.
        address: of this machine, for NCCL's rendezvous.
        packed: many tensors per message.
        timeout_seconds: longest wait for one call to the engine.
    """

    continues = True
    after_finish = False

    def __init__(
        self,
        kind: Kind,
        dtype: str | None = None,
        *,
        address: str = "127.0.0.1",
        packed: bool = True,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.name: str = kind
        self._kind: Kind = kind
        self._dtype = dtype
        self._address = address
        self._packed = packed
        self._timeout = timeout_seconds
        self._senders: weakref.WeakKeyDictionary[Engine, tuple[Any, Source]] = weakref.WeakKeyDictionary()

    def stage(self, version: str, export: Export) -> Staged:
        """One private copy on the tensors' own device.

        Raises:
            PublishError: the export is sharded (vLLM's engines send whole tensors).
        """
        tensors: dict[str, Any] = {}
        for name, shape, _, tensor in pieces_of(export):
            if tuple(tensor.shape) != shape:
                raise PublishError(f"{self.name}: {name} comes in pieces; gather it before it is published")
            held = tensor.detach()
            kind = _torch_dtype(self._dtype) if self._dtype and held.is_floating_point() else held.dtype
            tensors[name] = held.to(dtype=kind, copy=True).contiguous()
        return stage_tensors(version, tensors)

    def init_info(self, workers: int) -> Any:
        """What vLLM's factory builds the trainer side from.

        Raises:
            PublishError: vLLM is not installed here.
        """
        try:
            module = importlib.import_module(f"vllm.distributed.weight_transfer.{self._kind}_engine")
        except ImportError as error:
            raise PublishError(
                f"the transport {self.name} runs vLLM's own sender: install vLLM beside the trainer, or use gloo, disk "
                "or delta"
            ) from error
        if self._kind == "ipc":
            return module.IPCTrainerInitInfo(rank=0, packed=self._packed)
        return module.NCCLTrainerInitInfo(
            rank=0,
            master_address=self._address,
            master_port=_free_port(self._address),
            world_size=1 + workers,
            packed=self._packed,
        )

    async def _sender(self, engine: Engine) -> tuple[Any, Source]:
        target = wired(engine, self.name)
        workers = await target.world_size()
        info = self.init_info(workers)
        factory = importlib.import_module("vllm.distributed.weight_transfer").WeightTransferTrainerFactory
        source = Source()
        client = Client(target, asyncio.get_running_loop(), self._timeout)
        sender = await asyncio.to_thread(factory.trainer_init, info, client=client, source=source)
        return sender, source

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Run vLLM's sender; after a failure the next attempt builds a new one."""
        known = self._senders.get(engine)
        sender, source = known if known is not None else await self._sender(engine)
        source.tensors = staged.tensors
        try:
            await asyncio.to_thread(sender.send_weights)
        except BaseException:
            self._senders.pop(engine, None)
            await asyncio.to_thread(sender.shutdown)
            raise
        finally:
            source.tensors = {}
        self._senders[engine] = (sender, source)

    async def abandon(self, engine: Engine) -> None:
        """Nothing to say: vLLM's own engines know no such message."""

    def release(self, staged: Staged) -> None:
        """Nothing but memory."""

    def close(self) -> None:
        """Leave every group."""
        for sender, _ in self._senders.values():
            sender.shutdown()
        self._senders.clear()


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
