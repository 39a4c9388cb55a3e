"""Training checkpoints: bit-identical resume, and errors that name the missing or corrupt part."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from slipstream.algorithms.batch import Batch, BatchRow
from slipstream.algorithms.objective import LossSpec
from slipstream.config.settings import LoraSettings, ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.errors import CheckpointError
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import SamplingSpec


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture
def build(model_path):
    backends = []

    def make(rank=0, dtype="bfloat16", handles=("policy",), path=model_path):
        optimizer = OptimizerSettings(lr=1e-2, warmup_steps=2, scheduler="cosine", total_steps=8)
        lora = LoraSettings(rank=rank, dropout=0.2 if rank else 0.0)
        training = TrainingSettings(threads=1, optimizer=optimizer, lora=lora)
        backends.append(TorchBackend(ModelSettings(path=path, dtype=dtype), training, handles=handles))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


def batch(step):
    rng = np.random.default_rng(step)
    rows = []
    for i in range(3):
        ids = rng.integers(3, 250, 8 + i)
        ones = np.ones(len(ids) - 1)
        rows.append(
            BatchRow(
                str(i),
                str(i),
                "g",
                ids[:-1],
                ids[1:],
                ones > 0,
                ones / 30,
                ones * rng.normal(),
                -5 * ones,
                SamplingSpec(),
            )
        )
    return Batch(rows, step)


def train(backend, steps):
    losses = []
    for step in steps:
        losses.append(backend.forward_backward("policy", batch(step), LossSpec("ppo_clip")).result().loss)
        assert backend.optim_step("policy").result().applied
    return losses


def masters(backend):
    return {name: tensor.clone() for name, tensor in dict(backend._optimizer.state())["master"].items()}


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (0, "bfloat16"), (4, "bfloat16")])
def test_a_run_cut_at_three_of_four_steps_continues_to_the_bit(build, tmp_path, rank, dtype):
    whole = build(rank, dtype)
    losses = train(whole, range(4))
    first = build(rank, dtype)
    assert train(first, range(3)) == losses[:3]
    first.save("policy", tmp_path).result()
    resumed, cold = build(rank, dtype), build(rank, dtype)
    resumed.load("policy", tmp_path).result()
    assert train(resumed, [3]) == losses[3:]
    want, got = masters(whole), masters(resumed)
    assert all(torch.equal(want[n], got[n]) for n in want)
    cold.load("policy", tmp_path, weights_only=True).result()
    train(cold, [3])
    assert any(not torch.equal(want[n], t) for n, t in masters(cold).items())


def test_nothing_in_a_checkpoint_is_pickled(build, tmp_path):
    backend = build()
    train(backend, [0])
    backend.save("policy", tmp_path).result()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == sorted([f"{p}.safetensors" for p in ("master", "exp_avg", "exp_avg_sq", "rng")] + ["training.json"])
    assert json.loads((tmp_path / "training.json").read_text())["step"] == 1


def test_a_checkpoint_before_the_first_step_loads(build, tmp_path):
    backend, other = build(), build()
    backend.save("policy", tmp_path).result()
    other.load("policy", tmp_path).result()
    assert train(other, range(2)) == train(backend, range(2))


@pytest.mark.parametrize("part", ["master", "exp_avg", "exp_avg_sq", "rng"])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_part_is_named_and_nothing_changes(build, tmp_path, part, damage):
    backend = build()
    train(backend, [0])
    backend.save("policy", tmp_path).result()
    file = tmp_path / f"{part}.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    victim = build()
    before = masters(victim)
    with pytest.raises(CheckpointError, match=f"{part}.safetensors"):
        victim.load("policy", tmp_path).result()
    assert all(torch.equal(before[n], t) for n, t in masters(victim).items())


def test_a_missing_or_broken_manifest_is_named(build, tmp_path):
    backend = build()
    with pytest.raises(CheckpointError, match=r"training\.json"):
        backend.load("policy", tmp_path).result()
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"training\.json"):
        backend.load("policy", tmp_path).result()


def test_another_models_checkpoint_is_refused(build, tmp_path):
    wide = str(tiny_model_dir(tmp_path / "wide", hidden_size=32))
    other = build(path=wide)
    other.save("policy", tmp_path / "ckpt").result()
    with pytest.raises(CheckpointError, match="shape"):
        build().load("policy", tmp_path / "ckpt").result()


def test_a_full_disk_is_a_checkpoint_error_without_a_manifest(build, tmp_path, monkeypatch):
    from slipstream.training import checkpoint

    backend = build()
    backend.save("policy", tmp_path).result()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"master\.safetensors.*No space left"):
        backend.save("policy", tmp_path).result()
    assert not (tmp_path / "training.json").exists()


def test_the_reference_is_saved_and_loaded_by_its_own_handle(build, tmp_path):
    backend = build(handles=("policy", "reference"))
    train(backend, [0])
    backend.set_reference()
    backend.save("reference", tmp_path / "reference").result()
    backend.save("policy", tmp_path / "policy").result()
    other = build(handles=("policy", "reference"))
    other.load("reference", tmp_path / "reference").result()
    a, b = (x.forward("reference", batch(9)).result().logprobs for x in (backend, other))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(CheckpointError, match="handle"):
        other.load("policy", tmp_path / "reference").result()


def test_resetting_the_optimizer_starts_a_phase_with_the_same_weights(build, tmp_path):
    backend, fresh = build(), build()
    train(backend, range(2))
    backend.save("policy", tmp_path).result()
    fresh.load("policy", tmp_path, weights_only=True).result()
    backend.reset_optimizer(OptimizerSettings(lr=1e-3)).result()
    fresh.reset_optimizer(OptimizerSettings(lr=1e-3)).result()
    assert train(backend, range(2)) == train(fresh, range(2))
    shutil.rmtree(tmp_path)
