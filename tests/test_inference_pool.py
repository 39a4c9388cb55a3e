"""Replica pools: routing, gates, deaths, restarts, catching up; in process and with real servers and router."""

import asyncio
import contextlib
import signal
import socket

import numpy as np
import psutil
import pytest

from pool_kit import family, far_pool, near_pool, request, server_process
from slipstream.config.settings import InferenceSettings
from slipstream.errors import InferenceError, LedgerError, PublishError, RequestError, SettingsError
from slipstream.inference.fake import FakeEngine
from slipstream.inference.launch.router import router_installed
from slipstream.inference.pool.build import build_pool, needs_pool
from slipstream.inference.pool.member import Member
from slipstream.inference.pool.pool import ReplicaPool
from slipstream.inference.types import Engine
from slipstream.weights import InProcessTransport, MemoryTransport, Publisher
from slipstream.weights.pooled import PooledReplica, link, publish_to_pool

needs_router = pytest.mark.skipif(not router_installed(), reason="the wheel vllm-router is not installed")


async def until(holds, seconds=60):
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def counts(pool):
    return [len(member.engine.requests) for member in pool.members]


# ---- in this process


async def test_a_pool_is_an_engine_and_sessions_stay():
    async with near_pool(3) as pool:
        assert isinstance(pool.engine, Engine)
        for turn in range(3):
            await pool.engine.generate_many([request(f"{s}-{turn}", f"s{s}") for s in range(6)])
        seen = [{r.session_id for r in member.engine.requests} for member in pool.members]
        assert counts(pool) == [6, 6, 6]
        assert sum(map(len, seen)) == 6


async def test_an_ended_session_makes_room():
    async with near_pool(2) as pool:
        await pool.engine.generate_many([request(f"a{i}", f"s{i}") for i in range(4)])
        busy = {r.session_id for r in pool.members[0].engine.requests}
        for name in busy:
            await pool.engine.finish_session(name)
        await pool.engine.generate_many([request(f"b{i}", f"n{i}") for i in range(2)])
        assert counts(pool) == [4, 2]


async def test_control_calls_reach_every_member():
    async with near_pool(3) as pool:
        await pool.engine.pause("keep")
        assert [await member.engine.is_paused() for member in pool.members] == [True] * 3
        await pool.engine.start_weight_update()
        await pool.engine.finish_weight_update("policy/0/1")
        await pool.engine.resume()
        assert {await member.engine.weight_version() for member in pool.members} == {"policy/0/1"}
        assert await pool.engine.weight_version() == "policy/0/1"
        assert not await pool.engine.is_paused()


async def test_a_member_that_dies_under_a_control_call_is_left_out():
    async with near_pool(2, health_failures=1) as pool:
        await pool.members[0].engine.close()

        async def dead():
            raise InferenceError("connection lost")

        pool.members[0].engine.weight_version = dead
        assert await pool.engine.weight_version() == "policy/0/0"
        assert pool.members[0].state == "down"


async def test_a_living_member_that_refuses_a_control_call_is_named():
    async with near_pool(2) as pool:
        with pytest.raises(InferenceError, match="replica r0: start_weight_update needs a paused engine"):
            await pool.engine.start_weight_update()


async def test_metrics_are_sums():
    async with near_pool(2) as pool:
        await pool.engine.generate_many([request(f"r{i}", f"s{i}", max_tokens=5) for i in range(4)])
        metrics = await pool.engine.metrics()
        assert (metrics["generation_tokens_total"], metrics["delivered_tokens_total"]) == (20, 20)


async def test_counters_go_on_over_a_restart():
    async with near_pool(1) as pool:
        await pool.engine.generate(request("a", max_tokens=7))
        await pool.engine.metrics()
        pool.members[0].engine = FakeEngine(300)
        await pool.engine.generate(request("b", max_tokens=2))
        assert (await pool.engine.metrics())["generation_tokens_total"] == 9


async def test_an_answer_is_withheld_while_an_update_is_open():
    async with near_pool(1) as pool:
        member = pool.members[0]
        pool.hold(member)
        answer = asyncio.create_task(pool.engine.generate(request("a")))
        await until(lambda: member.running == 0 and member.engine.requests)
        await asyncio.sleep(0.05)
        assert not answer.done()
        pool.admit(member)
        assert len((await answer).token_ids) == 4


async def test_an_answer_of_wrong_weights_is_discarded_and_others_are_not():
    async with near_pool(2, step=0.02, policy="round_robin") as pool:
        bad, good = (asyncio.create_task(pool.engine.generate(request(n))) for n in ("bad", "good"))
        await until(lambda: counts(pool) == [1, 1])
        pool.taint(pool.members[0])
        pool.withdraw(pool.members[0], "failed its checksum", drain=True)
        with pytest.raises(InferenceError, match="the answer is discarded"):
            await bad
        assert len((await good).token_ids) == 4
        await pool.engine.generate_many([request(f"r{i}") for i in range(4)])
        assert counts(pool) == [1, 5]


async def test_a_dead_member_is_left_out_and_a_request_on_it_is_an_error():
    async with near_pool(2, step=0.01, policy="round_robin", health_failures=1) as pool:
        told = []
        pool.on_down = lambda member, reason: told.append((member.name, reason))
        on_it = asyncio.create_task(pool.engine.generate(request("a", max_tokens=400)))
        await until(lambda: counts(pool) == [1, 0])
        await pool.members[0].engine.close()
        with pytest.raises(InferenceError):
            await on_it
        # By the time the caller has the error, routing has followed.
        await pool.engine.generate_many([request(f"r{i}") for i in range(4)])
        assert counts(pool) == [1, 4]
        assert told == [("r0", "1 health checks in a row failed")]


async def test_requests_wait_for_a_member_that_comes_back_up_to_date():
    async with near_pool(1, health_failures=1) as pool:
        member, synced = pool.members[0], []

        async def resync(back):
            synced.append(back.name)
            assert not back.routable

        pool.resync = resync
        await member.engine.close()
        await until(lambda: member.state == "down")
        waiting = asyncio.create_task(pool.engine.generate(request("a")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        member.engine = FakeEngine(300)
        assert len((await waiting).token_ids) == 4
        assert synced == ["r0"]


async def test_a_failing_resync_is_tried_again_and_never_routed_to():
    async with near_pool(1, health_failures=1) as pool:
        member, tries = pool.members[0], []

        async def resync(back):
            tries.append(1)
            if len(tries) < 2:
                raise InferenceError("the weights did not verify")

        pool.resync = resync
        await member.engine.close()
        await until(lambda: member.state == "down")
        member.engine = FakeEngine(300)
        await until(lambda: len(tries) == 1)
        assert not pool.routable
        await until(lambda: member.state == "up")
        assert len(tries) == 2


async def test_the_wait_for_a_replica_has_a_deadline_and_names_the_reason():
    async with near_pool(1, health_failures=1, recover_seconds=0.3) as pool:
        await pool.members[0].engine.close()
        await until(lambda: pool.members[0].state == "down")
        with pytest.raises(InferenceError, match=r"within 0.3 s: r0 is down \(.*does not answer"):
            await pool.engine.generate(request("a"))


async def test_a_closed_pool_says_so_to_those_who_wait():
    pool = near_pool(1)
    await pool.start()
    pool.withdraw(pool.members[0], "parked", drain=False)
    waiting = asyncio.create_task(pool.engine.generate(request("a")))
    await asyncio.sleep(0.02)
    await pool.close()
    with pytest.raises(InferenceError, match="the pool is closed"):
        await waiting


async def test_members_need_different_names():
    with pytest.raises(InferenceError, match="different names"):
        ReplicaPool([Member("a", FakeEngine(300)), Member("a", FakeEngine(300))])


# ---- a router that fails


class FrailRouter:
    """Stands in for the router process: dies, refuses and fails to start as told."""

    url, why_ended = "http://router:1", "router ended by signal 9"

    def __init__(self):
        self.exited = asyncio.Event()
        self.exited.set()
        self.starts, self.workers, self.broken, self.deaf = 0, [], False, False

    async def start(self, urls):
        self.starts += 1
        if self.broken:
            raise InferenceError("no port is free")
        self.exited.clear()
        self.workers, self.deaf = list(urls), False

    async def set_workers(self, urls):
        if self.deaf:
            raise InferenceError("the router does not follow")
        self.workers = list(urls)

    async def stop(self):
        self.exited.set()


def routed_pool(monkeypatch, **options):
    monkeypatch.setattr("slipstream.inference.pool.pool._BACKOFF_SECONDS", 0.01)
    pool = near_pool(2, **options)
    pool.router, told = FrailRouter(), []
    pool.on_router = told.append
    return pool, told


async def test_whoever_suspects_a_dead_router_waits_until_it_is_back(monkeypatch):
    pool, told = routed_pool(monkeypatch)
    async with pool:
        pool.router.exited.set()
        await pool.suspect()
        assert (pool.router.starts, pool.router.exited.is_set()) == (2, False)
        assert told == ["the router is down: router ended by signal 9", "the router is up"]
        await pool.wait_routable()


async def test_a_router_that_cannot_be_started_again_is_given_up_with_the_reason(monkeypatch):
    pool, told = routed_pool(monkeypatch, restarts=2)
    async with pool:
        pool.router.broken = True
        pool.router.exited.set()
        with pytest.raises(InferenceError, match="given up after 2 restarts; last: router ended by signal 9"):
            await pool.wait_routable()
        assert pool.router.starts == 3
        assert "given up" in told[-1]


async def test_a_router_that_follows_nobody_is_replaced(monkeypatch):
    pool, told = routed_pool(monkeypatch)
    async with pool:
        pool.router.deaf = True
        pool.withdraw(pool.members[0], "parked", drain=False)
        await until(lambda: pool.router.workers == ["r1"])
        assert pool.router.starts == 2
        assert told[-1] == "the router is up"


# ---- processes


def port_is_free(url):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return True


@needs_router
@pytest.mark.slow
async def test_engine_killed_mid_token_behind_the_router(tmp_path):
    """The lost request is a typed, retryable error; the next one is answered; the engine returns; nothing is left."""
    pool = far_pool(tmp_path, step=0.01)
    synced = []

    async def resync(member):
        synced.append(member.name)

    pool.resync = resync
    async with pool:
        started = family(pool)
        asked = [asyncio.create_task(pool.engine.generate(request(f"r{i}", f"s{i}", max_tokens=300))) for i in range(4)]
        await asyncio.sleep(1.0)
        victim = pool.members[0]
        server_process(victim).send_signal(signal.SIGKILL)
        done = await asyncio.gather(*asked, return_exceptions=True)
        lost = [answer for answer in done if isinstance(answer, BaseException)]
        assert len(lost) == 2, done
        assert {type(answer) for answer in lost} == {InferenceError}
        # All of these are answered, though a replica is missing: sessions of the dead one have moved.
        again = await pool.engine.generate_many([request(f"again{i}", f"s{i}") for i in range(4)])
        assert [len(answer.token_ids) for answer in again] == [4] * 4
        await until(lambda: victim.state == "up")
        assert (synced, victim.restarts) == (["r0"], 1)
        await until(lambda: len(pool.router._workers) == 2)
        assert set(await pool.router.workers()) == {member.url for member in pool.members}
        urls = [member.url for member in pool.members] + [pool.router.url]
        started += family(pool)
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert all(map(port_is_free, urls))


@needs_router
@pytest.mark.slow
async def test_router_killed_and_engine_hung(tmp_path):
    """A dead router is replaced; an engine that stops answering is ended and restarted."""
    async with far_pool(tmp_path, step=0.01, health_failures=1) as pool:
        before = pool.router.child.pid
        psutil.Process(before).children()[0].kill()
        await until(lambda: pool.router._child is not None and pool.router.child.pid != before)
        await pool.engine.generate(request("a", "s"))
        # Behind the router it is not known who answers: asked directly, a hung engine misses its health deadline.
        victim = pool.members[1]
        victim.engine._control = 1.0
        server_process(victim).suspend()
        await until(lambda: victim.state == "down")
        await until(lambda: victim.state == "up")
        assert victim.restarts == 1
        answers = await pool.engine.generate_many([request(f"b{i}", f"t{i}") for i in range(6)])
        assert len(answers) == 6


@pytest.mark.slow
async def test_a_restarted_engine_is_brought_to_the_last_good_version_before_it_answers(tmp_path):
    """The opening incident: a replica that came back with its first weights must not answer with them."""
    pool = far_pool(tmp_path, count=2, router=False, policy="round_robin")
    async with pool:
        replicas = [PooledReplica(pool, member) for member in pool.members]
        publisher = Publisher(replicas, MemoryTransport())
        link(pool, publisher)
        twin = FakeEngine(300, scale=1.0, seed=9)
        receipts = await publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/1")
        assert [receipt.result for receipt in receipts] == ["published", "published"]
        want = await twin.generate(request("want"))
        server_process(pool.members[0]).kill()
        for i in range(12):
            try:
                answer = await pool.engine.generate(request(f"a{i}"))
            except InferenceError:
                continue
            assert answer.token_ids == want.token_ids
            assert [run.version for run in answer.versions] == ["policy/0/1"]
        await until(lambda: pool.members[0].routable)
        assert pool.members[0].restarts == 1
        assert await pool.members[0].engine.weight_version() == "policy/0/1"
        direct = await pool.members[0].engine.generate(request("direct"))
        assert direct.token_ids == want.token_ids
        publisher.close()


async def test_replicas_that_were_lost_before_anything_was_published_take_the_first_publish():
    class Sick(FakeEngine):
        well = True

        async def health(self):
            return self.well and await super().health()

    engines = [Sick(300, seed=i) for i in range(2)]
    pool = ReplicaPool(
        [Member(f"r{i}", engine) for i, engine in enumerate(engines)],
        health_seconds=0.02,
        health_failures=1,
        recover_seconds=20.0,
    )
    async with pool:
        publisher = Publisher([PooledReplica(pool, member) for member in pool.members])
        link(pool, publisher)
        for engine in engines:
            engine.well = False
        await until(lambda: all(replica.state == "quarantined" for replica in publisher.replicas))
        twin = FakeEngine(300, seed=9)
        publishing = asyncio.create_task(publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/1"))
        await asyncio.sleep(0.05)
        assert not publishing.done()
        for engine in engines:
            engine.well = True
        assert {receipt.result for receipt in await publishing} == {"published"}
        assert len((await pool.engine.generate(request("a"))).token_ids) == 4


async def test_a_living_replica_that_took_no_weights_is_given_another_chance_at_the_next_publish():
    class Broken(FakeEngine):
        broken = False

        async def update_weights(self, chunk):
            if self.broken:
                raise InferenceError("no room for weights")
            await super().update_weights(chunk)

    engines = [Broken(300, seed=i) for i in range(2)]
    pool = ReplicaPool([Member(f"r{i}", engine) for i, engine in enumerate(engines)], recover_seconds=20.0)
    async with pool:
        publisher = Publisher([PooledReplica(pool, member) for member in pool.members])
        link(pool, publisher)
        results = []
        for counter in (1, 2, 3):
            engines[1].broken = counter == 2
            twin = FakeEngine(300, seed=counter)
            got = await publish_to_pool(pool, publisher, lambda twin=twin: twin.weights, f"policy/0/{counter}")
            results.append([receipt.result for receipt in got])
        assert results == [["published"] * 2, ["published", "quarantined"], ["published"] * 2]
        engines[0].broken = engines[1].broken = True
        with pytest.raises(PublishError):
            await publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/4")
        engines[0].broken = engines[1].broken = False
        got = await publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/5")
        assert [receipt.result for receipt in got] == ["published"] * 2


# ---- servers that others run


class Foreign(FakeEngine):
    """A server that somebody may restart: it then has its first weights, under its own name for them."""

    def __init__(self, seed=0, refuses=False, **options):
        super().__init__(300, seed=seed, scale=1.0, weight_version="default", **options)
        self.refuses = refuses

    async def generate(self, request):
        if self.refuses:
            raise RequestError("the model policy-adapter does not exist")
        return await super().generate(request)

    async def finish_weight_update(self, weight_version):
        await super().finish_weight_update(weight_version)
        self.refuses = False


@contextlib.asynccontextmanager
async def published(*engines, router=None, data=None, **options):
    """A pool over these engines that hold the weights of seed 9 as policy/0/1; what it tells; its publisher."""
    members = [Member(f"r{i}", engine) for i, engine in enumerate(engines)]
    pool = ReplicaPool(members, policy="round_robin", health_seconds=30.0, recover_seconds=20.0)
    pool.router, told = router, []
    async with pool:
        pool.data = data
        publisher = Publisher([PooledReplica(pool, member) for member in pool.members], **options)
        link(pool, publisher)
        pool.on_change = lambda member: told.append(f"{member.name} is {member.state} {member.reason}".rstrip())
        await publish_to_pool(pool, publisher, lambda: FakeEngine(300, scale=1.0, seed=9).weights, "policy/0/1")
        yield pool, publisher, told


async def test_an_answer_of_a_server_that_somebody_restarted_is_discarded_and_it_is_brought_back():
    engines = [Foreign(), Foreign()]
    async with published(*engines) as (pool, _, told):
        want = await pool.engine.generate(request("want"))
        engines[0].__init__()
        answers = await asyncio.gather(
            *(pool.engine.generate(request(f"a{i}")) for i in range(4)), return_exceptions=True
        )
        lost = [answer for answer in answers if isinstance(answer, InferenceError)]
        assert len(lost) == 2
        assert "it is of version default, and published was policy/0/1; was a server restarted?" in str(lost[0])
        assert {answer.token_ids for answer in answers if answer not in lost} == {want.token_ids}
        await until(lambda: len(pool.routable) == 2)
        assert told == [
            "r0 is down it answers as version default, published was policy/0/1: was it restarted?",
            "r0 is up",
        ]
        for i in range(4):
            assert (await pool.engine.generate(request(f"b{i}"))).token_ids == want.token_ids


async def test_behind_a_router_the_restarted_server_is_found_by_asking_and_the_others_stay():
    engines = [Foreign(), Foreign()]
    async with published(*engines, router=FrailRouter(), data=engines[0]) as (pool, publisher, told):
        engines[0].__init__()
        with pytest.raises(InferenceError, match="it is of version default"):
            await pool.engine.generate(request("a"))
        await until(lambda: len(pool.routable) == 2)
        assert [text.partition(" it")[0] for text in told] == ["r0 is down", "r0 is up"]
        assert await engines[0].weight_version() == "policy/0/1"
        assert (await pool.engine.generate(request("b"))).versions[0].version == publisher.last_good


async def test_a_restarted_server_that_refuses_what_requests_name_is_found_too():
    engine = Foreign()
    async with published(engine) as (pool, _, told):
        engine.__init__(refuses=True)
        with pytest.raises(RequestError, match="does not exist"):
            await pool.engine.generate(request("a"))
        await until(lambda: bool(pool.routable))
        assert len(told) == 2
        assert (await pool.engine.generate(request("b"))).versions[0].version == "policy/0/1"
        engine.refuses = True  # and one that holds what it should is not taken out
        with pytest.raises(RequestError):
            await pool.engine.generate(request("c"))
        assert len(told) == 2


async def test_a_stream_of_a_restarted_server_ends_with_an_error():
    engine = Foreign()
    async with published(engine) as (pool, _, _):
        engine.__init__()
        with pytest.raises(InferenceError, match="it is of version default"):
            [part async for part in pool.engine.stream(request("a"))]


async def test_tokens_of_every_version_that_was_there_meanwhile_are_good():
    engine = Foreign(step_seconds=0.002)
    async with published(engine, pause_mode="keep") as (pool, publisher, told):
        answer = asyncio.create_task(pool.engine.generate(request("a", max_tokens=200)))
        await until(lambda: len(engine.requests) == 1)
        for counter in (2, 3):
            await asyncio.sleep(0.05)
            twin = FakeEngine(300, scale=1.0, seed=counter)
            await publish_to_pool(pool, publisher, lambda twin=twin: twin.weights, f"policy/0/{counter}")
        assert [run.version for run in (await answer).versions] == ["policy/0/1", "policy/0/2", "policy/0/3"]
        assert told == []


# ---- a parked replica


class Stale(FakeEngine):
    """Answers "ok" and keeps its weights, when told to."""

    keeps = False

    async def update_weights(self, chunk):
        if self.keeps and not np.array_equal(
            chunk["head.weight"], FakeEngine(300, scale=1.0, seed=9).weights["head.weight"]
        ):
            return
        await super().update_weights(chunk)


async def ask_until_done(pool, name, session):
    """As an episode: an aborted answer is asked for again at once."""
    for attempt in range(50):
        result = await pool.engine.generate(request(f"{name}.{attempt}", session))
        if result.finish_reason != "abort":
            return result
    raise AssertionError("the engine keeps aborting")


class LateRouter(FrailRouter):
    """Goes on sending to all of its workers for a while after it was told of new ones."""

    async def set_workers(self, urls):
        await asyncio.sleep(0.3)
        await super().set_workers(urls)


class Line:
    """The router's data plane: the last of its workers gets everything."""

    def __init__(self, router, engines):
        self.router, self.engines = router, engines

    async def generate(self, request):
        return await self.engines[self.router.workers[-1]].generate(request)

    async def close(self):
        pass


@pytest.mark.parametrize("routed", [False, True])
async def test_a_parked_replica_holds_no_request(routed):
    """Requests queue at it while it is paused, come again when they are aborted, and all end elsewhere."""
    good, stale = FakeEngine(300), Stale(300)
    router = LateRouter() if routed else None
    line = Line(router, {"r0": good, "r1": stale}) if routed else None
    async with published(good, stale, router=router, data=line, pause_mode="keep", attempts=1) as (pool, publisher, _):
        loading = asyncio.Event()

        class Slow(InProcessTransport):
            async def send(self, staged, engine):
                loading.set()
                await asyncio.sleep(0.1)
                await super().send(staged, engine)

        publisher._transport, stale.keeps = Slow(), True
        twin = FakeEngine(300, scale=1.0, seed=2)
        publishing = asyncio.create_task(publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/2"))
        await loading.wait()
        asked = [asyncio.create_task(ask_until_done(pool, f"q{i}", f"s{i}")) for i in range(6)]
        assert {receipt.result for receipt in await publishing} == {"published", "rolled_back"}
        async with asyncio.timeout(8):
            results = await asyncio.gather(*asked)
        assert {run.version for result in results for run in result.versions} == {"policy/0/2"}
        assert stale.requests, "some have queued there"


# ---- listeners that fail


async def test_a_watcher_outlives_a_listener_that_fails_and_the_next_publish_says_so():
    async with published(Foreign(), Foreign()) as (pool, publisher, _):

        def full(*what):
            raise LedgerError("events.jsonl cannot be written: no space left on device")

        pool.on_change = full
        engine = pool.members[0].engine
        await engine.close()
        await pool.suspect()
        await until(lambda: pool.members[0].state == "down")
        engine.__init__()
        await until(lambda: pool.members[0].routable)
        twin = FakeEngine(300, scale=1.0, seed=2)
        with pytest.raises(LedgerError, match="no space left"):
            await publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/2")
        receipts = await publish_to_pool(pool, publisher, lambda: twin.weights, "policy/0/2")
        assert [receipt.result for receipt in receipts] == ["published", "published"]


async def test_a_receipt_that_cannot_be_written_costs_a_returning_replica_nothing():
    async with published(Foreign(), Foreign()) as (pool, publisher, told):

        def full(receipt):
            raise LedgerError("no space left on device")

        publisher._on_receipt = full
        pool.members[0].engine.__init__()
        await asyncio.gather(*(pool.engine.generate(request(f"a{i}")) for i in range(2)), return_exceptions=True)
        await until(lambda: pool.members[0].routable)
        assert [text.split()[2] for text in told] == ["down", "up"]
        with pytest.raises(LedgerError):
            await publish_to_pool(pool, publisher, lambda: pool.members[0].engine.weights, "policy/0/2")


async def test_the_router_is_replaced_also_when_its_listener_fails(monkeypatch):
    pool, told = routed_pool(monkeypatch)

    def full(text):
        told.append(text)
        raise LedgerError("no space left on device")

    pool.on_router = full
    async with pool:
        pool.router.exited.set()
        await pool.suspect()
        assert (pool.router.starts, len(told)) == (2, 2)
        with pytest.raises(LedgerError):
            pool.raise_untold()
        pool.raise_untold()


# ---- members that do not come up


async def test_a_member_that_cannot_start_fails_the_pool_with_its_log(tmp_path):
    pool = far_pool(tmp_path, count=1, router=False)
    spec = pool.members[0].spec
    object.__setattr__(spec, "command", lambda port: ["python3", "-c", "print('no such model: x'); exit(3)"])
    with pytest.raises(InferenceError, match=r"(?s)r0 ended with status 3.*no such model: x"):
        await pool.start()


async def test_a_member_that_keeps_dying_is_given_up_and_calls_say_why(tmp_path):
    pool = far_pool(tmp_path, count=1, router=False, restarts=1)
    async with pool:
        member = pool.members[0]
        object.__setattr__(member.spec, "command", lambda port: ["python3", "-c", "print('out of memory'); exit(9)"])
        server_process(member).kill()
        await until(lambda: member.state == "failed")
        with pytest.raises(InferenceError, match=r"(?s)given up after 1 restarts.*out of memory"):
            await pool.engine.generate(request("a"))


# ---- settings


def test_one_embedded_engine_needs_no_pool(tmp_path):
    assert not needs_pool(InferenceSettings())
    with pytest.raises(SettingsError, match="needs no pool"):
        build_pool(InferenceSettings(), "m", log_dir=tmp_path)


def test_settings_become_command_lines(tmp_path):
    settings = InferenceSettings.model_validate(
        {"engine": "vllm", "replicas": 2, "max_model_len": 512, "launch": {"python": "/x/python", "args": ["--y"]}}
    )
    pool = build_pool(settings, "the/model", log_dir=tmp_path, weight_transfer="slipstream")
    command = pool.members[1].spec.command(8123)
    assert command[:5] == ["/x/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "the/model"]
    assert {"8123", "512", "processed_logprobs", "--enable-scale-out", "--y"} <= set(command)
    assert pool.router is not None
    embedded = build_pool(InferenceSettings(replicas=2, kv_cache_tokens=99), "m", log_dir=tmp_path)
    assert '"kv_cache_tokens": 99' in " ".join(embedded.members[0].spec.command(1))


@pytest.mark.parametrize("given", [{"engine": "vllm"}, {"replicas": 2}])
def test_servers_are_started_to_return_what_the_trainer_replays(tmp_path, given):
    flags = {"--return-sampling-mask", "--enable-return-routed-experts"}
    settings = InferenceSettings.model_validate(given)

    def command(returns):
        return build_pool(settings, "m", log_dir=tmp_path, returns=returns).members[0].spec.command(1)

    assert not flags & set(command(()))

    def environment(returns):
        return build_pool(settings, "m", log_dir=tmp_path, returns=returns).members[0].spec.env

    runner = "VLLM_USE_V2_MODEL_RUNNER"
    assert [runner in environment(returns) for returns in (("kept_sets",), ())] == [settings.engine == "vllm", False]
    assert flags & set(command(("kept_sets",))) == {"--return-sampling-mask"}
    assert flags <= set(command(("kept_sets", "routed_experts")))


def test_given_urls_are_members_without_processes(tmp_path):
    settings = InferenceSettings(engine="http", urls=("http://a:1", "http://b:2"))
    pool = build_pool(settings, "m", log_dir=tmp_path)
    assert [(member.url, member.spec) for member in pool.members] == [("http://a:1", None), ("http://b:2", None)]
