"""The vLLM side without vLLM: what the plug-in reads back and when it loads, and what vLLM's own senders are told.

``vllm`` here is a stand-in with the few names that are used; the same code against the real one is in
``test_vllm_publish.py``.
"""

import asyncio
import json
import sys
import types

import httpx
import numpy as np
import pytest

from slipstream.errors import PublishError, RequestError
from slipstream.inference.checksum import tensor_checksum
from slipstream.inference.client import HttpEngine
from slipstream.inference.fake import FakeEngine
from slipstream.inference.transfer import vllm_plugin
from slipstream.inference.transfer.raw import Raw
from slipstream.inference.transfer.vllm_plugin import NO_ADAPTER
from slipstream.weights import AdapterTransport, NativeTransport, Publisher, Replica
from slipstream.weights.verify import compare_checksums

torch = pytest.importorskip("torch")


def packed_linear(weight):
    """A layer as vLLM's CPU path leaves it: the weight lives in the kernel alone."""
    layer = torch.nn.Module()
    layer.kernel, layer.input_size = weight.clone(), weight.shape[1]
    layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
    layer.cpu_linear = lambda x, w, bias: torch.nn.functional.linear(x, layer.kernel)
    return layer


def model_of(weights):
    """A model in vLLM's layout: q, k, v fused and packed; the norm and the embedding plain."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.embed, model.norm, model.attn = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    model.embed.weight = torch.nn.Parameter(weights["embed.weight"].clone(), requires_grad=False)
    model.norm.weight = torch.nn.Parameter(weights["norm.weight"].clone(), requires_grad=False)
    fused = torch.cat([weights[f"attn.{part}_proj.weight"] for part in "qkv"])
    model.attn.qkv_proj = packed_linear(fused)
    return model


def weights_of(seed):
    torch.manual_seed(seed)
    shapes = {"embed.weight": (50, 64), "norm.weight": (64,)}
    shapes |= {f"attn.{part}_proj.weight": (rows, 64) for part, rows in zip("qkv", (64, 16, 16), strict=True)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def raws(weights):
    return {name: Raw.of(tensor) for name, tensor in weights.items()}


def sums(weights):
    return {name: tensor_checksum(tensor) for name, tensor in weights.items()}


# ---- reading back


def test_what_the_kernels_hold_is_read_back_exactly():
    weights = weights_of(0)
    assert vllm_plugin.read_back(model_of(weights), raws(weights), "v1") == sums(weights)


@pytest.mark.parametrize("name", ["attn.q_proj.weight", "attn.v_proj.weight", "embed.weight", "norm.weight"])
def test_old_weights_under_one_name_are_found_and_shown(name):
    sent = weights_of(0)
    held = {**sent, name: weights_of(1)[name]}
    told = vllm_plugin.read_back(model_of(held), raws(sent), "v1")
    assert told == sums(held)
    assert told[name] != sums(sent)[name]


def test_a_step_of_one_unit_in_the_last_place_is_noticed():
    old = weights_of(0)
    moved = torch.rand(old["attn.q_proj.weight"].shape) < 0.02
    bits = old["attn.q_proj.weight"].view(torch.int16)
    new = {**old, "attn.q_proj.weight": (bits + moved.to(torch.int16)).view(torch.bfloat16)}
    told = vllm_plugin.read_back(model_of(old), raws(new), "v1")
    assert told["attn.q_proj.weight"] == sums(old)["attn.q_proj.weight"]


def test_parts_of_a_fused_layer_in_the_wrong_order_are_found():
    sent = weights_of(0)
    model = model_of(sent)
    k, v = model.attn.qkv_proj.kernel[64:80].clone(), model.attn.qkv_proj.kernel[80:].clone()
    model.attn.qkv_proj.kernel[64:80], model.attn.qkv_proj.kernel[80:] = v, k
    told = vllm_plugin.read_back(model, raws(sent), "v1")
    assert told["attn.k_proj.weight"] == sums(sent)["attn.v_proj.weight"]


def test_parameters_that_were_not_sent_are_reported():
    sent = weights_of(0)
    model = model_of(sent)
    del sent["norm.weight"]
    told = vllm_plugin.read_back(model, raws(sent), "v1")
    assert set(told) == {*sent, "norm.weight"}


def test_packed_layers_that_were_not_sent_are_reported():
    sent = weights_of(0)
    model = model_of(sent)
    model.extra = packed_linear(torch.ones(4, 64, dtype=torch.bfloat16))
    told = vllm_plugin.read_back(model, raws(sent), "v1")
    assert told["extra.weight"] == tensor_checksum(torch.ones(4, 64, dtype=torch.bfloat16))


def test_a_tied_head_that_kept_its_old_kernel_is_reported():
    old, sent = weights_of(1), weights_of(0)
    model = model_of(sent)
    model.head = packed_linear(sent["embed.weight"])
    model.head.weight = model.embed.weight
    assert set(vllm_plugin.read_back(model, raws(sent), "v1")) == set(sent)
    model.head.kernel = old["embed.weight"]
    told = vllm_plugin.read_back(model, raws(sent), "v1")
    assert told["head.weight"] == sums(old)["embed.weight"]


def test_a_wider_copy_of_the_same_numbers_is_the_same():
    sent = weights_of(0)
    model = model_of(sent)
    model.norm.weight = torch.nn.Parameter(sent["norm.weight"].float(), requires_grad=False)
    assert vllm_plugin.read_back(model, raws(sent), "v1") == sums(sent)
    model.norm.weight = torch.nn.Parameter(sent["norm.weight"].float() * 1.0001, requires_grad=False)
    assert vllm_plugin.read_back(model, raws(sent), "v1") != sums(sent)


def test_a_tied_head_is_packed_again_after_a_load():
    sent = weights_of(0)
    model = model_of(sent)
    model.head = packed_linear(weights_of(1)["embed.weight"])
    model.head.weight = model.embed.weight

    def pack(layer):
        layer.kernel = layer.weight.detach().clone()

    model.head.quant_method = types.SimpleNamespace(process_weights_after_loading=pack)
    vllm_plugin._repack_ties(model, raws(sent))
    assert set(vllm_plugin.read_back(model, raws(sent), "v1")) == set(sent)


def test_names_that_cannot_be_found_are_unknown_not_right():
    sent = weights_of(0)
    sent["elsewhere.weight"] = torch.ones(3)
    told = vllm_plugin.read_back(model_of(weights_of(0)), raws(sent), "v1")
    assert "elsewhere.weight" not in told


def test_shards_are_unknown_not_wrong():
    sent = weights_of(0)
    model = model_of(sent)
    model.embed.weight = torch.nn.Parameter(sent["embed.weight"][:25].clone(), requires_grad=False)
    assert "embed.weight" not in vllm_plugin.read_back(model, raws(sent), "v1")


def test_columns_differ_from_version_to_version_and_cover_all_in_time():
    seen = set()
    for version in range(60):
        picked = vllm_plugin._columns(f"policy/0/{version}", 64, 16)
        assert len(set(picked)) == 16
        seen.update(picked)
    assert seen == set(range(64))


# ---- the engine class, on a stand-in for vLLM


@pytest.fixture
def vllm(monkeypatch):
    """Enough of vLLM to build the plug-in's class and to run its own senders."""
    made = {}

    def module(name, **names):
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made[name])

    class Engine:
        def __init__(self, config, vllm_config, device, model):
            self.vllm_config, self.device, self.model, self._default_model = vllm_config, device, model, model
            self.model_config = None

    class Factory:
        _registry = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name, path, class_name):
            if name in cls._registry:
                raise ValueError(name)
            cls._registry[name] = (path, class_name)

    base = {"WeightTransferEngine": Engine, "WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    package = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed"):
        module(name)
    module(f"{package}.base", **base)
    module(f"{package}.factory", WeightTransferEngineFactory=Factory)
    module(f"{package}.clients", _json_safe_update_payload=lambda info: {**info, "safe": True})
    module(package, base=made[f"{package}.base"])
    monkeypatch.delitem(vllm_plugin.__dict__, "SlipstreamTransferEngine", raising=False)
    yield made
    vllm_plugin.__dict__.pop("SlipstreamTransferEngine", None)


def parallel(**fields):
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(**{"data_parallel_index": 0, "world_size": 1, "rank": 0, **fields})
    )


def test_registration_may_come_twice(vllm):
    vllm_plugin.register()
    vllm_plugin.register()
    factory = vllm["vllm.distributed.weight_transfer.factory"].WeightTransferEngineFactory
    assert factory._registry == {"slipstream": (vllm_plugin.__name__, "SlipstreamTransferEngine")}


def test_nothing_is_loaded_before_everything_has_arrived(vllm, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    loads = []
    monkeypatch.setattr(vllm_plugin, "load", lambda model, config, received, device: loads.append(sorted(received)))
    weights = weights_of(0)
    names = sorted(weights)
    for i, part in enumerate((names[:2], names[2:])):
        save_file({name: weights[name] for name in part}, tmp_path / f"{i}.safetensors")
    engine = vllm_plugin.SlipstreamTransferEngine(None, parallel(), "cpu", model_of(weights))
    engine.start_weight_update()
    for i in (0, 1):
        engine.update_weights({"kind": "file", "version": "v1", "path": str(tmp_path / f"{i}.safetensors")})
        assert loads == []
    engine.finish_weight_update()
    assert loads == [names]
    assert engine.held() == sums(weights)
    assert engine.held() == {}, "what was received is let go of after it was verified"


def test_an_update_begun_anew_forgets_the_old_one(vllm, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    loads = []
    monkeypatch.setattr(vllm_plugin, "load", lambda model, config, received, device: loads.append(sorted(received)))
    weights = weights_of(0)
    save_file(weights, tmp_path / "w.safetensors")
    engine = vllm_plugin.SlipstreamTransferEngine(None, parallel(), "cpu", model_of(weights))
    engine.start_weight_update()
    engine.update_weights({"path": str(tmp_path / "w.safetensors")})
    with pytest.raises(Exception, match="abandoned, as asked"):
        engine.update_weights({"kind": "abandon"})
    engine.start_weight_update()
    engine.finish_weight_update()
    assert loads == []


def test_worker_extension_reports_through_the_engine(vllm):
    worker = vllm_plugin.WorkerExtension()
    worker.weight_transfer_engine = None
    assert worker.slipstream_checksums() == {}
    worker.weight_transfer_engine = vllm_plugin.SlipstreamTransferEngine(
        None, parallel(), "cpu", model_of(weights_of(0))
    )
    assert worker.slipstream_checksums() == {}


def test_each_worker_of_a_replica_has_a_rank_of_its_own():
    ranks = [
        vllm_plugin._worker_index(parallel(data_parallel_index=d, world_size=2, rank=r).parallel_config)
        for d in (0, 1)
        for r in (0, 1)
    ]
    assert ranks == [0, 1, 2, 3]


# ---- vLLM's own senders


class Wire:
    """An engine that writes down what it is told."""

    def __init__(self):
        self.told = []

    async def world_size(self):
        return 2

    async def init_transfer(self, info):
        self.told.append(("init", info))

    async def transfer(self, info):
        self.told.append(("update", info))

    async def call(self, method, path, body=None):
        self.told.append((path, body))


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
async def test_vllms_own_sender_runs_between_our_start_and_finish(vllm, monkeypatch, kind):
    made = []

    class Sender:
        def __init__(self, info, client, source):
            self.info, self.client, self.source, self.closed = info, client, source, False
            client.init_weight_transfer_engine({"rank_offset": 1})
            made.append(self)

        def send_weights(self):
            self.client.start_weight_update()
            meta = [(m.name, str(m.dtype), m.shape) for m in self.source.metadata()]
            assert [m[0] for m in meta] == [name for name, _ in self.source]
            self.client.update_weights({"names": meta})
            self.client.finish_weight_update()

        def shutdown(self):
            self.closed = True

    package = "vllm.distributed.weight_transfer"
    info = lambda **fields: fields  # noqa: E731
    monkeypatch.setitem(
        sys.modules,
        f"{package}.{kind}_engine",
        types.SimpleNamespace(NCCLTrainerInitInfo=info, IPCTrainerInitInfo=info),
    )
    vllm[package].WeightTransferTrainerFactory = types.SimpleNamespace(
        trainer_init=lambda info, client, source: Sender(info, client, source)
    )
    engine = Wire()
    carrier = NativeTransport(kind, "bfloat16")
    for version in ("v1", "v2"):
        await carrier.send(carrier.stage(version, {"w": torch.ones(2, 3)}), engine)
    assert len(made) == 1
    assert made[0].info["rank"] == 0
    assert made[0].info.get("world_size", 3) == 3
    expected = ("update", {"names": [("w", "torch.bfloat16", (2, 3))], "safe": True})
    assert engine.told == [("init", {"rank_offset": 1}), expected, expected]
    carrier.close()
    assert made[0].closed


async def test_without_vllm_the_native_transports_say_what_to_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    carrier = NativeTransport("nccl")
    with pytest.raises(PublishError, match="use gloo, disk or delta"):
        await carrier.send(carrier.stage("v1", {"w": torch.ones(2)}), Wire())


def test_sharded_exports_are_refused_by_vllms_senders():
    pieces = [("w", (4,), (slice(0, 2),), torch.ones(2)), ("w", (4,), (slice(2, 4),), torch.ones(2))]
    with pytest.raises(PublishError, match="comes in pieces"):
        NativeTransport("nccl").stage("v1", pieces)


async def test_a_client_that_moved_asks_the_new_server_for_the_plug_in():
    class Client(HttpEngine):
        async def call(self, method, path, body=None, **options):
            if path == "/weight_checker":
                return {"checksums": {"w": "another hash"}}
            if self.base_url.endswith(":1"):
                raise RequestError("HTTP 404: Not Found")
            return {"results": [{"w": "float32[1]:0"}]}

    client = Client("http://a:1")
    assert await client.checksum() == {"w": "another hash"}
    await client.reconnect("http://a:2")
    assert await client.checksum() == {"w": "float32[1]:0"}
    await client.close()


async def test_a_call_that_comes_while_a_client_moves_finds_no_closed_one():
    class SlowToClose(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            return httpx.Response(200)

        async def aclose(self):
            await asyncio.sleep(0.1)

    client = HttpEngine("http://a:1", transport=SlowToClose())
    moving = asyncio.create_task(client.reconnect("http://a:2"))
    await asyncio.sleep(0.02)
    assert await client.health()
    await moving
    await client.close()


# ---- adapters


def half_adapter():
    stem = "base_model.model.model.layers.0.self_attn"
    return {
        f"{stem}.q_proj.lora_A.weight": torch.ones(2, 4),
        f"{stem}.q_proj.lora_B.weight": torch.full((6, 2), 3.0),
        f"{stem}.v_proj.lora_A.weight": torch.full((2, 4), 2.0),
        f"{stem}.v_proj.lora_B.weight": torch.full((3, 2), 4.0),
    }


async def test_an_adapter_is_written_for_peft_loaded_in_place_and_deleted(tmp_path):
    from safetensors.numpy import load_file

    engine = Wire()
    carrier = AdapterTransport(tmp_path, lora_name="student")
    staged = carrier.stage("policy/0/1", half_adapter())
    await carrier.send(staged, engine)
    folder = tmp_path / "adapter-policy-0-1"
    assert engine.told == [
        ("/v1/unload_lora_adapter", {"lora_name": "student"}),
        ("/v1/load_lora_adapter", {"lora_name": "student", "lora_path": str(folder)}),
    ]
    assert sorted(load_file(folder / "adapter_model.safetensors")) == sorted(half_adapter())
    config = json.loads((folder / "adapter_config.json").read_text())
    # The scale is in B already.
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    carrier.release(staged)
    assert list(tmp_path.iterdir()) == []


class Adapter:
    """What vLLM keeps of an adapter: its tensors by module, those of packed layers in lists."""

    def __init__(self, loras):
        self.get_lora = loras.get


def manager_of(sent, *, scale=1.0, tp_size=1):
    """vLLM's adapter manager after ``sent`` was loaded into slot 1 of 2, rank 2 of at most 4: q, k, v in one layer."""
    stem, path = "model.layers.0.self_attn", "model.layers.0.self_attn.qkv_proj"
    parts = [f"{stem}.{x}_proj" for x in "qkv"]
    tensors = {name: value.to(torch.bfloat16) for name, value in sent.items()}
    halves = {side: [tensors.get(f"base_model.model.{p}.lora_{side}.weight") for p in parts] for side in "AB"}
    a_stacked = [torch.zeros(2, 1, 4, 4, dtype=torch.bfloat16) for _ in parts]
    b_stacked = [torch.zeros(2, 1, size, 4, dtype=torch.bfloat16) for size in (6, 3, 3)]
    for stacked, half, factor in ((a_stacked, halves["A"], 1.0), (b_stacked, halves["B"], scale)):
        for buffer, like in zip(stacked, half, strict=True):
            if like is not None:
                buffer[1, 0, : like.shape[0], : like.shape[1]] = like * factor
    layer = types.SimpleNamespace(lora_a_stacked=a_stacked, lora_b_stacked=b_stacked, tp_size=tp_size)
    bare = types.SimpleNamespace(lora_a_stacked=[], lora_b_stacked=[], tp_size=tp_size)
    weights = types.SimpleNamespace(lora_a=halves["A"], lora_b=halves["B"])
    return types.SimpleNamespace(
        lora_index_to_id=[None, 7],
        modules={path: layer, "model.layers.0.mlp.down_proj": bare},
        packed_modules={path: parts},
        get_adapter={7: Adapter({path: weights})}.__getitem__,
    )


def test_an_adapter_is_read_back_from_the_buffers_that_are_multiplied_with(tmp_path):
    staged = AdapterTransport(tmp_path, dtype="bfloat16").stage("v1", half_adapter())
    held = vllm_plugin.read_back_adapter(manager_of(half_adapter()))
    assert compare_checksums(staged.checksums, held).verdict == "ok"
    assert set(held) == set(staged.checksums)
    other = half_adapter() | {next(iter(half_adapter())): torch.zeros(2, 4)}
    assert compare_checksums(staged.checksums, vllm_plugin.read_back_adapter(manager_of(other))).verdict == "failed"
    scaled = vllm_plugin.read_back_adapter(manager_of(half_adapter(), scale=0.5))
    assert compare_checksums(staged.checksums, scaled).verdict == "failed"


def test_an_adapter_that_cannot_be_read_back_is_unknown(tmp_path):
    staged = AdapterTransport(tmp_path, dtype="bfloat16").stage("v1", half_adapter())
    sharded = vllm_plugin.read_back_adapter(manager_of(half_adapter(), tp_size=2))
    assert compare_checksums(staged.checksums, sharded).verdict == "unknown"


def test_an_adapter_that_is_not_there_is_no_unknown_one(tmp_path):
    """A probe would not tell it from one that changes little."""
    staged = AdapterTransport(tmp_path, dtype="bfloat16").stage("v1", half_adapter())
    empty = manager_of(half_adapter())
    empty.lora_index_to_id = [None, None]
    verdict = compare_checksums(staged.checksums, vllm_plugin.read_back_adapter(empty))
    assert (verdict.verdict, verdict.detail) == ("failed", "parameters held but not sent: no adapter is loaded")


@pytest.mark.parametrize(("part", "row"), [(0, 3), (1, 0), (2, 2)])  # beyond the rank of q and v; k has no adapter
def test_what_lies_beside_an_adapter_in_its_buffers_is_found(tmp_path, part, row):
    staged = AdapterTransport(tmp_path, dtype="bfloat16").stage("v1", half_adapter())
    manager = manager_of(half_adapter())
    layer = next(iter(manager.modules.values()))
    layer.lora_a_stacked[part][0, 0, row, 0] = 1  # another adapter's slot
    assert compare_checksums(staged.checksums, vllm_plugin.read_back_adapter(manager)).verdict == "ok"
    layer.lora_a_stacked[part][1, 0, row, 0] = 1
    assert compare_checksums(staged.checksums, vllm_plugin.read_back_adapter(manager)).verdict == "failed"


def test_layers_of_another_form_are_unknown_and_the_rest_is_told(tmp_path):
    """Embeddings (one tensor), and experts (three stacks for all of them)."""
    manager = manager_of(half_adapter())
    experts = {"lora_a_stacked": [torch.zeros(4, 4)] * 3, "lora_b_stacked": [torch.zeros(4, 4)] * 3}
    manager.modules["model.embed_tokens"] = types.SimpleNamespace(
        lora_a_stacked=torch.zeros(1, 8, 4), lora_b_stacked=torch.zeros(1, 1, 4, 4)
    )
    manager.modules["model.layers.0.experts"] = types.SimpleNamespace(**experts)
    path = "model.layers.0.self_attn.qkv_proj"
    attention = manager.get_adapter(7).get_lora(path)
    stacks = types.SimpleNamespace(lora_a=[torch.ones(2, 4, 4)] * 3, lora_b=[torch.ones(2, 4, 4)] * 3)
    manager.get_adapter = {7: Adapter({path: attention, "model.layers.0.experts": stacks})}.__getitem__
    assert set(vllm_plugin.read_back_adapter(manager)) == set(half_adapter())


class DropsAdapters(FakeEngine):
    """As vLLM 0.32: the end of an update drops every adapter that its workers hold."""

    def __init__(self):
        super().__init__(8)
        self.held, self.served = {NO_ADAPTER: "float32[0]:0"}, set()

    async def call(self, method, path, body=None):
        from safetensors.torch import load_file

        if path == "/v1/unload_lora_adapter":
            if body["lora_name"] not in self.served:
                raise RequestError("The lora adapter cannot be found.")
            self.served.remove(body["lora_name"])
            return
        assert body["lora_name"] not in self.served, "vLLM refuses a name that it serves"
        self.served.add(body["lora_name"])
        self.held = sums(load_file(f"{body['lora_path']}/adapter_model.safetensors"))

    async def finish_weight_update(self, weight_version):
        await super().finish_weight_update(weight_version)
        self.held = {NO_ADAPTER: "float32[0]:0"}

    async def checksum(self):
        return self.held


async def test_an_adapter_is_loaded_after_the_update_in_which_vllm_drops_adapters(tmp_path):
    engine = DropsAdapters()
    pub = Publisher([Replica(engine)], AdapterTransport(tmp_path, dtype="bfloat16"), attempts=1)
    for version in ("policy/0/1", "policy/0/2"):
        (receipt,) = await pub.publish(half_adapter(), version)
        assert (receipt.published, receipt.verification.kind) == (True, "checksum")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter-policy-0-2"]
    pub.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_under_a_name_is_replaced(tmp_path):
    AdapterTransport(tmp_path).stage("policy/0/1", half_adapter())
    staged = AdapterTransport(tmp_path).stage("policy/0/1", half_adapter())
    assert (staged.payload / "adapter_model.safetensors").is_file()


def test_a_worker_reports_its_adapter_when_nothing_was_received(vllm):
    worker = vllm_plugin.WorkerExtension()
    worker.weight_transfer_engine = vllm_plugin.SlipstreamTransferEngine(
        None, parallel(), "cpu", model_of(weights_of(0))
    )
    worker.model_runner = types.SimpleNamespace(
        lora_manager=types.SimpleNamespace(_adapter_manager=manager_of(half_adapter()))
    )
    assert sorted(worker.slipstream_checksums()) == sorted(half_adapter())


def test_adapters_do_not_go_with_requests_that_are_kept(tmp_path):
    with pytest.raises(PublishError, match="use pause_mode wait or abort"):
        Publisher([Replica(FakeEngine(8))], AdapterTransport(tmp_path), pause_mode="keep")


def test_whole_weights_are_no_adapter(tmp_path):
    with pytest.raises(PublishError, match="publish merged weights by another transport"):
        AdapterTransport(tmp_path).stage("v1", {"w": np.ones(2, np.float32)})
