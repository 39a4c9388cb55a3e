"""Publishing to engines whose checksums cannot be compared: the trainer says what fixed tokens have to score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from run_kit import tiny_settings
from slipstream.errors import PublishError
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.pretrained import load_causal_lm, load_tokenizer
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.inference.pool.member import Member
from slipstream.inference.pool.pool import ReplicaPool
from slipstream.trainers.parts import Parts, build_backend
from slipstream.trainers.probe import SEQUENCES, TOKENS, TOLERANCES, build_probe
from slipstream.trainers.serving import Serving
from slipstream.weights import InProcessTransport, Publisher, VersionCounter
from slipstream.weights.pooled import PooledReplica, link


class Opaque(EmbeddedEngine):
    """As a vLLM with its own checksums, or a sharded one: what it answers cannot be compared."""

    loads = True

    async def checksum(self) -> dict[str, str]:
        return {}

    async def update_weights(self, chunk: Any) -> None:
        if self.loads:
            await super().update_weights(chunk)


@pytest.fixture
async def parts(tiny_dir: Path, tmp_path: Path) -> AsyncIterator[Parts]:
    """Of a run whose engine is a server; it holds other weights than the trainer."""
    settings = tiny_settings(
        tiny_dir, tmp_path / "r", "inference.engine=http", "inference.urls=http://a:1", "inference.transport=disk"
    )
    tokenizer = load_tokenizer(tiny_dir, None)
    other = load_causal_lm(tiny_model_dir(tmp_path / "other", seed=1), "float32")
    engine = Opaque(other, tokenizer, settings.inference)
    pool = ReplicaPool([Member("engine-0", engine)])
    await pool.start()
    publisher = Publisher([PooledReplica(pool, pool.members[0])], InProcessTransport("float32"), attempts=1)
    link(pool, publisher)
    backend = build_backend(settings)
    yield Parts(
        settings=settings,
        tokenizer=tokenizer,
        renderer=None,  # type: ignore[arg-type]
        train_data=None,
        eval_rows=(),
        serving=Serving(pool.engine, publisher, pool),
        backend=backend,
        counter=VersionCounter(),
        fingerprint="",
        deadline=600.0,
    )
    backend.close()
    await pool.close()


async def test_a_server_without_comparable_checksums_is_published_to_by_a_probe(parts: Parts) -> None:
    (receipt,) = await parts.publish()
    assert (receipt.published, receipt.verification.kind) == (True, "probe")
    assert "tolerance 0.05" in receipt.verification.detail


async def test_a_server_that_keeps_other_weights_is_found_out(parts: Parts) -> None:
    parts.serving.pool.members[0].engine.loads = False  # type: ignore[union-attr]
    with pytest.raises(PublishError, match="verify by probe: largest log-prob gap"):
        await parts.publish()


async def test_the_probe_is_the_same_tokens_each_time_and_as_tolerant_as_the_coarser_dtype(parts: Parts) -> None:
    one, other = [await build_probe(parts.backend, 300, (dtype, "float32"), 600) for dtype in TOLERANCES]
    assert one.sequences == other.sequences
    assert [len(ids) for ids in one.sequences] == [TOKENS] * SEQUENCES
    assert all(0 <= token < 300 for ids in one.sequences for token in ids)
    assert (one.tolerance, other.tolerance) == (0.05, 0.5)
    assert one.expected == other.expected


async def test_a_trainer_that_replays_routes_scores_a_probe_too(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "moe", arch="qwen3_moe")
    backend = build_backend(tiny_settings(model, tmp_path / "r", "training.routing_replay=true"))
    try:
        probe = await build_probe(backend, 300, ("float32",), 600)
    finally:
        backend.close()
    assert all(value < 0 for values in probe.expected for value in values)
