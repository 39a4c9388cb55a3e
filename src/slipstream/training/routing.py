"""Routing replay: a mixture-of-experts model that sends its tokens where the engine sent them.

Owns: the hooks on the routers, and the scores of replayed experts under the model's present weights.
Refuses: where routes come from (``replay``), routers whose scores it cannot reproduce (``ModelError`` at load).

R3 (arXiv 2510.11370): the *choice* of experts is the sampler's; their *scores* are recomputed from the trainer's own
logits, so the router still learns.  A router's formula is not looked up by model name but found by a probe: the first
of the known forms that reproduces the router's own scores on random inputs is the one replayed.

    replay = RoutingReplay(model)
    with replay.active(routes_TLK):     # around forward and backward: checkpointed layers run their routers again
        model(...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ContractError, ModelError
from slipstream.inference.embedded.routers import expert_ids, find_routers

Score = Callable[[Tensor, Tensor], Tensor]
_PROBE_TOKENS = 32


def _softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(logits.float(), -1).gather(-1, ids)


def _sigmoid(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.sigmoid(logits.float()).gather(-1, ids)


def _normalised(score: Score) -> Score:
    def normalised(logits: Tensor, ids: Tensor) -> Tensor:
        picked = score(logits, ids)
        return picked / picked.sum(-1, keepdim=True)

    return normalised


FORMS: tuple[Score, ...] = (_softmax, _normalised(_softmax), _sigmoid, _normalised(_sigmoid))
"""Scores of chosen experts from router logits ``(tokens, experts)``: Qwen-MoE and OLMoE without and with
``norm_topk_prob``, Mixtral (normalised; a softmax over the chosen logits is the same number), sigmoid gates."""


class RoutingReplay:
    """Hooks on every router of ``model``; outside ``active`` they change nothing."""

    def __init__(self, model: Any, name: str = "the model") -> None:
        """Raises ``ModelError`` for a dense model and for routers of an unknown form."""
        routers = find_routers(model)
        if not routers:
            raise ModelError(
                f"training.routing_replay is set, but {name} has no expert routers that can be replayed; switch it off"
            )
        # Not a context variable: a backward pass may run checkpointed layers again on a thread of its own.
        self._routes: Tensor | None = None
        self.layers = len(routers)
        found = [_probe(router, name) for router in routers]
        self.top_k = found[0][1]
        if any(top_k != self.top_k for _, top_k in found):
            raise ModelError(f"{name}: its layers choose different numbers of experts, which cannot be replayed")
        for layer, (router, (score, _)) in enumerate(zip(routers, found, strict=True)):
            router.register_forward_hook(self._hook(layer, score))

    @contextlib.contextmanager
    def active(self, routes_TLK: Tensor | None) -> Iterator[None]:
        """Replay these experts, ``(tokens, layers, top-k)``, -1 for the router's own choice; None replays nothing."""
        before, self._routes = self._routes, routes_TLK
        try:
            yield
        finally:
            self._routes = before

    def _hook(self, layer: int, score: Score) -> Any:
        def replay(module: Any, args: Any, output: Any) -> Any:
            routes = self._routes
            if routes is None:
                return None
            logits, scores, own = output
            if len(routes) != len(own):
                raise ContractError(f"routes of {len(routes)} tokens for a pass over {len(own)}")
            wanted = routes[:, layer]
            ids = torch.where(wanted >= 0, wanted, own)
            return logits, score(logits, ids).to(scores.dtype), ids

        return replay


@torch.no_grad()
def _probe(router: Any, name: str) -> tuple[Score, int]:
    """Which form reproduces this router's scores, and how many experts it chooses."""
    weight = next(router.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_TOKENS, weight.shape[-1], generator=generator).to(weight.device, weight.dtype)
    output = router(hidden)
    ids = expert_ids(output)
    if ids is not None:
        logits, scores, _ = output
        tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
        for form in FORMS:
            if logits.shape[:1] == ids.shape[:1] and torch.allclose(
                form(logits, ids), scores.float(), atol=tolerance, rtol=tolerance
            ):
                return form, int(ids.shape[1])
    raise ModelError(f"{name}: {type(router).__name__} scores its experts in a form that routing replay does not know")
