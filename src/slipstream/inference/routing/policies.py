"""The policies of ``vllm-router`` as pure objects.

Owns: one decision per request, from the request's session and tokens, the replicas' loads, and what was decided
before.  Refuses: clocks (``now`` is passed in), HTTP, health checks (an unhealthy replica is left out of the list).

Lifecycle: ``choose`` per request, in order of arrival; ``finish_session`` when a trajectory ends; ``forget`` when a
replica leaves for good.  ``replicas`` must come in the order in which the router lists them (``GET /workers``): round
robin and equal loads depend on it, the session policies do not.

The behaviour is that of version 0.1.17 on its token endpoint, ``POST /inference/v1/generate``, as measured: sessions
are named by the header ``X-Session-ID``; the cache-aware policy looks at token ids only and ignores sessions.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slipstream.errors import InferenceError
from slipstream.inference.routing.hashing import ring_hash
from slipstream.inference.routing.prefixes import PrefixTree

PolicyName = Literal["sticky_least_loaded", "consistent_hash", "cache_aware", "round_robin"]

SESSION_TTL_SECONDS = 7200.0
_SWEEP_SECONDS = 60.0
_POINTS = 160


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A healthy replica as a policy sees it: its base URL and the requests it is working on."""

    url: str
    running: int = 0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a request tells the router."""

    session_id: str | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The token ids as the router writes them."""
        return " ".join(map(str, self.token_ids))


class RoutingPolicy(Protocol):
    """One decision per request."""

    name: str

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        """URL of the replica that answers; ``now`` in seconds, never going back.

        Raises:
            InferenceError: there is no replica.
        """
        ...

    def finish_session(self, session_id: str) -> None:
        """No more requests of this session follow."""
        ...

    def forget(self, url: str) -> None:
        """The replica's cache is gone (it was restarted or removed)."""
        ...


def _need(replicas: Sequence[ReplicaView]) -> None:
    if not replicas:
        raise InferenceError("no replica is in routing: all are down, parked or quarantined")


class RoundRobin:
    """In turn, whatever the load."""

    name = "round_robin"

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        _need(replicas)
        chosen = replicas[self._count % len(replicas)]
        self._count += 1
        return chosen.url

    def finish_session(self, session_id: str) -> None:
        """Knows no sessions."""

    def forget(self, url: str) -> None:
        """Knows no caches."""


class ConsistentHash:
    """A session's replica is where its name falls on a ring of 160 points per replica.

    Needs no memory and moves few sessions when a replica joins or leaves; balances sessions only on average.
    """

    name = "consistent_hash"

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        _need(replicas)
        urls = tuple(replica.url for replica in replicas)
        if urls != self._urls:
            # A later point at the same place replaces an earlier one, as in a map.
            points = {ring_hash(f"{url}:{i}"): url for url in urls for i in range(_POINTS)}
            self._urls, self._ring = urls, sorted(points.items())
        place = ring_hash(self._key(request))
        at = bisect.bisect_left(self._ring, (place, ""))
        return self._ring[at % len(self._ring)][1]

    @staticmethod
    def _key(request: RouteRequest) -> str:
        if request.session_id:
            return f"header:x-session-id:{request.session_id}"
        text = request.text
        return f"request_hash:{ring_hash(text):016x}" if len(text.encode()) > 100 else f"request:{text}"

    def finish_session(self, session_id: str) -> None:
        """Keeps no sessions."""

    def forget(self, url: str) -> None:
        """Knows no caches."""


@dataclass
class _Session:
    url: str
    seen: float


class StickyLeastLoaded:
    """A new session goes to the replica with the fewest open sessions and stays there.

    Equal counts are decided by rendezvous hashing of the session's name.  A session ends with ``finish_session``, or
    after ``ttl`` idle seconds.
    """

    name = "sticky_least_loaded"

    def __init__(self, ttl: float = SESSION_TTL_SECONDS) -> None:
        self._ttl = ttl
        self._sessions: dict[str, _Session] = {}
        self._open: Counter[str] = Counter()
        self._swept: float | None = None

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        _need(replicas)
        self._sweep(now)
        if not request.session_id:
            return self._least(replicas, request.text)
        session = self._sessions.get(request.session_id)
        if session is not None:
            if any(replica.url == session.url for replica in replicas):
                session.seen = now
                return session.url
            self.finish_session(request.session_id)
        url = self._least(replicas, request.session_id)
        self._sessions[request.session_id] = _Session(url, now)
        self._open[url] += 1
        return url

    def _least(self, replicas: Sequence[ReplicaView], key: str) -> str:
        fewest = min(self._open[replica.url] for replica in replicas)
        idle = [replica.url for replica in replicas if self._open[replica.url] == fewest]
        return max(idle, key=lambda url: ring_hash(f"{key}:{url}"))

    def _sweep(self, now: float) -> None:
        if self._swept is None:
            self._swept = now
        if now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            for name in [n for n, s in self._sessions.items() if now - s.seen >= self._ttl]:
                self.finish_session(name)

    def finish_session(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._open[session.url] -= 1

    def forget(self, url: str) -> None:
        """Sessions move when they next ask and the replica is not in the list; one that came back keeps them."""


class CacheAware:
    """The replica that has seen most of the prompt, while loads are balanced; else the least busy one.

    A prefix that several have seen equally far goes to the least busy of them.

    Args:
        threshold: share of the prompt's tokens that must match, and more.
        imbalance: requests by which the busiest may exceed the least busy replica.
        ratio: and the factor that it must exceed too, before the cache is disregarded.
    """

    name = "cache_aware"

    def __init__(self, threshold: float = 0.3, imbalance: int = 64, ratio: float = 1.5) -> None:
        self._threshold, self._imbalance, self._ratio = threshold, imbalance, ratio
        self._tree = PrefixTree()

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        _need(replicas)
        ids = request.token_ids
        idle = min(replicas, key=lambda replica: replica.running)
        busiest = max(replica.running for replica in replicas)
        uneven = busiest - idle.running > self._imbalance and busiest > idle.running * self._ratio
        url = idle.url if uneven else self._nearest(ids, replicas, idle)
        self._tree.insert(ids, url)
        return url

    def _nearest(self, ids: tuple[int, ...], replicas: Sequence[ReplicaView], idle: ReplicaView) -> str:
        seen_by, matched = self._tree.match(ids)
        if not ids or matched / len(ids) <= self._threshold:
            return idle.url
        # Several may have seen it: the least busy of them.
        near = [replica for replica in replicas if replica.url in seen_by]
        if near:
            return min(near, key=lambda replica: replica.running).url
        for url in seen_by:
            self._tree.remove(url)
        return replicas[0].url

    def finish_session(self, session_id: str) -> None:
        """Knows no sessions."""

    def forget(self, url: str) -> None:
        self._tree.remove(url)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "sticky_least_loaded": StickyLeastLoaded,
    "consistent_hash": ConsistentHash,
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
}


def build_policy(name: str) -> RoutingPolicy:
    """A fresh policy by name.

    Raises:
        InferenceError: no such policy.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise InferenceError(f"no routing policy {name!r}; there are {', '.join(POLICIES)}") from None
