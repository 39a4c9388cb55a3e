"""The torch backend on tiny models: metamorphic laws of scores and gradients, handles, LoRA, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.algorithms.batch import Batch, BatchRow
from slipstream.algorithms.losses import LOSSES, LossValues, register_loss
from slipstream.algorithms.objective import LossSpec
from slipstream.config.settings import LoraSettings, ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.errors import ContractError, ModelError, SettingsError
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.training.model import PolicyModel
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import SamplingSpec
from slipstream.weights import AdapterTransport

PPO = LossSpec("ppo_clip")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    made = {}

    def get(arch="llama"):
        if arch not in made:
            made[arch] = tiny_model_dir(tmp_path_factory.mktemp("models") / arch, arch=arch)
        return str(made[arch])

    return get


@pytest.fixture
def build(model_dir):
    backends = []

    def make(
        arch="llama", *, dtype="float32", handles=("policy",), model=None, optimizer=None, total_steps=None, **training
    ):
        optimizer = optimizer or OptimizerSettings(lr=1e-2)
        backend = TorchBackend(
            ModelSettings(path=model_dir(arch), dtype=dtype, **(model or {})),
            TrainingSettings(threads=1, optimizer=optimizer, **training),
            handles=handles,
            total_steps=total_steps,
        )
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


def rows(seed=0, groups=2, members=3, prompt=9, response=6, temperature=1.0, system=0):
    """Groups of rows with a common prompt, responses of uneven length, an untrained gap, random advantages.

    All prompts begin with the same ``system`` tokens.
    """
    rng = np.random.default_rng(seed)
    out = []
    common = rng.integers(3, 250, system)
    for g in range(groups):
        start = np.concatenate([common, rng.integers(3, 250, prompt + g)])
        for m in range(members):
            ids = np.concatenate([start, rng.integers(3, 250, response + m - g)])
            trained = np.arange(len(ids) - 1) >= len(start) - 1
            trained[len(start) + 1] = False  # an observation inside the response
            count = len(ids) - 1
            out.append(
                BatchRow(
                    row_id=f"{g}.{m}",
                    trajectory_id=f"{g}.{m}",
                    group_id=str(g),
                    inputs_T=ids[:-1],
                    targets_T=ids[1:],
                    trained_T=trained,
                    weights_T=np.where(trained, 0.05, 0.0),
                    advantages_T=np.where(trained, rng.normal(), 0.0),
                    behaviour_logprobs_T=np.where(trained, -rng.uniform(3, 8, count), 0.0),
                    sampling=SamplingSpec(temperature=temperature),
                )
            )
    return out


def run(backend, batch_rows, loss=PPO):
    """(per-row log-probs, gradients, loss); clears the gradients."""
    batch = Batch(batch_rows)
    out = backend.forward_backward("policy", batch, loss).result()
    grads = backend.gradients()
    backend._submit(backend._optimizer.zero_grad).result()
    return out.logprobs, grads, out


def assert_same(a, b, atol=2e-5):
    for x, y in zip(a[0], b[0], strict=True):
        np.testing.assert_allclose(x, y, atol=atol)
    scale = max(float(g.abs().max()) for g in b[1].values())
    for name in b[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=0, atol=atol * max(1.0, scale))
    assert a[2].loss == pytest.approx(b[2].loss, abs=1e-4)


def plain_logprobs(path, batch_rows):
    """Each row alone through transformers' eager attention, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    out = []
    with torch.no_grad():
        for row in batch_rows:
            logits = model(torch.as_tensor(row.inputs_T)[None], use_cache=False).logits[0] / row.sampling.temperature
            logp = logits.log_softmax(-1).gather(1, torch.as_tensor(row.targets_T)[:, None])[:, 0]
            out.append(logp.double().numpy()[row.trained_T])
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "qwen3_moe", "gpt2"])
def test_packed_and_shared_scores_are_transformers_own(build, model_dir, arch):
    batch = rows(temperature=0.7)
    got = build(arch).forward("policy", Batch(batch)).result().logprobs
    for a, b in zip(got, plain_logprobs(model_dir(arch), batch), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_sharing_a_prompt_changes_neither_scores_nor_gradients(build, arch):
    shared, separate = build(arch), build(arch, share_prompts=False)
    batch = rows()
    a, b = run(shared, batch), run(separate, batch)
    assert a[2].metrics["packed_tokens"] < 0.7 * b[2].metrics["packed_tokens"]
    assert_same(a, b)


def bush():
    """Three groups under a system message, with an equal row, one that begins another, and trained shared tokens."""
    batch = rows(groups=3, prompt=10, system=24)
    longest = max(batch[:3], key=lambda row: len(row.inputs_T))
    cut = len(longest.inputs_T) - 2
    arrays = ("inputs_T", "targets_T", "trained_T", "weights_T", "advantages_T", "behaviour_logprobs_T")
    begins = replace(longest, row_id="cut", **{name: getattr(longest, name)[:cut] for name in arrays})
    equal = replace(batch[4], row_id="equal", advantages_T=batch[4].advantages_T - 0.5)
    inside = batch[7].trained_T.copy()
    inside[[0, 9, 23, 30]] = True  # targets whose predictors lie in the root, at its end, and in the group's stem
    trained = replace(
        batch[7],
        trained_T=inside,
        weights_T=np.where(inside, 0.05, 0.0),
        advantages_T=np.where(inside, 0.7, 0.0),
        behaviour_logprobs_T=np.where(inside, -5.0, 0.0),
    )
    return [*batch[:7], trained, begins, batch[8], equal]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"])
@pytest.mark.parametrize("attn", ["auto", "sdpa"])
def test_a_tree_of_beginnings_changes_neither_scores_nor_gradients(build, arch, attn):
    model = {"attn_implementation": attn}
    batch = bush()
    tree = run(build(arch, model=model), batch)
    by_group = run(build(arch, model=model, max_tokens_per_microbatch=66), batch)
    alone = run(build(arch, model=model, share_prompts=False), batch)
    tokens = [out[2].metrics["packed_tokens"] for out in (tree, by_group, alone)]
    assert tokens == sorted(tokens)
    assert tokens[0] < 0.4 * tokens[2]
    assert (tree[2].metrics["microbatches"], by_group[2].metrics["microbatches"]) == (1, 3)
    assert_same(tree, alone)
    assert_same(by_group, alone)


@pytest.mark.parametrize("attn", ["auto", "sdpa"])
def test_another_groups_question_and_answers_leave_a_group_alone(build, attn):
    backend, batch = build(model={"attn_implementation": attn}), bush()
    before = backend.forward("policy", Batch(batch)).result().logprobs
    changed = []
    for row in batch:
        ids = np.append(row.inputs_T, row.targets_T[-1])
        ids[26:] = ids[26:] + (3 if row.group_id == "1" else 0)
        changed.append(replace(row, inputs_T=ids[:-1], targets_T=ids[1:]))
    after = backend.forward("policy", Batch(changed)).result().logprobs
    for row, a, b in zip(batch, before, after, strict=True):
        if row.group_id == "1":
            assert not np.allclose(a, b)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("budget", [1, 20, 37, 45])
def test_the_microbatch_split_changes_nothing(build, budget):
    a, b = run(build(max_tokens_per_microbatch=budget), rows()), run(build(), rows())
    assert a[2].metrics["microbatches"] > b[2].metrics["microbatches"] == 1
    assert_same(a, b)
    for name, value in b[2].metrics.items():
        if name not in ("microbatches", "packed_tokens"):
            assert a[2].metrics[name] == pytest.approx(value, abs=1e-4), name


def test_a_loss_over_groups_sees_whole_groups_whatever_the_split(build):
    """Squared spread of a group's row sums: its gradient at one row depends on the others."""

    @register_loss("test_group_spread", needs=(), unit="group")
    def spread(xp, inputs, settings):
        group_mean = xp.segment_mean(inputs.logprobs, inputs.group_index, inputs.n_groups)
        gap = inputs.logprobs - group_mean[inputs.group_index]
        return LossValues(xp.segment_mean(gap * gap, inputs.group_index, inputs.n_groups))

    try:
        loss = LossSpec("test_group_spread", entropy_coef=0.1)
        whole, split = run(build(), rows(), loss), run(build(max_tokens_per_microbatch=20), rows(), loss)
    finally:
        LOSSES.remove("test_group_spread")
    assert split[2].metrics["microbatches"] > 2
    assert_same(split, whole)
    assert max(float(g.abs().max()) for g in whole[1].values()) > 1e-3


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_vocabulary_chunk_changes_nothing(build, chunk):
    assert_same(run(build(logprob_chunk_tokens=chunk), rows()), run(build(), rows()))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_dense_mask_agrees_with_the_blockwise_kernel(build, attn):
    assert_same(run(build(model={"attn_implementation": attn}), rows()), run(build(), rows()))


def test_gradient_checkpointing_changes_nothing(build):
    assert_same(run(build(model={"gradient_checkpointing": True}), rows()), run(build(), rows()))


def test_permuting_rows_permutes_scores_and_keeps_gradients(build):
    backend, batch = build(), rows()
    order = np.random.default_rng(1).permutation(len(batch))
    a, b = run(backend, batch), run(backend, [batch[i] for i in order])
    restored = [b[0][list(order).index(i)] for i in range(len(batch))]
    assert_same((restored, b[1], b[2]), a)


def test_replacing_row_0_leaves_row_1(build):
    backend, batch = build(share_prompts=False), rows()
    before = backend.forward("policy", Batch(batch)).result().logprobs
    other = replace(batch[0], inputs_T=batch[0].inputs_T[::-1].copy(), targets_T=batch[0].targets_T[::-1].copy())
    after = backend.forward("policy", Batch([other, *batch[1:]])).result().logprobs
    assert not np.allclose(before[0], after[0])
    for a, b in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_untrained_slots_may_hold_anything(build, poison):
    backend, batch = build(), rows()

    def fill(row):
        at = ~row.trained_T
        return replace(
            row,
            advantages_T=np.where(at, poison, row.advantages_T),
            behaviour_logprobs_T=np.where(at, poison, row.behaviour_logprobs_T),
        )

    a, b = run(backend, [fill(r) for r in batch]), run(backend, batch)
    for name in b[1]:
        assert torch.equal(a[1][name], b[1][name])
    assert a[2].loss == b[2].loss


def test_a_row_that_trains_nothing_is_not_computed_and_has_no_scores(build):
    backend, batch = build(), rows()
    silent = replace(batch[2], trained_T=np.zeros_like(batch[2].trained_T), weights_T=np.zeros(len(batch[2].inputs_T)))
    out = backend.forward("policy", Batch([*batch[:2], silent])).result()
    assert [len(x) for x in out.logprobs] == [batch[0].n_trained, batch[1].n_trained, 0]


def test_gradients_equal_a_plain_loop_and_add_over_calls(build, model_dir):
    """Likelihood training through the backend and through a hand-written loop over single rows."""
    backend, batch = build(), rows()
    once = run(backend, batch, LossSpec("cross_entropy"))[1]
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32, attn_implementation="eager")
    for row in batch:
        logits = model(torch.as_tensor(row.inputs_T)[None], use_cache=False).logits[0]
        logp = logits.log_softmax(-1).gather(1, torch.as_tensor(row.targets_T)[:, None])[:, 0]
        (-(torch.as_tensor(row.weights_T) * logp).sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(once[name], parameter.grad, rtol=1e-3, atol=1e-5)
    backend.forward_backward("policy", Batch(batch[:2]), LossSpec("cross_entropy"))
    backend.forward_backward("policy", Batch(batch[2:]), LossSpec("cross_entropy"))
    for name, grad in backend.gradients().items():
        torch.testing.assert_close(grad, once[name], rtol=1e-3, atol=1e-5)


def test_training_steps_equal_a_plain_adamw_loop(build, model_dir):
    backend = build(optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=0.5))
    batch = rows()
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32, attn_implementation="eager")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(3):
        out = backend.forward_backward("policy", Batch(batch), LossSpec("cross_entropy")).result()
        result = backend.optim_step("policy").result()
        plain.zero_grad()
        total = 0.0
        for row in batch:
            logits = model(torch.as_tensor(row.inputs_T)[None], use_cache=False).logits[0]
            logp = logits.log_softmax(-1).gather(1, torch.as_tensor(row.targets_T)[:, None])[:, 0]
            loss = -(torch.as_tensor(row.weights_T) * logp).sum()
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        plain.step()
        assert out.loss == pytest.approx(total, rel=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        assert result.applied


def test_temperature_is_each_rows_own(build, model_dir):
    batch = [*rows(temperature=0.5)[:2], *rows(seed=3, temperature=1.7)[:2]]
    got = build().forward("policy", Batch(batch)).result().logprobs
    for a, b in zip(got, plain_logprobs(model_dir(), batch), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_truncated_sampling_without_kept_sets_is_refused(build):
    backend = build()
    for spec, why in (
        ({"top_p": 0.9}, "kept sets"),
        ({"top_k": 5}, "kept sets"),
        ({"min_p": 0.1}, "kept sets"),
        ({"repetition_penalty": 1.1}, "penalties"),
    ):
        batch = Batch([replace(rows()[0], sampling=SamplingSpec(**spec))])
        with pytest.raises(ContractError, match=why):
            backend.forward("policy", batch).result()


def test_greedy_rows_are_refused(build):
    batch = Batch([replace(rows()[0], sampling=SamplingSpec(temperature=0.0))])
    with pytest.raises(ContractError, match="evaluation only"):
        build().forward_backward("policy", batch, PPO).result()


def test_entropy_on_request(build):
    out = build().forward("policy", Batch(rows()), entropy=True).result()
    assert all(
        len(e) == len(p) and (e > 0).all() and (e < np.log(300)).all()
        for e, p in zip(out.entropy, out.logprobs, strict=True)
    )


def test_a_non_finite_loss_refuses_the_step_and_leaves_everything(build):
    backend, batch = build(), rows()

    def run_step(rs):
        backend.forward_backward("policy", Batch(rs), PPO).result()
        return backend.optim_step("policy").result()

    def state():
        return {p: {n: t.clone() for n, t in ts.items()} for p, ts in backend._optimizer.state()}

    assert run_step(batch).applied
    before = state()
    bad = replace(
        batch[0], weights_T=np.where(batch[0].trained_T, 1e38, 0.0), advantages_T=np.full(len(batch[0].inputs_T), 1e38)
    )
    result = run_step([bad, *batch[1:]])
    assert not result.applied
    assert result.reason
    after = state()
    assert all(torch.equal(before[p][n], after[p][n]) for p in before for n in before[p])
    assert run_step(batch).applied


def test_a_zero_learning_rate_changes_no_weight(build):
    backend = build(optimizer=OptimizerSettings(lr=0.0))
    before = {t.name: t.tensor.clone() for t in backend.export_weights("policy")}
    backend.forward_backward("policy", Batch(rows()), PPO)
    assert backend.optim_step("policy").result().applied
    assert all(torch.equal(before[t.name], t.tensor) for t in backend.export_weights("policy"))


@pytest.mark.parametrize("lora", [0, 4])
def test_the_reference_stays_while_the_policy_moves(build, lora):
    backend = build(handles=("policy", "reference"), lora=LoraSettings(rank=lora))
    batch = Batch(rows(temperature=0.8))
    first = backend.forward("policy", batch).result().logprobs
    reference = backend.forward("reference", batch).result().logprobs
    for a, b in zip(first, reference, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for _ in range(2):
        backend.forward_backward("policy", batch, PPO)
        backend.optim_step("policy")
    moved = backend.forward("policy", batch).result().logprobs
    assert max(float(np.abs(a - b).max()) for a, b in zip(first, moved, strict=True)) > 1e-2
    again = backend.forward("reference", batch).result().logprobs
    for a, b in zip(reference, again, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ContractError, match="frozen"):
        backend.forward_backward("reference", batch, PPO).result()


@pytest.mark.parametrize("lora", [0, 4])
def test_set_reference_takes_the_present_policy_which_then_moves_on(build, tmp_path, lora):
    backend = build(handles=("policy", "reference"), lora=LoraSettings(rank=lora))
    batch = Batch(rows())

    def learn():
        backend.forward_backward("policy", batch, PPO)
        assert backend.optim_step("policy").result().applied

    learn()
    backend.set_reference().result()
    policy = backend.forward("policy", batch).result().logprobs
    learn()
    moved = backend.forward("policy", batch).result().logprobs
    assert max(float(np.abs(a - b).max()) for a, b in zip(policy, moved, strict=True)) > 1e-3
    assert "reference" in backend.saved_handles
    backend.save("reference", tmp_path / "reference").result()
    other = build(handles=("policy", "reference"), lora=LoraSettings(rank=lora))
    other.load("reference", tmp_path / "reference").result()
    for trainer in (backend, other):
        for a, b in zip(policy, trainer.forward("reference", batch).result().logprobs, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(moved, backend.forward("policy", batch).result().logprobs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_lora_trains_adapters_only_and_exports_the_merged_weights(build, tmp_path, model_dir, arch):
    backend = build(arch, lora=LoraSettings(rank=4, alpha=8.0))
    batch = rows()
    base = {t.name: t.tensor.clone() for t in backend.export_weights("policy")}
    backend.forward_backward("policy", Batch(batch), PPO)
    assert all("lora_" in name for name in backend.gradients())
    assert backend.optim_step("policy").result().applied
    scores = backend.forward("policy", Batch(batch)).result().logprobs
    merged = {t.name: t.tensor for t in backend.export_weights("policy")}
    assert set(merged) == set(base)
    assert not any("lora" in name or "base_layer" in name for name in merged)
    assert any(not torch.equal(merged[n], base[n]) for n in base)
    backend.save_pretrained("policy", tmp_path / "merged").result()
    for a, b in zip(scores, plain_logprobs(str(tmp_path / "merged"), batch), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    backend.save_adapter(tmp_path / "adapter").result()
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(model_dir(arch), dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).merge_and_unload()
    # What is sent to an engine that runs adapters is the same adapter, its scale in B.
    staged = AdapterTransport(tmp_path).stage("policy/0/1", backend.export_weights("adapter"))
    plain = AutoModelForCausalLM.from_pretrained(model_dir(arch), dtype=torch.float32)
    sent = PeftModel.from_pretrained(plain, str(staged.payload)).merge_and_unload()
    for state in (loaded.state_dict(), sent.state_dict()):
        for name in merged:
            torch.testing.assert_close(merged[name], state[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", "bfloat16"), ("qwen3", "float32"), ("qwen3_moe", "float32"), ("gpt2", "float32")]
)
def test_export_has_the_names_and_values_that_save_pretrained_writes(build, tmp_path, arch, dtype):
    from safetensors.torch import load_file

    backend = build(arch, dtype=dtype)
    backend.forward_backward("policy", Batch(rows()), PPO)
    backend.optim_step("policy")
    backend.save_pretrained("policy", tmp_path).result()
    exported = list(backend.export_weights("policy"))
    written = load_file(tmp_path / "model.safetensors")
    assert sorted(t.name for t in exported) == sorted(written)
    for piece in exported:
        assert piece.tensor.dtype == getattr(torch, dtype)
        assert piece.global_shape == tuple(written[piece.name].shape)
        assert torch.equal(piece.tensor, written[piece.name])
    assert (tmp_path / "tokenizer.json").exists()


def test_exact_mode_repeats_to_the_bit(build):
    def once():
        backend = build(dtype="bfloat16", determinism="exact", lora=LoraSettings(rank=4, dropout=0.3))
        losses = []
        for _ in range(2):
            losses.append(backend.forward_backward("policy", Batch(rows()), PPO).result().loss)
            backend.optim_step("policy")
        return losses, {t.name: t.tensor.clone() for t in backend.export_weights("policy")}

    try:
        (losses, weights), (losses_again, weights_again) = once(), once()
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses == losses_again
    assert losses[0] != losses[1]
    assert all(torch.equal(weights[n], weights_again[n]) for n in weights)


def test_an_architecture_without_attention_is_refused(build):
    with pytest.raises(ModelError, match="mamba"):
        build("mamba")


def test_the_startup_check_catches_rows_that_see_each_other(model_dir, monkeypatch):
    from slipstream.training import attention

    def leaky(self, window):
        total = self.layout.n_tokens
        return torch.ones(total, total, dtype=torch.bool).tril()

    model = PolicyModel.load(
        ModelSettings(path=model_dir(), dtype="float32", attn_implementation="sdpa"), LoraSettings()
    )
    model.check_packing()
    monkeypatch.setattr(attention.LayoutOnDevice, "mask_TT", leaky)
    with pytest.raises(ModelError, match="packed"):
        model.check_packing()


def test_a_failed_verb_reaches_its_future_and_later_verbs_run(build):
    backend = build()
    broken = Batch([replace(rows()[0], targets_T=rows()[0].targets_T + 10_000, inputs_T=rows()[0].inputs_T + 10_000)])
    failed = backend.forward("policy", broken)
    fine = backend.forward("policy", Batch(rows()))
    with pytest.raises(ModelError, match="vocabulary"):
        failed.result()
    assert len(fine.result().logprobs) == 6


def test_closed_backends_and_unknown_handles_say_so(build, model_dir):
    backend = build()
    with pytest.raises(ContractError, match="unknown handle"):
        backend.forward("critic", Batch(rows())).result()
    with pytest.raises(ContractError, match="unknown handle"):
        list(backend.export_weights("reference"))
    backend.close()
    with pytest.raises(ContractError, match="closed"):
        backend.forward("policy", Batch(rows()))
    with pytest.raises(SettingsError, match="handles"):
        TorchBackend(ModelSettings(path=model_dir()), TrainingSettings(), handles=("critic",))


def test_a_model_directory_without_weights_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        TorchBackend(ModelSettings(path=str(tmp_path)), TrainingSettings())
