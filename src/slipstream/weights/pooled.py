"""Publishing to a replica pool.

Owns: the link between a publisher's replicas and a pool's members: gates, quarantine, catching up after a restart.
Refuses: how weights travel (the transport) and when a member is restarted (the pool).

    pool = build_pool(settings.inference, path, log_dir=logs)
    replicas = [PooledReplica(pool, member) for member in pool.members]
    publisher = Publisher(replicas, transport)
    link(pool, publisher)

From then on: a replica is routed to only while the publisher holds its weights for good; a member that died is
quarantined at once, and after its restart it is brought to the last good version and verified before it answers.  One
that lives and was quarantined since it took no weights is given another chance before the next publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.errors import InferenceError, PublishError
from slipstream.inference.pool.member import Member
from slipstream.inference.pool.pool import ReplicaPool
from slipstream.trajectory import WeightVersion
from slipstream.weights.publisher import Publisher
from slipstream.weights.receipt import Receipt
from slipstream.weights.replica import Replica
from slipstream.weights.transport import Export
from slipstream.weights.verify import Probe

FRESH = "restarted before anything was published; waits for the first publish"


class PooledReplica(Replica):
    """A member behind its gate; the pool's routing follows the gate.

    Requests go through ``pool.engine``, which withholds and discards answers as the gate says.
    """

    def __init__(self, pool: ReplicaPool, member: Member) -> None:
        super().__init__(member.engine, member.name)
        self.pool, self.member = pool, member

    def hold(self) -> None:
        super().hold()
        self.pool.hold(self.member)

    def serve(self, version: str) -> None:
        super().serve(version)
        self.pool.admit(self.member, version)

    def park(self, version: str, reason: str) -> None:
        super().park(version, reason)
        self.pool.withdraw(self.member, reason, drain=True)

    def quarantine(self, reason: str) -> None:
        super().quarantine(reason)
        self.pool.withdraw(self.member, reason, drain=True)

    def taint(self) -> None:
        super().taint()
        self.pool.taint(self.member)


def link(pool: ReplicaPool, publisher: Publisher) -> None:
    """Let the pool quarantine what died and bring back what was restarted."""
    replicas = {replica.name: replica for replica in publisher.replicas}

    def on_down(member: Member, reason: str) -> None:
        replicas[member.name].quarantine(f"down: {reason.splitlines()[0]}")

    async def resync(member: Member) -> None:
        if publisher.last_good is None:
            # It holds what every other replica holds now: the weights of its directory.
            version = await member.engine.weight_version()
            replicas[member.name].park(version, FRESH)
            return
        try:
            await publisher.readmit(member.name)
        except Exception as error:
            # Fault boundary: a receipt that cannot be written is no fault of the replica's; the next publish raises it.
            if isinstance(error, PublishError) or replicas[member.name].state != "serving":
                raise
            pool.remember(error)

    pool.on_down, pool.resync = on_down, resync


async def _readmit_living(pool: ReplicaPool, publisher: Publisher) -> None:
    """Another chance for replicas that live, but whose weights could not be made good at an earlier publish."""
    living = {member.name for member in pool.members if member.state == "up"}
    if any(replica.state == "quarantined" and replica.name in living for replica in publisher.replicas):
        await publisher.recover()


async def publish_to_pool(
    pool: ReplicaPool,
    publisher: Publisher,
    export: Callable[[], Export],
    version: WeightVersion | str,
    *,
    probe: Probe | None = None,
    seconds: float = 1800.0,
    attempts: int = 3,
) -> Sequence[Receipt]:
    """Publish, waiting for replicas that are being restarted when there is no other.

    Args:
        pool: whose members are published to.
        publisher: over the pool's replicas.
        export: makes a fresh export for each attempt; the weights must not change meanwhile.
        version: the same for every attempt, since the weights are.
        probe: for replicas whose checksums cannot be compared.
        seconds: deadline of all attempts.
        attempts: a replica may die in the middle of each.

    Raises:
        PublishError: no replica took the version, or none came back in time.
        Exception: what a listener of the pool has failed with since the last publish, such as ``LedgerError``.
    """
    pool.raise_untold()
    try:
        async with asyncio.timeout(seconds):
            for left in reversed(range(attempts)):
                await _readmit_living(pool, publisher)
                # Not until one is routed to: one that was restarted before the first publish waits for that itself.
                await pool.wait_until(lambda: any(replica.state != "quarantined" for replica in publisher.replicas))
                try:
                    return await publisher.publish(export(), version, probe=probe)
                except PublishError:
                    # Worth another attempt only when a process died under it and will be back.
                    if not left or not any(member.state in ("down", "starting") for member in pool.members):
                        raise
                    await pool.suspect()
    except TimeoutError as error:
        raise PublishError(f"cannot publish {version}: not done within {seconds:g} s") from error
    except InferenceError as error:
        raise PublishError(f"cannot publish {version}: {error}") from error
    raise AssertionError("unreachable")
