"""Any transformers causal LM, run on the engine's own key/value blocks.

Owns: ``GenericRunner``: the model's own modules with an attention function of ours, registered through
transformers' attention interface.  Refuses: layers that keep state outside attention, cross-attention, attention
sinks, key and value heads of different sizes (``ModelError``).

The packed batch goes in as one row; since the attention function alone mixes tokens, that is exact.  The experts that
a mixture-of-experts model sent each token to are reported in ``plan.routes``.
Features are logits: soft caps and scales of the model's head are then the model's own business.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.errors import ModelError
from slipstream.inference.embedded.attention import ForwardPlan
from slipstream.inference.embedded.routers import RouteRecorder

_NAME = "slipstream_embedded"


class _Active(threading.local):
    """The pass that runs on this thread: its plan, or a list that records the layers' shapes."""

    plan: ForwardPlan | None = None
    shapes: list[tuple[int, int]] | None = None
    layer: int = 0


_active = _Active()


def _attention(
    module: Any,
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
    """The attention function: ``query`` (1, H, N, D), ``key, value`` (1, K, N, D) -> (1, N, H, D)."""
    if kwargs.get("s_aux") is not None:
        raise ModelError("attention sinks are not supported by the embedded engine; serve this model with vLLM")
    if key.shape != value.shape or query.shape[2] != key.shape[2]:
        raise ModelError("keys and values of different shapes are not supported by the embedded engine")
    layer, _active.layer = _active.layer, _active.layer + 1
    if _active.shapes is not None:
        _active.shapes.append((key.shape[1], key.shape[3]))
        return torch.zeros_like(query).transpose(1, 2), None
    plan = _active.plan
    assert plan is not None, "attention called outside the engine's forward pass"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kv = torch.stack([key[0], value[0]]).permute(2, 0, 1, 3)
    out = plan.attend(layer, query[0].transpose(0, 1), kv, scale, sliding_window, softcap)
    return out.view(1, out.shape[0], query.shape[1], query.shape[3]), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks come from the plan."""
    return None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)


def _by_checkpoint_name(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``(name in a checkpoint, live tensor)``.

    Where a model keeps several checkpoint tensors in one parameter (the experts of a layer), these are views of their
    places in it.  Places are found by sending element numbers, not weights, through transformers' own conversion.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, parameter in parameters:
        value = parameter.data
        if list(revert_weight_conversion(model, {name: value.to("meta")})) == [name]:
            yield name, value
            continue
        numbers = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
        for part, places in revert_weight_conversion(model, {name: numbers}).items():
            yield part, _view_of(value, places.long(), f"{model.config.model_type}: {part}, a part of {name},")


def _view_of(value: Tensor, places: Tensor, what: str) -> Tensor:
    """The view of ``value`` whose elements are these, by number; ``ModelError`` when no view has them."""
    first = places[(0,) * places.ndim]
    strides = [int(places.select(d, min(1, n - 1)).flatten()[0] - first) for d, n in enumerate(places.shape)]
    view = value.as_strided(places.shape, strides, value.storage_offset() + int(first))
    numbers = torch.arange(value.numel()).as_strided(places.shape, strides, int(first))
    if not value.is_contiguous() or not torch.equal(numbers, places):
        raise ModelError(f"{what} is stored in a way that cannot be updated in place; serve this model with vLLM")
    return view


class GenericRunner:
    """See the module's contract.  The model becomes the engine's: nobody else may run or change it."""

    kind = "generic"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        name = model.config.model_type
        try:
            model.set_attn_implementation(_NAME)
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{name}: does not support the attention interface ({error})") from error
        head = model.get_output_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.dtype, self.device = head.weight.dtype, head.weight.device
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._recorder = RouteRecorder(model)
        shapes = self._probe()
        expected = int(model.config.get_text_config().num_hidden_layers)
        if len(shapes) != expected or len(set(shapes)) != 1:
            raise ModelError(
                f"{name}: {len(shapes)} of {expected} layers use standard attention (shapes {sorted(set(shapes))}); "
                "models with other state or uneven heads are not supported by the embedded engine"
            )
        self.routers = self._recorder.layers
        self.layers = expected
        self.kv_heads, self.head_dim = shapes[0]
        self._named = dict(_by_checkpoint_name(model, model.named_parameters(remove_duplicate=False)))
        self._unique = frozenset(name for name, _ in _by_checkpoint_name(model, model.named_parameters()))

    def _run(self, ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        _active.layer = 0
        with torch.inference_mode():
            output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **kwargs)
        return output.logits[0]

    def _probe(self) -> list[tuple[int, int]]:
        shapes: list[tuple[int, int]] = []
        _active.shapes = shapes
        try:
            self._run(torch.tensor([1, 2], device=self.device), torch.tensor([0, 1], device=self.device))
        except TypeError as error:
            raise ModelError(f"{self.model.config.model_type}: cannot run packed batches ({error})") from error
        finally:
            _active.shapes = None
        return shapes

    def forward(self, plan: ForwardPlan, wanted: Tensor) -> Tensor:
        """Logits of the wanted rows."""
        _active.plan = plan
        try:
            if self._keeps_rows:
                logits = self._run(plan.token_ids, plan.positions, logits_to_keep=wanted)
            else:
                logits = self._run(plan.token_ids, plan.positions)[wanted]
            plan.routes = self._recorder.take(len(plan.token_ids))
            return logits
        finally:
            _active.plan = None

    def logits(self, features: Tensor) -> Tensor:
        """The identity."""
        return features

    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint names, tied aliases included."""
        return {name: tuple(value.shape) for name, value in self._named.items()}

    def required(self) -> frozenset[str]:
        """Each parameter once."""
        return self._unique

    def write(self, name: str, value: Tensor) -> None:
        """In place; visible at once."""
        with torch.no_grad():
            self._named[name].copy_(value)

    def commit(self) -> None:
        """Nothing is repacked."""

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The live parameters."""
        for name, value in self._named.items():
            yield name, value.contiguous()
