"""The delta transport: what changed since the last version, and a way back to it from nothing.

Owns: which packets lead to a version, when a new anchor is due, joining old packets, deleting what nobody needs.
Refuses: the codec (``slipstream.inference.transfer.packet``).

A *route* is an anchor and the deltas that lead from it to one version.  Every announcement carries the whole route;
a receiver that already holds a version on it reads only the rest, one that has just been started reads all of it.

* **Failed attempt.**  The base of a new delta is the last version that was not released, so a version that nobody took
  is never built upon.  After a failed announcement the same replica is sent an anchor of its own.
* **Resume.**  A new process has no base: its first version is an anchor.  Version names are never reused, and packets
  check the content they are applied to, so a receiver's older mirror cannot be mistaken for a base.
* **Compaction.**  Long routes have their older deltas joined into one; when the deltas of a route outweigh
  ``anchor_share`` of the weights, the next version is an anchor.

Memory: one more host copy of the weights per receiver (its mirror).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.errors import InferenceError, PublishError
from slipstream.inference.transfer.packet import join, write_anchor, write_delta
from slipstream.inference.transfer.raw import Raw
from slipstream.inference.types import Engine
from slipstream.weights.transport import Export, Staged, collect, stage_tensors
from slipstream.weights.wire import abandon, slug, wired


@dataclass
class _Route:
    """Packets in order (the first is an anchor) with their sizes, and the weights that they lead to."""

    packets: list[tuple[Path, int]]
    raws: dict[str, Raw] = field(repr=False)
    own_anchor: Path | None = None
    """An anchor of exactly this version, made when somebody could not follow the route."""

    @property
    def delta_bytes(self) -> int:
        return sum(size for _, size in self.packets[1:])


class DeltaTransport:
    """Packets in a directory that both sides see.

    Args:
        directory: below the transfer directory of every engine; packets of this transport only are touched.
        dtype: as for ``InProcessTransport``.  bfloat16 keeps deltas small: most weights do not move in a step.
        anchor_share: deltas of one route, as a share of the weights, above which the next version is an anchor.
        join_after: deltas on a route above which the older ones are joined into one.
        keep: newest deltas that stay single, so that a replica up to this many versions behind reads few bytes.
    """

    name = "delta"
    continues = True
    after_finish = False

    def __init__(
        self,
        directory: Path,
        dtype: str | None = None,
        *,
        anchor_share: float = 0.5,
        join_after: int = 8,
        keep: int = 4,
    ) -> None:
        if not 0 <= keep < join_after:
            raise PublishError(f"delta: keep={keep} must be at least 0 and below join_after={join_after}")
        self._directory = directory
        self._dtype = dtype
        self._anchor_share = anchor_share
        self._join_after = join_after
        self._keep = keep
        self._live: dict[str, Staged] = {}
        self._suspect: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._files: set[Path] = set()

    # ---- staging

    def stage(self, version: str, export: Export) -> Staged:
        """Copy the weights, and write what leads to them.

        Raises:
            PublishError: a packet cannot be written (a full disk); nothing of this version is left.
        """
        staged = stage_tensors(version, collect(export, self._dtype))
        raws = {name: Raw.of(tensor) for name, tensor in staged.tensors.items()}
        base = next(reversed(self._live.values()), None)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            packets = self._follow(base, staged, raws) if base is not None else None
            if packets is None:
                packets = [
                    self._made(f"anchor-{slug(version)}", lambda p: write_anchor(p, raws, version, staged.checksums))
                ]
        except (InferenceError, OSError) as error:
            self._prune()
            raise PublishError(f"cannot stage a delta of {version}: {error}") from error
        staged = replace(staged, payload_bytes=packets[-1][1], payload=_Route(packets, raws))
        self._live[version] = staged
        self._prune()
        return staged

    def _made(self, name: str, write: Callable[[Path], int]) -> tuple[Path, int]:
        path = self._directory / f"{name}.packet"
        self._files.add(path)
        return path, write(path)

    def _follow(self, base: Staged, staged: Staged, raws: dict[str, Raw]) -> list[tuple[Path, int]] | None:
        """The base's route and one delta more; None when an anchor is due."""
        route: _Route = base.payload
        same = {n: (r.dtype, r.shape) for n, r in raws.items()} == {
            n: (r.dtype, r.shape) for n, r in route.raws.items()
        }
        if not same or route.delta_bytes > self._anchor_share * base.bytes:
            return None
        packets = self._joined(route.packets)
        name = f"delta-{slug(base.version)}-to-{slug(staged.version)}"
        made = self._made(
            name,
            lambda path: write_delta(
                path, route.raws, raws, base.version, staged.version, base.checksums, staged.checksums
            ),
        )
        return [*packets, made]

    def _joined(self, packets: list[tuple[Path, int]]) -> list[tuple[Path, int]]:
        anchor, deltas = packets[0], packets[1:]
        if len(deltas) <= self._join_after:
            return packets
        old, recent = deltas[: len(deltas) - self._keep], deltas[len(deltas) - self._keep :]
        name = f"joined-{old[0][0].stem}-and-{old[-1][0].stem}"
        return [anchor, self._made(name, lambda path: join(path, [p for p, _ in old])), *recent]

    # ---- sending

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Announce the route; to an engine whose last announcement failed, an anchor."""
        target = wired(engine, self.name)
        route: _Route = staged.payload
        packets = [path for path, _ in route.packets]
        if engine in self._suspect:
            packets = [await asyncio.to_thread(self._own_anchor, staged)]
        self._suspect.add(engine)
        message = {"kind": "delta", "version": staged.version, "packets": [str(path) for path in packets]}
        await target.transfer(message)
        self._suspect.discard(engine)

    def _own_anchor(self, staged: Staged) -> Path:
        route: _Route = staged.payload
        with self._lock:  # several replicas may have failed at once
            if route.own_anchor is None:
                name = f"repair-{slug(staged.version)}"
                route.own_anchor, _ = self._made(
                    name, lambda p: write_anchor(p, route.raws, staged.version, staged.checksums)
                )
            return route.own_anchor

    async def abandon(self, engine: Engine) -> None:
        """See ``Transport``."""
        await abandon(engine, self.name)

    # ---- the end

    def release(self, staged: Staged) -> None:
        """Forget a version; packets that no other version needs are deleted."""
        self._live.pop(staged.version, None)
        self._prune()

    def _prune(self) -> None:
        needed: set[Path] = set()
        for staged in self._live.values():
            route: _Route = staged.payload
            needed.update(path for path, _ in route.packets)
            if route.own_anchor is not None:
                needed.add(route.own_anchor)
        for path in self._files - needed:
            path.unlink(missing_ok=True)
        self._files &= needed

    def close(self) -> None:
        """Delete every packet."""
        self._live.clear()
        self._prune()
        with contextlib.suppress(OSError):
            self._directory.rmdir()  # only when nothing else lies there
