"""Blockwise attention against a dense mask in float64, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.errors import ContractError
from slipstream.training.attention import active_layout, blockwise_forward, masked_forward
from slipstream.training.layout import Block, Layout

CPU = torch.device("cpu")


def layout(*blocks):
    positions = [
        np.concatenate([np.arange(b.stem), *[np.arange(b.stem, b.stem + n) for n in b.branches]]) for b in blocks
    ]
    total = blocks[-1].end
    empty = np.zeros(0, dtype=np.int64)
    return Layout(np.zeros(total, dtype=np.int64), np.concatenate(positions), blocks, (), empty, empty, empty)


MIXED = layout(Block(0, 7, (3, 5, 0, 2)), Block(17, 9), Block(26, 40, (33, 48)))
EVEN = layout(Block(0, 5), Block(5, 30, (6, 6, 6)), Block(53, 1, (1,)))


def qkv(total, heads, kv_heads, dtype):
    torch.manual_seed(0)
    shapes = ((heads, total), (kv_heads, total), (kv_heads, total))
    return [torch.randn(1, t, h, 16, dtype=dtype).transpose(1, 2).requires_grad_() for h, t in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("packed", [MIXED, EVEN], ids=["mixed", "even"])
def test_blockwise_equals_the_dense_mask(packed, heads, kv_heads, dtype, tolerance):
    total = packed.n_tokens
    inputs = qkv(total, heads, kv_heads, dtype)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn(1, total, heads, 16, dtype=dtype)
    with active_layout(packed, CPU):
        got, _ = blockwise_forward(None, *inputs, None)
        want, _ = masked_forward(None, *doubles, None)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    got_grads = torch.autograd.grad(got, inputs, weight)
    want_grads = torch.autograd.grad(want, doubles, weight.double())
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


def test_a_branch_sees_its_stem_and_itself_only():
    inputs = qkv(MIXED.n_tokens, 2, 2, torch.float64)
    with active_layout(MIXED, CPU):
        out, _ = blockwise_forward(None, *inputs, None)
    # Rows 7..9 are the first branch of block 0: stem 0..6 and earlier tokens of the branch.
    (grad,) = torch.autograd.grad(out[0, 8].sum(), inputs[2])
    touched = grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
    assert touched == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_sliding_window_counts_positions_not_packed_places():
    inputs = qkv(MIXED.n_tokens, 2, 2, torch.float64)
    with active_layout(MIXED, CPU):
        out, _ = blockwise_forward(None, *inputs, None, sliding_window=3)
    # Packed place 11 is the second token (position 8) of the second branch; 6 is the stem's last (position 6).
    (grad,) = torch.autograd.grad(out[0, 11].sum(), inputs[2])
    assert grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [6, 10, 11]


def test_soft_caps_take_the_dense_path():
    inputs = qkv(MIXED.n_tokens, 2, 1, torch.float32)
    with active_layout(MIXED, CPU):
        capped, _ = blockwise_forward(None, *inputs, None, softcap=0.5)
        huge, _ = blockwise_forward(None, *inputs, None, softcap=1e4)
        plain, _ = blockwise_forward(None, *inputs, None)
    torch.testing.assert_close(huge, plain, rtol=0, atol=1e-5)
    assert float((capped - plain).abs().max()) > 1e-2


def test_masks_and_missing_layouts_are_refused():
    inputs = qkv(MIXED.n_tokens, 2, 2, torch.float32)
    with pytest.raises(ContractError, match="without a layout"):
        blockwise_forward(None, *inputs, None)
    with active_layout(MIXED, CPU), pytest.raises(ContractError, match="attention mask"):
        blockwise_forward(None, *inputs, torch.ones(1))
    with active_layout(layout(Block(0, 3)), CPU), pytest.raises(ContractError, match="3 tokens"):
        blockwise_forward(None, *inputs, None)
