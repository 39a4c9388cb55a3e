"""The embedded engine computes what transformers computes, however requests are batched and cached."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from engine_kit import expected_logprobs, gap, logits_of, model_and_tokenizer, prompt, request, running
from slipstream.errors import ModelError
from slipstream.inference.embedded import sharing
from slipstream.inference.embedded.runner import build_runner
from slipstream.inference.embedded.tiny import tiny_model
from slipstream.trajectory import SamplingSpec

TOLERANCE = 2e-4
FAST = ("llama", "qwen2", "qwen3", "mistral")
GENERIC = ("gemma2", "phi3", "olmo2", "qwen3_moe", "gpt2")


@pytest.mark.parametrize("arch", FAST + GENERIC)
async def test_sampled_logprobs_are_those_of_a_full_forward_pass(arch):
    model, _ = model_and_tokenizer(arch)
    async with running(arch) as engine:
        assert (await engine.info()).extra["runner"] == ("llama" if arch in FAST else "generic")
        asked = [request(prompt(n, n), max_tokens=24, seed=n) for n in (1, 5, 40)]
        for ask, got in zip(asked, await engine.generate_many(asked), strict=True):
            assert len(got.token_ids) == 24
            assert gap(model, ask, got) < TOLERANCE


@pytest.mark.parametrize("arch", FAST)
async def test_generic_runner_agrees_with_the_fast_one(arch):
    asked = [request(prompt(20, n), max_tokens=16, seed=n) for n in range(3)]
    async with running(arch) as fast, running(arch, force_generic=True) as generic:
        assert (await generic.info()).extra["runner"] == "generic"
        for a, b in zip(await fast.generate_many(asked), await generic.generate_many(asked), strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)


async def test_greedy_is_the_argmax_with_its_logprob_at_temperature_one():
    model, _ = model_and_tokenizer()
    async with running() as engine:
        got = await engine.generate(request(prompt(9), sampling=SamplingSpec(temperature=0), max_tokens=12))
    ids = [*prompt(9), *got.token_ids]
    assert list(got.token_ids) == list(logits_of(model, ids)[8:-1].argmax(-1))
    assert got.logprobs == pytest.approx(expected_logprobs(model, prompt(9), got.token_ids), abs=TOLERANCE)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
async def test_requests_that_join_and_leave_sample_what_they_would_alone(arch):
    asked = [request(prompt(3 + 7 * n, n), max_tokens=4 + 9 * (n % 4), seed=n) for n in range(12)]
    async with running(arch, max_batch_size=5) as engine:
        alone = [await engine.generate(ask) for ask in asked]
        await engine.reset_prefix_cache()
        crowd = await asyncio.gather(*(engine.generate(ask) for ask in asked))
    for one, other in zip(alone, crowd, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("cost", [0, 40, 10**9])
async def test_sharing_blocks_changes_no_numbers(monkeypatch, cost):
    """Everything shared, some shared, nothing shared: groups under one template, members of unequal length."""
    monkeypatch.setattr(sharing.row_starts, "__defaults__", (cost,))
    model, _ = model_and_tokenizer()
    template = prompt(30, 99)
    asked = [
        request(template + prompt(5 + 6 * g, g), max_tokens=3 + 5 * m, seed=10 * g + m)
        for g, m in itertools.product(range(3), range(4))
    ]
    async with running() as engine:
        for ask, got in zip(asked, await engine.generate_many(asked), strict=True):
            assert gap(model, ask, got) < TOLERANCE


async def test_a_row_follows_its_prompt_into_and_out_of_sharing(monkeypatch):
    """Alone, a prompt is copied to the row; when others join it is read together; when they leave, copied back."""
    monkeypatch.setattr(sharing.row_starts, "__defaults__", (10,))
    model, _ = model_and_tokenizer()
    ids = prompt(40)
    first, others = request(ids, max_tokens=200), [request(ids, max_tokens=20, seed=n) for n in range(3)]
    async with running() as engine:
        starts = []
        step = engine._core.step

        def watched():
            step()
            starts.extend(s.row_start for s in engine._core.decoding if s.request is first)

        monkeypatch.setattr(engine._core, "step", watched)
        task = asyncio.create_task(engine.generate(first))
        while (await engine.metrics())["generation_tokens_total"] < 20:
            await asyncio.sleep(0.001)
        results = [*await engine.generate_many(others), await task]
    assert [start for start, _ in itertools.groupby(starts[1:])] == [0, 40, 0]
    for ask, got in zip([*others, first], results, strict=True):
        assert gap(model, ask, got) < TOLERANCE


@pytest.mark.parametrize("fits", [True, False])
async def test_a_newcomer_that_cuts_a_block_which_others_read_in_place(monkeypatch, fits):
    """The block's identity goes to its tail; those who decode over it must not lose its front, for a single token."""
    monkeypatch.setattr(sharing.row_starts, "__defaults__", (0,))
    model, _ = model_and_tokenizer()
    ids = prompt(40)
    old = [request(ids, max_tokens=60, seed=n) for n in range(2)]
    late = request((*ids[:20], *prompt(10, 7)), max_tokens=5 if fits else 90, seed=9)
    room = {} if fits else {"kv_cache_tokens": 40 + 3 * 60 + 20}
    async with running(**room) as engine:
        task = asyncio.gather(*(engine.generate(ask) for ask in old))
        while (await engine.metrics())["generation_tokens_total"] < 20:
            await asyncio.sleep(0.001)
        assert await engine._call(lambda core: len(core._shared)) > 0
        splits = await engine._call(lambda core: core.tree.splits)
        last = asyncio.create_task(engine.generate(late))
        while await engine._call(lambda core: core.tree.splits) == splits:
            await asyncio.sleep(0.001)
        assert not task.done(), "the block is cut while others decode"
        results = [*await task, await last]
    for ask, got in zip([*old, late], results, strict=True):
        assert gap(model, ask, got) < TOLERANCE


async def test_copies_that_do_not_fit_are_read_in_place():
    """A cache too small to copy prompts into rows still decodes, and right."""
    model, _ = model_and_tokenizer()
    asked = [request(prompt(100, n), max_tokens=20, seed=n) for n in range(2)]
    async with running(kv_cache_tokens=2 * 100 + 2 * 20) as engine:
        for ask, got in zip(asked, await engine.generate_many(asked), strict=True):
            assert gap(model, ask, got) < TOLERANCE


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
async def test_prompt_logprobs_are_at_temperature_one(arch):
    model, _ = model_and_tokenizer(arch)
    ids = prompt(33)
    async with running(arch) as engine:
        got = await engine.generate(
            request(ids, prompt_logprobs=True, max_tokens=2, sampling=SamplingSpec(temperature=3, top_k=2))
        )
    assert got.prompt_logprobs is not None
    assert got.prompt_logprobs[0] is None
    assert got.prompt_logprobs[1:] == pytest.approx(expected_logprobs(model, ids[:1], ids[1:]), abs=TOLERANCE)


async def test_bfloat16_stays_near_float32():
    model, _ = model_and_tokenizer("qwen3")
    asked = [request(prompt(20, n), max_tokens=24, seed=n) for n in range(4)]
    async with running("qwen3", dtype="bfloat16") as engine:
        gaps = [gap(model, a, g) for a, g in zip(asked, await engine.generate_many(asked), strict=True)]
    assert max(gaps) < 0.1


def test_the_callers_model_is_never_changed():
    model, _ = tiny_model(3, arch="gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    runner = build_runner(model)
    for name, shape in runner.parameters().items():
        runner.write(name, torch.zeros(shape))
    runner.commit()
    assert model.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_state_outside_attention_is_refused_by_name():
    with pytest.raises(ModelError, match="mamba"):
        build_runner(tiny_model(0, arch="mamba")[0])


def test_an_attention_that_is_not_standard_is_refused():
    model, _ = tiny_model(0, arch="gpt2")
    original = model.forward

    def shifted(*args, **kwargs):
        output = original(*args, **kwargs)
        if model.config._attn_implementation != "slipstream_embedded":
            output.logits = output.logits.roll(1, -1)
        return output

    model.forward = shifted
    with pytest.raises(ModelError, match="does not reproduce"):
        build_runner(model, owned=True)
