"""A real vLLM holds to the inference contract, and names the version of every token; run by ``make test-vllm``."""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")

from slipstream.inference.client import HttpEngine
from slipstream.inference.conformance import CHECKS, run_conformance
from slipstream.inference.embedded.pretrained import BUNDLED, load_causal_lm, load_tokenizer, resolve
from slipstream.inference.types import GenerateRequest
from slipstream.weights import MemoryTransport
from versions_kit import judge
from vllm_kit import moved, publisher, python, serving, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

DEVIATIONS = {
    "http_unknown_fields_are_refused": "it ignores what it does not know; our client sends nothing that it would",
    "update_out_of_order_is_refused": "it takes an update while it runs; the publisher always pauses it first",
}
"""Checks that vLLM 0.32 is known to fail, and why that is bearable."""


@pytest.fixture(scope="module")
async def vllm(python, tmp_path_factory):
    """One server."""
    async with serving(python, tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture(scope="module")
async def client(vllm, tmp_path_factory):
    """The same server, with what the suite needs to know."""
    tokenizer = load_tokenizer(BUNDLED)
    engine = HttpEngine(
        vllm.base_url,
        model="policy",
        timeout_seconds=1800,
        control_seconds=600,
        transfer_dir=tmp_path_factory.mktemp("weights"),
        eos_token_ids=[tokenizer.eos_token_id],
    )
    async with engine:
        yield engine


@pytest.mark.parametrize("name", list(CHECKS))
async def test_vllm_conforms(client, weights, name):
    """Long requests are short here: a small machine decodes a few tokens a second."""
    tokenizer = load_tokenizer(BUNDLED)
    (result,) = await run_conformance(
        client, tokenizer, weights=weights, tolerance=0.2, deadline=1200, long_tokens=48, only=[name]
    )
    print(f"\n{result.status:8} {result.name:40} {result.seconds:6.1f} s  {result.detail}", flush=True)
    if name in DEVIATIONS:
        assert result.status == "failed", f"vLLM has learnt this: {DEVIATIONS[name]}"
    elif result.status == "skipped":
        pytest.skip(result.detail)
    else:
        assert result.status == "passed", result.detail


async def test_vllm_names_the_version_of_every_token(vllm, weights):
    """Updates land in the middle of generations at random; salted caches.

    vLLM computes the keys and values of a frozen request anew after the update, so a plain forward pass is the judge.
    """
    rng = random.Random(0)
    versions = {f"exact/0/{i}": moved(weights, i, scale=0.15) for i in range(4)}
    order = list(versions)
    pub = publisher(vllm, MemoryTransport())
    await pub.publish(versions[order[0]], order[0])
    prompts = [tuple(rng.randrange(1000, 20000) for _ in range(rng.randrange(5, 30))) for _ in range(3)]
    asked = [
        asyncio.create_task(
            vllm.generate(
                GenerateRequest(f"exact{i}", prompt, max_tokens=72, seed=i, ignore_eos=True, cache_salt=f"exact{i}")
            )
        )
        for i, prompt in enumerate(prompts)
    ]
    begun = (await vllm.metrics())["generation_tokens_total"]
    for version in order[1:]:
        wanted = begun + rng.randrange(25, 60)
        async with asyncio.timeout(1800):
            while (await vllm.metrics())["generation_tokens_total"] < wanted and not all(t.done() for t in asked):
                await asyncio.sleep(0.05)
        await pub.publish(versions[version], version)
        begun = wanted
    answers = await asyncio.gather(*asked)
    pub.close()
    model = load_causal_lm(resolve(BUNDLED), "bfloat16")
    verdicts = [
        v for p, a in zip(prompts, answers, strict=True) for v in judge(model, versions, p, a, order, "rebuilt")
    ]
    for verdict in verdicts:
        print(verdict)
    assert sum(len(answer.versions) > 1 for answer in answers) >= 2, [answer.versions for answer in answers]
    assert len(verdicts) >= 5
    for verdict in verdicts:
        # bfloat16 on both sides, in different kernels.
        assert verdict.named < 0.2, verdict
        assert min(verdict.neighbours.values()) > max(0.5, 5 * verdict.named), verdict
