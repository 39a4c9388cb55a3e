"""Each token is of the version that its answer names, with updates landing in the middle at random."""

# ruff: noqa: E402 - torch first

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")

from slipstream.config.settings import InferenceSettings
from slipstream.inference.types import GenerateRequest
from slipstream.weights import InProcessTransport, Publisher, Replica
from versions_kit import judge


def changed(weights, seed):
    """Weights far enough from the others to be told apart by a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {n: w + 0.15 * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items()}


@pytest.mark.parametrize("seed", [0, 1])
async def test_embedded_engine_names_the_version_of_every_token(seed):
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.tiny import tiny_model

    rng = random.Random(seed)
    model, tokenizer = tiny_model(seed=0)
    settings = InferenceSettings(dtype="float32", kv_cache_tokens=4096, pause_mode="keep")
    engine = EmbeddedEngine(tiny_model(seed=0)[0], tokenizer, settings)
    await engine.start()
    base = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    weights = {f"policy/0/{i}": changed(base, i) for i in range(1, 5)}
    order = list(weights)
    publisher = Publisher([Replica(engine)], InProcessTransport("float32"), pause_mode="keep")
    await publisher.publish(weights[order[0]], order[0])
    prompts = [tuple(rng.randrange(5, 250) for _ in range(rng.randrange(3, 40))) for _ in range(4)]
    asked = [
        asyncio.create_task(engine.generate(GenerateRequest(f"r{i}", prompt, max_tokens=160, seed=i, ignore_eos=True)))
        for i, prompt in enumerate(prompts)
    ]
    for version in order[1:]:
        before = (await engine.metrics())["generation_tokens_total"]
        wanted = before + rng.randrange(20, 160)
        async with asyncio.timeout(60):
            while (await engine.metrics())["generation_tokens_total"] < wanted and not all(t.done() for t in asked):
                await asyncio.sleep(0.001)
        await publisher.publish(weights[version], version)
    answers = await asyncio.gather(*asked)
    await engine.close()
    verdicts = [v for p, a in zip(prompts, answers, strict=True) for v in judge(model, weights, p, a, order, "kept")]
    assert sum(len(answer.versions) > 1 for answer in answers) >= 3, [a.versions for a in answers]
    assert len(verdicts) >= 6
    for verdict in verdicts:
        assert verdict.named < 1e-3, verdict
        assert min(verdict.neighbours.values()) > 0.02, verdict
    # A trainer that computes everything anew sees other log-probs after an update in flight: the gap is real.
    later = [v.other for v in verdicts if v.run.start > 0]
    assert max(later) > 10 * max(v.named for v in verdicts)
