"""The probe of a publish: fixed tokens, and what the trainer's present weights score them.

Owns: which tokens, their scores, and how far an engine's may be off.
Refuses: deciding when a probe is used (``Publisher`` does, where checksums cannot be compared).

    probe = await build_probe(backend, vocab=32000, dtypes=("bfloat16", "bfloat16"), seconds=600)
    await publisher.publish(export, version, probe=probe)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from slipstream.algorithms.batch import Batch
from slipstream.trainers.waiting import within
from slipstream.training.model import probe_row
from slipstream.training.protocol import TrainingBackend
from slipstream.weights import Probe

SEQUENCES, TOKENS = 2, 16
TOLERANCES = {"float32": 0.05, "bfloat16": 0.5}
"""Nats.  Single log-probs of unlikely tokens differ by about 0.3 from bfloat16 alone."""
_SEED = 0


async def build_probe(backend: TrainingBackend, vocab: int, dtypes: Collection[str], seconds: float) -> Probe:
    """Score ``SEQUENCES`` rows of ``TOKENS`` token ids below ``vocab``, the same ids each time, at temperature 1.

    ``dtypes`` are those that trainer and engine compute in; the coarsest decides the tolerance.

    Raises:
        DeadlineError: the backend has not scored them within ``seconds``.
    """
    ids_RT = np.random.default_rng(_SEED).integers(0, vocab, (SEQUENCES, TOKENS))
    rows = [probe_row(ids, f"probe-{i}") for i, ids in enumerate(ids_RT)]
    scored = await within(backend.forward("policy", Batch(rows)), seconds, "scoring the probe")
    expected = [values.tolist() for values in scored.logprobs]
    return Probe(ids_RT.tolist(), expected, max(TOLERANCES[dtype] for dtype in dtypes))
