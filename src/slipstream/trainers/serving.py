"""What samples in a run, and how weights reach it.

Owns: building the engine (in this process, or a pool of replicas) and the publisher over it, from settings.
Refuses: when anything is published (``parts``, ``run``).

    async with open_serving(settings, tokenizer, incarnation, warn=print) as serving:
        await serving.publish(export, version)
        result = await serving.engine.generate(request)

Everything that was started is ended when the context is left; a run that is killed leaves nothing either, since each
server has a guard that notices.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.config.settings import RunSettings
from slipstream.inference.launch.engines import Returned
from slipstream.inference.pool.build import build_pool, needs_pool
from slipstream.inference.pool.pool import ReplicaPool
from slipstream.inference.types import Engine
from slipstream.rollout.types import sampling_spec
from slipstream.trajectory import WeightVersion
from slipstream.weights import (
    AdapterTransport,
    DeltaTransport,
    DiskTransport,
    GlooTransport,
    InProcessTransport,
    MemoryTransport,
    NativeTransport,
    Probe,
    Publisher,
    Receipt,
    Replica,
    Transport,
)
from slipstream.weights.pooled import PooledReplica, link, publish_to_pool
from slipstream.weights.transport import Export


@dataclass
class Serving:
    """``engine`` is what rollouts talk to; it never answers with weights that were not verified."""

    engine: Engine
    publisher: Publisher
    pool: ReplicaPool | None = None
    exported: Literal["policy", "adapter"] = "policy"
    """Which of the trainer's weights it takes."""

    async def publish(
        self, export: Callable[[], Export], version: WeightVersion | str, *, probe: Probe | None = None
    ) -> Sequence[Receipt]:
        """Publish to every replica, with a probe for those whose checksums cannot be compared.

        Raises ``PublishError`` when none took the version.
        """
        if self.pool is None:
            return await self.publisher.publish(export(), version, probe=probe)
        return await publish_to_pool(self.pool, self.publisher, export, version, probe=probe)


def build_transport(settings: RunSettings) -> Transport:
    """How weights travel; ``auto`` is shared memory to servers that are started here."""
    inference = settings.inference
    dtype, kind = inference.dtype, inference.transport
    if not needs_pool(inference):
        return InProcessTransport(dtype, recycle=settings.training.heap_growth > 1)
    if kind in ("auto", "memory"):
        return MemoryTransport(dtype)
    if kind == "gloo":
        return GlooTransport(dtype, host=inference.transfer_host)
    if kind in ("nccl", "ipc"):
        return NativeTransport(kind, dtype, address=inference.transfer_host)
    folder = transfer_dir(settings) / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "adapter":
        return AdapterTransport(folder, dtype=dtype)
    return DiskTransport(folder, dtype) if kind == "disk" else DeltaTransport(folder, dtype)


def transfer_dir(settings: RunSettings) -> Path:
    """Directory that trainer and engines see."""
    given = settings.inference.transfer_dir
    return (given if given is not None else settings.run_dir / "transfer").resolve()


@contextlib.asynccontextmanager
async def open_serving(
    settings: RunSettings,
    tokenizer: Any,
    incarnation: int,
    warn: Callable[[str], object],
    on_receipt: Callable[[Receipt], None] | None = None,
) -> AsyncIterator[Serving]:
    """Start what samples.

    ``warn`` is told when a replica is lost, comes back or is given up; ``on_receipt`` what each replica came to at each
    publish, failed ones and those of catching up included.

    Raises ``ModelError`` or ``InferenceError`` naming what cannot be used.
    """
    inference = settings.inference
    version = str(WeightVersion("policy", incarnation, 0))
    async with contextlib.AsyncExitStack() as stack:
        transport = build_transport(settings)
        if not needs_pool(inference):
            from slipstream.inference.embedded.engine import EmbeddedEngine

            engine = EmbeddedEngine(
                settings.model.path,
                tokenizer,
                inference,
                weight_version=version,
                determinism=settings.training.determinism,
            )
            stack.push_async_callback(engine.close)
            await engine.start()
            replica = Replica(engine)
            publisher = Publisher([replica], transport, pause_mode=inference.pause_mode, on_receipt=on_receipt)
            stack.callback(publisher.close)
            yield Serving(replica, publisher)
            return
        folder, kind = transfer_dir(settings), inference.transport
        folder.mkdir(parents=True, exist_ok=True)
        returns: list[Returned] = []
        if sampling_spec(settings.rollout.sampling).cut:
            returns.append("kept_sets")
        if settings.training.routing_replay:
            returns.append("routed_experts")
        adapter = settings.training.lora.rank if kind == "adapter" else None
        pool = build_pool(
            inference,
            _model_directory(settings),
            log_dir=settings.run_dir / "engines",
            weight_version=version,
            transfer_dir=folder,
            weight_transfer="nccl" if kind == "nccl" else "ipc" if kind == "ipc" else "slipstream",
            returns=returns,
            adapter_rank=adapter,
        )
        await pool.start()
        stack.push_async_callback(pool.close)
        publisher = Publisher(
            [PooledReplica(pool, member) for member in pool.members],
            transport,
            pause_mode=inference.pause_mode,
            on_receipt=on_receipt,
        )
        stack.callback(publisher.close)
        link(pool, publisher)
        pool.on_change = lambda member: warn(f"replica {member.name} is {member.state} {member.reason}".rstrip())
        pool.on_router = warn
        yield Serving(pool.engine, publisher, pool, "adapter" if adapter else "policy")


def _model_directory(settings: RunSettings) -> str:
    """What servers are told to load: a bundled model is a directory here, and no name that they know."""
    from slipstream.inference.embedded.pretrained import resolve

    return str(resolve(settings.model.path))
