"""Log-probs and entropy of trained tokens, without ever holding the logits of more than one chunk.

Owns: the vocabulary projection and its gradient, over the whole vocabulary or over the ids that a truncating sampler
kept.  Refuses: which tokens are trained, losses.

The backward pass computes a chunk's logits again (the last chunk's are kept, since a chunk may live anyway) and
normalises them again.  All reductions over the vocabulary are float32.

Formulas, with ``z = cap(h W^T + b) / temperature``, ``p = softmax(z)``, ``H = -sum p log p``:
``d log p_target / dz = onehot - p`` and ``dH/dz = -p (log p + H)``, where ``p = 0`` contributes 0 even when
``log p = -inf``.  Under a kept set, ``z = -inf`` for every other id, so its probability and gradient are exactly 0.

Shape legend: ``N`` tokens, ``M`` ids scored in each place, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.embedded.linear import product
from slipstream.training.lean import GradientSink

# Rows of a chunk are reduced in slices of about this many elements, so that the passes of one slice
# (widen, normalise, pick) run in cache.
_SLICE_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Head:
    """The vocabulary projection: ``weight_VD``, optional ``bias_V``, optional final soft cap (gemma).

    With a ``sink`` the weight's gradient goes there, in float32, and autograd gets none.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    sink: GradientSink | None = None


@dataclass(frozen=True)
class Kept:
    """Ids that a truncating sampler kept, for some of N tokens; the others have the whole vocabulary.

    Token ``n`` has ``ids_M[edges[n]:edges[n + 1]]``; ``token_M`` is the token of each of the M entries; ``limited_N``
    marks the tokens that have a kept set.
    """

    ids_M: Tensor
    token_M: Tensor
    limited_N: Tensor
    edges: Sequence[int]

    def restrict_(self, z: Tensor, start: int) -> Tensor:
        """Put -inf at every id that is not kept, in place, for tokens ``start ..`` of ``z`` (rows, V)."""
        stop = start + z.shape[0]
        low, high = self.edges[start], self.edges[stop]
        keep = (~self.limited_N[start:stop])[:, None].expand(-1, z.shape[1]).clone()
        keep[self.token_M[low:high] - start, self.ids_M[low:high]] = True
        return z.masked_fill_(~keep, -math.inf)


def score_tokens(
    hidden_ND: Tensor,
    head: Head,
    targets: Tensor,
    temperature_N: Tensor,
    *,
    chunk: int = 512,
    entropy: bool = False,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Float32 log-probs of ``targets``, in their shape, and entropies (N,), under ``temperature_N``; differentiable.

    Args:
        hidden_ND: last hidden state at the predicting positions.
        head: the projection; its gradient is computed only where it requires one.
        targets: int64 ids, ``(N,)`` or several in each place, ``(N, M)``.
        temperature_N: float32, > 0; logits are divided by it.
        chunk: tokens projected together.
        entropy: also return the entropy of each predicting distribution.
        kept: the ids over which each token's distribution is normalised; None is the whole vocabulary.
    """
    targets_NM = targets if targets.ndim == 2 else targets[:, None]
    logprobs_NM, entropies = _Score.apply(
        hidden_ND, head.weight_VD, head.bias_V, targets_NM, temperature_N, chunk, entropy, head, kept
    )
    return logprobs_NM if targets.ndim == 2 else logprobs_NM[:, 0], entropies if entropy else None


def _scratch(weight: Tensor, rows: int) -> Tensor | None:
    """One block for the logits of all chunks, which are so large that the system maps and unmaps them each time.

    None in float32, where the faster product, which brings its own block, is worth more.
    """
    return None if weight.dtype is torch.float32 else weight.new_empty((rows, weight.shape[0]))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
    """Raw logits, in ``scratch`` where there is one."""
    if scratch is None:
        return product(hidden, weight, bias)
    raw = torch.mm(hidden, weight.t(), out=scratch[: len(hidden)])
    return raw if bias is None else raw.add_(bias)


class _Slice:
    """Float32 memory for one slice of a chunk, used for all of them: logits, and what becomes of them."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._blocks = torch.empty((2, rows, weight.shape[0]), dtype=torch.float32, device=weight.device)

    def logits(self, raw: Tensor, temperature: Tensor, softcap: float | None) -> Tensor:
        """Capped, tempered logits."""
        z = self._blocks[0, : len(raw)].copy_(raw)
        if softcap is not None:
            z.div_(softcap).tanh_().mul_(softcap)
        return z.div_(temperature[:, None])

    def log_softmax(self, z: Tensor) -> Tensor:
        """``log p``."""
        return torch.log_softmax(z, 1, out=self._blocks[1, : len(z)])

    def softmax(self, z: Tensor) -> Tensor:
        """``p``."""
        return torch.softmax(z, 1, out=self._blocks[1, : len(z)])


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        entropy: bool,
        head: Head,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        total, vocab, softcap = hidden.shape[0], weight.shape[0], head.softcap
        step = max(1, _SLICE_ELEMENTS // vocab)
        work = _Slice(weight, min(step, total))
        entropies = torch.zeros(total, dtype=torch.float32, device=hidden.device)
        picked = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        raw, scratch = None, _scratch(weight, min(chunk, total))
        for start in range(0, total, chunk):
            raw = _project(hidden[start : start + chunk], weight, bias, scratch)
            for low in range(0, raw.shape[0], step):
                at = slice(start + low, min(start + low + step, start + raw.shape[0]))
                z = work.logits(raw[low : low + step], temperature[at], softcap)
                if kept is not None:
                    kept.restrict_(z, at.start)
                log_p = work.log_softmax(z)
                picked[at] = log_p.gather(1, targets[at])
                if entropy:
                    p = log_p.exp()
                    # Zero mass times -inf is 0, the limit of p log p.
                    entropies[at] = -torch.where(p > 0, p * log_p, 0.0).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropies)
        ctx.last = (raw, scratch) if any(ctx.needs_input_grad[:3]) else (None, None)
        ctx.chunk, ctx.entropy, ctx.step, ctx.kept = chunk, entropy, step, kept
        # The parameter itself, by which a sink knows it.
        ctx.head, ctx.softcap = head, softcap
        return picked, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight: Tensor | None = None
        d_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=hidden.device) if need_bias else None
        starts = list(range(0, hidden.shape[0], ctx.chunk))
        work = _Slice(weight, min(ctx.step, hidden.shape[0]))
        (raw, scratch), ctx.last = ctx.last, (None, None)
        # From the last chunk, whose logits are at hand, to the first.
        for start in reversed(starts):
            h = hidden[start : start + ctx.chunk]
            if start != starts[-1] or raw is None:
                raw = _project(h, weight, bias, scratch)
            for low in range(0, raw.shape[0], ctx.step):
                at = slice(start + low, min(start + low + ctx.step, start + raw.shape[0]))
                entropy = (grad_entropy[at], entropies[at]) if ctx.entropy else None
                raw[low : low + ctx.step] = _logit_gradient(
                    work,
                    raw[low : low + ctx.step],
                    targets[at],
                    temperature[at],
                    grad_logprob[at],
                    entropy,
                    ctx.softcap,
                    None if ctx.kept is None else (ctx.kept, at.start),
                )
            # ``raw`` now holds the gradient with respect to the logits.
            if d_hidden is not None:
                d_hidden[start : start + ctx.chunk] = product(raw, weight.t())
            if need_weight and ctx.head.sink is not None:
                ctx.head.sink.add_product(ctx.head.weight_VD, raw, h)
            elif need_weight:
                part = raw.t() @ h
                if len(starts) == 1:
                    d_weight = part
                else:  # sums over chunks stay in float32, so that the chunk size does not cost precision
                    d_weight = part.float() if d_weight is None else d_weight.add_(part)
            if d_bias is not None:
                d_bias += raw.sum(0, dtype=torch.float32)
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            *(None,) * 6,
        )


def _logit_gradient(
    work: _Slice,
    raw: Tensor,
    targets: Tensor,
    temperature: Tensor,
    grad_logprob: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    kept: tuple[Kept, int] | None,
) -> Tensor:
    """Gradient with respect to the raw logits of one slice, float32."""
    z = work.logits(raw, temperature, softcap)
    slope = None
    if softcap is not None:
        slope = 1 - (z * (temperature[:, None] / softcap)).square_()
    if kept is not None:
        kept[0].restrict_(z, kept[1])  # after the slope, which has to stay finite
    total = -grad_logprob.sum(1, keepdim=True)
    if entropy is None:
        z = work.softmax(z).mul_(total)
    else:
        grad_entropy, value = entropy
        log_p = work.log_softmax(z)
        p = log_p.exp()
        surprise = torch.where(p > 0, log_p + value[:, None], 0.0)
        z = p.mul_(total - grad_entropy[:, None] * surprise)
    z.scatter_add_(1, targets, grad_logprob)
    z.div_(temperature[:, None])
    return z.mul_(slope) if slope is not None else z
