"""Attention over packed layouts with shared stems.

Owns: two functions registered with transformers' ``AttentionInterface``; both read the layout that
``active_layout`` has put in a context variable, so that no model class has to forward an argument.

* ``slipstream_blockwise`` (CPU): every stem is one causal flash call; every branch is a full call against its
  stem plus a causal call against itself, merged by log-sum-exp.  Nothing is padded, no stem is copied per
  branch, and grouped key/value heads are read through zero strides.  The backward pass hands the *merged*
  output and log-sum-exp to the kernel's backward for each part, which yields exactly that part's share of
  the gradient (the identity behind ring attention, Liu et al. 2023, arXiv:2310.01889).
* ``slipstream_masked`` (any device, soft caps, sliding windows): one dense ``(T, T)`` mask.

Refuses: attention sinks, position biases, dropout, and running without an active layout.

Lifecycle: ``register()`` once per process; ``with active_layout(layout):`` around forward *and* backward
(checkpointed layers run again inside backward).

Shape legend: ``H`` query heads, ``K`` key/value heads, ``r = H/K``, ``T`` packed tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ContractError, ModelError
from slipstream.training.layout import Block, Layout

BLOCKWISE, MASKED = "slipstream_blockwise", "slipstream_masked"
_ACTIVE: ContextVar[LayoutOnDevice | None] = ContextVar("slipstream_layout", default=None)
_UNSUPPORTED = ("s_aux", "position_bias")

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class LayoutOnDevice:
    """A layout beside what attention derives from it once per micro-batch."""

    layout: Layout
    device: torch.device
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask_TT(self, window: int | None) -> Tensor:
        """True where a query (first axis) sees a key, under an optional sliding window."""
        if window not in self.masks:
            layout, total = self.layout, self.layout.n_tokens
            stem = torch.full((total,), -1)
            run = torch.empty(total, dtype=torch.long)
            for number, block in enumerate(layout.blocks):
                stem[block.start : block.end] = number
                run[block.start : block.split] = -1 - number
                for start, end in block.branch_spans():
                    run[start:end] = start
            positions = torch.as_tensor(layout.positions_T)
            same_block = stem[:, None] == stem[None, :]
            visible = same_block & ((run[:, None] == run[None, :]) | (run[None, :] < 0))
            gap = positions[:, None] - positions[None, :]
            visible &= gap >= 0
            if window is not None:
                visible &= gap < window
            self.masks[window] = visible.to(self.device)
        return self.masks[window]


@contextmanager
def active_layout(layout: Layout, device: torch.device) -> Iterator[None]:
    """Make ``layout`` the one that attention reads in this context."""
    token = _ACTIVE.set(LayoutOnDevice(layout, device))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def register() -> None:
    """Tell transformers about both functions; masks are ours, so its own mask builders return None."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in ((BLOCKWISE, blockwise_forward), (MASKED, masked_forward)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def _current(mask: Tensor | None, total: int, dropout: float, kwargs: dict[str, Any]) -> LayoutOnDevice:
    active = _ACTIVE.get()
    if active is None:
        raise ContractError("packed attention was called without a layout; wrap the call in active_layout(...)")
    if mask is not None:
        raise ContractError("packed attention got an attention mask; call the model without one, and use_cache=False")
    if active.layout.n_tokens != total:
        raise ContractError(f"the layout holds {active.layout.n_tokens} tokens, attention got {total}")
    if dropout:
        raise ModelError("attention dropout is not supported in training; set attention_dropout to 0")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(f"this architecture uses attention with {name}, which packed training does not support")
    return active


def masked_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dense attention under the layout's mask; ``(1, H, T, D)`` in, ``(1, T, H, D)`` out."""
    active = _current(attention_mask, query.shape[2], dropout, kwargs)
    mask = active.mask_TT(sliding_window)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
        scores = torch.tanh(query.float() @ key.float().transpose(-1, -2) * (scale / softcap)) * softcap
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out = weights.to(value.dtype) @ value
    return out.transpose(1, 2).contiguous(), None


def blockwise_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Blockwise flash attention; ``(1, H, T, D)`` in, ``(1, T, H, D)`` out."""
    active = _current(attention_mask, query.shape[2], dropout, kwargs)
    longest = int(active.layout.positions_T.max()) + 1
    if softcap is not None or (sliding_window is not None and sliding_window < longest):
        return masked_forward(
            module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, **kwargs
        )
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    out: Tensor = _Blockwise.apply(query, key, value, scale, active.layout.blocks)
    return out, None


def _grouped(x_HTD: Tensor, groups: int, start: int, end: int) -> Tensor:
    """View ``(H, T, D)`` as ``(K, r, end-start, D)``; key/value heads get a zero stride over ``r``."""
    heads = x_HTD.shape[0]
    part = x_HTD[:, start:end]
    if heads == groups:
        return part.unsqueeze(1)
    return part.unflatten(0, (groups, heads // groups))


class _Blockwise(torch.autograd.Function):
    """Attention of all blocks; saves inputs, output and one log-sum-exp per call, nothing quadratic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: tuple[Block, ...]) -> Tensor:
        q, k, v = query[0], key[0], value[0]
        kv_heads, repeats = k.shape[0], q.shape[0] // k.shape[0]
        out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
        out_htd = out.transpose(0, 1)
        sums: list[Tensor] = []

        def run(start: int, end: int, key_start: int, key_end: int, causal: bool) -> tuple[Tensor, Tensor]:
            part_k = _grouped(k, kv_heads, key_start, key_end).expand(-1, repeats, -1, -1)
            part_v = _grouped(v, kv_heads, key_start, key_end).expand(-1, repeats, -1, -1)
            result: tuple[Tensor, Tensor] = _flash(
                _grouped(q, kv_heads, start, end), part_k, part_v, 0.0, causal, scale=scale
            )
            return result

        for block in blocks:
            part, lse = run(block.start, block.split, block.start, block.split, True)
            _grouped(out_htd, kv_heads, block.start, block.split).copy_(part)
            sums.append(lse)
            for start, end in block.branch_spans():
                # One call per branch would repeat the stem's packing; all branches see the same stem.
                own, lse_own = run(start, end, start, end, True)
                _grouped(out_htd, kv_heads, start, end).copy_(own)
                sums.append(lse_own)
            if block.branches:
                far, lse_far = run(block.split, block.end, block.start, block.split, False)
                lse_own = torch.cat(sums[-len(block.branch_spans()) :], dim=2)
                del sums[-len(block.branch_spans()) :]
                lse = torch.logaddexp(lse_far, lse_own)
                near = _grouped(out_htd, kv_heads, block.split, block.end)
                merged = far * (lse_far - lse).exp().unsqueeze(-1) + near * (lse_own - lse).exp().unsqueeze(-1)
                near.copy_(merged)
                sums.append(lse)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.scale, ctx.blocks = scale, blocks
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *sums = ctx.saved_tensors
        q, k, v = query[0], key[0], value[0]
        kv_heads, repeats = k.shape[0], q.shape[0] // k.shape[0]
        out_htd, go_htd = out.transpose(0, 1), grad_out[0].transpose(0, 1)
        # (T, H, D) storage: the projections' backward wants tokens outermost.
        dq, dk, dv = (x.new_empty((x.shape[1], x.shape[0], x.shape[2])).transpose(0, 1) for x in (q, k, v))

        def run(
            start: int, end: int, key_start: int, key_end: int, causal: bool, lse: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            grads = _flash_backward(
                _grouped(go_htd, kv_heads, start, end),
                _grouped(q, kv_heads, start, end),
                _grouped(k, kv_heads, key_start, key_end).expand(-1, repeats, -1, -1),
                _grouped(v, kv_heads, key_start, key_end).expand(-1, repeats, -1, -1),
                _grouped(out_htd, kv_heads, start, end),
                lse,
                0.0,
                causal,
                scale=ctx.scale,
            )
            return grads[0].flatten(0, 1), grads[1].sum(1), grads[2].sum(1)

        remaining = iter(sums)
        for block in ctx.blocks:
            stem = slice(block.start, block.split)
            dq[:, stem], dk[:, stem], dv[:, stem] = run(
                block.start, block.split, block.start, block.split, True, next(remaining)
            )
            if not block.branches:
                continue
            lse = next(remaining)
            rest = slice(block.split, block.end)
            dq[:, rest], far_k, far_v = run(block.split, block.end, block.start, block.split, False, lse)
            dk[:, stem] += far_k
            dv[:, stem] += far_v
            for start, end in block.branch_spans():
                own = slice(start, end)
                near_lse = lse[:, :, start - block.split : end - block.split].contiguous()
                near_q, dk[:, own], dv[:, own] = run(start, end, start, end, True, near_lse)
                dq[:, own] += near_q
        return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0), None, None
