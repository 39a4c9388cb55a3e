"""Attention over packed layouts: trees of runs of tokens.

Owns: two functions registered with transformers' ``AttentionInterface``; both read the layout that
``active_layout`` has put in a context variable, so that no model class has to forward an argument.

* ``slipstream_blockwise`` (CPU): every run is one causal flash call, and one full call from everything that hangs from
  it, which is contiguous; a token's parts are merged by log-sum-exp.  Grouped key/value heads are read through zero
  strides.  Short runs of about one length are one batch of small products instead, padded to the longest, and with
  them the short runs that they hang from: a kernel call for each is mostly the call.  The backward pass hands the
  *merged* output and log-sum-exp to the kernel's backward for each part, which yields exactly that part's share of the
  gradient (the identity behind ring attention, Liu et al. 2023, arXiv:2310.01889).
* ``slipstream_masked`` (any device, soft caps, sliding windows): one dense ``(T, T)`` mask.

Refuses: attention sinks, position biases, dropout, and running without an active layout.

Lifecycle: ``register()`` once per process; ``with active_layout(layout):`` around forward *and* backward
(checkpointed layers run again inside backward).

Shape legend: ``H`` query heads, ``K`` key/value heads, ``r = H/K``, ``T`` packed tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ContractError, ModelError
from slipstream.training.layout import Layout, Run

BLOCKWISE, MASKED = "slipstream_blockwise", "slipstream_masked"
_ACTIVE: ContextVar[LayoutOnDevice | None] = ContextVar("slipstream_layout", default=None)
_UNSUPPORTED = ("s_aux", "position_bias")
_SHORT = 96
"""Tokens: runs up to this length are laid side by side."""
_STEP = 16
"""Tokens: side by side lie runs whose lengths are the same multiple of this, rounded up."""
_SHORT_ABOVE = 64
"""Tokens: as much of what short runs hang from is read with them, once for each."""
_FEWEST = 3
"""Runs: fewer than these are kernel calls of their own."""

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
            layout = self.layout
            place = torch.arange(layout.n_tokens)
            lengths = torch.tensor([run.stop - run.start for run in layout.runs])
            reach = torch.tensor([run.reach for run in layout.runs]).repeat_interleave(lengths)
            visible = (place[:, None] >= place) & (place[:, None] < reach)
            if window is not None:
                positions = torch.as_tensor(layout.positions_T)
                visible &= positions[:, None] - positions < window
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
    out: Tensor = _Blockwise.apply(query, key, value, scale, active.layout.runs)
    return out, None


class _Heads:
    """Views of packed tensors for the kernel, with ``K`` key/value heads of ``r`` query heads each."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.kv, self.repeats = kv_heads, heads // kv_heads

    def query(self, x_HTD: Tensor, start: int, end: int) -> Tensor:
        """``(H, T, ...)`` -> ``(K, r, end-start, ...)``."""
        return x_HTD[:, start:end].unflatten(0, (self.kv, self.repeats))

    def key(self, x_KTD: Tensor, start: int, end: int) -> Tensor:
        """``(K, T, D)`` -> ``(K, r, end-start, D)`` with a zero stride over ``r``."""
        return x_KTD[:, start:end].unsqueeze(1).expand(-1, self.repeats, -1, -1)


@dataclass(frozen=True, eq=False)
class _Bunch:
    """Short runs of about one length, side by side: ``n`` runs of ``L`` places, some of them pads.

    ``take`` says which packed token each of the ``n L`` places reads (a pad reads its run's last), ``real`` which of
    the places are no pads, ``tokens`` what those read, ``pads`` which are.

    Where short runs that these hang from are read with them, each run's keys begin with ``P`` more places:
    ``take_keys`` says which packed token each of the ``n (P + L)`` places reads, ``above`` which of the first ``n P``
    are no pads, and ``tokens_above`` what those read.  ``hidden`` is True where place ``i`` of a run does not see key
    ``j``: ``(1, L, P + L)``, or ``(n, ...)`` where runs differ.
    """

    n: int
    take: Tensor
    real: Tensor
    tokens: Tensor
    pads: Tensor
    take_keys: Tensor
    above: Tensor
    tokens_above: Tensor
    hidden: Tensor
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def places_above(self) -> int:
        """P."""
        return self.hidden.shape[2] - self.hidden.shape[1]

    def mask(self, kv: int, repeats: int, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a key and -inf elsewhere, ``(1 or K n, L r, P + L)``; all layers ask for the same."""
        found = self._masks.get((kv, repeats, dtype))
        if found is None:
            found = torch.zeros(self.hidden.shape, dtype=dtype).masked_fill_(self.hidden, float("-inf"))
            found = found.repeat_interleave(repeats, 1)
            found = found if len(found) == 1 else found.repeat(kv, 1, 1)
            self._masks[kv, repeats, dtype] = found
        return found


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which runs are read how: ``alone`` by a kernel call each, from all of ``forks``' descendants by another."""

    bunches: tuple[_Bunch, ...]
    alone: tuple[Run, ...]
    forks: tuple[Run, ...]


@lru_cache(maxsize=4)  # all layers of a micro-batch ask for the same; it holds their masks
def _plan(runs: tuple[Run, ...]) -> _Plan:
    """Short runs in bunches, the runs that are left, and the runs whose descendants are not read with them."""
    above: dict[Run, tuple[Run, ...]] = {}
    path: list[Run] = []
    for run in runs:  # in preorder
        while path and path[-1].reach < run.stop:
            path.pop()
        above[run] = tuple(path)
        path.append(run)

    def size(these: Iterable[Run]) -> int:
        return sum(run.stop - run.start for run in these)

    def near(run: Run) -> tuple[Run, ...]:
        """The closest short runs above, as many as may be read with ``run``."""
        found: tuple[Run, ...] = ()
        for parent in reversed(above[run]):
            if size((parent, *found)) > _SHORT_ABOVE:
                break
            found = (parent, *found)
        return found

    kinds: dict[tuple[int, int], list[Run]] = {}
    alone: list[Run] = []
    for run in runs:
        if size([run]) > _SHORT:
            alone.append(run)
        else:
            kinds.setdefault((-(-size([run]) // _STEP), -(-size(near(run)) // _STEP)), []).append(run)
    alone += [run for together in kinds.values() if len(together) < _FEWEST for run in together]
    bunched = [together for together in kinds.values() if len(together) >= _FEWEST]
    # A run is read with what hangs from it either everywhere or nowhere.
    forks = {parent for run in alone for parent in above[run]}
    forks |= {parent for together in bunched for run in together for parent in set(above[run]) - set(near(run))}
    bunches = (_bunch(together, [[p for p in near(run) if p not in forks] for run in together]) for together in bunched)
    return _Plan(tuple(bunches), tuple(alone), tuple(run for run in runs if run in forks))


def _bunch(runs: list[Run], above: list[list[Run]]) -> _Bunch:
    own = [list(range(run.start, run.stop)) for run in runs]
    before = [[token for run in these for token in range(run.start, run.stop)] for these in above]
    places, more = max(map(len, own)), max(map(len, before))
    take = torch.tensor([tokens + tokens[-1:] * (places - len(tokens)) for tokens in own])
    is_real = torch.tensor([[i < len(tokens) for i in range(places)] for tokens in own]).flatten()
    real = is_real.nonzero()[:, 0]
    # A pad above reads the first of its run's own tokens, and nobody sees it.
    take_above = torch.tensor(
        [tokens + mine[:1] * (more - len(tokens)) for tokens, mine in zip(before, own, strict=True)]
    )
    is_above = torch.tensor([[i < len(tokens) for i in range(more)] for tokens in before], dtype=torch.bool)
    same = len({len(tokens) for tokens in before}) == 1
    later = torch.ones(places, places, dtype=torch.bool).triu_(1)
    unseen = ~(is_above[:1] if same else is_above)
    return _Bunch(
        n=len(runs),
        take=take.flatten(),
        real=real,
        tokens=take.flatten()[real],
        pads=(~is_real).nonzero()[:, 0],
        take_keys=torch.cat([take_above.long().view(len(runs), more), take], 1).flatten(),
        above=is_above.flatten().nonzero()[:, 0],
        tokens_above=take_above.flatten()[is_above.flatten()].long(),
        hidden=torch.cat([unseen[:, None].expand(-1, places, -1), later.expand(len(unseen), -1, -1)], 2),
    )


class _Bunched:
    """One bunch of one layer: ``B = K n`` products, whose rows are ``L`` places of ``r`` query heads each."""

    def __init__(self, bunch: _Bunch, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scale: float) -> None:
        self.bunch, self.kv, self.scale = bunch, k_KTD.shape[0], scale
        self.q = self.gather(q_HTD)
        self.k, self.v = (self._gather(x, bunch.take_keys) for x in (k_KTD, v_KTD))
        self.mask = bunch.mask(self.kv, q_HTD.shape[0] // self.kv, q_HTD.dtype)

    def _by_head(self, x_HTD: Tensor) -> Tensor:
        """``(K, T, r, ...)``, a view; ``r`` is 1 for keys and values."""
        return x_HTD.unflatten(0, (self.kv, -1)).transpose(1, 2)

    def _gather(self, x_HTD: Tensor, take: Tensor, blank: Tensor | None = None) -> Tensor:
        found = self._by_head(x_HTD).index_select(1, take)
        if blank is not None and len(blank):
            found.index_fill_(1, blank, 0)
        rows = found.shape[1] // self.bunch.n * found.shape[2]
        return found.reshape(self.kv * self.bunch.n, rows, *found.shape[3:])

    def gather(self, x_HTD: Tensor, *, zero_pads: bool = False) -> Tensor:
        """``(B, L r, ...)``: a copy."""
        return self._gather(x_HTD, self.bunch.take, self.bunch.pads if zero_pads else None)

    def scatter(self, x_BL: Tensor, into_HTD: Tensor) -> None:
        """The reverse of ``gather``, without the pads."""
        into = self._by_head(into_HTD)
        whole = x_BL.reshape(self.kv, len(self.bunch.take), *into.shape[2:])
        into.index_copy_(1, self.bunch.tokens, whole if not len(self.bunch.pads) else whole[:, self.bunch.real])

    def scatter_keys(self, x_BS: Tensor, into_KTD: Tensor) -> None:
        """As ``scatter``, for keys' places; what belongs to runs above is left to ``add_above``."""
        self.scatter(x_BS[:, self.bunch.places_above :], into_KTD)

    def add_above(self, x_BS: Tensor, into_TKD: Tensor) -> None:
        """Add what the ``P`` first places of all runs say to the tokens that they read."""
        if not self.bunch.places_above:
            return
        shares = x_BS[:, : self.bunch.places_above].unflatten(0, (self.kv, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        all_real = len(self.bunch.above) == len(shares)
        into_TKD.index_add_(0, self.bunch.tokens_above, shares if all_real else shares[self.bunch.above])

    def scores(self) -> Tensor:
        return torch.baddbmm(self.mask, self.q, self.k.transpose(1, 2), alpha=self.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        scores = self.scores()
        most = scores.amax(-1, keepdim=True)
        weights = scores.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        return torch.bmm(weights, self.v).div_(total), most.add_(total.log_())[..., 0]

    def backward(self, go: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.scores().sub_(lse.unsqueeze(-1)).exp_()
        d_scores = torch.bmm(go, self.v.transpose(1, 2)).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(self.scale)
        return (
            torch.bmm(d_scores, self.k),
            torch.bmm(d_scores.transpose(1, 2), self.q),
            torch.bmm(weights.transpose(1, 2), go),
        )


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, scale: float, runs: tuple[Run, ...]
) -> tuple[Tensor, Tensor]:
    """Attention of all runs: ``(H or K, T, D)`` in; ``(T, H, D)`` in the inputs' dtype and log-sum-exps ``(T, H)`` out.

    Half-precision inputs are widened for the kernel calls: on CPUs its bfloat16 backward is up to ten times
    slower than float32 on short runs and no faster on long ones, and the merge wants float32 anyway.
    """
    q, k, v = (_widen(x) for x in (query, key, value))
    heads = _Heads(q.shape[0], k.shape[0])
    out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
    lse = q.new_empty(out.shape[:2])

    def attend(queries: tuple[int, int], run: Run, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = heads.key(k, run.start, run.stop), heads.key(v, run.start, run.stop)
        part, part_lse = _flash(heads.query(q, *queries), keys, values, 0.0, causal, scale=scale)
        return part, part_lse, heads.query(out.transpose(0, 1), *queries), heads.query(lse.t(), *queries)

    plan = _plan(runs)
    for bunch in plan.bunches:
        bunched = _Bunched(bunch, q, k, v, scale)
        part, part_lse = bunched.forward()
        bunched.scatter(part, out.transpose(0, 1))
        bunched.scatter(part_lse, lse.t())
    for run in plan.alone:
        part, part_lse, whole, whole_lse = attend((run.start, run.stop), run, True)
        whole.copy_(part)
        whole_lse.copy_(part_lse)
    for run in plan.forks:
        part, part_lse, whole, whole_lse = attend((run.stop, run.reach), run, False)
        # The new part's share is exp(b) / (exp(a) + exp(b)) = sigmoid(b - a).
        whole.lerp_(part, torch.sigmoid(part_lse - whole_lse).unsqueeze(-1))
        whole_lse.copy_(torch.logaddexp(part_lse, whole_lse))
    return out.to(query.dtype), lse


def attend_runs_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    runs: tuple[Run, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``query, key, value``, ``(T, H or K, D)`` each and at least float32.

    ``grad_out`` and ``out`` are ``(T, H, D)``, ``lse`` is ``(T, H)``, the inputs are those of ``attend_runs``.
    """
    q, k, v = (_widen(x) for x in (query, key, value))
    out_HTD, go_HTD = (_widen(x).transpose(0, 1) for x in (out, grad_out))
    heads = _Heads(q.shape[0], k.shape[0])
    # (T, H, D) storage: the projections' backward wants tokens outermost.
    grads = [x.new_empty((x.shape[1], x.shape[0], x.shape[2])) for x in (q, k, v)]
    dq, dk, dv = (x.transpose(0, 1) for x in grads)

    def back(queries: tuple[int, int], run: Run, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        go, at, merged, merged_lse = (heads.query(x, *queries) for x in (go_HTD, q, out_HTD, lse.t()))
        keys, values = heads.key(k, run.start, run.stop), heads.key(v, run.start, run.stop)
        gq, gk, gv = _flash_backward(go, at, keys, values, merged, merged_lse, 0.0, causal, scale=scale)
        return gq.flatten(0, 1), gk.sum(1), gv.sum(1)

    plan = _plan(runs)
    delta_HT = (go_HTD * out_HTD).sum(-1) if plan.bunches else None
    to_above: list[tuple[_Bunched, Tensor, Tensor]] = []
    for bunch in plan.bunches:
        assert delta_HT is not None
        bunched = _Bunched(bunch, q, k, v, scale)
        d_queries, d_keys, d_values = bunched.backward(
            bunched.gather(go_HTD, zero_pads=True), bunched.gather(delta_HT, zero_pads=True), bunched.gather(lse.t())
        )
        bunched.scatter(d_queries, dq)
        bunched.scatter_keys(d_keys, dk)
        bunched.scatter_keys(d_values, dv)
        to_above.append((bunched, d_keys, d_values))
    for run in plan.alone:
        own = slice(run.start, run.stop)
        dq[:, own], dk[:, own], dv[:, own] = back((run.start, run.stop), run, True)
    # Sums come last: up to here every place was written by its own run.
    for bunched, d_keys, d_values in to_above:
        bunched.add_above(d_keys, grads[1])
        bunched.add_above(d_values, grads[2])
    for run in plan.forks:
        own, rest = slice(run.start, run.stop), slice(run.stop, run.reach)
        gq, gk, gv = back((run.stop, run.reach), run, False)
        dq[:, rest] += gq
        dk[:, own] += gk
        dv[:, own] += gv
    return grads[0], grads[1], grads[2]


class _Blockwise(torch.autograd.Function):
    """``attend_runs`` for autograd; saves inputs, output and log-sum-exps, nothing quadratic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, runs: tuple[Run, ...]) -> Tensor:
        out, lse = attend_runs(query[0], key[0], value[0], scale, runs)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale, ctx.runs = scale, runs
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = attend_runs_backward(grad_out[0], query[0], key[0], value[0], out, lse, ctx.scale, ctx.runs)
        dq, dk, dv = (x.transpose(0, 1).to(query.dtype).unsqueeze(0) for x in grads)
        return dq, dk, dv, None, None


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
