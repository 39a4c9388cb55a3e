"""Mixture-of-experts routers: finding them in a transformers model, and recording what they choose.

Owns: which modules are routers, their order, the ids of the experts that each token went to.
Refuses: changing a choice (``slipstream.training.routing`` replays recorded ones), routers of another form.

A router is a module whose class name ends in ``TopKRouter`` and whose forward returns ``(logits, scores, indices)``
with ``(tokens, top-k)`` expert ids last; transformers writes Qwen-MoE, Mixtral, OLMoE, Granite, gpt-oss and others so.
Layers are numbered by the order of these modules, as vLLM numbers the layers of ``routed_experts``.

>>> recorder = RouteRecorder(model)                 # doctest: +SKIP
>>> model(input_ids=ids); recorder.take(ids.numel())  # doctest: +SKIP
array of shape (tokens, layers, top-k)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def find_routers(model: Any) -> list[Any]:
    """The routers of a model, first layer first; empty for a dense model."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def expert_ids(output: Any) -> Tensor | None:
    """The ``(tokens, top-k)`` ids in a router's output, or None when it has another form."""
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    ids = output[2]
    return ids if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() else None


class RouteRecorder:
    """Remembers the experts of the last forward pass.  One thread at a time, like the model itself."""

    def __init__(self, model: Any) -> None:
        routers = find_routers(model)
        self.layers = len(routers)
        self._seen: dict[int, Tensor] = {}
        self._handles = [router.register_forward_hook(self._hook(i)) for i, router in enumerate(routers)]

    def _hook(self, layer: int) -> Any:
        def record(module: Any, args: Any, output: Any) -> None:
            ids = expert_ids(output)
            if ids is None:
                self.close()  # another kind of router: nothing can be reported
                return
            self._seen[layer] = ids.detach()

        return record

    def take(self, tokens: int) -> npt.NDArray[np.int16] | None:
        """``(tokens, layers, top-k)`` of the pass that just ran; None for a model without such routers."""
        seen, self._seen = self._seen, {}
        if not self.layers or len(seen) != self.layers or any(len(ids) != tokens for ids in seen.values()):
            return None
        experts: npt.NDArray[np.int16] = (
            torch.stack([seen[i] for i in range(self.layers)], 1).to(torch.int16).cpu().numpy()
        )
        return experts

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.layers, self._seen = [], 0, {}
