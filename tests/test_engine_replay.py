"""What the engine returns for the trainer to replay: kept sets of truncated sampling, experts of every token fed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine_kit import expected_logprobs, logits_of, model_and_tokenizer, prompt, request, running
from slipstream.errors import InferenceError, RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.embedded.routers import RouteRecorder
from slipstream.inference.embedded.runner import build_runner
from slipstream.inference.embedded.tiny import tiny_model
from slipstream.inference.fake import FakeEngine, processed_logprobs
from slipstream.inference.server import build_app
from slipstream.inference.wire import read_choice
from slipstream.trajectory import SamplingSpec

CUT = SamplingSpec(temperature=1.3, top_p=0.9, top_k=12)


@pytest.mark.parametrize("spec", [CUT, SamplingSpec(min_p=0.2), SamplingSpec(top_k=3)], ids=str)
async def test_kept_sets_are_the_support_of_each_draw(spec):
    model, _ = model_and_tokenizer()
    async with running() as engine:
        asked = request(prompt(9), sampling=spec, kept_sets=True, max_tokens=6)
        result = await engine.generate(asked)
    rows = logits_of(model, [*asked.token_ids, *result.token_ids])[len(asked.token_ids) - 1 : -1]
    assert len(result.kept_sets) == 6
    for row, kept, token, logprob in zip(rows, result.kept_sets, result.token_ids, result.logprobs, strict=True):
        want = np.flatnonzero(np.isfinite(processed_logprobs(row, spec)))
        assert kept.tolist() == want.tolist()
        scaled = row / spec.temperature
        assert scaled[token] - np.logaddexp.reduce(scaled[kept]) == pytest.approx(logprob, abs=1e-4)


async def test_nothing_is_kept_that_nobody_asked_for_or_cut():
    async with running() as engine:
        results = await engine.generate_many(
            [
                request(prompt(5), sampling=CUT),
                request(prompt(5), kept_sets=True),
                request(prompt(5), sampling=SamplingSpec(temperature=0, top_k=3), kept_sets=True),
            ]
        )
    assert [r.kept_sets for r in results] == [None, None, None]
    assert [r.routed_experts for r in results] == [None, None, None]


async def test_a_stream_reports_the_kept_sets_of_its_new_tokens():
    async with running() as engine:
        parts = [p async for p in engine.stream(request(prompt(5), sampling=CUT, kept_sets=True, max_tokens=4))]
    assert [len(p.kept_sets or ()) for p in parts] == [len(p.token_ids) for p in parts]
    assert sum(len(p.token_ids) for p in parts) == 4


async def test_banned_ids_are_not_in_a_kept_set():
    async with running() as engine:
        eos = (await engine.info()).eos_token_ids[0]
        spec = SamplingSpec(top_p=0.999)
        result = await engine.generate(request(prompt(5), sampling=spec, kept_sets=True, min_tokens=3, max_tokens=3))
    assert all(eos not in kept for kept in result.kept_sets)


async def test_the_fake_engine_keeps_its_support_too():
    engine = FakeEngine(300, scale=4.0)
    await engine.start()
    result = await engine.generate(request(prompt(5), sampling=SamplingSpec(top_k=4), kept_sets=True, max_tokens=3))
    assert [len(kept) for kept in result.kept_sets] == [4, 4, 4]
    assert all(token in kept for token, kept in zip(result.token_ids, result.kept_sets, strict=True))


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(temperature=0.7), SamplingSpec(top_k=3)], ids=str)
async def test_the_head_of_every_place_is_that_of_the_sampled_distribution(spec):
    model, _ = model_and_tokenizer()
    async with running() as engine:
        asked = [request(prompt(9), sampling=spec, top_logprobs=5, max_tokens=4, seed=seed) for seed in range(2)]
        plain = request(prompt(9), sampling=spec, max_tokens=4, seed=0)
        first, second, silent = await engine.generate_many([*asked, plain])
    assert silent.top_logprobs is None
    assert silent.token_ids == first.token_ids
    rows = logits_of(model, [*asked[0].token_ids, *first.token_ids])[len(asked[0].token_ids) - 1 : -1]
    for row, (ids, values) in zip(rows, first.top_logprobs, strict=True):
        want = processed_logprobs(row, spec)
        assert len(ids) == min(5, np.isfinite(want).sum())
        assert set(ids.tolist()) == set(np.argsort(-want)[: len(ids)].tolist())
        assert values == pytest.approx(want[ids], abs=1e-4)
    # Two draws from one distribution report one head, whatever they drew.
    assert first.top_logprobs[0][0].tolist() == second.top_logprobs[0][0].tolist()


@pytest.mark.parametrize("spec", [SamplingSpec(temperature=3.0), SamplingSpec(top_k=3)], ids=str)
async def test_heads_survive_the_wire_whether_or_not_the_sampled_token_is_in_them(spec):
    async with running() as engine:
        client = HttpEngine.in_process(build_app(engine, None))
        asked = request(prompt(9), sampling=spec, top_logprobs=4, max_tokens=8)
        here, there = await engine.generate(asked), await client.generate(asked)
        parts = [part async for part in client.stream(asked)]
    inside = [token in ids for token, (ids, _) in zip(here.token_ids, here.top_logprobs, strict=True)]
    assert all(inside) == (spec.top_k == 3)
    for found in (there.top_logprobs, [head for part in parts for head in part.top_logprobs]):
        for (ids, values), (want_ids, want_values) in zip(found, here.top_logprobs, strict=True):
            assert ids.tolist() == want_ids.tolist()
            np.testing.assert_allclose(values, want_values, rtol=1e-6)


def test_candidates_that_are_named_by_text_are_refused():
    asked = request(prompt(3), top_logprobs=2)
    row = {"token": "the", "logprob": -0.5, "top_logprobs": [{"token": "the", "logprob": -0.5}]}
    choice = {"token_ids": [4], "logprobs": {"content": [row]}, "finish_reason": "length"}
    with pytest.raises(InferenceError, match="--return-tokens-as-token-ids"):
        read_choice(asked, choice, {}, "http://x")
    row["top_logprobs"] = []
    with pytest.raises(InferenceError, match="--max-logprobs"):
        read_choice(asked, choice, {}, "http://x")
    # vLLM fills up with ids that cannot be drawn.
    row["top_logprobs"] = [{"token": "token_id:4", "logprob": -0.5}, {"token": "token_id:0", "logprob": -9999.0}]
    ids, values = read_choice(asked, choice, {}, "http://x").top_logprobs[0]
    assert (ids.tolist(), values.tolist()) == ([4], [-0.5])


async def test_the_fake_engine_reports_heads_too():
    engine = FakeEngine(300, scale=4.0)
    await engine.start()
    result = await engine.generate(request(prompt(5), top_logprobs=3, max_tokens=2))
    assert [len(ids) for ids, _ in result.top_logprobs] == [3, 3]
    assert all(values[0] >= values[-1] for _, values in result.top_logprobs)


def routes_of(model, ids):
    """Experts of every token in one plain forward pass of transformers: (tokens, layers, top-k)."""
    recorder = RouteRecorder(model)
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return recorder.take(len(ids))
    finally:
        recorder.close()


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
async def test_experts_of_every_token_fed_are_those_of_a_plain_forward_pass(arch):
    model, _ = model_and_tokenizer(arch)
    async with running(arch) as engine:
        asked = [
            request(prompt(20), routed_experts=True, max_tokens=5),
            request(prompt(20)[:12] + prompt(6, 1), routed_experts=True, max_tokens=3),  # splits the first one's block
            request(prompt(20), routed_experts=True, max_tokens=1),
        ]
        results = [await engine.generate(one) for one in asked]
    for one, result in zip(asked, results, strict=True):
        fed = [*one.token_ids, *result.token_ids[:-1]]
        assert result.routed_experts.shape == (len(fed), 2, 2)
        want = routes_of(model, fed)
        assert (np.sort(result.routed_experts, -1) == np.sort(want, -1)).mean() > 0.99


async def test_a_later_turn_reports_the_experts_of_what_is_cached():
    model, _ = model_and_tokenizer("qwen3_moe")
    async with running("qwen3_moe") as engine:
        first = await engine.generate(request(prompt(16), routed_experts=True, max_tokens=10, session_id="s"))
        longer = (*prompt(16), *first.token_ids, 40, 41)
        second = await engine.generate(request(longer, routed_experts=True, max_tokens=4, session_id="s"))
        assert second.cached_tokens > 0
        group = await engine.generate_many(
            [request(longer, routed_experts=True, max_tokens=n, group_id="g") for n in (2, 7, 4)]
        )
    known = len(first.routed_experts)
    assert np.array_equal(second.routed_experts[:known], first.routed_experts)
    for result in (second, *group):
        fed = [*longer, *result.token_ids[:-1]]
        assert (np.sort(result.routed_experts, -1) == np.sort(routes_of(model, fed), -1)).mean() > 0.99


async def test_a_dense_model_refuses_to_report_experts():
    async with running() as engine:
        with pytest.raises(RequestError, match="no expert routers"):
            await engine.generate(request(prompt(5), routed_experts=True))


async def test_scores_stay_right_with_reports_on():
    model, _ = model_and_tokenizer("qwen3_moe")
    async with running("qwen3_moe") as engine:
        asked = request(prompt(9), sampling=CUT, kept_sets=True, routed_experts=True, max_tokens=6)
        result = await engine.generate(asked)
    want = expected_logprobs(model, asked.token_ids, result.token_ids, CUT)
    assert list(result.logprobs) == pytest.approx(want, abs=1e-3)


async def test_replay_data_survive_the_wire():
    async with running("qwen3_moe") as engine:
        app = build_app(engine, None, return_sampling_mask=True, return_routed_experts=True)
        client = HttpEngine.in_process(app)
        asked = request(prompt(9), sampling=CUT, kept_sets=True, routed_experts=True, max_tokens=5)
        here, there = await engine.generate(asked), await client.generate(asked)
        last = [part async for part in client.stream(asked)][-1]
    assert here.token_ids == there.token_ids
    assert [k.tolist() for k in there.kept_sets] == [k.tolist() for k in here.kept_sets]
    assert np.array_equal(there.routed_experts, here.routed_experts)
    assert np.array_equal(last.routed_experts, here.routed_experts)


@pytest.mark.parametrize(
    ("wants", "flag"),
    [({"kept_sets": True, "sampling": CUT}, "--return-sampling-mask"), ({"routed_experts": True}, "--enable-return-")],
)
async def test_a_server_that_was_not_started_to_return_them_is_refused(wants, flag):
    async with running("qwen3_moe") as engine:
        client = HttpEngine.in_process(build_app(engine, None))
        with pytest.raises(InferenceError, match=flag):
            await client.generate(request(prompt(9), **wants))


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt2"])
def test_parameters_have_the_names_and_places_of_a_checkpoint(arch, tmp_path):
    """Experts lie in one parameter each in the model, and apart in its checkpoint."""
    model, _ = tiny_model(3, arch=arch)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    runner = build_runner(model, force_generic=True)
    held = dict(runner.held())
    assert set(saved) <= set(runner.parameters())
    assert runner.required() <= set(runner.parameters())
    for name, value in saved.items():
        assert torch.equal(held[name], value), name
    changed = {name: torch.randn_like(value) for name, value in saved.items()}
    for name, value in changed.items():
        runner.write(name, value)
    runner.commit()
    for name, value in runner.held():
        if name in changed:
            assert torch.equal(value, changed[name]), name
