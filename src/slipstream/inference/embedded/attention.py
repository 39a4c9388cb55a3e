"""Attention over shared blocks and private rows.

Owns: the layout of one forward pass (``ForwardPlan``), the private rows (``RowStore``), and the attention of a
packed batch in which some tokens prefill blocks and others decode.  Refuses: projections, positions, sampling.

Shapes (legend): N packed tokens, n decoding sequences, H query heads, K key/value heads, G = H / K, D head
dimension, S block tokens, R rows, C row capacity, L layers.

A decoding sequence attends to the shared blocks on its path (each read once for all its users) and to its own
row; the parts are joined by their log-sum-exps, which is exact.  Prefill does the same with its ancestors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.inference.embedded.prefix import Node

RowIndex: TypeAlias = "Tensor | slice | None"
"""Some rows; None means all."""


_WIDTH_STEP = 16  # row tokens
_SLACK = 2 * _WIDTH_STEP
"""Reading so many empty places costs less than copying rows out: the products want whole ones."""


@dataclass
class Segment:
    """Packed tokens ``[begin, end)`` fill ``node``; with ``reread`` they only re-read its last token."""

    node: Node
    begin: int
    end: int
    ancestors: list[Node]
    reread: bool = False


@dataclass
class DecodeBatch:
    """Packed tokens ``[begin, begin + n)``, one for each of the rows ``0 .. n-1``."""

    begin: int
    n: int
    lengths: list[int]
    """Row tokens before this step; the new token is written at this place."""
    starts: list[int]
    """Absolute position of each row's first token."""
    paths: list[list[Node]]
    shared: list[tuple[Node, RowIndex]] = field(default_factory=list)
    """Blocks read once for several rows, and which rows."""
    write_index: Tensor | None = None
    mask: Tensor | None = None
    width: int = 0
    """Row tokens that attention reads; see ``RowStore.prepare``."""


class RowStore:
    """Private keys and values: a (L, 2, R, K, C, D) buffer that grows with what runs."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.buffer = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def rows(self) -> int:
        return int(self.buffer.shape[2])

    @property
    def capacity(self) -> int:
        return int(self.buffer.shape[4])

    def block(self, tokens: int) -> Tensor:
        """Room for a node of so many tokens."""
        shape = (self.layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, capacity: int, live_rows: int) -> None:
        """Make room (and give much unused room back); rows ``[0, live_rows)`` keep their content."""
        roomy = self.capacity > 2 * capacity + 64
        if rows <= self.rows and capacity <= self.capacity and not roomy:
            return
        rows = -(-rows // 8) * 8
        # No slack: growing copies what there is every few steps, a part of whose width would be copied in all of them.
        capacity = -(-capacity // _WIDTH_STEP) * _WIDTH_STEP
        # Zeros, because masked places are multiplied by 0 and must be finite.
        shape = (self.layers, 2, rows, self.kv_heads, capacity, self.head_dim)
        fresh = torch.zeros(shape, dtype=self.dtype, device=self.device)
        live, width = min(live_rows, self.rows), min(capacity, self.capacity)
        fresh[:, :, :live, :, :width] = self.buffer[:, :, :live, :, :width]
        self.buffer = fresh

    def shrink(self) -> None:
        """Give the memory back (nothing runs)."""
        self.buffer = self.buffer[:, :, :0, :, :0].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row over another; a new row may be empty and not allocated yet."""
        if length == 0:
            return
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]

    def rebase(self, row: int, length: int, start: int, new_start: int, path: Seq[Node]) -> None:
        """Change the absolute position at which a row begins, keeping its ``length`` tokens' content.

        Moving back copies what is missing from the path's blocks.
        """
        own = self.buffer[:, :, row]
        if new_start > start:
            shift = new_start - start
            own[..., : length - shift, :] = own[..., shift:length, :].clone()
            return
        shift = start - new_start
        if length:
            own[..., shift : shift + length, :] = own[..., :length, :].clone()
        for node in path:
            low, high = max(node.start, new_start), min(node.end, start)
            if low < high:
                assert node.kv is not None
                own[..., low - new_start : high - new_start, :] = node.kv[..., low - node.start : high - node.start, :]

    def prepare(self, batch: DecodeBatch, exact: bool) -> None:
        """Index and mask tensors that every layer of a step shares, and how much of the rows is read.

        That is the whole capacity, or the longest row's tokens where those are far fewer.  The capacity tells of what
        ran before, and the width may move rounding; so ``exact`` reads by the longest row always.
        """
        lengths = torch.tensor(batch.lengths, device=self.device)
        rows = torch.arange(batch.n, device=self.device)[:, None, None]
        halves = torch.arange(2, device=self.device)[None, :, None] * self.rows
        heads = torch.arange(self.kv_heads, device=self.device)[None, None, :]
        index = ((halves + rows) * self.kv_heads + heads) * self.capacity + lengths[:, None, None]
        batch.write_index = index.reshape(-1)
        longest = max(batch.lengths) + 1
        full = not exact and self.capacity <= longest + _SLACK
        batch.width = self.capacity if full else -(-longest // _WIDTH_STEP) * _WIDTH_STEP
        hidden = torch.arange(batch.width, device=self.device)[None, :] > lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        batch.mask = mask.repeat_interleave(self.kv_heads, 0)[:, None, :]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: ``q`` (H, T, D), ``k, v`` (K, S, D) -> output (H, T, D), log-sum-exp (H, T) fp32."""
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q[None], k[None], v[None], 0.0, causal, scale=scale)
        return out[0], lse[0]
    groups = q.shape[0] // k.shape[0]
    scores = (q.float() @ k.float().repeat_interleave(groups, 0).transpose(1, 2)) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(above, -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = (scores - lse[..., None]).exp() @ v.float().repeat_interleave(groups, 0)
    return out.to(q.dtype), lse


def join(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint keys, joined: outputs (..., D) fp32, log-sum-exps (...) fp32."""
    weight_b = torch.sigmoid(lse_b - lse_a)[..., None]
    return torch.lerp(out_a, out_b, weight_b), torch.logaddexp(lse_a, lse_b)


def reference(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Textbook attention with a sliding window and a soft cap, in fp32, for layers that have them.

    ``q`` (T, H, D) at positions ``first ..``; ``k, v`` (K, S, D) at positions ``0 ..``; returns (T, H, D).
    """
    groups = q.shape[1] // k.shape[0]
    scores = q.float().transpose(0, 1) @ k.float().repeat_interleave(groups, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(first, first + q.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = key > at
    if window is not None:
        hidden = hidden | (key <= at - window)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return (weights @ v.float().repeat_interleave(groups, 0)).transpose(0, 1).to(q.dtype)


@dataclass
class ForwardPlan:
    """One forward pass: ``token_ids`` (N,) at ``positions`` (N,), and where their keys go and what they read."""

    token_ids: Tensor
    positions: Tensor
    segments: list[Segment]
    decode: DecodeBatch | None
    rows: RowStore
    routes: npt.NDArray[np.int16] | None = None
    """(N, layers, top-k): the experts that a runner with routers reports after the pass."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store ``kv`` (N, 2, K, D) of this layer and attend with ``q`` (N, H, D); returns (N, H * D)."""
        plain = softcap is None and (window is None or int(self.positions.max()) < window)
        out = q.new_empty(q.shape)  # contiguous, whatever the strides of q
        for segment in self.segments:
            part = slice(segment.begin, segment.end)
            block = segment.node.kv
            assert block is not None
            if not segment.reread:
                block[layer].copy_(kv[part].permute(1, 2, 0, 3))
            if plain:
                out[part] = self._prefill(layer, segment, q[part], scale)
            else:
                keys = torch.cat([n.kv[layer] for n in segment.ancestors if n.kv is not None] + [block[layer]], 2)
                first = segment.node.end - (segment.end - segment.begin)
                out[part] = reference(q[part], keys[0], keys[1], first, scale, window, softcap)
        if self.decode is not None:
            part = slice(self.decode.begin, self.decode.begin + self.decode.n)
            self._write_rows(layer, kv[part])
            if plain:
                mixed = self._decode(layer, q[part], scale)
            else:
                mixed = self._decode_reference(layer, q[part], scale, window, softcap)
            if not self.segments:
                return mixed.reshape(self.decode.n, -1)
            out[part] = mixed
        return out.view(out.shape[0], -1)

    def _prefill(self, layer: int, segment: Segment, q: Tensor, scale: float) -> Tensor:
        heads_first = q.transpose(0, 1)
        own = segment.node.kv
        assert own is not None
        out, lse = attend(heads_first, own[layer, 0], own[layer, 1], scale, causal=not segment.reread)
        if not segment.ancestors:
            return out.transpose(0, 1)
        out = out.float()
        for node in segment.ancestors:
            assert node.kv is not None
            part, part_lse = attend(heads_first, node.kv[layer, 0], node.kv[layer, 1], scale, causal=False)
            out, lse = join(out, lse, part.float(), part_lse)
        return out.transpose(0, 1).to(q.dtype)

    def _write_rows(self, layer: int, kv: Tensor) -> None:
        assert self.decode is not None
        assert self.decode.write_index is not None
        flat = self.rows.buffer[layer].view(-1, self.rows.head_dim)
        flat.index_copy_(0, self.decode.write_index, kv.reshape(-1, self.rows.head_dim))

    def _decode(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """``q`` (n, H, D) -> (n, H, D)."""
        batch, store = self.decode, self.rows
        assert batch is not None
        assert batch.mask is not None
        n, heads, dim = q.shape
        kv_heads = store.kv_heads
        groups = heads // kv_heads
        # Rows and heads are neighbours in memory, so (n, K) folds into one batch dimension without a copy.
        folded = store.buffer[layer].view(2, store.rows * kv_heads, store.capacity, dim)
        keys, values = folded[:, : n * kv_heads, : batch.width]
        q_rows = q.reshape(n * kv_heads, groups, dim)
        mask = batch.mask.expand(-1, groups, -1)
        scores = torch.baddbmm(mask, q_rows, keys.transpose(1, 2), alpha=scale)
        if not batch.shared:
            return torch.bmm(torch.softmax(scores, -1), values).view(n, heads, dim)
        out, lse = _weigh(scores, values)
        out, lse = out.view(n, kv_heads, groups, dim), lse.view(n, kv_heads, groups)
        grouped = q.reshape(n, kv_heads, groups, dim)
        for node, users in batch.shared:
            assert node.kv is not None
            mine = grouped if users is None else grouped[users]
            q_node = mine.transpose(0, 1).reshape(kv_heads, -1, dim)
            node_scores = torch.bmm(q_node, node.kv[layer, 0].transpose(1, 2)).mul_(scale)
            part, part_lse = _weigh(node_scores, node.kv[layer, 1])
            part = part.view(kv_heads, -1, groups, dim).transpose(0, 1)
            part_lse = part_lse.view(kv_heads, -1, groups).transpose(0, 1)
            if users is None:
                out, lse = join(out, lse, part, part_lse)
            else:
                out[users], lse[users] = join(out[users], lse[users], part, part_lse)
        return out.reshape(n, heads, dim).to(q.dtype)

    def _decode_reference(
        self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        batch = self.decode
        assert batch is not None
        out = q.new_empty(q.shape)
        for row in range(batch.n):
            start, length = batch.starts[row], batch.lengths[row] + 1
            parts = [n.kv[layer] for n in batch.paths[row] if n.kv is not None and n.start < start]
            keys = torch.cat([*parts, self.rows.buffer[layer, :, row, :, :length]], 2)
            out[row] = reference(q[row : row + 1], keys[0], keys[1], start + length - 1, scale, window, softcap)[0]
        return out


def _weigh(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of ``scores`` (B, Q, S) over ``values`` (B, S, D): output (B, Q, D) and log-sum-exp (B, Q), both fp32."""
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    # The largest weight is exp(max - lse), so the log-sum-exp needs no second pass of exponentials.
    lse = scores.amax(-1).float() - weights.amax(-1).log_()
    return torch.bmm(weights.to(values.dtype), values).float(), lse
