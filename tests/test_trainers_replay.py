"""Whole runs on truncated samples and on a mixture of experts: sampler and trainer score the same tokens alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.ledger import LedgerReader
from slipstream.trainers.run import train
from slipstream.trajectory import KEPT_SETS, ROUTED_EXPERTS, TOP_LOGPROBS, Trajectory
from test_trainers_run import StopAt

SHORT = [*EXACT, "schedule.steps=3", "checkpoint.every_steps=1", "data.eval=[]", "training.optimizer.lr=0.01"]
CUT = ["rollout.sampling.temperature=1.2", "rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20"]


def gaps(run_dir: Path) -> list[float]:
    rows = LedgerReader(run_dir).metrics("train")
    return [m.values["policy/rollout_train_logprobs_abs_diff_max"] for m in rows]


def trained(run_dir: Path) -> list[Trajectory]:
    return [r.trajectory for r in LedgerReader(run_dir).trajectories(phase="train") if r.live]


def test_a_run_on_truncated_samples_scores_them_as_sampled_and_resumes(tiny_dir: Path, tmp_path: Path) -> None:
    whole = tiny_settings(tiny_dir, tmp_path / "whole", *SHORT, *CUT)
    assert train(whole).finished
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *SHORT, *CUT)
    train(broken, [StopAt(2)])
    assert train(broken).finished
    assert weights_digest(tmp_path / "broken") == weights_digest(tmp_path / "whole")
    assert max(gaps(tmp_path / "whole")) < 1e-3
    for member in trained(tmp_path / "whole"):
        for span in member.sampled_spans():  # the record holds what was kept
            kept = span.side[KEPT_SETS].values
            assert all(token in own and len(own) <= 20 for token, own in zip(span.token_ids, kept, strict=True))


def test_a_run_with_centred_scores_gets_its_heads_from_the_engine_and_resumes(tiny_dir: Path, tmp_path: Path) -> None:
    chosen = [*SHORT, "algorithm.loss=score_centering", "algorithm.top_logprobs=6", "algorithm.loss_settings.cap=2.0"]
    assert train(tiny_settings(tiny_dir, tmp_path / "whole", *chosen)).finished
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *chosen)
    train(broken, [StopAt(2)])
    assert train(broken).finished
    assert weights_digest(tmp_path / "broken") == weights_digest(tmp_path / "whole")
    for row in LedgerReader(tmp_path / "whole").metrics("train"):
        assert 0 < row.values["policy/loss_metrics/head_mass"] < 1
        # One set of weights, so the tail is the policy's own.
        assert abs(row.values["policy/loss_metrics/tail_scale_mean"] - 1) < 1e-3
    for member in trained(tmp_path / "whole"):
        for span in member.sampled_spans():  # the record holds them
            assert all(len(ids) == len(values) == 6 for ids, values in span.side[TOP_LOGPROBS].values)


def test_a_run_on_a_mixture_of_experts_replays_its_routes(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "moe", arch="qwen3_moe")
    train(tiny_settings(model, tmp_path / "r", *SHORT, "training.routing_replay=true"))
    assert max(gaps(tmp_path / "r")) < 1e-3
    for member in trained(tmp_path / "r"):
        for row in member.rows:
            routes = np.concatenate(
                [span.side[ROUTED_EXPERTS].values for span in row.spans if ROUTED_EXPERTS in span.side]
            )
            assert routes.shape[1:] == (2, 2)
            assert (routes[1:] >= 0).all()
