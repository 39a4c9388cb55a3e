"""A batch's way through one model: its micro-batches, and what the model says of each.

Owns: layouts, the replay of the sampler's kept sets and of the engine's experts, outputs by name, per-row results.
Refuses: losses, optimisation, which handle a model stands for.

    way = Pass(batch, model, training, device)
    for layout in way.layouts:
        with way.open(layout):                          # open through backward
            outputs = way.outputs(layout, entropy=True)  # {"logprobs": (N,), "entropy": (N,)}, or {"values": (N,)}
            results.put(layout, outputs)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.config.settings import TrainingSettings
from slipstream.training.attention import active_layout
from slipstream.training.critic import Critic
from slipstream.training.layout import Layout, plan_layouts
from slipstream.training.model import PolicyModel
from slipstream.training.replay import (
    check_sampling,
    kept_sets,
    layout_routes,
    route_keys,
    row_routes,
    top_ids,
    top_width,
)
from slipstream.training.routing import RoutingReplay


class Pass:
    """``batch`` under ``model`` (log-probs), or under ``critic`` (values); ``routing`` replays the engine's experts.

    Raises ``ContractError`` for rows that cannot be scored under the distribution they were sampled from.
    """

    def __init__(
        self,
        batch: Batch,
        model: PolicyModel,
        training: TrainingSettings,
        device: torch.device,
        *,
        critic: Critic | None = None,
        routing: RoutingReplay | None = None,
    ) -> None:
        self.batch, self.model, self._training, self._device = batch, model, training, device
        self._critic, self._routing = critic, routing
        if critic is None:
            check_sampling(batch.rows)
        keys = None
        if routing is not None:
            self._routes = [row_routes(row, routing.layers, routing.top_k) for row in batch.rows]
            keys = route_keys(batch.rows, self._routes)
        limit, share = training.max_tokens_per_microbatch, training.share_prompts
        self.layouts = plan_layouts(batch.rows, limit, share=share, keys=keys)

    @contextlib.contextmanager
    def open(self, layout: Layout) -> Iterator[None]:
        """What attention and routers read; keep it open through ``backward``."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(active_layout(layout, self._device))
            if self._routing is not None:
                shape = self._routing.layers, self._routing.top_k
                routes_TLK = layout_routes(layout, self._routes, *shape, self._device)
                stack.enter_context(self._routing.active(routes_TLK))
            yield

    def outputs(self, layout: Layout, *, entropy: bool = False, top: bool = False) -> dict[str, Tensor]:
        """The model's outputs for the trained tokens, each ``(N,)`` float32, under the names of ``loss_inputs``.

        ``top`` adds ``top_logprobs``, ``(N, K)``: the model's log-probs of the sampler's most likely tokens.
        """
        if self._critic is not None:
            return {"values": self._critic.values(layout)}
        rows = self.batch.rows
        logprobs, spread = self.model.score(
            layout,
            self._temperature(layout),
            chunk=self._training.logprob_chunk_tokens,
            entropy=entropy,
            kept=kept_sets(rows, layout, self._device),
            beside_NK=top_ids(rows, layout, self._top_width, self._device) if top else None,
        )
        out = {"logprobs": logprobs[:, 0], "top_logprobs": logprobs[:, 1:]} if top else {"logprobs": logprobs}
        return out if spread is None else {**out, "entropy": spread}

    @cached_property
    def _top_width(self) -> int:
        return top_width(self.batch.rows)

    def _temperature(self, layout: Layout) -> Tensor:
        per_row = [self.batch.rows[i].sampling.temperature for i in layout.row_ids_R]
        return torch.as_tensor(np.asarray(per_row, dtype=np.float32)[layout.row_N], device=self._device)


class RowValues:
    """Per-row float64 arrays in batch order by output name, filled layout by layout; a row without news stays empty.

    What has several numbers in each place has them in the second dimension.
    """

    def __init__(self, batch: Batch) -> None:
        self._rows = len(batch.rows)
        self._named: dict[str, list[FloatArray]] = {}

    def put(self, layout: Layout, outputs: Mapping[str, Tensor]) -> None:
        """Take one layout's outputs."""
        edges = np.searchsorted(layout.row_N, np.arange(len(layout.row_ids_R) + 1))
        for name, values_N in outputs.items():
            flat = values_N.detach().double().cpu().numpy()
            rows = self._named.setdefault(name, self._empty())
            for place, index in enumerate(layout.row_ids_R):
                rows[index] = flat[edges[place] : edges[place + 1]]

    def rows(self, name: str) -> list[FloatArray]:
        """One array per row of the batch."""
        return self._named.get(name) or self._empty()

    def _empty(self) -> list[FloatArray]:
        return [np.zeros(0) for _ in range(self._rows)]
