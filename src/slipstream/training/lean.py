"""A Llama-like model's layers as one autograd function with its backward written out.

Owns: ``LeanStack``: the packed forward and backward of Llama, Mistral, Qwen2 and Qwen3 bodies (embedding to last norm)
on the CPU.  Refuses: adapters, partly frozen models, masks, dropout, windows and other architectures (``LeanStack.of``
is None; transformers' modules serve those), the vocabulary projection.

What it spares, against modules under autograd: weight gradients are multiplied straight into the optimiser's float32
buffer; sums of gradients and residuals ride on the products; normalised inputs and activations are computed again
instead of kept.  Per token and layer it keeps the two residual inputs, queries, keys, values, their mix, gate and up;
with ``checkpointing`` only the residual input.

The residual's gradient is float32 throughout; what enters a product has the compute dtype.

Lifecycle: ``LeanStack.of(model, sink)`` once the parameters have their final memory and dtype; then, inside
``active_layout``, ``stack(layout)`` and autograd's ``backward`` on what it returns.

>>> stack = LeanStack.of(policy.hf, optimizer, checkpointing=False)
>>> hidden_TD = stack(layout)

Shape legend: ``T`` packed tokens, ``D`` hidden size, ``H`` query heads, ``K`` key/value heads, ``d`` head size,
``F`` width of the gated part; ``O`` and ``I`` a matrix's outputs and inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.embedded.linear import product
from slipstream.inference.embedded.llama import LlamaRunner
from slipstream.training.attention import BLOCKWISE, attend_runs, attend_runs_backward
from slipstream.training.layout import Layout


class GradientSink(Protocol):
    """Where weight gradients go; ``MasterOptimizer`` is one."""

    def add_product(self, parameter: Tensor, left_TO: Tensor, right_TI: Tensor) -> None:
        """``gradient += left^T right``."""
        ...

    def add_gradient(self, parameter: Tensor, value: Tensor) -> None:
        """``gradient += value``."""
        ...

    def add_rows(self, parameter: Tensor, ids_T: Tensor, value_TD: Tensor) -> None:
        """``gradient[ids[t]] += value[t]``."""
        ...


class _Linear:
    """``y = x W^T + b`` on the layer's own parameters, forward and backward."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer

    def forward(self, x_TI: Tensor, plus: Tensor | None = None) -> Tensor:
        """``x W^T + b``, and ``plus`` where given."""
        bias = self.layer.bias
        return product(x_TI, self.layer.weight.detach(), None if bias is None else bias.detach(), plus)

    def backward(self, grad_TO: Tensor, x_TI: Tensor, sink: GradientSink, plus: Tensor | None = None) -> Tensor:
        """Give the parameters' gradients to ``sink``; returns that of ``x``, and ``plus`` where given."""
        sink.add_product(self.layer.weight, grad_TO, x_TI)
        if self.layer.bias is not None:
            sink.add_gradient(self.layer.bias, grad_TO.sum(0, dtype=torch.float32))
        return product(grad_TO, self.layer.weight.detach().t(), plus=plus)


class _Norm:
    """RMS normalisation over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), statistics in float32."""

    def __init__(self, module: Any) -> None:
        self.parameter: Tensor = module.weight
        self.eps = float(module.variance_epsilon)

    def scale(self, x: Tensor) -> Tensor:
        """``1 / sqrt(mean(x^2) + eps)``, with a last axis of 1."""
        norm = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
        return norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """``weight * (x * scale)``, rounded to the dtype after each product as the reference models do."""
        return (x.float() * scale).to(x.dtype).mul_(self.parameter.detach())

    def backward(self, grad: Tensor, x: Tensor, scale: Tensor, sink: GradientSink) -> Tensor:
        """Gradient of ``x``, to be multiplied by ``scale`` (the caller can fuse that with a sum)."""
        # Widened first: products of mixed dtypes take twice as long.
        unit, wide, weight = x.float() * scale, grad.float(), self.parameter.detach().float()
        product = unit * wide
        sink.add_gradient(self.parameter, product.flatten(0, -2).sum(0))
        lean = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        return (wide * weight).addcmul_(unit, lean, value=-1)


@dataclass
class _Kept:
    """What one layer's backward needs."""

    x: Tensor
    scale: Tensor
    raw: tuple[Tensor, Tensor] | None
    """Queries and keys before their norms, for models that have those."""
    raw_scales: tuple[Tensor, Tensor] | None
    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    lse: Tensor
    middle: Tensor
    middle_scale: Tensor
    gate: Tensor
    up: Tensor


@dataclass
class _Pass:
    """What all layers of one forward pass share: the layout and its rotary tables."""

    layout: Layout
    cos: Tensor
    sin: Tensor
    """``(T, 1, 1, d/2)``, and ``(T, 1, 2, d/2)`` with the sign of the half that it multiplies."""

    def turn(self, x_THd: Tensor, *, back: bool = False) -> Tensor:
        """Rotate in place: halves (a, b) become (a cos - b sin, b cos + a sin)."""
        halves = x_THd.unflatten(-1, (2, -1))
        swapped = halves.flip(2)
        halves.mul_(self.cos).addcmul_(swapped, self.sin, value=-1 if back else 1)
        return x_THd


class _Layer:
    def __init__(self, module: Any, shape: tuple[int, int, int]) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.heads, self.kv_heads, self.dim = shape
        self.softmax_scale = float(self.dim) ** -0.5
        self.norm, self.post_norm = _Norm(module.input_layernorm), _Norm(module.post_attention_layernorm)
        self.qk_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self.q, self.k, self.v = (_Linear(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = _Linear(attention.o_proj)
        self.gate, self.up, self.down = (_Linear(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def forward(self, x_TD: Tensor, way: _Pass) -> tuple[Tensor, _Kept]:
        scale = self.norm.scale(x_TD)
        y = self.norm.forward(x_TD, scale)
        q, k, v = (
            part.forward(y).unflatten(-1, (heads, self.dim))
            for part, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        raw = raw_scales = None
        if self.qk_norms is not None:
            raw = (q, k)
            raw_scales = (self.qk_norms[0].scale(q), self.qk_norms[1].scale(k))
            q, k = (norm.forward(a, b) for norm, a, b in zip(self.qk_norms, raw, raw_scales, strict=True))
        q, k = way.turn(q), way.turn(k)
        mixed, lse = attend_runs(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.softmax_scale, way.layout.runs
        )
        middle = self.out.forward(mixed.flatten(1), plus=x_TD)
        middle_scale = self.post_norm.scale(middle)
        y = self.post_norm.forward(middle, middle_scale)
        gate, up = self.gate.forward(y), self.up.forward(y)
        result = self.down.forward(F.silu(gate).mul_(up), plus=middle)
        return result, _Kept(x_TD, scale, raw, raw_scales, q, k, v, mixed, lse, middle, middle_scale, gate, up)

    def backward(self, grad_TD: Tensor, kept: _Kept, way: _Pass, sink: GradientSink) -> None:
        """Turn the float32 gradient of the layer's output into that of its input, in place."""
        self._backward_mlp(grad_TD, kept, sink)
        dtype = kept.x.dtype
        d_mixed = self.out.backward(grad_TD.to(dtype), kept.mixed.flatten(1), sink).view_as(kept.mixed)
        q, k, v = (x.transpose(0, 1) for x in (kept.q, kept.k, kept.v))
        d_q, d_k, d_v = attend_runs_backward(
            d_mixed, q, k, v, kept.mixed, kept.lse, self.softmax_scale, way.layout.runs
        )
        # The tables have the compute dtype, the gradients are float32 until they enter a product.
        d_q, d_k, d_v = d_q.to(dtype), d_k.to(dtype), d_v.to(dtype)
        d_q, d_k = way.turn(d_q, back=True), way.turn(d_k, back=True)
        if self.qk_norms is not None and kept.raw is not None and kept.raw_scales is not None:
            d_q, d_k = (
                norm.backward(grad, x, scale, sink).mul_(scale).to(dtype)
                for norm, grad, x, scale in zip(self.qk_norms, (d_q, d_k), kept.raw, kept.raw_scales, strict=True)
            )
        y = self.norm.forward(kept.x, kept.scale)
        d_y = self.q.backward(d_q.flatten(1), y, sink)
        d_y = self.k.backward(d_k.flatten(1), y, sink, plus=d_y)
        d_y = self.v.backward(d_v.flatten(1), y, sink, plus=d_y)
        grad_TD.addcmul_(self.norm.backward(d_y, kept.x, kept.scale, sink), kept.scale)

    def _backward_mlp(self, grad_TD: Tensor, kept: _Kept, sink: GradientSink) -> None:
        silu = F.silu(kept.gate)
        d_gated = self.down.backward(grad_TD.to(kept.x.dtype), silu * kept.up, sink)
        d_up = silu.mul_(d_gated)
        d_gate = torch.ops.aten.silu_backward(d_gated.mul_(kept.up), kept.gate)
        y = self.post_norm.forward(kept.middle, kept.middle_scale)
        d_y = self.gate.backward(d_gate, y, sink)
        d_y = self.up.backward(d_up, y, sink, plus=d_y)
        grad_TD.addcmul_(self.post_norm.backward(d_y, kept.middle, kept.middle_scale, sink), kept.middle_scale)


class LeanStack:
    """See the module's contract."""

    def __init__(self, model: Any, sink: GradientSink | None, checkpointing: bool) -> None:
        config, body = model.config, model.model
        heads = int(config.num_attention_heads)
        dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.embedding: Tensor = body.embed_tokens.weight
        self.layers = [_Layer(layer, (heads, int(config.num_key_value_heads), dim)) for layer in body.layers]
        self.norm = _Norm(body.norm)
        self.sink, self.checkpointing = sink, checkpointing
        self._rotary = body.rotary_emb

    @staticmethod
    def of(model: Any, sink: GradientSink | None, *, checkpointing: bool) -> LeanStack | None:
        """The stack of ``model`` (a transformers causal LM), or None where this form does not compute what it does.

        Without a sink the model must be frozen: it is scored and never trained.
        """
        if not LlamaRunner.fits(model) or model.config._attn_implementation != BLOCKWISE:
            return None
        named = dict(model.model.named_parameters())
        suits = all(p.requires_grad is (sink is not None) and p.device.type == "cpu" for p in named.values())
        if not suits or any(".lora_" in name or ".base_layer." in name for name in named):
            return None
        return LeanStack(model, sink, checkpointing)

    def __call__(self, layout: Layout) -> Tensor:
        """Hidden states after the last norm, ``(T, D)``, differentiable."""
        hidden: Tensor = _Run.apply(self.embedding, self, layout)
        return hidden

    def _begin(self, layout: Layout, dtype: torch.dtype) -> _Pass:
        positions = torch.as_tensor(layout.positions_T)[None]
        cos, sin = self._rotary(torch.zeros(1, 1, dtype=dtype), positions)
        half = cos.shape[-1] // 2
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        return _Pass(layout, cos[:, None, None, :], torch.stack([-sin, sin], 1)[:, None])

    def forward(self, layout: Layout, keep: bool) -> tuple[Tensor, Tensor, _Pass, list[_Kept | Tensor]]:
        """Output, the last norm's input, what layers share, and what each backward needs (nothing unless ``keep``)."""
        x = F.embedding(torch.as_tensor(layout.ids_T), self.embedding.detach())
        way, all_kept = self._begin(layout, x.dtype), []
        for layer in self.layers:
            begin = x
            x, kept = layer.forward(x, way)
            if keep:
                all_kept.append(begin if self.checkpointing else kept)
        return self.norm.forward(x, self.norm.scale(x)), x, way, all_kept

    def backward(self, grad_TD: Tensor, last_TD: Tensor, way: _Pass, all_kept: list[_Kept | Tensor]) -> None:
        """Give every parameter's gradient to the sink; empties ``all_kept`` from its end."""
        sink = self.sink
        assert sink is not None, "a frozen model asks for no gradients"
        scale = self.norm.scale(last_TD)
        grad = self.norm.backward(grad_TD, last_TD, scale, sink).mul_(scale)
        for layer in reversed(self.layers):
            kept = all_kept.pop()
            if isinstance(kept, Tensor):
                _, kept = layer.forward(kept, way)
            layer.backward(grad, kept, way, sink)
        sink.add_rows(self.embedding, torch.as_tensor(way.layout.ids_T), grad)


class _Run(torch.autograd.Function):
    """The embedding stands for all parameters: their gradients go to the sink, so autograd gets none."""

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, stack: LeanStack, layout: Layout) -> Tensor:
        out, last, way, kept = stack.forward(layout, keep=ctx.needs_input_grad[0])
        ctx.stack, ctx.kept = stack, (last, way, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if ctx.kept is None:
            raise RuntimeError("backward through a lean stack a second time; run its forward again")
        kept, ctx.kept = ctx.kept, None
        ctx.stack.backward(grad, *kept)
        return None, None, None
