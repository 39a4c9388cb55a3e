"""Publishing to a real vLLM on this machine's CPU, by every transport; run by ``make test-vllm``.

One server for the whole module.  Weights are verified by what the kernels hold, not by what the server says.
"""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

import json
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.errors import InferenceError, PublishError
from slipstream.weights import DeltaTransport, DiskTransport, GlooTransport, MemoryTransport
from vllm_kit import gap, moved, publisher, python, reference, scores, serving, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
async def vllm(python, tmp_path_factory):
    """One server that can be told to misbehave."""
    async with serving(
        python, tmp_path_factory.mktemp("vllm"), "--worker-extension-cls", "vllm_faults.FaultyExtension"
    ) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["memory", "gloo", "disk", "delta"])
async def test_weights_arrive_are_read_back_and_change_what_is_sampled(vllm, weights, tmp_path, kind):
    carrier = {
        "memory": MemoryTransport,
        "gloo": GlooTransport,
        "disk": lambda: DiskTransport(tmp_path),
        "delta": lambda: DeltaTransport(tmp_path),
    }[kind]()
    pub = publisher(vllm, carrier)
    for step in (1, 2):
        new = moved(weights, step)
        (receipt,) = await pub.publish(new, f"{kind}/0/{step}")
        assert (receipt.published, receipt.attempts, receipt.verification.kind) == (True, 1, "checksum")
        assert receipt.verification.detail == f"{len(weights)} parameters"
        got, versions = await scores(vllm, f"{kind}{step}")
        assert versions == [f"{kind}/0/{step}"]
        mine, other = reference(new), reference(moved(weights, 3 - step))
        assert 3 * gap(got, mine) < gap(got, other), (gap(got, mine), gap(got, other))
    pub.close()
    assert not [path for path in Path("/dev/shm").iterdir() if "slipstream" in path.name]


async def test_a_load_that_is_skipped_is_found_in_the_kernels(vllm, weights):
    """The worker receives everything and loads nothing: what "ok" is worth."""
    first, second = moved(weights, 1), moved(weights, 2)
    await publisher(vllm, MemoryTransport()).publish(first, "skip/0/1")
    await vllm.call("POST", "/collective_rpc", {"method": "slipstream_fault", "args": ["skip-load"]})
    try:
        with pytest.raises(PublishError, match="parameters differ"):
            await publisher(vllm, MemoryTransport(), attempts=1).publish(second, "skip/0/2")
    finally:
        await vllm.call("POST", "/collective_rpc", {"method": "slipstream_fault", "args": [""]})
    (receipt,) = await publisher(vllm, MemoryTransport()).publish(second, "skip/0/2")
    assert receipt.published


async def test_a_failed_load_leaves_a_model_that_takes_the_next_one(vllm, weights, tmp_path):
    pub = publisher(vllm, MemoryTransport())
    (receipt,) = await pub.publish(moved(weights, 1), "retry/0/1")
    broken = dict(list(moved(weights, 2).items())[:-3])
    broken["model.layers.0.self_attn.q_proj.weight"] = torch.ones(7, 5, dtype=torch.bfloat16)
    with pytest.raises(PublishError, match="rolled_back"):
        await pub.publish(broken, "retry/0/2")
    got, versions = await scores(vllm, "after-failure")
    assert versions == ["retry/0/1"]
    assert 3 * gap(got, reference(moved(weights, 1))) < gap(got, reference(moved(weights, 2)))
    (receipt,) = await pub.publish(moved(weights, 3), "retry/0/3")
    assert receipt.published
    pub.close()


async def test_an_update_left_open_is_ended(vllm, weights):
    await vllm.pause("keep")
    await vllm.start_weight_update()
    with pytest.raises(InferenceError, match="already"):
        await vllm.start_weight_update()
    (receipt,) = await publisher(vllm, MemoryTransport()).publish(moved(weights, 4), "open/0/1")
    assert (receipt.published, receipt.attempts) == (True, 1)


async def test_vllms_own_engines_take_what_we_give_them(python):
    """The names that ``NativeTransport`` uses, looked up in the real package (there is no GPU here)."""
    code = (
        "import json, inspect, dataclasses\n"
        "from vllm.distributed.weight_transfer import WeightTransferTrainerFactory as F\n"
        "from vllm.distributed.weight_transfer import nccl_engine as n, ipc_engine as i, clients as c, base as b\n"
        "n.NCCLTrainerInitInfo(rank=0, master_address='x', master_port=1, world_size=2, packed=True)\n"
        "i.IPCTrainerInitInfo(rank=0, packed=True)\n"
        "assert c._json_safe_update_payload({'names': []}) == {'names': []}\n"
        "print(json.dumps({'init': list(inspect.signature(F.trainer_init).parameters),"
        " 'client': sorted(m for m in vars(b.VLLMWeightSyncClient) if m[0] != '_'),"
        " 'meta': [f.name for f in dataclasses.fields(b.ParamMeta)],"
        " 'known': sorted(F._registry)}))\n"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["init"] == ["init_info", "client", "source"]
    from slipstream.weights.native import Client

    assert set(told["client"]) <= {name for name in vars(Client) if not name.startswith("_")}
    assert told["meta"] == ["name", "dtype", "shape"]
    assert {"nccl", "ipc"} <= set(told["known"])
