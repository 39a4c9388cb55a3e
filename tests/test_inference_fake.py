"""The fake engine is a real engine: its distribution, stops and versions are what the contract says."""

import asyncio
import math

import numpy as np
import pytest

from slipstream.errors import InferenceError
from slipstream.inference.fake import FakeEngine, processed_logprobs
from slipstream.inference.types import Engine, GenerateRequest
from slipstream.trajectory import SamplingSpec


def request(name="r", ids=(1, 2, 3), **kwargs):
    return GenerateRequest(name, ids, **kwargs)


async def test_is_an_engine():
    assert isinstance(FakeEngine(8), Engine)


async def test_uniform_by_default():
    result = await FakeEngine(64, eos_token_ids=()).generate(request(max_tokens=5, seed=1))
    assert len(result.token_ids) == 5
    assert result.logprobs == pytest.approx([-math.log(64)] * 5)


async def test_script_gets_an_end_of_sequence():
    engine = FakeEngine(300, reply=lambda r: list(b"hi"))
    result = await engine.generate(request(max_tokens=9))
    assert result.token_ids == (104, 105, 299)
    assert (result.text, result.finish_reason, result.stop_reason) == ("hi", "stop", None)


async def test_script_is_cut_by_max_tokens():
    engine = FakeEngine(300, reply=lambda r: list(b"hello"))
    result = await engine.generate(request(max_tokens=2))
    assert (result.text, result.finish_reason) == ("he", "length")


async def test_script_that_raises_reaches_the_caller():
    def reply(_):
        raise InferenceError("scripted death")

    with pytest.raises(InferenceError, match="scripted death"):
        await FakeEngine(300, reply=reply).generate(request())


async def test_sampling_frequencies_follow_the_reported_distribution():
    engine = FakeEngine(6, eos_token_ids=(), scale=1.0)
    spec = SamplingSpec(temperature=0.7, top_k=4)
    counts = np.zeros(6)
    requests = [request(f"r{i}", sampling=spec, max_tokens=1, seed=i) for i in range(2000)]
    for result in await engine.generate_many(requests):
        counts[result.token_ids[0]] += 1
    expected = np.exp(processed_logprobs(engine._logits(3), spec)) * 2000
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi2 = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001


async def test_update_while_frozen_splits_the_versions_and_the_distribution():
    engine = FakeEngine(16, eos_token_ids=(), step_seconds=0.001)
    task = asyncio.create_task(engine.generate(request(max_tokens=60, seed=3)))
    await asyncio.sleep(0.02)
    await engine.pause("keep")
    bias = np.zeros(16, np.float32)
    bias[5] = 50
    await engine.start_weight_update()
    await engine.update_weights({"head.bias": bias})
    await engine.finish_weight_update("policy/0/1")
    await engine.resume()
    result = await task
    old, new = result.versions
    assert (old.version, new.version, new.end) == ("policy/0/0", "policy/0/1", 60)
    assert set(result.token_ids[new.start :]) == {5}
    assert result.logprobs[old.start] == pytest.approx(-math.log(16))


async def test_close_ends_requests_in_flight():
    engine = FakeEngine(16, eos_token_ids=(), step_seconds=0.01)
    task = asyncio.create_task(engine.generate(request(max_tokens=4000)))
    await asyncio.sleep(0.02)
    await engine.close()
    with pytest.raises(InferenceError, match="closed"):
        await task


async def test_cache_never_crosses_salts():
    engine = FakeEngine(16, eos_token_ids=())
    await engine.generate(request("a", tuple(range(10)), cache_salt="x", max_tokens=1))
    same = await engine.generate(request("b", tuple(range(10)), cache_salt="x", max_tokens=1))
    other = await engine.generate(request("c", tuple(range(10)), cache_salt="y", max_tokens=1))
    assert (same.cached_tokens, other.cached_tokens) == (9, 0)
