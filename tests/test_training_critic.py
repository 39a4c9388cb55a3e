"""The critic behind its handle: values, gradients, learning, saving and going on to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.algorithms.batch import Batch
from slipstream.algorithms.objective import LossSpec
from slipstream.config.algorithm import CriticSettings, TeacherSettings
from slipstream.config.settings import LoraSettings, ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.errors import ContractError, SettingsError
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.training.torch_backend import TorchBackend
from test_training_backend import rows


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("models") / "qwen3", arch="qwen3"))


def backend(path, critic=None, lr=1e-2, handles=("policy", "critic"), **training):
    training.setdefault("optimizer", OptimizerSettings(lr=lr))
    return TorchBackend(
        ModelSettings(path=path, dtype="float32"),
        TrainingSettings(threads=1, **training),
        handles=handles,
        critic=critic or CriticSettings(optimizer=OptimizerSettings(lr=lr)),
    )


def spec(batch, trainer, targets, clip=1e9):
    old = trainer.forward("critic", batch).result().values
    return LossSpec("value_clip", {"clip": clip}, old_values=old, returns=targets)


def returns(batch, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=row.n_trained) for row in batch.rows]


def test_values_start_at_zero_and_learn_their_returns(path):
    batch = Batch(rows())
    targets = returns(batch)
    with backend(path) as trainer:
        values = trainer.forward("critic", batch).result().values
        assert [len(v) for v in values] == [row.n_trained for row in batch.rows]
        assert all(float(np.abs(v).max()) == 0 for v in values)
        policy = trainer.forward("policy", batch).result().logprobs
        errors = []
        for _ in range(40):
            out = trainer.forward_backward("critic", batch, spec(batch, trainer, targets)).result()
            assert trainer.optim_step("critic").result().applied
            errors.append(out.metrics["loss_metrics/value_error"])
        assert errors[-1] < 0.3 * errors[0]
        # A critic of its own leaves the policy alone.
        for a, b in zip(policy, trainer.forward("policy", batch).result().logprobs, strict=True):
            assert np.array_equal(a, b)


def test_a_value_sees_nothing_of_the_token_it_judges(path):
    first = rows()[0]
    at = int(np.flatnonzero(first.trained_T)[-1])
    targets = first.targets_T.copy()
    targets[at] = (targets[at] + 7) % 250
    changed = replace(first, targets_T=targets)
    with backend(path) as trainer:
        batch = Batch([first])
        for _ in range(3):
            trainer.forward_backward("critic", batch, spec(batch, trainer, returns(batch))).result()
            trainer.optim_step("critic").result()
        a, b = (trainer.forward("critic", Batch([row])).result().values[0] for row in (first, changed))
        assert float(np.abs(a).max()) > 0
        assert np.array_equal(a, b)


def test_the_microbatch_split_changes_neither_values_nor_gradients(path):
    batch = Batch(rows())
    found = []
    for budget in (8192, 30):
        with backend(path, max_tokens_per_microbatch=budget) as trainer:
            trainer.forward_backward("critic", batch, spec(batch, trainer, returns(batch))).result()
            trainer.optim_step("critic").result()
            trainer.forward_backward("critic", batch, spec(batch, trainer, returns(batch))).result()
            found.append((trainer.forward("critic", batch).result().values, trainer.gradients("critic")))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-4, rtol=1e-3)


def test_an_own_critic_does_not_train_a_head_that_nothing_reads(path):
    with backend(path) as trainer:
        names = set(trainer.gradients("critic"))
    assert "value_head.weight" in names
    assert not any("lm_head" in name for name in names)


def test_a_shared_head_adds_its_gradient_to_the_policys_and_moves_with_it(path):
    batch = Batch(rows())
    shared = CriticSettings(backbone="shared")
    with backend(path, shared) as trainer:
        assert trainer.saved_handles == ("policy",)
        targets = returns(batch)
        for _ in range(2):  # a head of zeros passes no gradient on: the first step moves it
            trainer.forward_backward("critic", batch, spec(batch, trainer, targets)).result()
            assert trainer.optim_step("policy").result().applied
        trainer.forward_backward("critic", batch, spec(batch, trainer, targets)).result()
        value_only = trainer.gradients()
        trainer.forward_backward("policy", batch, LossSpec("ppo_clip")).result()
        both = trainer.gradients()
        name = "model.layers.0.self_attn.q_proj.weight"
        assert float(value_only[name].abs().max()) > 0
        assert not torch.equal(both[name], value_only[name])
        torch.testing.assert_close(both["value_head.weight"], value_only["value_head.weight"])
        with pytest.raises(ContractError, match="moves with it"):
            trainer.optim_step("critic").result()


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_saved_critic_goes_on_to_the_bit(path, tmp_path, kind):
    batch = Batch(rows())
    targets = returns(batch)
    settings = CriticSettings(backbone=kind, optimizer=OptimizerSettings(lr=1e-2))
    mover = "critic" if kind == "own" else "policy"

    def step(trainer):
        trainer.forward_backward("critic", batch, spec(batch, trainer, targets)).result()
        trainer.optim_step(mover).result()

    with backend(path, settings) as trainer:
        step(trainer)
        step(trainer)
        for handle in trainer.saved_handles:
            trainer.save(handle, tmp_path / handle).result()
        step(trainer)
        want = trainer.forward("critic", batch).result().values
    with backend(path, settings) as trainer:
        for handle in trainer.saved_handles:
            trainer.load(handle, tmp_path / handle).result()
        step(trainer)
        got = trainer.forward("critic", batch).result().values
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_losses_and_handles_that_do_not_fit_are_refused(path):
    batch = Batch(rows())
    with backend(path, handles=("policy",)) as trainer, pytest.raises(ContractError, match="unknown handle 'critic'"):
        trainer.forward("critic", batch).result()
    with backend(path) as trainer:
        with pytest.raises(ContractError, match="of kind 'policy'"):
            trainer.forward_backward("critic", batch, LossSpec("ppo_clip")).result()
        value = LossSpec("value_clip", old_values=returns(batch), returns=returns(batch))
        with pytest.raises(ContractError, match="of kind 'value'"):
            trainer.forward_backward("policy", batch, value).result()


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_beside_a_policy_of_adapters_a_critic_trains_all_it_has(path, kind):
    batch = Batch(rows())
    with backend(path, CriticSettings(backbone=kind), lora=LoraSettings(rank=2)) as trainer:
        names = set(trainer.gradients("critic"))
        assert any(".lora_" in name for name in names) == (kind == "shared")
        assert ("model.norm.weight" in names) == (kind == "own")
        out = trainer.forward_backward("critic", batch, spec(batch, trainer, returns(batch))).result()
        assert np.isfinite(out.loss)


def test_a_teacher_is_another_model_scored_like_the_policy(path, tmp_path):
    other = str(tiny_model_dir(tmp_path / "teacher", seed=5, arch="llama"))
    batch = Batch(rows(temperature=0.7))
    teacher = TeacherSettings(path=other, dtype="float32")
    models = ModelSettings(path=path, dtype="float32")
    with TorchBackend(models, TrainingSettings(threads=1), handles=("policy", "teacher"), teacher=teacher) as trainer:
        got = trainer.forward("teacher", batch).result().logprobs
        assert trainer.saved_handles == ("policy",)
        with pytest.raises(ContractError, match="frozen"):
            trainer.forward_backward("teacher", batch, LossSpec("ppo_clip")).result()
    with TorchBackend(ModelSettings(path=other, dtype="float32"), TrainingSettings(threads=1)) as alone:
        want = alone.forward("policy", batch).result().logprobs
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(SettingsError, match=r"teacher\.path"):
        TorchBackend(models, TrainingSettings(threads=1), handles=("policy", "teacher"))
