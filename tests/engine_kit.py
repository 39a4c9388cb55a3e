"""What the tests of the embedded engine share: tiny models, engines, and transformers as the judge."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from slipstream.config.settings import InferenceSettings
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.tiny import tiny_model
from slipstream.inference.fake import processed_logprobs
from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.trajectory import SamplingSpec

_ids = itertools.count()


@lru_cache(maxsize=16)
def model_and_tokenizer(arch: str = "llama", seed: int = 0) -> tuple[Any, Any]:
    return tiny_model(seed, arch=arch)


def request(prompt: Sequence[int], **fields: Any) -> GenerateRequest:
    base: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True, **fields}
    return GenerateRequest(f"r{next(_ids)}", tuple(prompt), **base)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 256, length))


@contextlib.asynccontextmanager
async def running(arch: str = "llama", **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """A started engine on one thread in float32; keyword arguments of the engine, or fields of its settings."""
    fields = {k: options.pop(k) for k in list(options) if k in InferenceSettings.model_fields}
    model, tokenizer = model_and_tokenizer(arch, options.pop("model_seed", 0))
    settings = InferenceSettings(**{"dtype": "float32", "threads": 1, **fields})
    engine = EmbeddedEngine(model, options.pop("tokenizer", tokenizer), settings, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def logits_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Transformers' own logits, one row per token."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double().numpy()


def expected_logprobs(
    model: Any, prompt_ids: Sequence[int], output: Sequence[int], spec: SamplingSpec | None = None
) -> list[float]:
    """Log-probs of ``output`` after ``prompt_ids`` by a full forward pass, under ``spec``, in float64."""
    rows = logits_of(model, [*prompt_ids, *output])[len(prompt_ids) - 1 : -1]
    return [
        float(processed_logprobs(row, spec or SamplingSpec(), prompt_ids, output[:i])[output[i]])
        for i, row in enumerate(rows)
    ]


def gap(model: Any, asked: GenerateRequest, result: GenerateResult) -> float:
    """Largest distance of an answer's log-probs from transformers'."""
    want = expected_logprobs(model, asked.token_ids, result.token_ids, asked.sampling)
    return max(abs(a - b) for a, b in zip(result.logprobs, want, strict=True))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
