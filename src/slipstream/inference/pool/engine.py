"""``PoolEngine``: the pool as one ``Engine``.

Owns: sending each request to one member (through the router, or by the policy), reaching every member with each
control call, and keeping back answers of weights that are not known to be good.
Refuses: retrying a request (the caller's attempts decide).

Answers and weights: while any member that may have answered has an update open, answers are withheld; when its weights
turn out to be wrong they are discarded.  Behind the router it is not known who answered, so a wrong replica costs
whatever was in flight on all of them; with routing in the client only its own.  An answer of a version that was not
there while it was made is discarded, too: a server that somebody restarted answers with its first weights.

An engine that dies in the middle of a token is an ``InferenceError`` here, raised after routing has followed, so that
the next attempt does not meet the same dead replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.pool.member import Member
from slipstream.inference.routing import ReplicaView, RouteRequest
from slipstream.inference.types import Engine, EngineInfo, GenerateRequest, GenerateResult, PauseMode
from slipstream.trajectory import VersionRun

if TYPE_CHECKING:
    from slipstream.inference.pool.pool import ReplicaPool

T = TypeVar("T")


@dataclass
class _Asked:
    """The line that a request goes out on, and what came back of it."""

    line: Engine
    versions: Sequence[VersionRun] = ()


class PoolEngine:
    """See the module; built by ``ReplicaPool``, which starts and closes what is behind it."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._info: EngineInfo | None = None
        self._seen: dict[str, Counter[str]] = {}
        self._lost: Counter[str] = Counter()
        self._delivered = 0

    # ---- lifecycle

    async def start(self) -> None:
        """The pool starts its members; this only waits until one answers."""
        await self._pool.wait_routable()

    async def close(self) -> None:
        """Close the pool."""
        await self._pool.close()

    async def info(self) -> EngineInfo:
        if self._info is None:
            await self._pool.wait_routable()
            self._info = await self._pool.routable[0].engine.info()
        return self._info

    async def health(self) -> bool:
        return bool(self._pool.routable)

    # ---- data plane

    def _choose(self, request: GenerateRequest) -> tuple[Engine, list[Member]]:
        """The line to send on, and who may answer."""
        pool = self._pool
        if pool.data is not None:
            return pool.data, list(pool.members)
        asked = RouteRequest(request.session_id, request.token_ids)
        views = [ReplicaView(member.url, member.running) for member in pool.routable]
        url = pool.policy.choose(asked, views, time.monotonic())
        member = next(member for member in pool.members if member.url == url)
        return member.engine, [member]

    @contextlib.asynccontextmanager
    async def _guarded(self, request: GenerateRequest) -> AsyncIterator[_Asked]:
        """Route a request; on the way out its answer is withheld while it may be wrong, and discarded if it is."""
        pool = self._pool
        await pool.wait_routable()
        line, witnesses = self._choose(request)
        asked = _Asked(line)
        before = sum(member.tainted for member in witnesses)
        began = [len(member.versions) for member in witnesses]
        for member in witnesses:
            member.running += 1
        try:
            yield asked
        except RequestError:
            # A server that somebody restarted may lack what requests name, such as an adapter.
            await asyncio.shield(pool.compare_versions(witnesses))
            raise
        except InferenceError:
            # Shielded: the caller may be cancelled, and the members' states must still be settled.
            await asyncio.shield(pool.suspect())
            raise
        finally:
            pool.done_with(witnesses)
        await pool.wait_settled(witnesses)
        if sum(member.tainted for member in witnesses) != before:
            raise InferenceError(
                f"request {request.request_id}: the answer is discarded, since a replica whose weights failed "
                "verification may have made part of it; ask again"
            )
        there = {v for m, n in zip(witnesses, began, strict=True) for v in m.versions[max(n - 1, 0) :]}
        strange = next((run.version for run in asked.versions if run.version not in there), None)
        if any(began) and strange is not None:
            await asyncio.shield(pool.compare_versions(witnesses))
            raise InferenceError(
                f"request {request.request_id}: the answer is discarded, since it is of version {strange}, and "
                f"published was {', '.join(sorted(there))}; was a server restarted?"
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        async with self._guarded(request) as asked:
            result = await asked.line.generate(request)
            asked.versions = result.versions
        self._delivered += len(result.token_ids)
        return result

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        tasks = [asyncio.ensure_future(self.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        """Partial results; while an update is open only the last one is withheld, and an error there voids the rest."""
        last: GenerateResult | None = None
        async with self._guarded(request) as asked:
            async for part in asked.line.stream(request):
                if last is not None:
                    yield last
                last = part
                asked.versions = part.versions  # complete on the last one
                self._delivered += len(part.token_ids)
        if last is not None:
            yield last

    async def finish_session(self, session_id: str) -> None:
        """No more requests of this session follow; never raises, since the trajectory is over either way."""
        router = self._pool.router
        if router is None:
            self._pool.policy.finish_session(session_id)
            return
        with contextlib.suppress(InferenceError):
            await router.finish_session(session_id)

    # ---- control plane: every member that is up

    async def _everywhere(self, call: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Answers by name.  A member that dies under the call is left out; with none left, those that return are asked.

        Raises:
            InferenceError: a living member refused, or no member came back.
        """
        pool = self._pool
        while True:
            members = [member for member in pool.members if member.state == "up"]
            got = await asyncio.gather(*(call(member.engine) for member in members), return_exceptions=True)
            faults = {m.name: a for m, a in zip(members, got, strict=True) if isinstance(a, BaseException)}
            if faults:
                await pool.suspect()
            for member in members:
                fault = faults.get(member.name)
                if isinstance(fault, InferenceError) and member.state == "up":
                    raise InferenceError(f"replica {member.name}: {fault}") from fault
                if fault is not None and not isinstance(fault, InferenceError):
                    raise fault
            answers = {m.name: a for m, a in zip(members, got, strict=True) if not isinstance(a, BaseException)}
            if answers:
                return answers
            await pool.wait_routable()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._everywhere(lambda engine: engine.abort(request_ids))

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._everywhere(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._everywhere(lambda engine: engine.resume())

    async def is_paused(self) -> bool:
        return any((await self._everywhere(lambda engine: engine.is_paused())).values())

    async def start_weight_update(self) -> None:
        await self._everywhere(lambda engine: engine.start_weight_update())

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        await self._everywhere(lambda engine: engine.update_weights(chunk))

    async def finish_weight_update(self, weight_version: str) -> None:
        await self._everywhere(lambda engine: engine.finish_weight_update(weight_version))

    async def weight_version(self) -> str:
        """The one version of all members that are routed to; in the middle of a publish, all there are."""
        held = await self._everywhere(lambda engine: engine.weight_version())
        names = {member.name for member in self._pool.routable} & held.keys() or held.keys()
        return "+".join(sorted({held[name] for name in names}))

    async def checksum(self) -> Mapping[str, str]:
        """The members' common checksums; ``InferenceError`` when they differ."""
        held = await self._everywhere(lambda engine: engine.checksum())
        (first, want), *others = held.items()
        for name, got in others:
            wrong = sorted(n for n in want.keys() | got.keys() if want.get(n) != got.get(n))
            if wrong:
                raise InferenceError(f"replicas {first} and {name} hold different weights: {', '.join(wrong[:3])}")
        return want

    async def reset_prefix_cache(self) -> None:
        await self._everywhere(lambda engine: engine.reset_prefix_cache())

    async def metrics(self) -> Mapping[str, float]:
        """Sums over the members.

        Counters go on over restarts, up to what a replica had last told before it died; ``delivered_tokens_total``
        counts the tokens of answers that arrived here.
        """
        now = {name: Counter(got) for name, got in (await self._everywhere(lambda engine: engine.metrics())).items()}
        for name, counts in now.items():
            before = self._seen.get(name, Counter())
            # A counter that went back belongs to a new life of the replica.
            for key, value in before.items():
                if key.endswith("_total") and counts[key] < value:
                    self._lost[key] += value  # type: ignore[assignment]
            self._seen[name] = counts
        total: Counter[str] = Counter()
        for counts in [*self._seen.values(), self._lost]:
            for key, value in counts.items():
                total[key] += value
        return {**{k: float(v) for k, v in total.items()}, "delivered_tokens_total": float(self._delivered)}

    @property
    def lines(self) -> Mapping[str, HttpEngine | Engine]:
        """Each member's own engine by name, for whoever publishes to each."""
        return {member.name: member.engine for member in self._pool.members}
