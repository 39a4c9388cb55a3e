"""Transports to engines in other processes: what arrives is verified, what fails is mended or kept out.

The servers are real processes with the real HTTP server (``transfer_server.py``); some of them lie, some die.
"""

import asyncio
import contextlib
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import InferenceError, PublishError
from slipstream.inference.client import HttpEngine
from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import build_app
from slipstream.inference.types import GenerateRequest
from slipstream.ledger import Ledger, LedgerReader
from slipstream.trajectory import SamplingSpec
from slipstream.weights import (
    Deadlines,
    DeltaTransport,
    DiskTransport,
    GlooTransport,
    InProcessTransport,
    MemoryTransport,
    Publisher,
    Replica,
)

HERE = Path(__file__).parent
VOCAB = 64
# Long: nothing here fails by its deadline, and the machine may be busy.
PATIENT = Deadlines(stage=300, pause=300, load=300, verify=300, resume=300)
TRANSPORTS = ["disk", "memory", "delta", "gloo"]


def transport(kind, directory, **options):
    if kind == "disk":
        return DiskTransport(directory, **options)
    if kind == "delta":
        return DeltaTransport(directory, **options)
    return {"memory": MemoryTransport, "gloo": GlooTransport, "in_process": InProcessTransport}[kind](**options)


def weights(seed):
    """Weights of a bigram model; neighbouring seeds differ in a few elements only."""
    rng = np.random.default_rng(0)
    held = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in FakeEngine(VOCAB, scale=2.0).weights.items()}
    for i in range(seed):
        for tensor in held.values():
            tensor.reshape(-1)[i::17] += 0.25
    return held


async def scores(engine, name):
    """Log-probs of fixed tokens: a fingerprint of the weights that really answered, and the version they carried."""
    result = await engine.generate(GenerateRequest(name, (1, 2, 3), max_tokens=6, seed=1, ignore_eos=True))
    return result, tuple(result.versions)


def expected_logprobs(seed, result):
    """What the weights of ``seed`` give the sampled tokens."""
    from slipstream.inference.fake import processed_logprobs

    held = weights(seed)
    ids = [3, *result.token_ids]
    out = []
    for a, b in itertools.pairwise(ids):
        logits = np.asarray(held["head.weight"] @ held["embed.weight"][a] + held["head.bias"], np.float64)
        out.append(float(processed_logprobs(logits, SamplingSpec())[b]))
    return out


@contextlib.asynccontextmanager
async def servers(folder, *faults):
    """One real server process per fault, as engines."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "transfer_server.py"), str(folder), fault], stdout=subprocess.PIPE, text=True
        )
        for fault in faults
    ]
    engines = []
    try:
        for process in processes:
            url = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 300)
            engines.append(HttpEngine(url.strip(), timeout_seconds=300, control_seconds=300))
        yield engines, processes
    finally:
        for engine in engines:
            await engine.close()
        for process in processes:
            process.kill()
            process.wait(10)
            process.stdout.close()


def local(folder):
    """An engine behind the HTTP application, in this process."""
    engine = FakeEngine(VOCAB, scale=2.0)
    return HttpEngine.in_process(build_app(engine, None, transfer_root=folder)), engine


def publisher(engines, carrier, **options):
    return Publisher(
        [Replica(e, f"r{i}", hold_seconds=300) for i, e in enumerate(engines)], carrier, deadlines=PATIENT, **options
    )


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "slipstream" in name}


# ---- every transport


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_weights_arrive_exactly_and_nothing_is_left(tmp_path, kind):
    carrier = transport(kind, tmp_path)
    client, engine = local(tmp_path)
    pub = publisher([client], carrier)
    for step in (1, 2, 3):
        (receipt,) = await pub.publish(weights(step), f"policy/0/{step}")
        assert (receipt.published, receipt.verification.kind, receipt.transport) == (True, "checksum", kind)
        assert all(np.array_equal(engine.weights[n], t) for n, t in weights(step).items())
    pub.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not shared_memory()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_trainers_next_step_does_not_reach_what_was_staged(tmp_path, kind):
    carrier = transport(kind, tmp_path)
    exported = weights(1)
    staged = carrier.stage("policy/0/1", exported)
    for tensor in exported.values():
        tensor += 1
    client, engine = local(tmp_path)
    await client.pause("keep")
    await client.start_weight_update()
    await carrier.send(staged, client)
    await client.finish_weight_update("policy/0/1")
    assert np.array_equal(engine.weights["head.bias"], weights(1)["head.bias"])
    carrier.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_an_engine_in_this_process_is_refused_with_the_mend(tmp_path, kind):
    pub = publisher([FakeEngine(VOCAB)], transport(kind, tmp_path))
    with pytest.raises(PublishError, match="use the in-process transport"):
        await pub.publish(weights(1), "policy/0/1")
    pub.close()


@pytest.mark.parametrize("kind", ["disk", "memory", "delta"])
async def test_bfloat16_travels_to_the_embedded_engine(tmp_path, kind):
    torch = pytest.importorskip("torch")
    from slipstream.config.settings import InferenceSettings
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.tiny import tiny_model

    model, tokenizer = tiny_model(seed=0)
    exported = {name: parameter.detach() for name, parameter in model.named_parameters()}
    engine = EmbeddedEngine(model, tokenizer, InferenceSettings(dtype="bfloat16", kv_cache_tokens=2048))
    await engine.start()
    try:
        client = HttpEngine.in_process(build_app(engine, tokenizer, transfer_root=tmp_path))
        pub = publisher([client], transport(kind, tmp_path, dtype="bfloat16"))
        for step in (1, 2):
            moved = {name: tensor + step * 1e-3 * torch.randn_like(tensor) for name, tensor in exported.items()}
            (receipt,) = await pub.publish(moved, f"policy/0/{step}")
            assert (receipt.published, receipt.verification.kind) == (True, "checksum")
        pub.close()
    finally:
        await engine.close()


# ---- the opening incident


@pytest.mark.parametrize(
    "kind", ["memory", "delta", *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("disk", "gloo"))]
)
async def test_replicas_that_lie_or_die_never_answer_under_the_wrong_version(tmp_path, kind):
    """Four replicas: sound, silently stale, ok without loading, dead in the middle.  The run goes on with the sound."""
    async with servers(tmp_path, "sound", "keeps-old", "ok-without-loading", "dies-in-the-middle") as (engines, _):
        carrier = transport(kind, tmp_path)
        ledger = Ledger(tmp_path / "run", 0)
        pub = publisher(
            engines,
            carrier,
            on_receipt=lambda r: ledger.event("receipt", receipt=r.to_json()),
        )
        answers = []
        for step in (1, 2, 3):
            await pub.publish(weights(step), f"policy/0/{step}")
            for replica in pub.replicas:
                with contextlib.suppress(InferenceError):
                    answers.append((step, replica.name, *(await scores(replica, f"s{step}-{replica.name}"))))
        pub.close()
        ledger.close()
    # Whoever answered did so with the weights that its version names.
    for step, name, result, versions in answers:
        assert [run.version for run in versions] == [f"policy/0/{step}"], name
        assert np.allclose(result.logprobs, expected_logprobs(step, result), atol=1e-5), name
    assert {(step, name) for step, name, *_ in answers} == {
        (1, "r0"), (2, "r0"), (3, "r0"), (1, "r1"), (1, "r3")
    }  # fmt: skip
    # And the ledger, read back from disk, says what happened to whom.
    written = [event.data["receipt"] for event in LedgerReader(tmp_path / "run").events("receipt")]
    told = {(e["version"], e["replica"]): (e["result"], " ".join(e["faults"])) for e in written}
    assert told["policy/0/1", "r2"][0] == "quarantined"
    assert "parameters differ" in told["policy/0/1", "r2"][1]
    assert told["policy/0/2", "r1"][0] in ("rolled_back", "quarantined")
    assert "parameters differ" in told["policy/0/2", "r1"][1]
    assert told["policy/0/2", "r3"][0] == "quarantined"
    assert "is the server running" in told["policy/0/2", "r3"][1]
    assert not shared_memory()


async def test_a_restarted_engine_catches_up_by_delta_and_serves_again(tmp_path):
    carrier = DeltaTransport(tmp_path)
    async with servers(tmp_path, "sound", "sound") as (engines, processes):
        pub = publisher(engines, carrier)
        await pub.publish(weights(1), "policy/0/1")
        processes[1].kill()
        processes[1].wait(10)
        await pub.publish(weights(2), "policy/0/2")
        assert [r.state for r in pub.replicas] == ["serving", "quarantined"]
        assert await pub.recover(health_seconds=30) == []
        async with servers(tmp_path, "sound") as (fresh, _):
            pub.replicas[1].engine = fresh[0]
            (receipt,) = await pub.recover(health_seconds=300)
            assert (receipt.published, receipt.holds) == (True, "policy/0/2")
            result, versions = await scores(pub.replicas[1], "after")
            assert [run.version for run in versions] == ["policy/0/2"]
            assert np.allclose(result.logprobs, expected_logprobs(2, result), atol=1e-5)
        pub.close()


# ---- deltas


def packets(folder):
    return sorted(path.name for path in folder.glob("*.packet"))


def routes(pub):
    return [path for path, _ in pub._last_good[0].payload.packets]


def tear(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("harm", [tear, Path.unlink], ids=["torn", "dropped"])
async def test_a_harmed_delta_is_refused_and_mended_by_an_anchor(tmp_path, harm):
    client, engine = local(tmp_path)
    carrier = DeltaTransport(tmp_path)
    pub = publisher([client], carrier)
    await pub.publish(weights(1), "policy/0/1")
    stage = carrier.stage

    def harmed(version, export):
        staged = stage(version, export)
        harm(staged.payload.packets[-1][0])
        return staged

    carrier.stage = harmed
    (receipt,) = await pub.publish(weights(2), "policy/0/2")
    assert (receipt.published, receipt.attempts) == (True, 2)
    assert "delta-policy-0-1-to-policy-0-2" in receipt.faults[0]
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(2).items())
    pub.close()


async def test_swapped_and_repeated_packets_cannot_lead_to_other_weights(tmp_path):
    client, engine = local(tmp_path)
    carrier = DeltaTransport(tmp_path)
    pub = publisher([client], carrier)
    for step in (1, 2, 3):
        await pub.publish(weights(step), f"policy/0/{step}")
    stage = carrier.stage

    def shuffled(version, export):
        staged = stage(version, export)
        route = staged.payload.packets
        route[1:] = [route[-1], *route[1:-1], *route[1:]]  # the newest first, then everything, some of it twice
        return staged

    carrier.stage = shuffled
    (receipt,) = await pub.publish(weights(4), "policy/0/4")
    assert receipt.published
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(4).items())
    pub.close()


async def test_a_version_that_nobody_took_is_not_built_upon(tmp_path):
    client, engine = local(tmp_path)
    carrier = DeltaTransport(tmp_path)
    pub = publisher([client], carrier)
    await pub.publish(weights(1), "policy/0/1")
    finish = engine.finish_weight_update

    async def broken(version):
        raise InferenceError("finish failed")

    engine.finish_weight_update = broken
    with pytest.raises(PublishError, match="finish failed"):
        await pub.publish(weights(2), "policy/0/2")
    engine.finish_weight_update = finish
    (receipt,) = [await pub.readmit("r0")]
    assert receipt.holds == "policy/0/1"
    (receipt,) = await pub.publish(weights(3), "policy/0/3")
    assert receipt.published
    assert packets(tmp_path) == ["anchor-policy-0-1.packet", "delta-policy-0-1-to-policy-0-3.packet"]
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(3).items())
    pub.close()


async def test_a_resumed_trainer_starts_with_an_anchor_whatever_the_engine_mirrors(tmp_path):
    client, engine = local(tmp_path)
    first = publisher([client], DeltaTransport(tmp_path))
    for step in (1, 2):
        await first.publish(weights(step), f"policy/0/{step}")
    # The first trainer is gone; the second has other weights under its own names.
    second = publisher([client], DeltaTransport(tmp_path))
    (receipt,) = await second.publish(weights(7), "policy/1/3")
    assert (receipt.published, receipt.payload_bytes >= receipt.bytes) == (True, True)
    (receipt,) = await second.publish(weights(8), "policy/1/4")
    assert receipt.payload_bytes < receipt.bytes
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(8).items())
    second.close()
    first.close()
    assert not packets(tmp_path)


async def test_long_routes_are_joined_and_late_receivers_still_follow(tmp_path):
    client, engine = local(tmp_path)
    carrier = DeltaTransport(tmp_path, anchor_share=100, join_after=3, keep=1)
    pub = publisher([client], carrier)
    for step in range(1, 12):
        await pub.publish(weights(step), f"policy/0/{step}")
        assert len(routes(pub)) <= 5
    assert any(name.startswith("joined-") for name in packets(tmp_path))
    assert [path.exists() for path in routes(pub)] == [True] * len(routes(pub))
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(11).items())
    late, other = local(tmp_path)
    pub.replicas[0].engine = late
    await pub.readmit("r0")
    assert all(np.array_equal(other.weights[n], t) for n, t in weights(11).items())
    pub.close()


async def test_heavy_routes_end_in_a_new_anchor_and_old_packets_go(tmp_path):
    client, _ = local(tmp_path)
    pub = publisher([client], DeltaTransport(tmp_path, anchor_share=0.3))
    for step in range(1, 9):
        await pub.publish(weights(step), f"policy/0/{step}")
    anchors = [name for name in packets(tmp_path) if name.startswith("anchor")]
    assert len(anchors) == 1
    assert anchors != ["anchor-policy-0-1.packet"]
    pub.close()


async def test_rollback_to_the_last_good_version_works_by_delta(tmp_path):
    client, engine = local(tmp_path)
    pub = publisher([client], DeltaTransport(tmp_path))
    await pub.publish(weights(1), "policy/0/1")
    update, failing = engine.update_weights, [True, True]

    async def half(chunk):
        if failing:
            failing.pop()
            await update(dict(list(chunk.items())[:1]))
            return
        await update(chunk)

    engine.update_weights = half
    with pytest.raises(PublishError, match="rolled_back"):
        await pub.publish(weights(2), "policy/0/2")
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(1).items())
    (receipt,) = await pub.publish(weights(3), "policy/0/3")
    assert receipt.published
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(3).items())
    pub.close()


# ---- full disk, dead groups, open updates


@pytest.mark.parametrize("kind", ["disk", "delta"])
async def test_full_disk_leaves_the_old_version_serving_and_no_torn_file(tmp_path, kind):
    client, engine = local(tmp_path)
    pub = publisher([client], transport(kind, tmp_path))
    await pub.publish(weights(1), "policy/0/1")
    before = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {name: np.random.default_rng(5).standard_normal(t.shape).astype(np.float32) for name, t in weights(1).items()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(PublishError, match=r"cannot (write|stage).*no replica was touched"):
            await pub.publish(big, "policy/0/2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    _, versions = await scores(pub.replicas[0], "old")
    assert [run.version for run in versions] == ["policy/0/1"]
    (receipt,) = await pub.publish(weights(3), "policy/0/3")
    assert receipt.published
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(3).items())
    pub.close()


async def test_a_broken_broadcast_group_is_replaced(tmp_path):
    client, engine = local(tmp_path)
    carrier = GlooTransport()
    pub = publisher([client], carrier)
    await pub.publish(weights(1), "policy/0/1")
    carrier._links[client].close()
    (receipt,) = await pub.publish(weights(2), "policy/0/2")
    assert (receipt.published, receipt.attempts) == (True, 2)
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(2).items())
    pub.close()


async def test_chunks_of_a_broadcast_add_up(tmp_path):
    client, engine = local(tmp_path)
    pub = publisher([client], GlooTransport(chunk_bytes=100))
    await pub.publish(weights(3), "policy/0/1")
    assert all(np.array_equal(engine.weights[n], t) for n, t in weights(3).items())
    pub.close()


async def test_an_update_left_open_by_a_dead_trainer_is_abandoned(tmp_path):
    client, engine = local(tmp_path)
    await client.pause("keep")
    await client.start_weight_update()
    start, refused = engine.start_weight_update, [True]

    async def strict():
        # As vLLM does: no second start before the open update has ended.
        if refused:
            raise InferenceError("start_weight_update called while an update is active")
        await start()

    update = engine.update_weights
    engine.start_weight_update = strict
    carrier = MemoryTransport()
    abandon = carrier.abandon

    async def ends(target):
        refused.clear()
        await abandon(target)

    carrier.abandon, engine.update_weights = ends, update
    (receipt,) = await publisher([client], carrier).publish(weights(1), "policy/0/1")
    assert receipt.published
    carrier.close()


async def test_receipts_say_how_little_a_delta_is(tmp_path):
    client, _ = local(tmp_path)
    pub = publisher([client], DeltaTransport(tmp_path))
    await pub.publish(weights(1), "policy/0/1")
    (receipt,) = await pub.publish(weights(2), "policy/0/2")
    told = receipt.to_json()
    assert (told["transport"], told["bytes"]) == ("delta", sum(t.nbytes for t in weights(2).values()))
    assert told["payload_bytes"] < told["bytes"]
    pub.close()


async def test_a_connection_that_the_server_closed_after_an_error_is_not_the_end():
    """As vLLM does: an error, and no more answers on that connection."""
    served = []

    async def handle(reader, writer):
        while line := await reader.readline():
            path = line.split()[1].decode()
            while (await reader.readline()).strip():
                pass
            if served and served[-1] == "/resume":
                break  # the idle connection is closed when the next request comes
            served.append(path)
            status = "500 Internal Server Error" if path == "/resume" else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            await writer.drain()
        served.append("closed")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        client = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(InferenceError, match="HTTP 500"):
            await client.resume()
        await client.reset_prefix_cache()
        assert served == ["/resume", "closed", "/reset_prefix_cache"]
        await client.close()
