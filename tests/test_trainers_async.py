"""Asynchronous runs on a tiny model: the same loop, exact versions, conservation, resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.errors import SettingsError
from slipstream.ledger import LedgerReader
from slipstream.trainers.parts import divide_cores
from slipstream.trainers.run import check, train
from slipstream.trajectory import WeightVersion
from test_trainers_run import StopAt, trained_prompts

ASYNC = ["schedule.kind=fully_async", "schedule.max_staleness_steps=2", "inference.pause_mode=keep"]


@pytest.fixture(scope="module")
def synchronous(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("sync") / "run"
    assert train(tiny_settings(tiny_dir, run_dir, *EXACT, "eval.every_steps=3")).finished
    return run_dir


@pytest.fixture(scope="module")
def asynchronous(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    assert train(tiny_settings(tiny_dir, run_dir, *ASYNC, "eval.every_steps=3")).finished
    return run_dir


@pytest.mark.parametrize("kind", ["fully_async", "bounded", "windowed"])
def test_staleness_0_through_the_asynchronous_machinery_is_bit_equal_to_the_synchronous_run(
    kind: str, synchronous: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    zero = [f"schedule.kind={kind}", "schedule.max_staleness_steps=0", "eval.every_steps=3"]
    train(tiny_settings(tiny_dir, tmp_path / "zero", *EXACT, *zero))
    assert weights_digest(tmp_path / "zero") == weights_digest(synchronous)
    one, other = LedgerReader(synchronous), LedgerReader(tmp_path / "zero")
    assert one.content_digest() == other.content_digest()


def test_work_runs_ahead_and_every_prompt_is_trained_once(asynchronous: Path) -> None:
    reader = LedgerReader(asynchronous)
    rows = reader.metrics("train")
    assert max(row.values["schedule/lag_max"] for row in rows) >= 1
    assert len(rows) == 6
    counts = trained_prompts(asynchronous)
    assert set(counts.values()) == {1}
    assert len(counts) == 24


def test_tokens_are_conserved_at_every_step_with_work_in_flight(asynchronous: Path) -> None:
    accounts = [e.data["account"] for e in LedgerReader(asynchronous).events("step")]
    assert any(a["in_flight"] + a["buffered"] > 0 for a in accounts)
    for account in accounts:
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled")
    assert accounts[-1]["in_flight"] == accounts[-1]["buffered"] == 0, "nothing was started that no step consumes"


def test_each_token_carries_the_servers_version_and_lags_are_reported(asynchronous: Path) -> None:
    reader = LedgerReader(asynchronous)
    before = {e.step: WeightVersion.parse(e.data["weight_version_before"]).counter for e in reader.events("step")}
    lags: Counter[int] = Counter()
    for record in reader.trajectories(phase="train"):
        for version, tokens in record.trajectory.versions().items():
            lag = before[record.step] - WeightVersion.parse(version).counter
            assert 0 <= lag <= 6
            lags[lag] += tokens
    assert max(lags) >= 1
    reported: Counter[int] = Counter()
    for row in reader.metrics("train"):
        trained = row.values["trainer/num_trained_tokens"]
        for lag in range(7):
            reported[lag] += round(row.values.get(f"async/version_lag_{lag}", 0.0) * trained)
        assert 0 <= row.values["async/mixed_version_share"] <= 1
        assert 0 <= row.values["perf/engine_idle_share"] <= 1
        assert 0 <= row.values["perf/trainer_idle_share"] <= 1
    assert reported == lags


@pytest.mark.parametrize("stop", [1, 3])
def test_an_asynchronous_run_that_was_stopped_goes_on_with_what_it_had(
    stop: int, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *ASYNC)
    assert train(settings, [StopAt(stop)]).steps == stop
    reader = LedgerReader(tmp_path / "r")
    held = reader.account_at(stop)
    assert held.buffered + held.in_flight > 0
    assert train(settings).finished
    counts = trained_prompts(tmp_path / "r")
    assert set(counts.values()) == {1}
    assert len(counts) == 24
    last = reader.events("step", live_only=True)[-1].data["account"]
    assert last["sampled"] == sum(v for k, v in last.items() if k != "sampled")


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_other_ways_to_pause_keep_the_books_balanced(pause: str, tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *ASYNC[:2], f"inference.pause_mode={pause}")
    assert train(settings).finished
    assert set(trained_prompts(tmp_path / "r").values()) == {1}


def test_a_loss_without_an_anchor_at_the_sampler_is_refused_when_sampling_runs_ahead(
    tiny_dir: Path, tmp_path: Path
) -> None:
    present = "algorithm.old_logprobs=recompute"
    with pytest.raises(SettingsError, match="older weights"):
        train(tiny_settings(tiny_dir, tmp_path / "a", *ASYNC, present))
    for allowed in (
        ["schedule.kind=sync", present],
        [*ASYNC[:1], "schedule.max_staleness_steps=0", present],
        [*ASYNC, present, "algorithm.off_policy.tis=token"],
        ASYNC,
    ):
        assert not check(tiny_settings(tiny_dir, tmp_path / "b", *allowed)).errors


def test_trainer_and_engine_share_the_cores_only_when_they_work_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    def threads(*overrides: str) -> tuple[int | None, int | None]:
        open_ones = ["training.threads=null", "inference.threads=null", *overrides]
        settings = divide_cores(tiny_settings(tiny_dir, tmp_path, *open_ones), cores=8)
        return settings.training.threads, settings.inference.threads

    assert threads(*ASYNC) == (4, 4)
    assert threads() == (None, None)
    assert threads(*ASYNC, "training.threads=1") == (1, None)


def test_one_step_off_trains_whole_batches_of_one_version(tiny_dir: Path, tmp_path: Path) -> None:
    assert train(tiny_settings(tiny_dir, tmp_path / "r", "schedule.kind=one_step_off")).finished
    rows = LedgerReader(tmp_path / "r").metrics("train")
    assert [row.values["schedule/lag_max"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert all(row.values["async/mixed_version_share"] == 0 for row in rows)
    assert [row.values["async/staleness_max"] for row in rows] == [0, 1, 1, 1, 1, 1]
