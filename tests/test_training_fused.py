"""Lean layers: equal to what transformers spells out, values and gradients; swapped only where equal."""

from __future__ import annotations

import pytest
import torch

from slipstream.inference.embedded.tiny import tiny_model
from slipstream.training.fused import lean_layers


def results(model, dtype):
    torch.manual_seed(0)
    embeddings = torch.randn(2, 7, model.config.hidden_size).to(dtype).requires_grad_()
    out = model.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    parameters = [p for p in model.base_model.parameters() if p is not model.get_input_embeddings().weight]
    return out, torch.autograd.grad((out.float() ** 3).sum(), [embeddings, *parameters])


@pytest.mark.parametrize(("arch", "swapped"), [("llama", 7), ("qwen2", 7), ("qwen3", 11), ("olmo2", 11), ("gpt2", 0)])
def test_swapped_layers_compute_the_same(arch, swapped):
    plain, lean = tiny_model(arch=arch)[0], tiny_model(arch=arch)[0]
    assert lean_layers(lean) == swapped
    (a, grads_a), (b, grads_b) = results(plain, torch.float32), results(lean, torch.float32)
    torch.testing.assert_close(b, a)
    for x, y in zip(grads_b, grads_a, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()) + 1e-6)


def test_bfloat16_gradients_are_as_close_to_float32_as_the_spelled_out_ones():
    exact = results(tiny_model()[0], torch.float32)[1]
    plain, lean = tiny_model()[0].bfloat16(), tiny_model()[0].bfloat16()
    lean_layers(lean)

    def error(model):
        grads = results(model, torch.bfloat16)[1]
        return sum(float((g.float() - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True))

    assert error(lean) < 1.2 * error(plain)


def test_a_norm_of_another_kind_is_left_alone():
    model = tiny_model(arch="gemma2")[0]
    lean_layers(model)
    for module in model.modules():
        if type(module).__name__ == "Gemma2RMSNorm":
            assert "forward" not in vars(module)


def test_a_norm_is_kept_as_input_and_one_number_per_token():
    saved = []
    x = torch.randn(1, 50, 64, dtype=torch.bfloat16, requires_grad=True)
    norm = next(m for m in tiny_model()[0].bfloat16().modules() if hasattr(m, "variance_epsilon"))
    lean_layers(norm)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        norm(x)
    assert sum(saved) <= x.numel() * 2 + 50 * 4 + 64 * 2
