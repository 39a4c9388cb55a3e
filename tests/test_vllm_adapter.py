"""Adapters on a real vLLM; run by ``make test-vllm``."""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

import pytest

torch = pytest.importorskip("torch")

from slipstream.errors import PublishError
from slipstream.inference.client import HttpEngine
from slipstream.weights import AdapterTransport, MemoryTransport
from vllm_kit import gap, moved, publisher, python, reference, scores, serving, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
async def vllm(python, tmp_path_factory):
    """A server that takes adapters."""
    async with serving(python, tmp_path_factory.mktemp("vllm"), "--enable-lora", "--max-lora-rank", "8") as engine:
        yield engine


def adapter_of(weights, seed):
    """An adapter of every q and v projection, and the weights with it merged."""
    generator = torch.Generator().manual_seed(seed)
    adapter, merged = {}, dict(weights)
    for name in [n for n in weights if n.endswith(("q_proj.weight", "v_proj.weight"))]:
        out, width = weights[name].shape
        a = (torch.randn(4, width, generator=generator) * 0.05).to(torch.bfloat16)
        b = (torch.randn(out, 4, generator=generator) * 0.1).to(torch.bfloat16)
        stem = "base_model.model." + name.removesuffix(".weight")
        adapter[f"{stem}.lora_A.weight"], adapter[f"{stem}.lora_B.weight"] = a, b
        merged[name] = (weights[name].float() + b.float() @ a.float()).to(torch.bfloat16)
    return adapter, merged


async def test_an_adapter_is_published_read_back_and_replaced(vllm, weights, tmp_path):
    # Requests name the adapter as their model.
    engine = HttpEngine(vllm.base_url, adapter="adapter", timeout_seconds=3600, control_seconds=3600)
    carrier = AdapterTransport(tmp_path, lora_name="adapter", dtype="bfloat16")
    pub = publisher(engine, carrier, pause_mode="wait", attempts=1)
    for step in (1, 2):
        adapter, merged = adapter_of(weights, step)
        (receipt,) = await pub.publish(adapter, f"adapter/0/{step}")
        assert (receipt.published, receipt.verification.kind, receipt.names) == (True, "checksum", len(adapter))
        got, versions = await scores(engine, f"s{step}")
        assert versions == [f"adapter/0/{step}"]
        assert gap(got, reference(merged)) < 0.1
        assert gap(got, reference(weights)) > 0.2, "the adapter has to show"
    pub.close()
    await engine.close()


async def test_an_adapter_that_was_not_loaded_is_found_out(vllm, weights, tmp_path, monkeypatch):
    """A server that answers "ok" and keeps the adapter before."""
    engine = HttpEngine(vllm.base_url, adapter="adapter", timeout_seconds=3600, control_seconds=3600)
    carrier = AdapterTransport(tmp_path, lora_name="adapter", dtype="bfloat16")
    pub = publisher(engine, carrier, pause_mode="wait", attempts=1)
    await pub.publish(adapter_of(weights, 3)[0], "adapter/0/3")

    async def nothing(staged, engine):
        return None

    monkeypatch.setattr(carrier, "send", nothing)
    with pytest.raises(PublishError, match="no adapter is loaded"):
        await pub.publish(adapter_of(weights, 4)[0], "adapter/0/4")
    pub.close()
    await engine.close()


async def test_whole_weights_reach_a_server_with_adapters_too(vllm, weights):
    (receipt,) = await publisher(vllm, MemoryTransport()).publish(moved(weights, 1), "whole/0/1")
    assert (receipt.published, receipt.verification.kind) == (True, "checksum")
