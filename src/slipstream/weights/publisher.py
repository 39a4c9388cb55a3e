"""Two-phase publishing in place, over every replica.

Owns: stage -> pause -> start -> chunks -> finish(version) -> verify -> resume, with a deadline on every phase; retry,
roll-back, quarantine; receipts.
Refuses: answering with unverified weights.  A replica whose weights are not known never answers a request.

Lifecycle of one publish::

    stage      copy and checksum the export, once; nothing is paused yet
    phase one  on every replica at once: pause, load, verify; a failed attempt is repeated
    fallback   a replica that still fails is rolled back to the last good version, else quarantined
    phase two  replicas that hold the new version resume; if there is none, rolled-back ones do

Verification reads checksums back while the replica is paused.  Where the engine cannot tell (see
``slipstream.weights.verify``) the replica is resumed behind its gate, probed, and its answers are withheld until the
probe has passed; if it fails they are discarded.

A replica that was rolled back while others advanced is parked (out of routing) until a later publish reaches it, so
that old weights do not sample beside new ones.  A quarantined replica comes back only through ``readmit``.

>>> import asyncio, numpy as np
>>> from slipstream.inference.fake import FakeEngine
>>> async def demo() -> str:
...     replica = Replica(FakeEngine(300))
...     weights = {name: np.zeros_like(t) for name, t in replica.engine.weights.items()}
...     receipts = await Publisher([replica]).publish(weights, "policy/0/1")
...     return f"{receipts[0].result} {receipts[0].verification.kind} {await replica.weight_version()}"
>>> asyncio.run(demo())
'published checksum policy/0/1'
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from slipstream.errors import InferenceError, PublishError
from slipstream.inference.transfer.raw import digest
from slipstream.inference.types import PauseMode
from slipstream.trajectory import WeightVersion
from slipstream.weights.receipt import Receipt, Result
from slipstream.weights.replica import Replica
from slipstream.weights.transport import Export, InProcessTransport, Staged, Transport
from slipstream.weights.verify import Probe, Verification, compare_checksums

T = TypeVar("T")


@dataclass(frozen=True)
class Deadlines:
    """Seconds per phase and replica.  A pause in mode ``wait`` lasts as long as the longest running request."""

    stage: float = 600.0
    pause: float = 600.0
    load: float = 600.0
    verify: float = 120.0
    resume: float = 60.0


class _Fault(Exception):
    """One attempt failed; the message is the reason."""


@dataclass
class _Progress:
    """What has happened to one replica so far."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: list[str] = field(default_factory=list)
    verification: Verification = field(default_factory=lambda: Verification("none", "unknown", "not reached"))
    opened: bool = False
    attempts: int = 0
    good: bool = False
    result: Result = "quarantined"

    @contextlib.asynccontextmanager
    async def timed(self, phase: str) -> AsyncIterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, T]) -> T:
    """``work``, or ``_Fault`` when it fails or is not done in time.

    This is the fault boundary of publishing: an engine may raise anything, and may not even heed cancellation, so
    the task is left behind rather than waited for.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        raise _Fault(f"{what}: not done within {seconds:g} s")
    if task.cancelled():
        raise _Fault(f"{what}: cancelled by the engine")
    error = task.exception()
    if error is not None:
        if not isinstance(error, Exception):
            raise error
        raise _Fault(f"{what}: {type(error).__name__}: {error}") from error
    return task.result()


class Publisher:
    """Publishes versions of one policy to a fixed set of replicas.

    Args:
        replicas: names must differ.
        transport: how weights travel; default: in process.
        pause_mode: what a pause does to running requests.
        attempts: tries per replica before the fallback.
        fallback: ``rollback`` loads the last good version (quarantine if that fails too); ``quarantine`` does not try.
        lagging: what a rolled-back replica does while others advanced: ``park`` or ``serve`` (its tokens carry the old
            version).
        deadlines: seconds per phase.
        probe: default probe for engines without comparable checksums; ``publish`` may give a fresher one.
        on_receipt: called with each receipt, for the ledger.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        transport: Transport | None = None,
        *,
        pause_mode: PauseMode = "wait",
        attempts: int = 2,
        fallback: Literal["rollback", "quarantine"] = "rollback",
        lagging: Literal["park", "serve"] = "park",
        deadlines: Deadlines | None = None,
        probe: Probe | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        names = [replica.name for replica in replicas]
        if not names or len(set(names)) != len(names):
            raise PublishError(f"a publisher needs replicas with different names, got {names}")
        if attempts < 1:
            raise PublishError(f"attempts must be >= 1, got {attempts}")
        self.replicas = tuple(replicas)
        self._transport: Transport = transport if transport is not None else InProcessTransport()
        if pause_mode == "keep" and not self._transport.continues:
            raise PublishError(
                f"requests kept by a pause would go on with old weights under the new version's name (transport "
                f"{self._transport.name}); use pause_mode wait or abort"
            )
        self._pause_mode: PauseMode = pause_mode
        self._attempts = attempts
        self._fallback = fallback
        self._lagging = lagging
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._probe = probe
        self._on_receipt = on_receipt
        self._last_good: tuple[Staged, Probe | None] | None = None
        self._lock = asyncio.Lock()
        self.receipts: tuple[Receipt, ...] = ()
        """Receipts of the last publish, also when it raised."""

    @property
    def last_good(self) -> str | None:
        """The version that a roll-back would load; None before the first successful publish."""
        return self._last_good[0].version if self._last_good is not None else None

    async def publish(
        self, export: Export, version: WeightVersion | str, *, probe: Probe | None = None
    ) -> list[Receipt]:
        """Publish ``export`` as ``version``; returns one receipt per replica that took part.

        Returns when at least one replica serves the new version; check ``Receipt.published`` of each.  The export is
        read in a worker thread: the trainer must not step meanwhile.

        Raises:
            PublishError: nothing could be staged, every replica is quarantined, or no replica took the version
                (those that could be rolled back serve the last good one again).
        """
        async with self._lock:
            progress = {r.name: _Progress() for r in self.replicas if r.state != "quarantined"}
            active = [r for r in self.replicas if r.name in progress]
            if not active:
                reasons = "; ".join(f"{r.name}: {r.reason}" for r in self.replicas)
                raise PublishError(f"cannot publish {version}: every replica is quarantined ({reasons})")
            self.receipts = ()
            started = time.perf_counter()
            stage = asyncio.to_thread(self._transport.stage, str(version), export)
            try:
                staged = await _within(self._deadlines.stage, "stage", stage)
            except _Fault as fault:
                raise PublishError(f"cannot publish {version}: {fault}; no replica was touched") from fault
            for p in progress.values():
                p.seconds["stage"] = time.perf_counter() - started
            try:
                return await self._run(active, progress, staged, probe or self._probe)
            except BaseException as error:
                await self._interrupted(active, f"publishing {version} was interrupted ({type(error).__name__})")
                if self._last_good is None or self._last_good[0] is not staged:
                    self._transport.release(staged)
                raise

    async def recover(self, health_seconds: float = 5.0) -> list[Receipt]:
        """Try to bring back every quarantined or parked replica whose engine says that it is well.

        One that fails again stays out, with the new reason.  Nobody else is paused.
        """
        receipts = []
        for replica in [r for r in self.replicas if r.state in ("quarantined", "parked")]:
            try:
                well = await _within(health_seconds, "health", replica.engine.health())
            except _Fault:
                well = False
            if well and self._last_good is not None:
                with contextlib.suppress(PublishError):
                    receipts.append(await self.readmit(replica.name))
        return receipts

    async def readmit(self, name: str) -> Receipt:
        """Bring a quarantined (or parked) replica back with the last good version; for instance a restarted engine.

        Raises:
            PublishError: there is no such replica, no last good version, or the replica fails again.
        """
        async with self._lock:
            replica = next((r for r in self.replicas if r.name == name), None)
            if replica is None or self._last_good is None:
                why = "no version has been published yet" if replica is not None else "there is no such replica"
                raise PublishError(f"cannot readmit {name}: {why}")
            staged, probe = self._last_good
            progress = _Progress()
            await self._bring(replica, progress, staged, probe)
            if progress.good:
                progress.result = "published"
                await self._resume(replica, progress, staged.version)
            else:
                await self._quarantine(replica, progress)
            receipt = self._receipt(replica, progress, staged)
            if not receipt.published:
                raise PublishError(f"cannot readmit {name}: {'; '.join(receipt.faults)}")
            return receipt

    def close(self) -> None:
        """Free the transport; no file, segment or group is left.  The engines go on with what they hold."""
        self._last_good = None
        self._transport.close()

    # ---- one publish

    async def _run(
        self, active: Sequence[Replica], progress: dict[str, _Progress], staged: Staged, probe: Probe | None
    ) -> list[Receipt]:
        await asyncio.gather(*(self._bring(r, progress[r.name], staged, probe) for r in active))
        good = [r for r in active if progress[r.name].good]
        bad = [r for r in active if not progress[r.name].good]
        await asyncio.gather(*(self._fall_back(r, progress[r.name]) for r in bad))
        for replica in good:
            progress[replica.name].result = "published"
        await asyncio.gather(*(self._resume(r, progress[r.name], staged.version) for r in good))
        published = any(progress[r.name].result == "published" for r in good)
        for replica in bad:
            if progress[replica.name].result == "rolled_back":
                await self._settle_rolled_back(replica, progress[replica.name], published, staged.version)
        if published:
            old, self._last_good = self._last_good, (staged, probe)
            if old is not None:
                self._transport.release(old[0])
        else:
            self._transport.release(staged)
        self.receipts = tuple(self._receipt(r, progress[r.name], staged) for r in active)
        if not published:
            causes = "; ".join(f"{r.replica} ({r.result}): {' | '.join(r.faults)}" for r in self.receipts)
            raise PublishError(f"no replica took {staged.version}: {causes}")
        return list(self.receipts)

    async def _bring(self, replica: Replica, progress: _Progress, staged: Staged, probe: Probe | None) -> None:
        """Phase one on one replica: pause, then load and verify until it holds or the attempts are used up."""
        first = progress.attempts
        while progress.attempts - first < self._attempts and not progress.good:
            progress.attempts += 1
            try:
                await self._attempt(replica, progress, staged, probe)
                progress.good = True
            except _Fault as fault:
                progress.faults.append(str(fault))

    async def _attempt(self, replica: Replica, progress: _Progress, staged: Staged, probe: Probe | None) -> None:
        engine, deadlines = replica.engine, self._deadlines
        async with progress.timed("pause"):
            await _within(deadlines.pause, f"pause({self._pause_mode})", engine.pause(self._pause_mode))
        replica.hold()
        async with progress.timed("load"):
            await _within(deadlines.load, "load", self._load(replica, progress, staged))
        async with progress.timed("verify"):
            held = await _within(deadlines.verify, "weight_version", engine.weight_version())
            if held != staged.version:
                raise _Fault(f"verify: the replica says it holds {held} after finish({staged.version})")
            checksums = await _within(deadlines.verify, "checksum", engine.checksum())
            progress.verification = compare_checksums(staged.checksums, checksums)
            if progress.verification.verdict == "unknown":
                progress.verification = await self._run_probe(replica, progress.verification, staged, probe)
        if progress.verification.verdict != "ok":
            raise _Fault(f"verify by {progress.verification.kind}: {progress.verification.detail}")

    async def _load(self, replica: Replica, progress: _Progress, staged: Staged) -> None:
        try:
            await replica.engine.start_weight_update()
        except InferenceError:
            # An attempt that died between start and finish leaves the update open: ours, or a dead trainer's.
            await self._transport.abandon(replica.engine)
            try:
                await replica.engine.start_weight_update()
            except InferenceError:
                if not progress.opened:
                    raise
        progress.opened = True
        if not self._transport.after_finish:
            await self._transport.send(staged, replica.engine)
        await replica.engine.finish_weight_update(staged.version)
        progress.opened = False
        if self._transport.after_finish:
            await self._transport.send(staged, replica.engine)

    async def _run_probe(
        self, replica: Replica, unknown: Verification, staged: Staged, probe: Probe | None
    ) -> Verification:
        """Resume behind the closed gate and score fixed tokens; pause again unless they score right."""
        if probe is None:
            raise _Fault(f"verify: {unknown.detail}, and there is no probe; give publish(probe=...)")
        engine, deadlines = replica.engine, self._deadlines
        try:
            await _within(deadlines.resume, "resume", engine.resume())
            verification = await _within(deadlines.verify, "probe", probe.verify(engine, staged.version))
        except BaseException:
            replica.taint()
            raise
        if verification.verdict != "ok":
            # Running requests went on under weights that are wrong.
            replica.taint()
        return verification

    async def _interrupted(self, active: Sequence[Replica], reason: str) -> None:
        """What a loading replica holds is not known, so it may not answer; one that was only paused goes on."""
        for replica in active:
            if replica.state == "held":
                replica.quarantine(reason)
        for replica in active:
            if replica.state == "serving":
                with contextlib.suppress(_Fault):
                    await _within(min(5.0, self._deadlines.resume), "resume", replica.engine.resume())

    async def _fall_back(self, replica: Replica, progress: _Progress) -> None:
        last = self._last_good
        if self._fallback == "rollback" and last is not None:
            try:
                failed = progress.verification
                await self._attempt(replica, progress, *last)
                progress.verification, progress.result = failed, "rolled_back"
                return
            except _Fault as fault:
                progress.faults.append(f"roll back to {last[0].version}: {fault}")
        elif self._fallback == "rollback":
            progress.faults.append("no version to roll back to: none has been published yet")
        await self._quarantine(replica, progress)

    async def _quarantine(self, replica: Replica, progress: _Progress) -> None:
        progress.result = "quarantined"
        replica.quarantine(progress.faults[-1] if progress.faults else "unknown weights")
        await self._stop(replica)

    async def _stop(self, replica: Replica) -> None:
        """End what it has, also what only queued there: its gate is shut, and nobody else would.  It may be dead."""
        for stop in (replica.engine.pause("abort"), replica.engine.abort(None)):
            with contextlib.suppress(_Fault):
                await _within(min(5.0, self._deadlines.resume), "stop", stop)

    async def _resume(self, replica: Replica, progress: _Progress, version: str) -> None:
        try:
            async with progress.timed("resume"):
                await _within(self._deadlines.resume, "resume", replica.engine.resume())
            replica.serve(version)
        except _Fault as fault:
            progress.faults.append(str(fault))
            await self._quarantine(replica, progress)

    async def _settle_rolled_back(
        self, replica: Replica, progress: _Progress, others_advanced: bool, version: str
    ) -> None:
        assert self._last_good is not None
        held = self._last_good[0].version
        if not others_advanced or self._lagging == "serve":
            await self._resume(replica, progress, held)
            return
        # The gate first: whoever is asked again meanwhile must go elsewhere, and not queue here for the next publish.
        replica.park(held, f"it could not take {version} and holds {held}")
        await self._stop(replica)

    def _receipt(self, replica: Replica, progress: _Progress, staged: Staged) -> Receipt:
        receipt = Receipt(
            version=staged.version,
            replica=replica.name,
            result=progress.result,
            holds=replica.holds,
            transport=self._transport.name,
            digest=digest(staged.checksums),
            names=len(staged.checksums),
            bytes=staged.bytes,
            payload_bytes=staged.payload_bytes,
            seconds=dict(progress.seconds),
            verification=progress.verification,
            attempts=progress.attempts,
            faults=tuple(progress.faults),
        )
        if self._on_receipt is not None:
            self._on_receipt(receipt)
        return receipt
