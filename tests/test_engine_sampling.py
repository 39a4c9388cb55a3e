"""The sampler: exact distributions, keyed noise, log-probs of what was really sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine_kit import gap, model_and_tokenizer, prompt, request, running
from slipstream.inference.embedded.sampling import Draw, sample, uniform
from slipstream.inference.fake import processed_logprobs
from slipstream.trajectory import SamplingSpec

PINNED = [0.6524484863740322, 0.36818951565166946, 0.20420983728006326]
SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.6),
    SamplingSpec(temperature=1.7, top_p=0.8),
    SamplingSpec(top_k=7),
    SamplingSpec(min_p=0.1),
    SamplingSpec(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    SamplingSpec(repetition_penalty=1.4),
    SamplingSpec(presence_penalty=0.8, frequency_penalty=0.3),
]


def draws(spec, count, prompt_ids=(), output=(), position=0, banned=()):
    return [Draw(spec, seed, position, np.array(prompt_ids, np.int64), list(output), banned) for seed in range(count)]


def chi_square(counts, probs):
    """Statistic and degrees of freedom, cells of small expectation pooled."""
    total = counts.sum()
    order = np.argsort(-probs)
    want, have = probs[order] * total, counts[order]
    split = int((want >= 5).sum())
    want = np.append(want[:split], want[split:].sum())
    have = np.append(have[:split], have[split:].sum())
    cells = want > 0
    return float((((have - want) ** 2)[cells] / want[cells]).sum()), int(cells.sum()) - 1


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_frequencies_match_the_reported_distribution(spec):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 300)
    seen, output = [3, 4, 5, 200], [5, 5, 9]
    want = np.exp(processed_logprobs(logits, spec, seen, output))
    rows = torch.tensor(logits, dtype=torch.float32).expand(20000, -1)
    tokens, logprobs, *_ = zip(*sample(rows, draws(spec, 20000, seen, output)), strict=True)
    counts = np.bincount(tokens, minlength=300)
    assert not counts[want == 0].any()
    statistic, freedom = chi_square(counts, want)
    # Wilson and Hilferty: the cube root is nearly normal; 4 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
    assert logprobs == pytest.approx(np.log(want[list(tokens)]), abs=1e-5)


def test_every_kept_token_has_its_share_of_the_noise():
    """Sweeping the noise over [0, 1) visits each token for exactly its probability."""
    from slipstream.inference.embedded.sampling import _inverse_cdf

    probs = torch.tensor(np.random.default_rng(1).dirichlet(np.full(1000, 0.05)), dtype=torch.float32)
    probs[[0, 255, 256, 999]] = 0
    probs /= probs.sum()
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    tokens = _inverse_cdf(probs.expand(len(u), -1), u)
    share = torch.bincount(tokens, minlength=1000).double() / len(u)
    assert (share - probs.double()).abs().max() < 2 / 20000
    assert not share[probs == 0].any()


def test_extreme_noise_never_picks_an_impossible_token():
    from slipstream.inference.embedded.sampling import _inverse_cdf

    probs = torch.zeros(3, 600)
    probs[0, 0], probs[1, 599], probs[2, 300] = 1, 1, 1e-30
    for u in (0.0, 0.5, 1 - 2**-53):
        assert _inverse_cdf(probs, torch.full((3,), u, dtype=torch.float64)).tolist() == [0, 599, 300]


def test_ties_at_the_threshold_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    tokens = {sample(logits, [d])[0].token for d in draws(SamplingSpec(top_k=2), 200)}
    assert tokens == {0, 1, 2, 3}


def test_top_p_looks_at_all_tokens_when_the_largest_do_not_hold_the_mass():
    logits = torch.zeros(1, 5000)
    logits[0, 0] = 1.0
    logits -= torch.arange(5000) * 1e-5
    kept = processed_logprobs(logits[0].double().numpy(), SamplingSpec(top_p=0.9))
    tokens, logprobs, *_ = zip(*sample(logits.expand(50, -1), draws(SamplingSpec(top_p=0.9), 50)), strict=True)
    assert logprobs == pytest.approx(kept[list(tokens)], abs=1e-4)
    assert max(tokens) > 1024


def test_noise_is_uniform_and_independent_across_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(400), np.arange(400), indexing="ij")
    u = uniform(seeds.ravel(), positions.ravel())
    counts = np.bincount((u * 100).astype(int), minlength=100)
    statistic, freedom = chi_square(counts, np.full(100, 0.01))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    grid = u.reshape(400, 400)
    for base, shifted in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        # 159,600 pairs: the standard error of a zero correlation is 0.0025.
        assert abs(np.corrcoef(base.ravel(), shifted.ravel())[0, 1]) < 0.01


def test_noise_is_pinned():
    """A change of the hash would change every seeded run."""
    values = uniform(np.array([0, 1, 2**63 - 1]), np.array([0, 0, 12345]))
    assert values.tolist() == PINNED


def test_banned_tokens_leave_the_distribution():
    logits = torch.zeros(64, 4)
    tokens, logprobs, *_ = zip(*sample(logits, draws(SamplingSpec(), 64, banned=(1, 3))), strict=True)
    assert set(tokens) == {0, 2}
    assert logprobs == pytest.approx([math.log(0.5)] * 64)


def test_the_callers_logits_are_not_changed():
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, draws(SamplingSpec(temperature=0.5, top_k=3), 2, banned=(1,)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("spec", SPECS, ids=str)
async def test_an_engines_logprobs_follow_the_whole_spec(spec):
    model, _ = model_and_tokenizer()
    asked = [request(prompt(12, n), max_tokens=20, seed=n, sampling=spec) for n in range(3)]
    async with running() as engine:
        for ask, got in zip(asked, await engine.generate_many(asked), strict=True):
            assert gap(model, ask, got) < 1e-3


async def test_mixed_specs_in_one_batch_do_not_touch_each_other():
    specs = [*SPECS, SamplingSpec(temperature=0)]
    asked = [request(prompt(12), max_tokens=10, seed=4, sampling=spec) for spec in specs]
    async with running() as engine:
        together = await engine.generate_many(asked)
        for ask, got in zip(asked, together, strict=True):
            assert (await engine.generate(ask)).token_ids == got.token_ids


async def test_noise_hangs_on_seed_and_position_alone():
    """Continuing from a sampled prefix needs the position's noise, so the seed gives the same first token anywhere."""
    async with running() as engine:
        a = await engine.generate(request(prompt(12), seed=9, max_tokens=6))
        await engine.generate(request(prompt(30, 5), seed=10))
        b = await engine.generate(request(prompt(12), seed=9, max_tokens=6))
        other = await engine.generate(request(prompt(12), seed=8, max_tokens=6))
    assert a.token_ids == b.token_ids != other.token_ids
