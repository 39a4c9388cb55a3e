"""Replay: what the engine sampled under a truncation, or through experts, is scored as exactly that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from replay_kit import groups, requests
from slipstream.algorithms.advantages import compute_advantages
from slipstream.algorithms.batch import Batch
from slipstream.algorithms.compile import compile_batch
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.objective import LossSpec
from slipstream.config.settings import (
    AlgorithmSettings,
    InferenceSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    TrainingSettings,
)
from slipstream.errors import ContractError, ModelError
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.pretrained import load_causal_lm
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import KEPT_SETS, ROUTED_EXPERTS, TOP_LOGPROBS, SamplingSpec

CUT = SamplingSpec(temperature=1.3, top_p=0.9, top_k=12)
ANCHORED = [name for name in LOSSES.names() if "old_logprobs" in LOSSES.get(name).needs]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    made = {}

    def get(arch):
        if arch not in made:
            made[arch] = str(tiny_model_dir(tmp_path_factory.mktemp("models") / arch, arch=arch))
        return made[arch]

    return get


async def sampled(path, spec, dtype="float32", prompts=2, samples=3, **fields):
    """A batch of an engine's samples."""
    engine = EmbeddedEngine(path, None, InferenceSettings(dtype=dtype, threads=1))
    await engine.start()
    try:
        asked = requests(prompts, samples, spec, **fields)
        found = groups(asked, await engine.generate_many(asked))
    finally:
        await engine.close()
    return compile_batch(found, compute_advantages(found, AlgorithmSettings()), "token_mean")


def backend(path, dtype="float32", handles=("policy",), lr=1e-2, **training):
    return TorchBackend(
        ModelSettings(path=path, dtype=dtype),
        TrainingSettings(threads=1, optimizer=OptimizerSettings(lr=lr), **training),
        handles=handles,
    )


def gaps(trainer, batch):
    """Distance of the trainer's log-probs from the sampler's, per row."""
    scored = trainer.forward("policy", batch).result().logprobs
    return [np.abs(a - r.behaviour_logprobs_T[r.trained_T]) for a, r in zip(scored, batch.rows, strict=True)]


async def test_a_truncated_sample_scores_as_it_was_sampled(model_dir):
    path = model_dir("llama")
    batch = await sampled(path, CUT, kept_sets=True)
    with backend(path, max_tokens_per_microbatch=24, handles=("policy", "reference")) as trainer:
        assert np.concatenate(gaps(trainer, batch)).max() < 1e-4
        # The same spans scored over the whole vocabulary: low by the mass that was cut off.
        whole = Batch([replace(row, sampling=SamplingSpec(temperature=1.3)) for row in batch.rows])
        assert min(float(gap.max()) for gap in gaps(trainer, whole)) > 0.02
        reference = trainer.forward("reference", batch).result().logprobs
        for a, row in zip(reference, batch.rows, strict=True):
            np.testing.assert_allclose(a, row.behaviour_logprobs_T[row.trained_T], atol=1e-4)


async def test_at_learning_rate_zero_every_replayed_ratio_is_exactly_one(model_dir):
    path = model_dir("llama")
    batch = await sampled(path, CUT, kept_sets=True)
    with backend(path, lr=0.0) as trainer:
        for _ in range(2):
            anchor = trainer.forward("policy", batch).result().logprobs
            for name in ANCHORED:
                out = trainer.forward_backward("policy", batch, LossSpec(name, old_logprobs=anchor)).result()
                assert trainer.optim_step("policy").result().applied
                assert out.metrics["loss_metrics/ratio_max"] == out.metrics["loss_metrics/ratio_min"] == 1.0, name
                assert out.metrics["loss_metrics/approx_kl"] == 0.0, name


@pytest.mark.parametrize("spec", [SamplingSpec(), CUT], ids=["whole", "cut"])
async def test_a_centred_score_has_the_gradient_of_its_formula(model_dir, spec):
    """Against the loss written out over transformers' own logits, float64 sums, with a sampler of other weights."""
    path = model_dir("llama")
    batch = await sampled(path, spec, kept_sets=True, top_logprobs=4)
    model = load_causal_lm(path, "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    model.save_pretrained(model_dir("llama") + "-moved")
    total = torch.zeros((), dtype=torch.float64)
    for row in batch.rows:
        logits = model(torch.as_tensor(row.inputs_T)[None]).logits[0].double() / row.sampling.temperature
        for at in np.flatnonzero(row.trained_T):
            z = logits[at]
            if row.sampling.cut:
                out = torch.full_like(z, -torch.inf)
                kept = torch.as_tensor(np.asarray(row.side_T[KEPT_SETS][at], dtype=np.int64))
                z = out.index_copy(0, kept, z[kept])
            log_p = z.log_softmax(0)
            ids, log_mu = (torch.as_tensor(np.asarray(part)) for part in row.side_T[TOP_LOGPROBS][at])
            mu, p = log_mu.double().exp(), log_p[ids.long()].detach().exp()
            rho = (1 - mu.sum()).clamp(min=0) / (1 - p.sum()).clamp(min=1e-6)
            centre = ((mu - rho * p) * log_p[ids.long()]).sum()
            total = total + row.weights_T[at] * row.advantages_T[at] * (centre - log_p[int(row.targets_T[at])])
    total.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    with backend(model_dir("llama") + "-moved", max_tokens_per_microbatch=24) as trainer:
        out = trainer.forward_backward("policy", batch, LossSpec("score_centering")).result()
        got = trainer.gradients()
    assert out.loss == pytest.approx(float(total), rel=1e-3, abs=1e-5)
    assert 0 < out.metrics["loss_metrics/head_mass"] <= 1.0001
    for name, gradient in got.items():
        scale = float(want[name].abs().max())
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=2e-3 * scale + 1e-7, msg=name)


async def test_a_batch_without_heads_is_refused(model_dir):
    batch = await sampled(model_dir("llama"), SamplingSpec(), prompts=1)
    with backend(model_dir("llama")) as trainer, pytest.raises(ContractError, match="lacks the sampler's most likely"):
        trainer.forward_backward("policy", batch, LossSpec("score_centering")).result()


async def test_mixed_rows_are_each_scored_under_their_own_support(model_dir):
    path = model_dir("llama")
    cut, plain = await sampled(path, CUT, kept_sets=True), await sampled(path, SamplingSpec(), prompts=1)
    renamed = [replace(row, row_id=f"p{row.row_id}", trajectory_id=f"p{row.row_id}") for row in plain.rows]
    with backend(path) as trainer:
        assert np.concatenate(gaps(trainer, Batch([*cut.rows, *renamed]))).max() < 1e-4


async def test_a_kept_set_of_other_tokens_is_refused(model_dir):
    path = model_dir("llama")
    batch = await sampled(path, CUT, kept_sets=True, prompts=1)
    row = batch.rows[0]
    wrong = np.array(row.side_T[KEPT_SETS], dtype=object)
    at = int(np.flatnonzero(row.trained_T)[2])
    wrong[at] = np.setdiff1d(wrong[at], [row.targets_T[at]])
    with backend(path) as trainer, pytest.raises(ContractError, match="does not contain the token"):
        trainer.forward("policy", Batch([replace(row, side_T={**row.side_T, KEPT_SETS: wrong})])).result()


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
async def test_replayed_experts_give_the_samplers_own_scores(model_dir, arch):
    path = model_dir(arch)
    batch = await sampled(path, SamplingSpec(), routed_experts=True)
    with backend(path, routing_replay=True, max_tokens_per_microbatch=30) as trainer:
        assert np.concatenate(gaps(trainer, batch)).max() < 1e-4


async def test_routing_follows_the_record_and_not_the_router(model_dir):
    """Experts that nobody would choose: the scores move, and differently routed rows no longer share their prompt."""
    path = model_dir("qwen3_moe")
    batch = await sampled(path, SamplingSpec(), prompts=1, routed_experts=True)

    def shifted(row):
        routes = np.empty(len(row.inputs_T), dtype=object)
        for t, own in enumerate(row.side_T[ROUTED_EXPERTS]):
            routes[t] = (own + 1) % 4
        return replace(row, side_T={ROUTED_EXPERTS: routes})

    first, second, third = batch.rows
    other = Batch([first, shifted(second), third])
    with backend(path, routing_replay=True) as trainer:
        plain, moved = gaps(trainer, batch), gaps(trainer, other)
        assert max(float(g.max()) for g in plain) < 1e-4
        assert moved[1].max() > 0.01
        assert max(float(moved[0].max()), float(moved[2].max())) < 1e-4


async def test_routes_survive_checkpointing_and_reach_the_router_with_a_gradient(model_dir):
    path = model_dir("qwen3_moe")
    batch = await sampled(path, SamplingSpec(), routed_experts=True)
    grads = []
    for again in (False, True):
        trainer = TorchBackend(
            ModelSettings(path=path, dtype="float32", gradient_checkpointing=again),
            TrainingSettings(threads=1, routing_replay=True),
        )
        with trainer:
            trainer.forward_backward("policy", batch, LossSpec("ppo_clip")).result()
            grads.append(trainer.gradients())
    name = "model.layers.0.mlp.gate.weight"
    assert float(grads[0][name].abs().max()) > 0
    for key, value in grads[0].items():
        np.testing.assert_allclose(value, grads[1][key], atol=1e-6)


async def test_sampled_rows_without_routes_are_refused_and_given_text_is_not(model_dir):
    path = model_dir("qwen3_moe")
    batch = await sampled(path, SamplingSpec(), prompts=1)
    text = [replace(r, behaviour_logprobs_T=np.full(len(r.inputs_T), np.nan)) for r in batch.rows]
    with backend(path, routing_replay=True) as trainer:
        with pytest.raises(ContractError, match="no routed experts"):
            trainer.forward("policy", batch).result()
        out = trainer.forward_backward("policy", Batch(text), LossSpec("cross_entropy")).result()
        assert np.isfinite(out.loss)


async def test_experts_of_another_model_are_refused(model_dir):
    path = model_dir("qwen3_moe")
    batch = await sampled(path, SamplingSpec(), prompts=1, routed_experts=True)
    row = batch.rows[0]
    routes = np.empty(len(row.inputs_T), dtype=object)
    for t, own in enumerate(row.side_T[ROUTED_EXPERTS]):
        routes[t] = own[:, :1]
    with backend(path, routing_replay=True) as trainer, pytest.raises(ContractError, match="the same model"):
        trainer.forward("policy", Batch([replace(row, side_T={ROUTED_EXPERTS: routes})])).result()


def test_a_dense_model_has_nothing_to_replay(model_dir):
    with pytest.raises(ModelError, match="no expert routers"):
        backend(model_dir("llama"), routing_replay=True)


async def test_a_lora_reference_routes_by_itself(model_dir):
    path = model_dir("qwen3_moe")
    batch = await sampled(path, SamplingSpec(), prompts=1, routed_experts=True)
    lora = LoraSettings(rank=2, target_modules=["q_proj", "v_proj"])
    with backend(path, routing_replay=True, lora=lora, handles=("policy", "reference")) as trainer:
        scored = trainer.forward("reference", batch).result().logprobs
    for a, row in zip(scored, batch.rows, strict=True):
        np.testing.assert_allclose(a, row.behaviour_logprobs_T[row.trained_T], atol=1e-3)
