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


@dataclass(frozen=True)
class _Branches:
    """Gather indices that lay a block's branches out as ``(n, longest)``.

    A place behind the end of a short branch repeats the block's first branch token; causality keeps it from
    every real query, and its own output and gradient are dropped.
    """

    count: int
    longest: int
    gather: Tensor
    """``(n * longest,)`` packed positions."""
    real: Tensor | None
    """``(total branch tokens,)`` places in the padded grid, in packed order; None when no place is empty."""

    @classmethod
    def of(cls, block: Block, device: torch.device) -> _Branches | None:
        spans = block.branch_spans()
        if not spans:
            return None
        starts, ends = torch.tensor(spans).T
        longest = int((ends - starts).max())
        grid = starts[:, None] + torch.arange(longest)
        inside = grid < ends[:, None]
        gather = torch.where(inside, grid, block.split).flatten().to(device)
        real = None if bool(inside.all()) else inside.flatten().nonzero()[:, 0].to(device)
        return cls(len(spans), longest, gather, real)


class _Heads:
    """Reshapes for ``K`` key/value heads with ``r`` query heads each."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.kv, self.repeats = kv_heads, heads // kv_heads

    def query(self, x_HTD: Tensor, start: int, end: int) -> Tensor:
        """``(H, T, D)`` -> ``(K, r, end-start, D)``, a view."""
        return x_HTD[:, start:end].unflatten(0, (self.kv, self.repeats))

    def key(self, x_KTD: Tensor, start: int, end: int) -> Tensor:
        """``(K, T, D)`` -> ``(K, r, end-start, D)`` with a zero stride over ``r``."""
        return x_KTD[:, start:end].unsqueeze(1).expand(-1, self.repeats, -1, -1)

    def own_query(self, x_HTD: Tensor, at: _Branches) -> Tensor:
        """``(H, T, D)`` -> ``(K * n, r, longest, D)``."""
        padded = x_HTD[:, at.gather].view(self.kv, self.repeats, at.count, at.longest, -1)
        return padded.transpose(1, 2).flatten(0, 1)

    def own_key(self, x_KTD: Tensor, at: _Branches) -> Tensor:
        """``(K, T, D)`` -> ``(K * n, r, longest, D)`` with a zero stride over ``r``."""
        padded = x_KTD[:, at.gather].view(self.kv * at.count, 1, at.longest, -1)
        return padded.expand(-1, self.repeats, -1, -1)

    def from_own(self, x: Tensor, at: _Branches) -> Tensor:
        """``(K * n, r, longest, D)`` -> ``(K, r, total branch tokens, D)``."""
        grid = x.unflatten(0, (self.kv, at.count)).transpose(1, 2)
        return grid.flatten(2, 3) if at.real is None else grid.flatten(2, 3)[:, :, at.real]

    def to_own(self, x: Tensor, at: _Branches) -> Tensor:
        """The inverse of ``from_own``; places without a token become 0."""
        grid = x
        if at.real is not None:
            grid = x.new_zeros((self.kv, self.repeats, at.count * at.longest, *x.shape[3:]))
            grid[:, :, at.real] = x
        return grid.unflatten(2, (at.count, at.longest)).transpose(1, 2).flatten(0, 1)


class _Blockwise(torch.autograd.Function):
    """Attention of all blocks; saves inputs, output and log-sum-exps, nothing quadratic.

    Half-precision inputs are widened for the kernel calls: on CPUs its bfloat16 backward is up to ten times
    slower than float32 on short runs and no faster on long ones, and the merge wants float32 anyway.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: tuple[Block, ...]) -> Tensor:
        q, k, v = (_widen(x[0]) for x in (query, key, value))
        heads = _Heads(q.shape[0], k.shape[0])
        out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
        out_HTD = out.transpose(0, 1)
        saved: list[Tensor] = []
        plans = [_Branches.of(block, q.device) for block in blocks]
        for block, at in zip(blocks, plans, strict=True):
            stem = (block.start, block.split)
            stem_k, stem_v = heads.key(k, *stem), heads.key(v, *stem)
            part, lse = _flash(heads.query(q, *stem), stem_k, stem_v, 0.0, True, scale=scale)
            heads.query(out_HTD, *stem).copy_(part)
            saved.append(lse)
            if at is None:
                continue
            rest = (block.split, block.end)
            far, far_lse = _flash(heads.query(q, *rest), stem_k, stem_v, 0.0, False, scale=scale)
            near, near_lse = _flash(
                heads.own_query(q, at), heads.own_key(k, at), heads.own_key(v, at), 0.0, True, scale=scale
            )
            near, near_lse = heads.from_own(near, at), heads.from_own(near_lse.unsqueeze(-1), at)[..., 0]
            lse = torch.logaddexp(far_lse, near_lse)
            merged = far * (far_lse - lse).exp_().unsqueeze(-1)
            merged.addcmul_(near, (near_lse - lse).exp_().unsqueeze(-1))
            heads.query(out_HTD, *rest).copy_(merged)
            saved.append(lse)
        ctx.save_for_backward(query, key, value, out.to(query.dtype), *saved)
        ctx.scale, ctx.blocks, ctx.plans = scale, blocks, plans
        return out.to(query.dtype).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *saved = ctx.saved_tensors
        q, k, v = (_widen(x[0]) for x in (query, key, value))
        out_HTD, go_HTD = (_widen(x).transpose(0, 1) for x in (out, grad_out[0]))
        heads = _Heads(q.shape[0], k.shape[0])
        # (T, H, D) storage: the projections' backward wants tokens outermost.
        dq, dk, dv = (x.new_empty((x.shape[1], x.shape[0], x.shape[2])).transpose(0, 1) for x in (q, k, v))
        remaining = iter(saved)
        for block, at in zip(ctx.blocks, ctx.plans, strict=True):
            stem, stem_at = (block.start, block.split), slice(block.start, block.split)
            stem_k, stem_v = heads.key(k, *stem), heads.key(v, *stem)

            def back(span: tuple[int, int], keys: Tensor, values: Tensor, lse: Tensor, causal: bool) -> Any:
                views = [heads.query(x, *span) for x in (go_HTD, q, out_HTD)]
                return _flash_backward(views[0], views[1], keys, values, views[2], lse, 0.0, causal, scale=ctx.scale)

            gq, gk, gv = back(stem, stem_k, stem_v, next(remaining), True)
            dq[:, stem_at], dk[:, stem_at], dv[:, stem_at] = gq.flatten(0, 1), gk.sum(1), gv.sum(1)
            if at is None:
                continue
            lse, rest, rest_at = next(remaining), (block.split, block.end), slice(block.split, block.end)
            far_q, gk, gv = back(rest, stem_k, stem_v, lse, False)
            dk[:, stem_at] += gk.sum(1)
            dv[:, stem_at] += gv.sum(1)
            near_q, gk, gv = _flash_backward(
                *(heads.to_own(heads.query(go_HTD, *rest), at), heads.own_query(q, at)),
                *(heads.own_key(k, at), heads.own_key(v, at), heads.own_query(out_HTD, at)),
                heads.to_own(lse.unsqueeze(-1), at)[..., 0].contiguous(),
                0.0,
                True,
                scale=ctx.scale,
            )
            dq[:, rest_at] = (far_q + heads.from_own(near_q, at)).flatten(0, 1)
            dk[:, rest_at] = heads.from_own(gk, at).sum(1)
            dv[:, rest_at] = heads.from_own(gv, at).sum(1)
        dq, dk, dv = (x.to(query.dtype).unsqueeze(0) for x in (dq, dk, dv))
        return dq, dk, dv, None, None


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
