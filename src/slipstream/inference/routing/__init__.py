"""Routing policies: which replica answers a request.

* ``policies``: the decisions of ``vllm-router`` 0.1.17 as pure objects (no clock, no I/O), checked against the real
  router decision by decision in the tests; used by ``inference.pool`` when it routes by itself, and by simulations.
* ``hashing``: the hashes those decisions rest on.  * ``prefixes``: the text tree of the cache-aware policy.

>>> policy = build_policy("sticky_least_loaded")
>>> replicas = [ReplicaView("http://a"), ReplicaView("http://b")]
>>> first = policy.choose(RouteRequest(session_id="s1"), replicas, now=0.0)
>>> second = policy.choose(RouteRequest(session_id="s2"), replicas, now=0.0)
>>> first != second and policy.choose(RouteRequest(session_id="s1"), replicas, now=1.0) == first
True
"""

from slipstream.inference.routing.policies import (
    POLICIES,
    CacheAware,
    ConsistentHash,
    ReplicaView,
    RoundRobin,
    RouteRequest,
    RoutingPolicy,
    StickyLeastLoaded,
    build_policy,
)

__all__ = [
    "POLICIES",
    "CacheAware",
    "ConsistentHash",
    "ReplicaView",
    "RoundRobin",
    "RouteRequest",
    "RoutingPolicy",
    "StickyLeastLoaded",
    "build_policy",
]
