"""The layers written out by hand against transformers' modules under autograd, on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.algorithms.batch import Batch, BatchRow
from slipstream.algorithms.objective import LossSpec
from slipstream.config.settings import LoraSettings, ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.inference.embedded.linear import PackedLinear
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import SamplingSpec

LEAN = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    made = {}

    def get(arch):
        if arch not in made:
            made[arch] = str(tiny_model_dir(tmp_path_factory.mktemp("models") / arch, arch=arch))
        return made[arch]

    return get


@pytest.fixture
def build(model_dir):
    made = []

    def make(arch="llama", *, lean=True, dtype="float32", handles=("policy",), model=None, **training):
        backend = TorchBackend(
            ModelSettings(path=model_dir(arch), dtype=dtype, **(model or {})),
            TrainingSettings(threads=1, optimizer=OptimizerSettings(lr=1e-2), **training),
            handles=handles,
        )
        if not lean:
            backend._policy._lean = None
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def batch(seed=0):
    """Two groups of three under one system message; uneven answers."""
    rng = np.random.default_rng(seed)
    common, out = rng.integers(3, 250, 20), []
    for g in range(2):
        start = np.concatenate([common, rng.integers(3, 250, 9 + g)])
        for m in range(3):
            ids = np.concatenate([start, rng.integers(3, 250, 6 + m)])
            trained = np.arange(len(ids) - 1) >= len(start) - 1
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
                    behaviour_logprobs_T=np.where(trained, -5.0, 0.0),
                    sampling=SamplingSpec(),
                )
            )
    return Batch(out)


def gradients(backend):
    logprobs = backend.forward_backward("policy", batch(), LossSpec("ppo_clip")).result().logprobs
    return np.concatenate(logprobs), backend.gradients()


def gap(a, b):
    """Relative distance of two sets of gradients, parameter by parameter; the largest."""
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", LEAN)
def test_scores_and_gradients_are_those_of_the_modules(build, arch, checkpointing):
    lean = build(arch, model={"gradient_checkpointing": checkpointing})
    assert lean._policy._lean is not None
    scores, grads = gradients(lean)
    plain_scores, plain_grads = gradients(build(arch, lean=False))
    np.testing.assert_allclose(scores, plain_scores, atol=2e-5)
    assert gap(grads, plain_grads) < 1e-4


@pytest.mark.parametrize("arch", LEAN)
def test_bfloat16_gradients_are_as_close_to_float32_as_those_of_the_modules(build, arch):
    _, exact = gradients(build(arch))
    _, lean = gradients(build(arch, dtype="bfloat16"))
    _, plain = gradients(build(arch, dtype="bfloat16", lean=False))
    distance = {
        name: sum(float((g[n] - exact[n]).square().sum()) for n in exact) ** 0.5
        for name, g in (("lean", lean), ("plain", plain))
    }
    assert distance["lean"] < 1.2 * distance["plain"]


def test_biases_get_their_gradient(build):
    backend = build("qwen2")
    _, grads = gradients(backend)
    biases = [name for name in grads if name.endswith("bias")]
    assert biases
    assert all(float(grads[name].abs().sum()) > 0 for name in biases if "k_proj" not in name)


def test_micro_batches_add_up(build):
    whole, parts = build("llama"), build("llama", max_tokens_per_microbatch=48)
    _, a = gradients(whole)
    _, b = gradients(parts)
    assert gap(a, b) < 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_the_size_of_a_chunk_of_logits_moves_neither_scores_nor_gradients(build, dtype, bound):
    whole, chunks = build("llama", dtype=dtype), build("llama", dtype=dtype, logprob_chunk_tokens=5)
    scores, a = gradients(whole)
    others, b = gradients(chunks)
    np.testing.assert_allclose(scores, others, atol=bound)
    assert gap(a, b) < bound


def test_a_frozen_reference_scores_to_the_bit_as_the_policy_does(build):
    backend = build("llama", handles=("policy", "reference"))
    one, other = (backend.forward(handle, batch()).result().logprobs for handle in ("policy", "reference"))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_architectures_and_adapters_keep_the_modules(build):
    assert build("gemma2")._policy._lean is None
    assert build("gpt2")._policy._lean is None
    assert build("llama", lora=LoraSettings(rank=2))._policy._lean is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_copies_nothing(build, dtype):
    backend = build("llama", dtype=dtype)
    live = {parameter.data_ptr() for parameter in backend._policy.hf.parameters()}
    assert {part.tensor.data_ptr() for part in backend.export_weights("policy")} <= live


def test_a_second_backward_is_refused(build):
    backend = build("llama")
    layout = _layout()

    def twice():
        from slipstream.training.attention import active_layout

        with active_layout(layout, torch.device("cpu")):
            hidden = backend._policy.hidden(layout)
            hidden.sum().backward(retain_graph=True)
            hidden.sum().backward()

    with pytest.raises(RuntimeError, match="second time"):
        backend._submit(twice).result()


def _layout():
    from slipstream.training.layout import plan_layouts

    (layout,) = plan_layouts(batch().rows, 8192)
    return layout


# ---- packed products of the engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_written_stay(dtype):
    first = torch.randn(48, 32).to(dtype)
    layer = PackedLinear(first)
    new = torch.randn(16, 32).to(dtype)
    layer.write_rows(16, 32, new)
    layer.commit()
    torch.testing.assert_close(layer.plain(), torch.cat([first[:16], new, first[32:]]), rtol=0, atol=0)


def test_a_matrix_written_whole_or_in_parts_is_never_unpacked(monkeypatch):
    layer = PackedLinear(torch.randn(48, 32))
    new = torch.randn(48, 32)
    for parts in ([(0, 48)], [(0, 16), (16, 48)]):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to_dense", None)
            for begin, end in parts:
                layer.write_rows(begin, end, new[begin:end])
            layer.commit()
        torch.testing.assert_close(layer.plain(), new, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [128, 129, 300, 1500])
def test_a_product_of_many_rows_is_that_of_its_pieces(rows):
    layer, x, other = PackedLinear(torch.randn(48, 32), torch.randn(48)), torch.randn(rows, 32), torch.randn(rows, 48)
    want = torch.nn.functional.linear(x, layer.plain(), layer.bias)
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.silu(x), torch.nn.functional.silu(want))
    torch.testing.assert_close(layer.times(x, other), want * other)
    torch.testing.assert_close(layer.plus(x, other), want + other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_numbers_lie_where_the_old_ones_lay(dtype):
    """The pages below a matrix are chosen once; a product sees what was written last."""
    layer = PackedLinear(torch.randn(48, 32).to(dtype))
    place = layer.memory()
    assert place[1] >= 48 * 32 * dtype.itemsize
    x, new = torch.randn(5, 32).to(dtype), torch.randn(48, 32).to(dtype)
    for parts in ([(0, 48)], [(0, 16), (16, 48)], [(8, 16)]):
        for begin, end in parts:
            layer.write_rows(begin, end, new[begin:end])
        layer.commit()
        assert layer.memory() == place
        torch.testing.assert_close(layer(x), PackedLinear(new)(x), rtol=0, atol=0)
        new = torch.cat([new[:8], torch.randn(8, 32).to(dtype), new[16:]])
