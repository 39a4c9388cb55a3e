"""Blockwise attention against a dense mask in float64, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.errors import ContractError
from slipstream.training.attention import _plan, active_layout, blockwise_forward, masked_forward
from slipstream.training.layout import Layout, Run

CPU = torch.device("cpu")


def layout(*trees):
    """A layout from nested runs, each ``(length, child, ...)``."""
    runs, positions = [], []

    def place(tree, start, depth):
        length, *children = tree
        mine = len(runs)
        runs.append(None)
        positions.append(np.arange(depth, depth + length))
        end = start + length
        for child in children:
            end = place(child, end, depth + length)
        runs[mine] = Run(start, start + length, end)
        return end

    end = 0
    for tree in trees:
        end = place(tree, end, 0)
    empty = np.zeros(0, dtype=np.int64)
    return Layout(np.zeros(end, dtype=np.int64), np.concatenate(positions), empty, tuple(runs), (), empty, empty, empty)


FLAT = layout((7, (3,), (5,), (2,)), (9,), (40, (33,), (48,)))
GROUPS = layout((28, *[(47,)] * 8), (29, *[(47,)] * 7, (41,)))
"""Samples of two short prompts, which are read with them."""
NESTED = layout(
    (120, *[(20 + i, (30,), (26 + i, *[(9,)] * 4), (31,), (70,)) for i in range(3)], (110,)), (5, (4,), (4,))
)
"""A long prompt above short questions; one of each question's answers leads to more."""
MIXED = layout((20, *[(33,)] * 4, (97,)), (50, (20, *[(5,)] * 4)), (60, *[(33, (3,))] * 3))
"""A short prompt of which one sample is too long to lie beside the others, and ones that together are too long."""
DEEP = layout((30, (6, (5,), (1, (4,), (50,))), (6,), (1, (1,), (2,))), (5,), (1, (1,)))


def qkv(total, heads, kv_heads, dtype):
    torch.manual_seed(0)
    shapes = ((heads, total), (kv_heads, total), (kv_heads, total))
    return [torch.randn(1, t, h, 16, dtype=dtype).transpose(1, 2).requires_grad_() for h, t in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(
    "packed", [FLAT, DEEP, GROUPS, NESTED, MIXED], ids=["flat", "deep", "groups", "nested", "mixed"]
)
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


TREES = st.recursive(
    st.tuples(st.sampled_from([1, 2, 5, 16, 17, 40, 100])),
    lambda below: st.builds(
        lambda length, child, times, more: (length, *[child] * times, *more),
        st.sampled_from([1, 3, 20, 64, 90]),
        below,
        st.integers(1, 4),
        st.lists(below, max_size=2),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_any_tree_equals_the_dense_mask(trees):
    packed = layout(*trees)
    assume(packed.n_tokens <= 1500)
    inputs = qkv(packed.n_tokens, 2, 1, torch.float64)
    weight = torch.randn(1, packed.n_tokens, 2, 16, dtype=torch.float64)
    found = []
    for attend in (blockwise_forward, masked_forward):
        with active_layout(packed, CPU):
            out, _ = attend(None, *inputs, None)
        found.append((out, *torch.autograd.grad(out, inputs, weight)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("packed", "forks", "above"), [(GROUPS, 0, [29]), (NESTED, 2, [22, 48, 50]), (MIXED, 3, [20, 33])]
)
def test_short_runs_are_read_with_what_they_hang_from(packed, forks, above):
    """What a kernel call of its own would read instead, for everything below; nothing is read both ways."""
    plan = _plan(packed.runs)
    assert len(plan.forks) == forks
    assert sorted({bunch.places_above for bunch in plan.bunches} - {0}) == above


@pytest.mark.parametrize("attend", [blockwise_forward, masked_forward])
def test_a_token_sees_its_ancestors_and_itself_only(attend):
    inputs = qkv(DEEP.n_tokens, 2, 2, torch.float64)
    with active_layout(DEEP, CPU):
        out, _ = attend(None, *inputs, None)
    # Run 41 hangs from run 30..35, which hangs from run 0..29; run 36..40 is a sibling of 41, and 42..45 its child.
    assert DEEP.runs[3:5] == (Run(41, 42, 96), Run(42, 46, 46))
    for place, seen in ((41, [*range(36), 41]), (43, [*range(36), 41, 42, 43]), (96, [*range(30), 96])):
        (grad,) = torch.autograd.grad(out[0, place].sum(), inputs[2], retain_graph=True)
        assert grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == seen


def test_a_sliding_window_counts_positions_not_packed_places():
    inputs = qkv(FLAT.n_tokens, 2, 2, torch.float64)
    with active_layout(FLAT, CPU):
        out, _ = blockwise_forward(None, *inputs, None, sliding_window=3)
    # Packed place 11 is the second token (position 8) of the second child; 6 is its parent's last (position 6).
    (grad,) = torch.autograd.grad(out[0, 11].sum(), inputs[2])
    assert grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [6, 10, 11]


def test_soft_caps_take_the_dense_path():
    inputs = qkv(FLAT.n_tokens, 2, 1, torch.float32)
    with active_layout(FLAT, CPU):
        capped, _ = blockwise_forward(None, *inputs, None, softcap=0.5)
        huge, _ = blockwise_forward(None, *inputs, None, softcap=1e4)
        plain, _ = blockwise_forward(None, *inputs, None)
    torch.testing.assert_close(huge, plain, rtol=0, atol=1e-5)
    assert float((capped - plain).abs().max()) > 1e-2


def test_masks_and_missing_layouts_are_refused():
    inputs = qkv(FLAT.n_tokens, 2, 2, torch.float32)
    with pytest.raises(ContractError, match="without a layout"):
        blockwise_forward(None, *inputs, None)
    with active_layout(FLAT, CPU), pytest.raises(ContractError, match="attention mask"):
        blockwise_forward(None, *inputs, torch.ones(1))
    with active_layout(layout((3,)), CPU), pytest.raises(ContractError, match="3 tokens"):
        blockwise_forward(None, *inputs, None)
