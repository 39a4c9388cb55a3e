"""The training-backend protocol, shaped like Tinker's verbs.

Owns: the verbs and their result types.  Refuses: environments, HTTP, how a loss is computed.

Lifecycle: a backend is built with a model; handles name what a verb acts on (``"policy"``,
``"reference"``, ``"critic"``, an adapter).  Every verb returns a ``Future``; verbs on one handle run in
the order they were called.  ``forward_backward`` accumulates plain sums (the weights in the batch already
contain 1/denominator); ``optim_step`` never rescales, and refuses a non-finite gradient, leaving
parameters and moments untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.algorithms.batch import Batch
from slipstream.algorithms.objective import LossSpec, Metric

__all__ = [
    "ExportedTensor",
    "ForwardResult",
    "LossSpec",
    "OptimResult",
    "StepOutput",
    "TrainingBackend",
]


@dataclass(frozen=True)
class ForwardResult:
    """Log-probs (and entropy when asked for) of each row's *trained* targets, in row order.

    ``logprobs[i]`` has shape ``(rows[i].n_trained,)``.  A critic gives ``values`` of that shape and no log-probs.
    """

    logprobs: Sequence[npt.NDArray[np.float64]]
    entropy: Sequence[npt.NDArray[np.float64]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Sequence[npt.NDArray[np.float64]] | None = None


@dataclass(frozen=True)
class StepOutput:
    """What ``forward_backward`` reports: the summed loss, per-row log-probs, metrics (already reduced).

    ``parts`` are the loss's metrics with their reducers, for whoever merges several optimiser steps.
    """

    loss: float
    logprobs: Sequence[npt.NDArray[np.float64]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimResult:
    """``grad_norm`` is before clipping; ``applied`` is False when a non-finite gradient was refused."""

    applied: bool
    grad_norm: float
    lr: float
    reason: str = ""


class ExportedTensor(NamedTuple):
    """One piece of a parameter: checkpoint name, global shape, the slice this piece fills, the tensor."""

    name: str
    global_shape: tuple[int, ...]
    slice: tuple[slice, ...]
    tensor: Any


class TrainingBackend(Protocol):
    """The one backend protocol."""

    def forward(self, handle: str, batch: Batch, *, entropy: bool = False) -> Future[ForwardResult]: ...

    def forward_backward(self, handle: str, batch: Batch, loss: LossSpec) -> Future[StepOutput]: ...

    def optim_step(self, handle: str) -> Future[OptimResult]: ...

    def export_weights(self, handle: str) -> Iterator[ExportedTensor]: ...

    def save(self, handle: str, directory: Path) -> Future[None]:
        """Write weights, moments, scheduler and RNG as safetensors and JSON; resumable to the bit."""
        ...

    def load(self, handle: str, directory: Path, *, weights_only: bool = False) -> Future[None]: ...

    def save_pretrained(self, handle: str, directory: Path) -> Future[None]:
        """Write a directory that ``transformers`` can load."""
        ...

    def close(self) -> None: ...
