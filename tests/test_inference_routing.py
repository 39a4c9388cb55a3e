"""Routing policies: their decisions are the real router's, one by one."""

import asyncio
import random

import psutil
import pytest

from routing_kit import routed
from slipstream.errors import InferenceError
from slipstream.inference.launch.router import RouterProcess, router_installed
from slipstream.inference.routing import POLICIES, ReplicaView, RouteRequest, StickyLeastLoaded, build_policy
from slipstream.inference.routing.hashing import furc_hash, murmur64a
from slipstream.inference.routing.prefixes import PrefixTree

needs_router = pytest.mark.skipif(not router_installed(), reason="the wheel vllm-router is not installed")
A, B, C = (ReplicaView(f"http://{name}:1") for name in "abc")


def ask(policy, session, replicas=(A, B, C), ids=(), now=0.0):
    return policy.choose(RouteRequest(session, tuple(ids)), replicas, now)


# ---- against vllm-router


@needs_router
async def test_a_start_that_is_cancelled_leaves_no_router(tmp_path):
    def below() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}

    before = below()
    router = RouterProcess("round_robin", tmp_path / "log")
    starting = asyncio.create_task(router.start(["http://127.0.0.1:9"]))  # nobody is there, so it is never ready
    while len(below() - before) < 2:  # its guard, and the router below that
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert below() <= before


@needs_router
async def test_sticky_least_loaded_decides_as_the_router(tmp_path):
    rng = random.Random(1)
    policy = build_policy("sticky_least_loaded")
    async with routed("sticky_least_loaded", 4, tmp_path / "log") as real:
        open_sessions: list[str] = []
        views = await real.views()
        for step in range(120):
            if step == 40:
                await real.router.set_workers(real.echoes.urls[1:])
                views = await real.views()
                continue
            if step == 80:
                await real.router.set_workers(real.echoes.urls)
                views = await real.views()
                continue
            if open_sessions and rng.random() < 0.25:
                ended = open_sessions.pop(rng.randrange(len(open_sessions)))
                policy.finish_session(ended)
                await real.router.finish_session(ended)
                continue
            if open_sessions and rng.random() < 0.5:
                session = rng.choice(open_sessions)
            else:
                session = f"group-{step // 8}/s{step}/a0"
                open_sessions.append(session)
            assert await real.ask(session, [1, 2, 3]) == ask(policy, session, views), f"step {step}, {session}"


@needs_router
async def test_consistent_hash_decides_as_the_router(tmp_path):
    policy = build_policy("consistent_hash")
    seen = set()
    async with routed("consistent_hash", 4, tmp_path / "log") as real:
        views = await real.views()
        for step in range(90):
            if step == 60:
                await real.router.set_workers(real.echoes.urls[:3])
                views = await real.views()
            got = await real.ask(f"group-{step}/s{step % 5}/a0", [step])
            assert got == ask(policy, f"group-{step}/s{step % 5}/a0", views), f"step {step}"
            seen.add(got)
    assert len(seen) == 4


@needs_router
async def test_round_robin_decides_as_the_router(tmp_path):
    policy = build_policy("round_robin")
    async with routed("round_robin", 3, tmp_path / "log") as real:
        views = await real.views()
        for step in range(12):
            assert await real.ask(None, [step]) == ask(policy, None, views), f"step {step}"


@needs_router
async def test_cache_aware_decides_as_the_router(tmp_path):
    rng = random.Random(2)
    policy = build_policy("cache_aware")
    decided = {"affinity": 0, "idle": 0}
    histories: list[list[int]] = []
    async with routed("cache_aware", 3, tmp_path / "log") as real:
        for step in range(150):
            if histories and rng.random() < 0.55:
                ids = rng.choice(histories)
                ids += [rng.randrange(50000) for _ in range(rng.randrange(1, 60))]
            elif histories and rng.random() < 0.5:
                other = rng.choice(histories)
                ids = other[: rng.randrange(1, len(other))] + [rng.randrange(50000) for _ in range(rng.choice([5, 40]))]
                histories.append(ids)
            else:
                ids = [rng.randrange(50000) for _ in range(rng.randrange(5, 120))]
                histories.append(ids)
            views = await real.views()
            hold = rng.random() < 0.3
            want = ask(policy, None, views, ids)
            assert await real.ask(None, ids, hold) == want, f"step {step}: {views}"
            idle = min(views, key=lambda view: view.running).url
            decided["idle" if want == idle else "affinity"] += 1
            if step % 40 == 39:
                await real.release()
        await real.release()
    assert min(decided.values()) > 20, f"the run decided one way only: {decided}"


@needs_router
async def test_cache_aware_leaves_the_cache_when_loads_are_uneven(tmp_path):
    policy = build_policy("cache_aware")
    ids = list(range(100, 160))
    async with routed("cache_aware", 2, tmp_path / "log") as real:
        owners = []
        for _ in range(70):
            views = await real.views()
            want = ask(policy, None, views, ids)
            assert await real.ask(None, ids, hold=True) == want
            owners.append(want)
        await real.release()
    assert len(set(owners[:60])) == 1
    assert len(set(owners)) == 2


# ---- by themselves


def test_a_session_stays_and_new_ones_spread():
    policy = StickyLeastLoaded()
    where = [ask(policy, f"s{i}") for i in range(9)]
    assert sorted(map(where.count, {A.url, B.url, C.url})) == [3, 3, 3]
    assert [ask(policy, f"s{i}") for i in range(9)] == where


def test_an_ended_session_makes_room():
    policy = StickyLeastLoaded()
    where = {f"s{i}": ask(policy, f"s{i}") for i in range(6)}
    on_a = [name for name, url in where.items() if url == A.url]
    for name in on_a:
        policy.finish_session(name)
    assert {ask(policy, "n1"), ask(policy, "n2")} == {A.url}


def test_a_lost_replicas_sessions_move_and_stay_moved():
    policy = StickyLeastLoaded()
    names = [f"s{i}" for i in range(6)]
    for name in names:
        ask(policy, name)
    moved = [ask(policy, name, (B, C)) for name in names]
    assert A.url not in moved
    assert [ask(policy, name) for name in names] == moved


def test_idle_sessions_expire():
    policy = StickyLeastLoaded(ttl=100)
    for i in range(3):
        ask(policy, f"old{i}", (A,), now=0)
    ask(policy, "new", (B,), now=50)
    assert ask(policy, "x", (A, B), now=60) == B.url
    assert ask(policy, "y", (A, B), now=161) == A.url


def test_consistent_hash_moves_few_sessions_when_a_replica_joins():
    policy = build_policy("consistent_hash")
    names = [f"session-{i}" for i in range(600)]
    before = [ask(policy, name, (A, B, C)) for name in names]
    after = [ask(policy, name, (A, B, C, ReplicaView("http://d:1"))) for name in names]
    moved = [(x, y) for x, y in zip(before, after, strict=True) if x != y]
    assert {y for _, y in moved} == {"http://d:1"}
    assert 0.1 < len(moved) / len(names) < 0.45


@pytest.mark.parametrize("name", list(POLICIES))
def test_without_replicas_the_error_says_so(name):
    with pytest.raises(InferenceError, match="no replica is in routing"):
        ask(build_policy(name), "s", ())


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(InferenceError, match="sticky_least_loaded"):
        build_policy("best")


def test_murmur_is_murmur():
    # Reference values of MurmurHash64A, one per length of the tail.
    assert murmur64a(b"hello", 0) == 0x1E68D17C457BF117
    assert murmur64a(b"", 0) == 0


def test_furc_hash_moves_only_to_the_new_bucket():
    keys = [f"key-{i}" for i in range(2000)]
    for n in (3, 8, 17):
        small, large = [furc_hash(k, n) for k in keys], [furc_hash(k, n + 1) for k in keys]
        moved = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
        assert {b for _, b in moved} == {n}
        assert 0.5 < len(moved) * (n + 1) / len(keys) < 1.6


def test_prefix_tree_finds_the_longest_and_forgets():
    tree = PrefixTree()
    tree.insert((1, 2, 3, 4, 5, 6), "x")
    tree.insert((1, 2, 3, 7, 8, 9), "y")
    assert tree.match((1, 2, 3, 4, 5, 6, 0, 0)) == ({"x"}, 6)
    assert tree.match((1, 2, 3, 7, 0)) == ({"y"}, 4)
    assert tree.match((1, 2, 3, 0)) == ({"x", "y"}, 3)
    tree.remove("x")
    assert tree.match((1, 2, 3, 4)) == ({"y"}, 3)
    assert tree.match((1, 2, 3, 7, 8, 9)) == ({"y"}, 6)


def test_cache_aware_counts_tokens_not_characters():
    policy = build_policy("cache_aware")
    busy = (ReplicaView(A.url, 1), B)
    assert ask(policy, None, (A, B), range(8)) == A.url
    assert ask(policy, None, busy, (0, 1, 2, 3, *range(50000, 50004))) == A.url
    assert ask(policy, None, busy, (0, 1, *range(3, 9))) == B.url
