"""What a plan has to know about a model, read from its directory without torch.

Owns: sizes from ``config.json`` and the exact parameter count from safetensors headers.
Refuses: loading weights, downloading anything.

>>> BUNDLED.layers, round(BUNDLED.parameters / 1e6)
(30, 135)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder-only transformer.  ``exact`` says that ``parameters`` was counted, not estimated."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    tied_embeddings: bool
    parameters: int
    exact: bool = False
    experts: int = 0
    """Experts of a mixture-of-experts layer; 0 for a dense model."""

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Input and output width of one layer's linear modules, under Llama's names."""
        q, kv, h, i = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        return {
            "q_proj": (h, q),
            "k_proj": (h, kv),
            "v_proj": (h, kv),
            "o_proj": (q, h),
            "gate_proj": (h, i),
            "up_proj": (h, i),
            "down_proj": (i, h),
        }

    @property
    def saved_elements_per_token(self) -> int:
        """Elements per token and layer that backward needs (norms, projections, rotary copies, gated MLP)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 4 * self.hidden_size + 3 * q + 4 * kv + 4 * self.intermediate_size


def facts_from_config(config: Mapping[str, Any], parameters: int | None = None) -> ModelFacts:
    """Sizes from the content of a ``config.json``; ``ModelError`` names a size that is missing or no number."""
    text = config.get("text_config", config)

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(text.get(name), int):
                return int(text[name])
        if default is None:
            raise ModelError(f"no whole number {' or '.join(names)}, so memory cannot be planned")
        return default

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    facts = ModelFacts(
        model_type=str(text.get("model_type", "unknown")),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * hidden),
        layers=size("num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings", "n_positions", default=0) or None,
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        parameters=parameters or 0,
        exact=parameters is not None,
        experts=size("num_experts", "num_local_experts", "n_routed_experts", default=0),
    )
    return facts if parameters is not None else _estimated(facts)


def _estimated(facts: ModelFacts) -> ModelFacts:
    layer = sum(wide * high for wide, high in facts.linears.values()) + 2 * facts.hidden_size
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)
    return replace(facts, parameters=facts.layers * layer + embeddings + facts.hidden_size)


def read_facts(path: str) -> ModelFacts | None:
    """The facts of a local directory or of the bundled model; None for a hub id, which is not here yet.

    Raises:
        ModelError: the directory holds no readable ``config.json`` or a corrupt safetensors header.
    """
    if path == BUNDLED_NAME:
        return BUNDLED
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: no config.json; this is not a transformers model directory") from error
    except ValueError as error:
        raise ModelError(f"{path}/config.json is no valid JSON ({error}); save the model again") from error
    shards = sorted(folder.glob("*.safetensors"))
    parameters = sum(map(_count, shards)) if shards else None
    try:
        return facts_from_config(config, parameters)
    except (ModelError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{path}/config.json is no decoder's ({error}); model.path needs a causal LM") from error


def _count(shard: Path) -> int:
    try:
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        tensors = [item for name, item in header.items() if name != "__metadata__"]
        wanted = 8 + length + max((item["data_offsets"][1] for item in tensors), default=0)
        parameters: int = sum(math.prod(item["shape"]) for item in tensors)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{shard}: no valid safetensors header ({error}); save the model again") from error
    if shard.stat().st_size != wanted:
        raise ModelError(f"{shard} has {shard.stat().st_size} bytes where {wanted} belong; copy or save it again")
    return parameters


BUNDLED_NAME = "smollm2-135m-instruct"

BUNDLED = facts_from_config(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    parameters=134_515_008,
)
"""SmolLM2-135M-Instruct, so that a plan can be made before the model is fetched."""
