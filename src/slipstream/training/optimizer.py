"""Master weights and AdamW: float32, flat, refusable.

Owns: one flat float32 buffer each of weights, gradients and moments; gradient accumulation in float32;
global-norm clipping; the learning-rate schedule; refusing a step that is not finite.
Refuses: models beyond their parameters, losses, rescaling.

The model computes with its own parameters (views of the master buffer in float32, a bfloat16 copy
otherwise).  A hook moves each parameter's gradient into the flat buffer as soon as autograd has it, so
micro-batches add up in float32 and half-precision gradients do not outlive their layer.

A refused step (non-finite loss, gradient or norm) clears the gradients and changes nothing else: neither
weights nor moments nor the schedule's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.config.settings import OptimizerSettings
from slipstream.errors import CheckpointError, SettingsError
from slipstream.training.protocol import OptimResult

_ALIGN = 16  # elements; keeps every parameter on a 64-byte boundary
_BLOCK = 1 << 20
"""Elements of a gradient that are widened at once: whole vocabularies would go through memory that the kernel maps anew
each time (measured on 49152 x 576 in bfloat16: adding takes 48 ms at once and 8 ms in blocks)."""


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int | None) -> float:
    """The rate of 0-based optimiser step ``step``.

    Warm-up is linear and reaches the full rate at step ``warmup_steps - 1`` (its first step is never 0);
    ``linear`` and ``cosine`` then fall to ``min_lr_ratio`` at ``total_steps``.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.scheduler == "constant":
        return settings.lr
    if total_steps is None:
        raise SettingsError(f"scheduler={settings.scheduler} needs total_steps (its length in optimiser steps)")
    span = max(1, total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    shape = 1 - done if settings.scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)


def _blocks(x: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """``x`` in blocks of whole rows, of ``_BLOCK`` elements for rows of ``width`` (None is their own)."""
    if x.ndim == 0:
        return (x,)
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[1:]) if width is None else width))
    return x.split(rows)


class MasterOptimizer:
    """AdamW over flat float32 masters of ``parameters`` (name -> trainable parameter of the model)."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        total_steps: int | None,
    ) -> None:
        self.parameters = dict(parameters)
        self.settings = settings
        self.total_steps = settings.total_steps if settings.total_steps is not None else total_steps
        learning_rate(settings, settings.warmup_steps, self.total_steps)  # refuse a missing length now
        self.step_count = 0
        self._problem = ""
        self._fresh: set[str] = set()
        self._spans: dict[str, tuple[int, int]] = {}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        cursor = 0
        for name, parameter in self.parameters.items():
            self._spans[name] = (cursor, cursor + parameter.numel())
            cursor += -(-parameter.numel() // _ALIGN) * _ALIGN
        device = next(iter(self.parameters.values())).device
        self._master = torch.zeros(cursor, dtype=torch.float32, device=device)
        self._grad = torch.zeros_like(self._master)
        for name, parameter in self.parameters.items():
            view = self._view(self._master, name)
            view.copy_(parameter.data)
            if parameter.dtype == torch.float32:
                parameter.data = view
            parameter.grad = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collector(name))
            for name, parameter in self.parameters.items()
        ]
        self.reset(settings, self.total_steps)

    def reset(self, settings: OptimizerSettings, total_steps: int | None) -> None:
        """Forget moments, schedule and gradients; keep the weights."""
        total = settings.total_steps if settings.total_steps is not None else total_steps
        learning_rate(settings, settings.warmup_steps, total)
        self.settings, self.total_steps, self.step_count = settings, total, 0
        flat = torch.nn.Parameter(self._master, requires_grad=True)
        self._adamw = torch.optim.AdamW(
            [flat],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._flat = flat
        self.zero_grad()

    def close(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, end = self._spans[name]
        return flat[start:end].view(self.parameters[name].shape)

    def _collector(self, name: str) -> Any:
        def collect(parameter: Tensor) -> None:
            if parameter.grad is not None:  # None where a lean layer has given it to the sink already
                self.add_gradient(parameter, parameter.grad)
                parameter.grad = None

        return collect

    # ---- the sink of lean layers (``slipstream.training.lean.GradientSink``)

    def _claim(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """The view of a parameter's gradient, and whether it holds a part of this step's already."""
        name = self._names[id(parameter)]
        fresh = name in self._fresh
        self._fresh.add(name)
        return self._view(self._grad, name), fresh

    def add_gradient(self, parameter: Tensor, value: Tensor) -> None:
        """``gradient += value``."""
        view, fresh = self._claim(parameter)
        for part, of in zip(_blocks(view), _blocks(value), strict=True):
            part.add_(of) if fresh else part.copy_(of)

    def add_product(self, parameter: Tensor, left_TO: Tensor, right_TI: Tensor) -> None:
        """``gradient += left^T right``, in float32: without a temporary, or for narrower inputs with a small one."""
        view, fresh = self._claim(parameter)
        if left_TO.dtype == self._grad.dtype:
            if fresh:
                view.addmm_(left_TO.t(), right_TI)
            else:
                torch.mm(left_TO.t(), right_TI, out=view)
            return
        for part, left_OT in zip(_blocks(view), _blocks(left_TO.t(), right_TI.shape[1]), strict=True):
            of = left_OT @ right_TI
            part.add_(of) if fresh else part.copy_(of)

    def add_rows(self, parameter: Tensor, ids_T: Tensor, value_TD: Tensor) -> None:
        """``gradient[ids[t]] += value[t]``, in order."""
        view, fresh = self._claim(parameter)
        if not fresh:
            view.zero_()
        view.index_add_(0, ids_T, value_TD.to(view.dtype))

    def zero_grad(self) -> None:
        """Drop accumulated gradients and any recorded problem."""
        self._fresh.clear()
        self._problem = ""

    def poison(self, reason: str) -> None:
        """Remember that the pending step must be refused (a loss was not finite)."""
        self._problem = self._problem or reason

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated float32 gradients by name (views; zero where nothing arrived)."""
        self._settle()
        return {name: self._view(self._grad, name) for name in self.parameters}

    def _settle(self) -> None:
        for name in self.parameters:
            if name not in self._fresh:
                self._view(self._grad, name).zero_()
                self._fresh.add(name)

    @torch.no_grad()
    def step(self) -> OptimResult:
        """Clip, update, refresh the compute copy and clear gradients; or refuse and only clear them."""
        rate = learning_rate(self.settings, self.step_count, self.total_steps)
        self._settle()
        norm = float(torch.linalg.vector_norm(self._grad))
        problem = self._problem
        if not problem and not math.isfinite(norm):
            worst = [n for n in self.parameters if not bool(torch.isfinite(self._view(self._grad, n)).all())]
            problem = f"gradient norm is {norm}; not finite in {', '.join(worst[:3]) or 'the norm itself'}"
        if problem:
            self.zero_grad()
            return OptimResult(False, norm, rate, problem)
        if norm > self.settings.max_grad_norm:
            self._grad.mul_(self.settings.max_grad_norm / (norm + 1e-6))
        self._adamw.param_groups[0]["lr"] = rate
        self._flat.grad = self._grad
        self._adamw.step()
        self._flat.grad = None
        self.step_count += 1
        self.publish()
        self.zero_grad()
        return OptimResult(True, norm, rate)

    def publish(self) -> None:
        """Copy masters into the model's parameters (nothing to do where they are the same memory)."""
        for name, parameter in self.parameters.items():
            if parameter.dtype != torch.float32:
                parameter.data.copy_(self._view(self._master, name))

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """``(part, tensors by parameter name)`` for master, exp_avg and exp_avg_sq, as views."""
        yield "master", {name: self._view(self._master, name) for name in self.parameters}
        moments = self._adamw.state.get(self._flat)
        if moments:
            for part in ("exp_avg", "exp_avg_sq"):
                yield part, {name: self._view(moments[part], name) for name in self.parameters}

    @torch.no_grad()
    def restore(self, parts: Mapping[str, Mapping[str, Tensor]], step_count: int | None) -> None:
        """Take weights, and with a ``step_count`` also moments and schedule, from ``state``'s form.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape; nothing has changed then.
        """
        for part, tensors in parts.items():
            for name, parameter in self.parameters.items():
                if name not in tensors:
                    raise CheckpointError(f"checkpoint part {part!r} lacks {name}")
                if tensors[name].shape != parameter.shape:
                    raise CheckpointError(
                        f"checkpoint part {part!r}: {name} has shape {tuple(tensors[name].shape)}, "
                        f"the model's is {tuple(parameter.shape)}"
                    )
            extra = sorted(set(tensors) - set(self.parameters))
            if extra:
                raise CheckpointError(f"checkpoint part {part!r} holds {extra[0]}, which this model does not train")
        self.reset(self.settings, self.total_steps)
        for name in self.parameters:
            self._view(self._master, name).copy_(parts["master"][name])
        if step_count is not None:
            self.step_count = step_count
            if "exp_avg" in parts:
                state: dict[str, Tensor] = {"step": torch.tensor(float(step_count), dtype=torch.float32)}
                for part in ("exp_avg", "exp_avg_sq"):
                    flat = torch.zeros_like(self._master)
                    for name in self.parameters:
                        self._view(flat, name).copy_(parts[part][name])
                    state[part] = flat
                self._adamw.state[self._flat] = state
        self.publish()
