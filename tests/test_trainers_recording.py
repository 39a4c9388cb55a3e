"""Recorded runs are repeated to the bit; single updates are repeated from the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_helpers import slipstream
from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.errors import LedgerError
from slipstream.ledger import Event, LedgerReader
from slipstream.trainers import replay
from slipstream.trainers.replay import replay_run, replay_update
from slipstream.trainers.run import train
from test_trainers_async import ASYNC
from test_trainers_run import StopAt


def asynchronous(pause: str, tokens: int = 32) -> list[str]:
    """Turns of so many tokens that updates may land in the middle of them."""
    total = f"rollout.max_total_tokens={max(256, 4 * tokens)}"
    long = [f"rollout.sampling.max_tokens_per_turn={tokens}", total, "eval.every_steps=3"]
    return [*ASYNC[:2], f"inference.pause_mode={pause}", *long]


def train_mixed(tiny_dir: Path, folder: Path, pause: str, *more: str) -> Path:
    """A recorded run in which updates did land inside trajectories; how long turns must be hangs on the machine."""
    for tokens in (32, 64, 120):
        run_dir = folder / f"run{tokens}"
        train(tiny_settings(tiny_dir, run_dir, *EXACT, *asynchronous(pause, tokens), *more))
        if mixed(run_dir) > 0:
            return run_dir
    raise AssertionError("no update landed inside a trajectory")


def mixed(run_dir: Path) -> float:
    """The largest share, of any step, of trajectories whose tokens are of several versions."""
    return max(row.values["async/mixed_version_share"] for row in LedgerReader(run_dir).metrics("train"))


@pytest.fixture(scope="module")
def recorded(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = train_mixed(tiny_dir, tmp_path_factory.mktemp("recorded"), "keep", "checkpoint.every_steps=1")
    return run_dir


def test_an_asynchronous_run_is_repeated_to_the_bit(recorded: Path) -> None:
    rows = LedgerReader(recorded).metrics("train")
    assert max(row.values["schedule/lag_max"] for row in rows) >= 1, "else nothing asynchronous was repeated"
    verdict = replay_run(recorded)
    assert verdict.equal
    assert (verdict.steps, verdict.weights_equal, list(verdict.differing)) == (6, True, [])
    assert weights_digest(recorded) == weights_digest(verdict.replayed_in)


@pytest.mark.parametrize("pause", ["abort", "wait"])
def test_other_pauses_are_repeated_too(pause: str, tiny_dir: Path, tmp_path: Path) -> None:
    if pause == "abort":
        run_dir = train_mixed(tiny_dir, tmp_path, pause)
    else:  # waiting for open requests keeps versions out of turns; only a trajectory of several turns can mix them
        run_dir = tmp_path / "r"
        train(tiny_settings(tiny_dir, run_dir, *EXACT, *asynchronous(pause)))
    assert replay_run(run_dir, tmp_path / "again").equal


def test_a_run_that_was_stopped_is_repeated_as_far_as_it_went(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *EXACT, *asynchronous("keep"))
    train(settings, [StopAt(2)])
    verdict = replay_run(tmp_path / "r")
    assert (verdict.steps, verdict.weights_equal, verdict.equal) == (2, None, True)
    train(settings)
    with pytest.raises(LedgerError, match="started 2 times"):
        replay_run(tmp_path / "r")


def test_a_difference_is_seen_and_named(recorded: Path, tiny_dir: Path, tmp_path: Path) -> None:
    train(tiny_settings(tiny_dir, tmp_path / "r", *EXACT, *asynchronous("keep"), "schedule.steps=2"))
    settings = (tmp_path / "r" / "settings.yaml").read_text()
    (tmp_path / "r" / "settings.yaml").write_text(settings.replace("lr: 0.002", "lr: 0.003"))
    verdict = replay_run(tmp_path / "r")
    assert not verdict.equal
    assert list(verdict.differing) == [1, 2]
    assert verdict.weights_equal is False


class Ledgers:
    """Stands in for two readers: what each side holds."""

    def __init__(self, steps: dict[int, str], scores: dict[tuple[int, str], float]) -> None:
        self._steps, self._scores = steps, scores

    def step_digests(self, *, without: Any) -> dict[int, str]:
        return self._steps

    def events(self, kind: str, *, live_only: bool) -> list[Event]:
        named = [(step, stage, {"name": "all", "stage": stage}) for step, stage in self._scores]
        return [Event(0, kind, s, {**data, "scores": self._scores[s, stage]}, {}) for s, stage, data in named]


STEPS, SCORES = {1: "a", 2: "b"}, {(0, "start"): 0.1, (1, "rl"): 0.2, (2, "rl"): 0.3}
LATE = {(0, "start"): 0.1, (1, "rl"): 0.2}


@pytest.mark.parametrize(
    ("one", "other", "whole", "differing", "evaluations"),
    [
        ((STEPS, SCORES), (STEPS, SCORES), True, [], []),
        ((STEPS, SCORES), ({1: "a"}, SCORES), True, [2], []),
        (({1: "a"}, SCORES), ({1: "a"}, SCORES), True, [2], []),  # missing on both sides is not equal
        ((STEPS, SCORES), (STEPS, LATE), True, [], ["rl of all at step 2 (not in the replay)"]),
        ((STEPS, LATE), (STEPS, SCORES), True, [], ["rl of all at step 2 (only in the replay)"]),
        ((STEPS, LATE), (STEPS, {(0, "start"): 0.7, (1, "rl"): 0.2}), True, [], ["start of all at step 0"]),
        ((STEPS, SCORES), (STEPS, LATE), False, [], []),  # the replay ends before the last evaluation
        ((STEPS, SCORES), (STEPS, {(0, "start"): 0.1}), False, [], ["rl of all at step 1 (not in the replay)"]),
    ],
)
def test_what_one_side_lacks_is_a_difference(
    one: Any, other: Any, whole: bool, differing: list[int], evaluations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {Path("/one"): Ledgers(*one), Path("/other"): Ledgers(*other)}
    monkeypatch.setattr(replay, "LedgerReader", held.__getitem__)
    verdict = replay._compare(Path("/one"), Path("/other"), 2, whole=whole)
    assert (list(verdict.differing), list(verdict.evaluations)) == (differing, evaluations)
    assert verdict.equal == (not differing and not evaluations)


def test_a_fast_run_has_no_recording(tiny_dir: Path, tmp_path: Path) -> None:
    train(tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=1", "data.eval=[]"))
    with pytest.raises(LedgerError, match="determinism=exact"):
        replay_run(tmp_path / "r")


@pytest.mark.parametrize("step", [6, 5])
def test_one_update_is_repeated_from_the_ledger_to_the_bit(step: int, recorded: Path) -> None:
    verdict = replay_update(recorded, step)
    assert verdict.gap == 0
    assert verdict.tokens > 0
    assert "policy/final_loss" in verdict.metrics
    assert verdict.began_at == f"rl-{step - 1:06d}" if step == 6 else True


def test_an_update_without_a_checkpoint_before_it_begins_at_the_first_weights(recorded: Path) -> None:
    verdict = replay_update(recorded, 2)
    assert (verdict.began_at, verdict.updates, verdict.gap) == ("the first weights", 2, 0)


def test_rules_on_rewards_falling_rates_and_stand_ins_are_repeated_too(tiny_dir: Path, tmp_path: Path) -> None:
    """The record holds what the rules made of rewards; they must not be applied to that again."""
    given = [
        *EXACT, "schedule.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=9", "data.eval=[]",
        "rollout.sampling.max_tokens_per_turn=6", "rollout.max_turns=1", "algorithm.overlong.factor=1.0",
        "algorithm.overlong.max_tokens=6", "algorithm.overlong.buffer_tokens=5", "algorithm.drop_zero_variance=true",
        "algorithm.dynamic_sampling.kind=replace", "algorithm.dynamic_sampling.min_good_fraction=0.0",
        "training.optimizer.scheduler=cosine",
    ]  # fmt: skip
    train(tiny_settings(tiny_dir, tmp_path / "r", *given))
    reader = LedgerReader(tmp_path / "r")
    components = {r.component for record in reader.trajectories(phase="train") for r in record.trajectory.rewards}
    assert "overlong" in components
    for step in (1, 3):
        verdict = replay_update(tmp_path / "r", step)
        assert verdict.gap == 0, (step, verdict)
        assert verdict.tokens > 0


def test_a_step_that_is_not_there_is_named(recorded: Path) -> None:
    with pytest.raises(LedgerError, match="step 7"):
        replay_update(recorded, 7)


def test_the_command_repeats_a_run_or_a_step_and_its_exit_code_says_what_it_found(
    recorded: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    whole = slipstream("replay", recorded, "--into", tmp_path / "again")
    assert whole.exit_code == 0, whole.output
    assert "6 steps repeated" in whole.output
    assert "every step equal to the bit, evaluations equal, weights equal to the bit" in whole.output
    one = slipstream("replay", recorded, "--step", 6)
    assert one.exit_code == 0, one.output
    assert "step 6 from rl-000005 (1 updates)" in one.output
    assert "equal to the bit" in one.output
    train(tiny_settings(tiny_dir, tmp_path / "r", *EXACT, *asynchronous("keep"), "schedule.steps=1", "data.eval=[]"))
    settings = (tmp_path / "r" / "settings.yaml").read_text()
    (tmp_path / "r" / "settings.yaml").write_text(settings.replace("lr: 0.002", "lr: 0.003"))
    other = slipstream("replay", tmp_path / "r")
    assert other.exit_code == 1, other.output
    assert "weights DIFFER" in other.output
