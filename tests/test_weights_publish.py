"""Publishing: what is verified serves, what is not never answers."""

import asyncio
import dataclasses
import itertools
import json

import numpy as np
import pytest

from slipstream.errors import CheckpointError, ContractError, InferenceError, PublishError
from slipstream.inference.client import HttpEngine
from slipstream.inference.fake import FakeEngine, processed_logprobs
from slipstream.inference.server import build_app
from slipstream.inference.types import GenerateRequest
from slipstream.trajectory import SamplingSpec
from slipstream.weights import (
    Deadlines,
    InProcessTransport,
    Probe,
    Publisher,
    Replica,
    VersionCounter,
    collect,
)

VOCAB = 32
QUICK = Deadlines(stage=5, pause=1, load=0.3, verify=1, resume=1)


def weights(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in FakeEngine(VOCAB).weights.items()}


def request(name="r", **fields):
    return GenerateRequest(name, (1, 2, 3), **{"max_tokens": 4, "seed": 1, "ignore_eos": True, **fields})


def publisher(*engines, **options):
    replicas = [Replica(engine, f"r{i}", hold_seconds=5) for i, engine in enumerate(engines)]
    return Publisher(replicas, **{"deadlines": QUICK, **options})


class Flaky(FakeEngine):
    """Misbehaves ``times`` times (-1: for ever) once ``armed``."""

    def __init__(self, times=-1, **options):
        super().__init__(VOCAB, **options)
        self.times, self.armed = times, True

    def strikes(self):
        if not self.armed or self.times == 0:
            return False
        self.times -= 1
        return True


class AnswersOkWithoutLoading(Flaky):
    async def update_weights(self, chunk):
        if not self.strikes():
            await super().update_weights(chunk)


class DiesInTheMiddle(Flaky):
    async def update_weights(self, chunk):
        if self.strikes():
            await super().update_weights(dict(list(chunk.items())[:1]))
            raise ConnectionResetError("worker died")
        await super().update_weights(chunk)


class Hangs(Flaky):
    async def update_weights(self, chunk):
        if self.strikes():
            await asyncio.Event().wait()
        await super().update_weights(chunk)


class KeepsOneParameter(Flaky):
    async def update_weights(self, chunk):
        await super().update_weights({k: v for k, v in chunk.items() if k != "head.bias" or not self.strikes()})


class KeepsTheOldVersionName(Flaky):
    async def finish_weight_update(self, weight_version):
        await super().finish_weight_update(self._version if self.strikes() else weight_version)


MISBEHAVIOURS = [AnswersOkWithoutLoading, DiesInTheMiddle, Hangs, KeepsOneParameter, KeepsTheOldVersionName]


async def test_publish_reaches_every_replica_and_is_verified_by_content():
    engines = FakeEngine(VOCAB), FakeEngine(VOCAB)
    pub = publisher(*engines, transport=InProcessTransport(chunk_bytes=1))
    receipts = await pub.publish(weights(1), "policy/0/1")
    for engine, receipt in zip(engines, receipts, strict=True):
        assert all(np.array_equal(engine.weights[n], t) for n, t in weights(1).items())
        assert (receipt.published, receipt.verification.kind, receipt.verification.verdict) == (True, "checksum", "ok")
        assert (receipt.names, receipt.bytes, receipt.attempts) == (3, 4 * (2 * VOCAB * 8 + VOCAB), 1)
        assert set(receipt.seconds) == {"stage", "pause", "load", "verify", "resume"}
    result = await pub.replicas[0].generate(request())
    assert [run.version for run in result.versions] == ["policy/0/1"]


async def test_receipts_are_json_and_reach_the_ledger():
    seen = []
    pub = publisher(FakeEngine(VOCAB), on_receipt=seen.append)
    receipts = await pub.publish(weights(1), "policy/0/1")
    assert seen == receipts == list(pub.receipts)
    assert json.loads(json.dumps(receipts[0].to_json()))["holds"] == "policy/0/1"


async def test_a_step_of_the_trainer_does_not_reach_the_last_good_copy():
    exported = weights(1)
    engine = Flaky()
    engine.armed = False
    pub = publisher(engine)
    await pub.publish(exported, "policy/0/1")
    exported["head.bias"] += 1
    assert np.array_equal(pub._last_good[0].tensors["head.bias"], weights(1)["head.bias"])


@pytest.mark.parametrize("engine", MISBEHAVIOURS)
async def test_one_failure_is_retried(engine):
    flaky = engine(times=1)
    (receipt,) = await publisher(flaky).publish(weights(1), "policy/0/1")
    assert (receipt.published, receipt.attempts, len(receipt.faults)) == (True, 2, 1)
    assert all(np.array_equal(flaky.weights[n], t) for n, t in weights(1).items())


@pytest.mark.parametrize("engine", MISBEHAVIOURS)
async def test_repeated_failure_rolls_back_to_the_last_good_version(engine):
    flaky = engine(times=2)
    flaky.armed = False
    pub = publisher(flaky)
    await pub.publish(weights(1), "policy/0/1")
    flaky.armed = True
    with pytest.raises(PublishError, match=r"no replica took policy/0/2: r0 \(rolled_back\)"):
        await pub.publish(weights(2), "policy/0/2")
    assert (pub.receipts[0].holds, pub.last_good) == ("policy/0/1", "policy/0/1")
    assert all(np.array_equal(flaky.weights[n], t) for n, t in weights(1).items())
    result = await pub.replicas[0].generate(request())
    assert [run.version for run in result.versions] == ["policy/0/1"]
    (receipt,) = await pub.publish(weights(3), "policy/0/3")
    assert receipt.published


@pytest.mark.parametrize("engine", [AnswersOkWithoutLoading, DiesInTheMiddle, Hangs, KeepsOneParameter])
async def test_without_a_good_version_the_replica_is_quarantined_and_never_answers(engine):
    pub = publisher(engine())
    (replica,) = pub.replicas
    with pytest.raises(PublishError, match=r"r0 \(quarantined\)"):
        await pub.publish(weights(1), "policy/0/1")
    assert not replica.routable
    assert await replica.engine.is_paused()
    with pytest.raises(InferenceError, match="quarantined"):
        await replica.generate(request())
    with pytest.raises(InferenceError, match="quarantined"):
        await replica.resume()
    with pytest.raises(PublishError, match="every replica is quarantined"):
        await pub.publish(weights(2), "policy/0/2")


async def test_fault_names_the_parameter_and_what_is_held():
    pub = publisher(KeepsOneParameter())
    with pytest.raises(PublishError, match=r"1 of 3 parameters differ \(head.bias\): sent float32\[32\]:"):
        await pub.publish(weights(1), "policy/0/1")


async def test_fault_tells_a_dtype_mismatch_from_old_weights():
    class HoldsHalf(FakeEngine):
        async def checksum(self):
            return {n: v.replace("float32", "float16") for n, v in (await super().checksum()).items()}

    with pytest.raises(PublishError, match=r"sent float32.*holds float16"):
        await publisher(HoldsHalf(VOCAB)).publish(weights(1), "policy/0/1")


async def test_dead_replica_does_not_hold_up_the_others():
    good, dead = FakeEngine(VOCAB), FakeEngine(VOCAB)
    pub = publisher(good, dead)
    await dead.close()
    receipts = await pub.publish(weights(1), "policy/0/1")
    assert [r.result for r in receipts] == ["published", "quarantined"]
    assert (await pub.replicas[0].generate(request())).finish_reason == "length"
    assert len(await pub.publish(weights(2), "policy/0/2")) == 1


async def test_rolled_back_replica_is_parked_while_others_advanced_and_returns_with_the_next_publish():
    good, flaky = FakeEngine(VOCAB), AnswersOkWithoutLoading(times=2)
    flaky.armed = False
    pub = publisher(good, flaky)
    await pub.publish(weights(1), "policy/0/1")
    flaky.armed = True
    receipts = await pub.publish(weights(2), "policy/0/2")
    assert [r.result for r in receipts] == ["published", "rolled_back"]
    with pytest.raises(InferenceError, match="parked: it could not take policy/0/2 and holds policy/0/1"):
        await pub.replicas[1].generate(request())
    assert all(r.published for r in await pub.publish(weights(3), "policy/0/3"))
    assert pub.replicas[1].routable


async def test_a_parked_replica_ends_what_only_queued_there():
    class PausesSlowly(AnswersOkWithoutLoading):
        """A request passes the gate when the engine admits nobody any more."""

        late = None

        async def pause(self, mode="abort"):
            await super().pause(mode)
            if self.armed and self.late is None:
                self.late = asyncio.create_task(pub.replicas[1].generate(request("late")))
                await asyncio.sleep(0.01)

    flaky = PausesSlowly(times=2)
    flaky.armed = False
    pub = publisher(FakeEngine(VOCAB), flaky, pause_mode="keep")
    await pub.publish(weights(1), "policy/0/1")
    flaky.armed = True
    receipts = await pub.publish(weights(2), "policy/0/2")
    assert [r.result for r in receipts] == ["published", "rolled_back"]
    async with asyncio.timeout(2):
        assert (await flaky.late).finish_reason == "abort"


async def test_rolled_back_replica_may_serve_its_old_version():
    flaky = AnswersOkWithoutLoading(times=2)
    flaky.armed = False
    pub = publisher(FakeEngine(VOCAB), flaky, lagging="serve")
    await pub.publish(weights(1), "policy/0/1")
    flaky.armed = True
    await pub.publish(weights(2), "policy/0/2")
    versions = [(await r.generate(request())).versions[0].version for r in pub.replicas]
    assert versions == ["policy/0/2", "policy/0/1"]


async def test_readmit_brings_a_quarantined_replica_back():
    good, flaky = FakeEngine(VOCAB), DiesInTheMiddle(times=3)
    pub = publisher(good, flaky)
    await pub.publish(weights(1), "policy/0/1")
    assert not pub.replicas[1].routable
    (receipt,) = [await pub.readmit("r1")]
    assert (receipt.published, receipt.holds) == (True, "policy/0/1")
    assert (await pub.replicas[1].generate(request())).versions[0].version == "policy/0/1"


async def test_running_requests_survive_a_publish_that_keeps_them():
    engine = FakeEngine(VOCAB, eos_token_ids=(), step_seconds=0.002)
    pub = publisher(engine, pause_mode="keep")
    task = asyncio.create_task(pub.replicas[0].generate(request(max_tokens=400)))
    while not (await engine.metrics())["generation_tokens_total"]:
        await asyncio.sleep(0.002)
    await pub.publish(weights(1), "policy/0/1")
    result = await task
    assert [run.version for run in result.versions] == ["policy/0/0", "policy/0/1"]
    assert result.versions[-1].end == 400


async def test_calls_during_an_update_wait_and_get_the_new_version():
    loading, sent = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def update_weights(self, chunk):
            loading.set()
            await sent.wait()
            await super().update_weights(chunk)

    pub = publisher(Slow(VOCAB), deadlines=Deadlines())
    publish = asyncio.create_task(pub.publish(weights(1), "policy/0/1"))
    await loading.wait()
    task = asyncio.create_task(pub.replicas[0].generate(request()))
    await asyncio.sleep(0.01)
    sent.set()
    await publish
    assert (await task).versions[0].version == "policy/0/1"


async def test_no_replica_resumes_before_all_have_been_verified():
    fast, seen = FakeEngine(VOCAB), []

    class Slow(FakeEngine):
        async def update_weights(self, chunk):
            await asyncio.sleep(0.1)
            seen.append((await fast.weight_version(), await fast.is_paused()))
            await super().update_weights(chunk)

    await publisher(fast, Slow(VOCAB)).publish(weights(1), "policy/0/1")
    assert seen == [("policy/0/1", True)]
    assert not await fast.is_paused()


async def test_cancelled_publish_leaves_no_replica_that_answers_with_unknown_weights():
    pub = publisher(Hangs(), deadlines=dataclasses.replace(QUICK, load=60))
    task = asyncio.create_task(pub.publish(weights(1), "policy/0/1"))
    while pub.replicas[0].state != "held":
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(InferenceError, match="interrupted"):
        await pub.replicas[0].generate(request())


async def test_publish_cancelled_before_loading_lets_the_replica_go_on():
    class SlowPause(FakeEngine):
        async def pause(self, mode="abort"):
            await super().pause(mode)
            await asyncio.sleep(10)

    pub = publisher(SlowPause(VOCAB), deadlines=dataclasses.replace(QUICK, pause=60))
    task = asyncio.create_task(pub.publish(weights(1), "policy/0/1"))
    while not await pub.replicas[0].is_paused():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pub.replicas[0].generate(request())).versions[0].version == "policy/0/0"


async def test_engine_that_ignores_cancellation_does_not_hang_the_publisher():
    class Stubborn(FakeEngine):
        async def update_weights(self, chunk):
            for _ in range(4):
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    continue

    pub = publisher(Stubborn(VOCAB), attempts=1, deadlines=dataclasses.replace(QUICK, load=0.1))
    async with asyncio.timeout(2):
        with pytest.raises(PublishError, match=r"load: not done within 0.1 s"):
            await pub.publish(weights(1), "policy/0/1")


# ---- engines that cannot tell what they hold


EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


class Opaque(Flaky):
    """Answers the hash of empty bytes for every parameter, and loads only when not striking."""

    async def checksum(self):
        return dict.fromkeys(self.weights, EMPTY_SHA256)

    async def update_weights(self, chunk):
        if not self.strikes():
            await super().update_weights(chunk)


def probe(seed, tolerance=0.01):
    """What the weights of ``seed`` score, computed without an engine."""
    held, ids = weights(seed), (3, 1, 4, 1, 5, 9, 2, 6)
    expected = []
    for a, b in itertools.pairwise(ids):
        logits = (held["head.weight"] @ held["embed.weight"][a] + held["head.bias"]).astype(np.float64)
        expected.append(float(processed_logprobs(logits, SamplingSpec())[b]))
    return Probe([ids], [expected], tolerance)


async def test_empty_hash_counts_as_unknown_and_is_refused_without_a_probe():
    with pytest.raises(PublishError, match=r"no comparable checksum for 3 of 3 names .*there is no probe"):
        await publisher(Opaque(times=0)).publish(weights(1), "policy/0/1")


async def test_probe_passes_weights_that_were_loaded():
    (receipt,) = await publisher(Opaque(times=0)).publish(weights(1), "policy/0/1", probe=probe(1))
    assert (receipt.published, receipt.verification.kind, receipt.verification.verdict) == (True, "probe", "ok")


async def test_probe_finds_weights_that_were_not_loaded():
    with pytest.raises(PublishError, match=r"verify by probe: largest log-prob gap"):
        await publisher(Opaque()).publish(weights(1), "policy/0/1", probe=probe(1))


async def test_tokens_sampled_before_a_failed_probe_are_discarded():
    engine = Opaque(times=1, eos_token_ids=(), step_seconds=0.002)
    pub = publisher(engine, pause_mode="keep")
    task = asyncio.create_task(pub.replicas[0].generate(request(max_tokens=400)))
    while not (await engine.metrics())["generation_tokens_total"]:
        await asyncio.sleep(0.002)
    (receipt,) = await pub.publish(weights(1), "policy/0/1", probe=probe(1))
    assert (receipt.published, receipt.attempts) == (True, 2)
    with pytest.raises(InferenceError, match="discarded"):
        await task
    assert (await pub.replicas[0].generate(request("again"))).versions[0].version == "policy/0/1"


async def test_answers_are_withheld_until_the_probe_has_passed():
    order, answered = [], asyncio.Event()

    class ProbedLate(Opaque):
        async def generate(self, request):
            if request.request_id.startswith("probe"):
                await answered.wait()
            result = await super().generate(request)
            order.append("probe" if request.request_id.startswith("probe") else "engine")
            answered.set()
            return result

    engine = ProbedLate(times=0, eos_token_ids=(), step_seconds=0.001)
    pub = publisher(engine, pause_mode="keep", deadlines=Deadlines())
    task = asyncio.create_task(pub.replicas[0].generate(request(max_tokens=200)))
    task.add_done_callback(lambda _: order.append("caller"))
    while not (await engine.metrics())["generation_tokens_total"]:
        await asyncio.sleep(0.002)
    await pub.publish(weights(1), "policy/0/1", probe=probe(1))
    await task
    await asyncio.sleep(0)
    assert order == ["engine", "probe", "caller"]


def test_probe_shapes_are_checked():
    with pytest.raises(ContractError, match="2 log-probs for 2 tokens"):
        Probe([(1, 2)], [(-1.0, -2.0)])


# ---- over HTTP, exports, versions


async def test_the_same_publisher_works_over_http(tmp_path):
    pytest.importorskip("safetensors")
    engine = FakeEngine(VOCAB)
    client = HttpEngine.in_process(build_app(engine, None, transfer_root=tmp_path), transfer_dir=tmp_path)
    await client.start()
    pub = publisher(client, deadlines=Deadlines())
    (receipt,) = await pub.publish(weights(1), "policy/0/1")
    assert (receipt.published, receipt.verification.kind) == (True, "checksum")
    assert np.array_equal(engine.weights["head.bias"], weights(1)["head.bias"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_embedded_engine_is_verified_by_what_it_reads_back(dtype):
    torch = pytest.importorskip("torch")
    from slipstream.config.settings import InferenceSettings
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.tiny import tiny_model

    class Lying(EmbeddedEngine):
        loads = True

        async def update_weights(self, chunk):
            if self.loads:
                await super().update_weights(chunk)

    model, tokenizer = tiny_model(seed=0)
    exported = {name: parameter.detach() for name, parameter in model.named_parameters()}
    engine = Lying(model, tokenizer, InferenceSettings(dtype=dtype, kv_cache_tokens=2048))
    await engine.start()
    try:
        pub = publisher(engine, transport=InProcessTransport(dtype=dtype), deadlines=Deadlines())
        (receipt,) = await pub.publish(exported, "policy/0/1")
        assert (receipt.published, receipt.verification.kind) == (True, "checksum")
        engine.loads = False
        with pytest.raises(PublishError, match="parameters differ"):
            await pub.publish({name: tensor + torch.ones(()) for name, tensor in exported.items()}, "policy/0/2")
        result = await pub.replicas[0].generate(request())
        assert [run.version for run in result.versions] == ["policy/0/1"]
    finally:
        await engine.close()


def test_pieces_are_put_together():
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    pieces = [
        ("w", (4, 3), (slice(0, 1), slice(None)), whole[:1]),
        ("w", (4, 3), (slice(1, 4), slice(None)), whole[1:]),
    ]
    assert np.array_equal(collect(pieces)["w"], whole)


@pytest.mark.parametrize(
    ("pieces", "rule"),
    [
        ([("w", (4,), (slice(0, 2),), np.zeros(2))], "pieces of w have 2 elements"),
        ([("w", (2,), (slice(0, 2),), np.zeros(2))] * 2, "w comes twice"),
        ([], "no tensors"),
    ],
)
async def test_bad_export_is_refused_before_any_replica_is_touched(pieces, rule):
    pub = publisher(FakeEngine(VOCAB))
    with pytest.raises(PublishError, match=f"{rule}.*no replica was touched"):
        await pub.publish(pieces, "policy/0/1")
    assert not await pub.replicas[0].is_paused()
    assert pub.replicas[0].state == "serving"


def test_torch_export_is_cast_to_what_the_engine_holds():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.randn(3, 2).T)
    staged = InProcessTransport(dtype="bfloat16").stage("v", {"w": parameter})
    assert staged.checksums["w"].startswith("bfloat16[2,3]:")
    assert not staged.tensors["w"].requires_grad
    with torch.no_grad():
        parameter.zero_()
    assert staged.tensors["w"].abs().sum() > 0


def test_versions_are_never_reused_across_incarnations():
    counter = VersionCounter("policy", 0)
    names = [str(counter.next()) for _ in range(3)]
    resumed = VersionCounter.resumed(json.loads(json.dumps(counter.state_dict())))
    names += [str(resumed.next()) for _ in range(3)]
    assert names == [f"policy/{i}/{n}" for i, n in ((0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6))]


def test_unreadable_counter_state_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="version counter"):
        VersionCounter.resumed({"policy": "p"})


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_staging_reuses_memory_only_when_the_last_view_of_it_is_gone(form):
    torch = pytest.importorskip("torch")

    def weights_of(value):
        array = np.full((4, 8), value, np.float32)
        return {"w": array if form == "numpy" else torch.from_numpy(array)}

    def place(staged):
        tensor = staged.tensors["w"]
        return tensor.ctypes.data if form == "numpy" else tensor.data_ptr()

    transport = InProcessTransport()
    first = transport.stage("1", weights_of(1))
    view = first.tensors["w"][1:2]
    where = place(first)
    transport.release(first)
    del first
    second = transport.stage("2", weights_of(2))
    assert place(second) != where
    assert float(view.sum()) == 8
    del view
    third = transport.stage("3", weights_of(3))
    assert place(third) == where
    assert float(second.tensors["w"].sum()) == 64
    assert float(third.tensors["w"].sum()) == 96
