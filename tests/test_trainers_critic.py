"""A critic in whole runs: it learns, is saved, goes on to the bit, warms up, and shares a backbone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_kit import groups, requests
from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.algorithms.batch import FloatArray
from slipstream.algorithms.check import algorithm_problems
from slipstream.algorithms.compile import compile_batch
from slipstream.config.settings import RunSettings
from slipstream.inference.fake import FakeEngine
from slipstream.ledger import LedgerReader
from slipstream.trainers.critic import by_row, by_trajectory
from slipstream.trainers.run import train
from slipstream.trajectory import SamplingSpec
from test_trainers_run import StopAt

PPO = [
    *EXACT, "algorithm.preset=ppo", "schedule.steps=3", "checkpoint.every_steps=1", "data.eval=[]",
    "training.optimizer.lr=0.005",
]  # fmt: skip
OWN = [*PPO, "algorithm.critic.optimizer.lr=0.01", "algorithm.critic.epochs_per_step=2"]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [dict(m.values) for m in LedgerReader(run_dir).metrics("train")]


def test_ppo_with_a_critic_of_its_own_resumes_to_the_bit(tiny_dir: Path, tmp_path: Path) -> None:
    assert train(tiny_settings(tiny_dir, tmp_path / "whole", *OWN)).finished
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *OWN)
    assert train(broken, [StopAt(1)]).stop_reason == "enough"
    assert train(broken).finished
    assert weights_digest(tmp_path / "broken") == weights_digest(tmp_path / "whole")
    seen = metrics(tmp_path / "whole")
    assert seen[0]["critic/explained_variance"] == 0  # values start at 0: they explain nothing
    assert [m["critic/refused_steps"] for m in seen] == [0, 0, 0]
    assert seen[-1]["critic/value_error"] < seen[0]["critic/value_error"]
    assert abs(seen[-1]["critic/value_mean"]) > 0
    for a, b in zip(seen, metrics(tmp_path / "broken"), strict=True):
        assert a["critic/value_error"] == b["critic/value_error"]


def test_without_a_clip_the_critic_learns_by_the_plain_squared_error(tiny_dir: Path, tmp_path: Path) -> None:
    free = [*OWN, "schedule.steps=1", "algorithm.critic.value_clip=null"]
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *free)).finished
    (seen,) = metrics(tmp_path / "r")
    assert seen["critic/loss"] == pytest.approx(seen["critic/value_error"] / 2, rel=1e-5)


def test_a_run_is_planned_from_its_own_record(tiny_dir: Path) -> None:
    """Every default stands in it, and none of them contradicts anything."""
    for backbone in ("own", "shared"):
        first = tiny_settings(tiny_dir, Path("r"), "algorithm.preset=ppo", f"algorithm.critic.backbone={backbone}")
        again = RunSettings.model_validate(first.model_dump(mode="json"))
        assert [str(p) for p in algorithm_problems(again)] == [str(p) for p in algorithm_problems(first)] == []


def test_in_its_warmup_the_critic_learns_alone(tiny_dir: Path, tmp_path: Path) -> None:
    train(tiny_settings(tiny_dir, tmp_path / "r", *OWN, "algorithm.critic.warmup_steps=2"))
    steps = [e.data for e in LedgerReader(tmp_path / "r").events("step")]
    moved = [s["weight_version_before"] != s["weight_version_after"] for s in steps]
    assert moved == [False, False, True]
    fates = {r.disposition for r in LedgerReader(tmp_path / "r").trajectories(phase="train") if r.step == 1}
    assert fates == {"filtered:critic_warmup"}
    assert all("critic/loss" in m for m in metrics(tmp_path / "r"))


def test_a_shared_backbone_moves_with_the_policy(tiny_dir: Path, tmp_path: Path) -> None:
    shared = [*PPO, "algorithm.critic.backbone=shared", "algorithm.minibatches_per_step=2"]
    train(tiny_settings(tiny_dir, tmp_path / "whole", *shared))
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *shared)
    train(broken, [StopAt(2)])
    train(broken)
    assert weights_digest(tmp_path / "broken") == weights_digest(tmp_path / "whole")
    seen = metrics(tmp_path / "whole")
    assert all(m["critic/loss"] > 0 for m in seen)
    assert "critic/lr" not in seen[0]
    assert abs(seen[-1]["critic/value_mean"]) > 0


async def test_arrays_by_row_and_by_trajectory_are_inverses() -> None:
    engine = FakeEngine(300, eos_token_ids=(299,))
    await engine.start()
    asked = requests(2, 3, SamplingSpec())
    batch = compile_batch(groups(asked, await engine.generate_many(asked)), None, "token_mean")
    rng = np.random.default_rng(0)
    rows: list[FloatArray] = [rng.normal(size=row.n_trained) for row in batch.rows]
    back = by_row(batch, by_trajectory(batch, rows))
    for row, own in zip(batch.rows, rows, strict=True):
        assert np.array_equal(back[row.row_id], own)
