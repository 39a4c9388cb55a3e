"""Adapters on a real vLLM; run by ``make test-vllm``."""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

import pytest

torch = pytest.importorskip("torch")

from slipstream.inference.client import HttpEngine
from slipstream.weights import AdapterTransport, MemoryTransport, Probe
from vllm_kit import moved, publisher, python, reference, serving, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
async def vllm(python, tmp_path_factory):
    """A server that takes adapters."""
    async with serving(python, tmp_path_factory.mktemp("vllm"), "--enable-lora", "--max-lora-rank", "8") as engine:
        yield engine


async def test_an_adapter_is_published_probed_and_replaced(vllm, weights, tmp_path):
    # Requests name the adapter as their model.
    engine = HttpEngine(vllm.base_url, model="adapter", timeout_seconds=3600, control_seconds=3600)
    carrier = AdapterTransport(tmp_path, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, lora_name="adapter")
    pub = publisher(engine, carrier, pause_mode="wait", attempts=1)
    layers = [name for name in weights if name.endswith("q_proj.weight")]
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        adapter, merged = {}, dict(weights)
        for name in layers:
            out, width = weights[name].shape
            a = torch.randn(4, width, generator=generator) * 0.05
            b = torch.randn(out, 4, generator=generator) * 0.05
            stem = "base_model.model." + name.removesuffix(".weight")
            adapter[f"{stem}.lora_A.weight"], adapter[f"{stem}.lora_B.weight"] = a, b
            merged[name] = (weights[name].float() + 2 * b @ a).to(torch.bfloat16)
        expected = reference(merged)
        probe = Probe([list(range(200, 230))], [expected], tolerance=0.5)
        (receipt,) = await pub.publish(adapter, f"adapter/0/{step}", probe=probe)
        assert (receipt.published, receipt.verification.kind) == (True, "probe")
    pub.close()
    await engine.close()


async def test_whole_weights_reach_a_server_with_adapters_too(vllm, weights):
    (receipt,) = await publisher(vllm, MemoryTransport()).publish(moved(weights, 1), "whole/0/1")
    assert (receipt.published, receipt.verification.kind) == (True, "checksum")
