"""Kept sets from a real vLLM, started as a run with a truncated sampler starts it; run by ``make test-vllm``."""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

import pytest

torch = pytest.importorskip("torch")

from slipstream.errors import InferenceError
from slipstream.inference.types import GenerateRequest
from slipstream.trajectory import SamplingSpec
from vllm_kit import python, serving, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
CUT = SamplingSpec(temperature=1.3, top_p=0.8, top_k=12)


async def test_a_truncated_sampler_returns_the_sets_that_it_normalised_over(python, weights, tmp_path):
    from slipstream.inference.embedded.pretrained import BUNDLED, load_causal_lm, resolve

    prompt = tuple(range(200, 230))
    request = GenerateRequest("cut", prompt, sampling=CUT, max_tokens=24, seed=3, ignore_eos=True, kept_sets=True)
    try:
        async with serving(python, tmp_path, returns=("kept_sets",)) as engine:
            result = await engine.generate(request)
    except InferenceError as error:
        if "requires Triton" in str(error):
            pytest.skip("vLLM's CPU build has no Triton, and its runner without it returns no kept sets")
        raise
    assert result.kept_sets is not None
    assert len(result.kept_sets) == len(result.token_ids) == 24
    assert all(1 <= len(kept) <= CUT.top_k for kept in result.kept_sets)
    assert any(len(kept) < CUT.top_k for kept in result.kept_sets), "top_p cut something too"
    model = load_causal_lm(resolve(BUNDLED), "bfloat16")
    ids = torch.tensor([*prompt, *result.token_ids])
    with torch.inference_mode():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float() / CUT.temperature
    gaps, whole_gaps = [], []
    for z, token, reported, kept in zip(logits, result.token_ids, result.logprobs, result.kept_sets, strict=True):
        places = kept.tolist()
        assert token in places
        own = torch.log_softmax(z[torch.as_tensor(kept.astype("int64"))], -1)[places.index(token)]
        gaps.append(abs(float(own) - reported))
        whole_gaps.append(abs(float(torch.log_softmax(z, -1)[token]) - reported))
    print("over the kept sets", sum(gaps) / 24, "over the vocabulary", sum(whole_gaps) / 24)
    assert sum(gaps) / 24 < 0.1
    assert sum(whole_gaps) > 3 * sum(gaps)
