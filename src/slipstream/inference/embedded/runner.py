"""What runs a model: one small protocol, two implementations, and the probe that vouches for them.

Owns: ``ModelRunner``, ``build_runner``.  Refuses: models with state outside attention, and any model whose runner
does not reproduce transformers' own logits on a probe.

* ``LlamaRunner`` (fast): a lean decoder for Llama, Mistral, Qwen2 and Qwen3 architectures.
* ``GenericRunner``: any transformers causal LM whose layers call the attention interface.

``forward`` returns *features*: whatever ``logits`` needs for a row (hidden states, or logits themselves).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from slipstream.errors import InferenceError, ModelError
from slipstream.inference.embedded.attention import ForwardPlan, RowStore, Segment
from slipstream.inference.embedded.prefix import PrefixTree

_PROBE_TOKENS = 12


class ModelRunner(Protocol):
    """A model that the engine can run and whose weights it can replace."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    kind: str
    routers: int
    """Mixture-of-experts layers whose choices ``forward`` leaves in ``plan.routes``; 0 for a dense model."""

    def forward(self, plan: ForwardPlan, wanted: torch.Tensor) -> torch.Tensor:
        """Run the packed batch; features of the packed rows ``wanted``."""
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """(M, features) -> (M, vocab)."""
        ...

    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint names and shapes, tied aliases included."""
        ...

    def required(self) -> frozenset[str]:
        """Names that a complete update must contain (tied aliases may be left out)."""
        ...

    def write(self, name: str, value: torch.Tensor) -> None:
        """Overwrite a parameter (shape already checked); takes effect at ``commit``."""
        ...

    def commit(self) -> None: ...

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each name with what the kernels hold, read back from their own layout."""
        ...


def check_chunk(runner: ModelRunner, chunk: Mapping[str, Any]) -> None:
    """Every name known, every shape right, every value a finite-typed tensor; raises before anything is written."""
    if not isinstance(chunk, Mapping):
        raise InferenceError(f"weight update: a chunk is a mapping of names to tensors, got {type(chunk).__name__}")
    shapes = runner.parameters()
    unknown = [name for name in chunk if name not in shapes]
    if unknown:
        close = next(iter(shapes))
        raise InferenceError(f"weight update: unknown parameter(s) {unknown[:5]}; names look like {close!r}")
    for name, value in chunk.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise InferenceError(f"weight update: {name} must be a floating-point tensor, got {type(value).__name__}")
        if tuple(value.shape) != shapes[name]:
            raise InferenceError(
                f"weight update: {name} has shape {tuple(value.shape)}, the model wants {shapes[name]}"
            )


def probe_plan(runner: ModelRunner, ids: torch.Tensor) -> ForwardPlan:
    """A plan that prefills one sequence and nothing else."""
    rows = RowStore(runner.layers, runner.kv_heads, runner.head_dim, runner.dtype, runner.device)
    tree = PrefixTree()
    node = tree.extend(tree.root(("probe",)), ids.cpu().numpy())
    node.kv = rows.block(len(ids))
    positions = torch.arange(len(ids), device=runner.device)
    return ForwardPlan(ids.to(runner.device), positions, [Segment(node, 0, len(ids), [])], None, rows)


def _agrees(runner: ModelRunner, ids: torch.Tensor, expected: torch.Tensor) -> bool:
    wanted = torch.arange(len(ids), device=runner.device)
    with torch.inference_mode():
        got = runner.logits(runner.forward(probe_plan(runner, ids), wanted)).float().cpu()
    divergence = torch.nn.functional.kl_div(
        torch.log_softmax(got, -1), torch.log_softmax(expected, -1), log_target=True, reduction="none"
    ).sum(-1)
    if runner.dtype is torch.float32:
        return bool(divergence.max() < 1e-4)
    # In bfloat16 single positions can be unstable (measured: transformers against its own float32, KL 4.9 at one
    # position of 12, 0.006 at the median), so the median decides; a wrong formula spoils nearly every position.
    return bool(divergence.median() < 0.05)


def _expected(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = model.get_output_embeddings().weight.shape[0]
    ids = (torch.arange(_PROBE_TOKENS) * 7919 + 3) % vocab
    with torch.inference_mode():
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return ids, logits.float().cpu()


def build_runner(model: Any, *, owned: bool = False, force_generic: bool = False) -> ModelRunner:
    """The fastest runner that fits ``model`` (a transformers causal LM in eval mode).

    The engine's weights are its own: a model that the caller keeps (``owned=False``) is copied, never aliased.
    Raises ``ModelError`` for architectures that cannot be served.
    """
    from slipstream.inference.embedded.generic import GenericRunner
    from slipstream.inference.embedded.llama import LlamaRunner

    name = getattr(model.config, "model_type", type(model).__name__)
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name}: keeps state outside attention; the embedded engine serves attention models only")
    ids, expected = _expected(model)
    if not force_generic and LlamaRunner.fits(model):
        fast = LlamaRunner(model)
        if _agrees(fast, ids, expected):
            return fast
    generic = GenericRunner(model if owned else copy.deepcopy(model))
    if not _agrees(generic, ids, expected):
        raise ModelError(
            f"{name}: the embedded engine does not reproduce transformers' logits for this architecture (its attention "
            "is not standard); serve it with vLLM (inference.engine=http)"
        )
    return generic
