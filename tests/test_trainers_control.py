"""Rules that end a run, going back to a checkpoint, generators of one's own, and stopping inside an evaluation."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ledger_synthetic import make_run
from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.config.settings import RuleSettings
from slipstream.errors import SettingsError
from slipstream.ledger import Ledger, LedgerReader, next_incarnation
from slipstream.rollout import GroupTask
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.checkpoint import CheckpointStore
from slipstream.trainers.parts import Parts
from slipstream.trainers.rules import RuleKeeper, verdict
from slipstream.trainers.run import train
from slipstream.trajectory import Group
from test_trainers_run import StopAt, trained_prompts


def rule(**values: Any) -> str:
    """A rule as an override."""
    body = ", ".join(f"{k}: {v}" for k, v in values.items())
    return f"rules=[{{{body}}}]"


def test_a_rule_waits_for_its_window_and_takes_the_mean() -> None:
    low = RuleSettings(metric="m", below=1.0, window=3)
    assert verdict(low, [0.0, 0.0]) is None
    assert verdict(low, [9.0, 0.0, 0.0, 0.0]) == "m was 0 over the last 3 values, below 1"
    assert verdict(low, [0.0, 0.0, 9.0]) is None
    assert verdict(RuleSettings(metric="m", above=1.0), [1.5]) == "m was 1.5, above 1"


@pytest.mark.parametrize("bounds", [{"above": 1.0}, {"below": 1.0}, {"above": 1.0, "below": -1.0}])
def test_what_is_no_number_is_out_of_bounds(bounds: dict[str, float]) -> None:
    rule = RuleSettings(metric="m", window=2, **bounds)
    assert verdict(rule, [math.nan]) is None
    assert verdict(rule, [0.5, math.nan]) == "m was nan over the last 2 values, which is no number"


def keeper(folder: Path, *rules: RuleSettings) -> tuple[RuleKeeper, Ledger]:
    ledger = Ledger(folder, next_incarnation(folder))
    return RuleKeeper(rules, ledger, CheckpointStore(folder / "checkpoints")), ledger


def warnings_of(ledger: Ledger) -> list[str]:
    return [event.data["message"] for event in ledger.reader.events("warning")]


def test_a_rule_on_the_warm_start_ends_it_and_is_not_missed_in_steps_of_rl(tmp_path: Path) -> None:
    loss = RuleSettings(metric="sft/loss", above=3.0, window=2)
    keeping, ledger = keeper(tmp_path, loss)
    with ledger:
        control = Control()
        keeping.on_step_end(StepInfo("rl", 1, 9, {"m": 1.0}), control)
        keeping.on_step_end(StepInfo("rl", 2, 9, {"m": 1.0}), control)
        assert warnings_of(ledger) == []
        keeping.on_step_end(StepInfo("sft", 1, 9, {"sft/loss": 5.0}), control)
        assert control.stop_reason is None
        keeping.on_step_end(StepInfo("sft", 2, 9, {"sft/loss": 4.0}), control)
        assert control.stop_reason == "rule: sft/loss was 4.5 over the last 2 values, above 3"
        misspelt, _ = keeper(tmp_path, RuleSettings(metric="sft/lost", above=3.0))
        misspelt.on_step_end(StepInfo("sft", 1, 9, {"sft/loss": 5.0}), control)
        assert "there is sft/loss" in warnings_of(ledger)[0]


def test_a_rule_that_watches_nothing_is_told_of_once_with_the_nearest_names(tmp_path: Path) -> None:
    misspelt = RuleSettings(metric="reward/avg_raw_rewards", below=0.1, window=2)
    held = RuleSettings(metric="reward/avg_raw_reward", below=0.1, window=1)
    keeping, ledger = keeper(tmp_path, misspelt, misspelt, held)
    metrics = {"reward/avg_raw_reward": 0.5, "policy/final_loss": 0.1}
    with ledger:
        for step in (1, 2, 3):
            keeping.on_step_end(StepInfo("rl", step, 9, metrics), Control())
            assert len(warnings_of(ledger)) == (step > 1)
        keeping.on_train_end(StepInfo("rl", 9, 9), Control())
        (words,) = warnings_of(ledger)
    assert "reward/avg_raw_rewards has not come (there is reward/avg_raw_reward) by step 2" in words


def test_metrics_of_evaluations_are_missed_by_evaluations_and_in_the_end(tmp_path: Path) -> None:
    rule = RuleSettings(metric="eval/all/avg_scor", below=0.1, window=2)
    keeping, ledger = keeper(tmp_path, rule, RuleSettings(metric="late", below=0.1, window=50))
    with ledger:
        for step in (1, 2, 3):
            keeping.on_step_end(StepInfo("rl", step, 9, {"m": 1.0}), Control())
        keeping.on_eval_end(StepInfo("rl", 3, 9, {"m": 1.0, "eval/all/avg_score": 1.0}), Control())
        keeping.on_train_end(StepInfo("rl", 3, 9), Control())
        assert warnings_of(ledger) == [], "there is a second evaluation to come, and the run goes on"
        keeping.on_eval_end(StepInfo("rl", 6, 9, {"m": 1.0, "eval/all/avg_score": 1.0}), Control())
        assert "eval/all/avg_scor has not come (there is eval/all/avg_score)" in warnings_of(ledger)[0]
        keeping.on_train_end(StepInfo("rl", 9, 9), Control())
        assert ["late has not come" in words for words in warnings_of(ledger)] == [False, True]


def test_a_metric_of_an_earlier_start_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    rare = next(iter(LedgerReader(run).metrics("train")[0].values))
    keeping, ledger = keeper(run, RuleSettings(metric=rare, above=1e9))
    with ledger:
        before = len(warnings_of(ledger))
        keeping.on_train_start(StepInfo("rl", 1, 9), Control())
        keeping.on_step_end(StepInfo("rl", 2, 9, {"m": 1.0}), Control())
        assert len(warnings_of(ledger)) == before


def test_a_rule_without_a_bound_and_a_stray_checkpoint_are_refused() -> None:
    with pytest.raises(ValidationError, match="no bound"):
        RuleSettings(metric="m")
    with pytest.raises(ValidationError, match="action=rollback"):
        RuleSettings(metric="m", above=1.0, to="rl-000001")


def test_a_rule_stops_the_run_after_a_checkpoint_and_says_why(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", rule(metric="trainer/global_step", above=2.5), "data.eval=[]")
    result = train(settings)
    assert (result.steps, result.finished) == (3, False)
    assert result.stop_reason == "rule: trainer/global_step was 3, above 2.5"
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "rl-000003"
    event = LedgerReader(tmp_path / "r").events("rule")[0]
    assert event.step == 3
    assert event.data["rule"]["metric"] == "trainer/global_step"


def test_a_rule_on_an_evaluation_is_judged_when_it_was_evaluated(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(
        tiny_dir, tmp_path / "r", rule(metric="eval/all/num_prompts", above=0), "eval.every_steps=2"
    )
    result = train(settings)
    assert result.steps == 2
    assert "eval/all/num_prompts" in str(result.stop_reason)


def test_rolling_back_leaves_the_earlier_checkpoint_in_charge(tiny_dir: Path, tmp_path: Path) -> None:
    plain = tiny_settings(tiny_dir, tmp_path / "plain", *EXACT, "data.eval=[]")
    train(plain)
    more = [*EXACT, "data.eval=[]", "checkpoint.every_steps=1", "checkpoint.keep=3", "checkpoint.rollbacks=0"]
    back = rule(metric="trainer/global_step", above=2.9, window=2, action="rollback")
    result = train(tiny_settings(tiny_dir, tmp_path / "r", *more, back))
    assert result.steps == 4, "the mean of steps 3 and 4 is 3.5"
    assert "going back to rl-000002" in str(result.stop_reason)
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "rl-000002"
    assert LedgerReader(tmp_path / "r").events("rollback")[0].data["name"] == "rl-000002"
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *more)).finished, "rules may change on a resume"
    assert weights_digest(tmp_path / "r") == weights_digest(tmp_path / "plain")
    assert set(trained_prompts(tmp_path / "r").values()) == {1}


def test_a_named_checkpoint_survives_pruning(tiny_dir: Path, tmp_path: Path) -> None:
    named = rule(metric="trainer/global_step", above=5.5, action="rollback", to="rl-000001")
    more = ["data.eval=[]", "checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.rollbacks=0"]
    result = train(tiny_settings(tiny_dir, tmp_path / "r", *more, named))
    assert "going back to rl-000001" in str(result.stop_reason)


def test_a_run_goes_back_by_itself_as_often_as_it_may_and_then_ends(tiny_dir: Path, tmp_path: Path) -> None:
    more = ["schedule.kind=fully_async", "data.eval=[]", "checkpoint.every_steps=1", "checkpoint.keep=3"]
    back = rule(metric="trainer/global_step", above=3.5, action="rollback")
    settings = tiny_settings(tiny_dir, tmp_path / "r", *more, "checkpoint.rollbacks=2", back)
    result = train(settings)
    assert (result.steps, result.finished) == (4, False)
    reader = LedgerReader(tmp_path / "r")
    told = [(e.step, e.data["name"], e.data["goes_on"]) for e in reader.events("rollback")]
    assert told == [(4, "rl-000003", True), (4, "rl-000003", True), (4, "rl-000003", False)]
    starts = [e.data["resumed_from"] for e in reader.events("run_started")]
    assert starts == [None, "rl-000003", "rl-000003"]
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *more, "rules=[]")).finished
    assert set(trained_prompts(tmp_path / "r").values()) == {1}
    assert [e.step for e in reader.events("step", live_only=True)] == [1, 2, 3, 4, 5, 6]
    for event in reader.events("step", live_only=True):
        account = event.data["account"]
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled")


def test_a_checkpoint_that_the_run_went_back_from_is_not_gone_back_to(tiny_dir: Path, tmp_path: Path) -> None:
    class Back(Callback):
        """Saves after steps 2 and 3, and goes back to 1 from there; later a rule looks for a checkpoint before 4."""

        times = 0

        def on_step_end(self, info: StepInfo, control: Control) -> None:
            if info.step in (1, 2) or (info.step == 3 and not self.times):
                control.save()
            if info.step == 4 and not self.times:
                self.times += 1
                control.roll_back("rl-000002", "a whim")

    late = rule(metric="trainer/global_step", above=4.5, action="rollback")
    more = ["data.eval=[]", "checkpoint.every_steps=0", "checkpoint.keep=9", late]
    result = train(tiny_settings(tiny_dir, tmp_path / "r", *more), [Back()])
    assert (tmp_path / "r" / "checkpoints" / "rl-000003").is_dir()
    assert "going back to rl-000002" in str(result.stop_reason)


class EvalStop(Callback):
    """Stops the run while the evaluation after step 2 is under way."""

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if info.phase == "rl" and info.step == 2:
            asyncio.get_running_loop().call_later(0.01, control.stop, "interrupted")


def test_stopping_inside_an_evaluation_ends_it_and_the_resumed_run_does_it_again(
    tiny_dir: Path, tmp_path: Path
) -> None:
    more = [
        *EXACT, "eval.every_steps=2", "eval.before=false", "eval.sampling.max_tokens_per_turn=24",
        "rollout.max_total_tokens=256",
    ]  # fmt: skip
    settings = tiny_settings(tiny_dir, tmp_path / "r", *more)
    result = train(settings, [EvalStop()])
    assert (result.steps, result.stop_reason) == (2, "interrupted")
    assert LedgerReader(tmp_path / "r").events("eval") == []
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "rl-000002"
    assert train(settings).finished
    assert [e.step for e in LedgerReader(tmp_path / "r").events("eval")] == [2, 4, 6]


def test_stopping_before_the_first_step_leaves_the_first_evaluation_to_the_resumed_run(
    tiny_dir: Path, tmp_path: Path
) -> None:
    class AtOnce(Callback):
        def on_train_start(self, info: StepInfo, control: Control) -> None:
            asyncio.get_running_loop().call_later(0.01, control.stop, "interrupted")

    settings = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=1")
    result = train(settings, [AtOnce()])
    assert (result.steps, dict(result.accuracy)) == (0, {})
    assert set(train(settings).accuracy) == {"start", "rl"}


# ---- generators of one's own


class Counting:
    """A generator object that asks the default one."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.tasks = inner, []

    async def generate_group(self, task: GroupTask) -> Group:
        self.tasks.append(task)
        return await self.inner.generate_group(task)


def counting(parts: Parts) -> Counting:
    """Built from the parts, as ``rollout.generator`` does it."""
    from slipstream.trainers.parts import _default_generator

    return Counting(_default_generator(parts, None, False))


def test_a_function_that_builds_a_generator_by_import_path(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(
        tiny_dir, tmp_path / "r", "rollout.generator=test_trainers_control:counting", "data.eval=[]", "schedule.steps=2"
    )
    assert train(settings).finished
    assert len(trained_prompts(tmp_path / "r")) == 8


class Batched:
    """SkyRL's interface: a batch in, arrays out, in the same order."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.phases: list[str] = []

    async def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
        from slipstream.inference.types import GenerateRequest

        self.phases.append(batch["batch_metadata"].training_phase)
        prompts = [self.parts.renderer.render_prompt(prompt).ids for prompt in batch["prompts"]]
        names = [f"{t.instance_id}/{t.repetition_id}/{len(self.phases)}" for t in batch["trajectory_ids"]]
        results = await self.parts.engine.generate_many(
            [
                GenerateRequest(name, tuple(ids), max_tokens=6, seed=i)
                for i, (name, ids) in enumerate(zip(names, prompts, strict=True))
            ]
        )
        return {
            "prompt_token_ids": [list(ids) for ids in prompts],
            "response_ids": [list(r.token_ids) for r in results],
            "rewards": [sum(t % 2 for t in r.token_ids) / 6 for r in results],
            "loss_masks": [[1] * len(r.token_ids) for r in results],
            "stop_reasons": [r.finish_reason for r in results],
            "rollout_logprobs": [list(r.logprobs) for r in results],
        }


def test_a_generator_written_for_skyrl_trains(tiny_dir: Path, tmp_path: Path) -> None:
    made: list[Batched] = []

    def build(parts: Parts) -> Batched:
        made.append(Batched(parts))
        return made[0]

    settings = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=2", "eval.before=false")
    result = train(settings, generator=build)
    assert result.finished
    assert set(made[0].phases) == {"train", "eval"}
    records = list(LedgerReader(tmp_path / "r").trajectories(phase="train"))
    assert {r.disposition for r in records} == {"trained"}
    assert {v for r in records for v in r.trajectory.versions()} == {"policy/0/1", "policy/0/2"}


def test_what_is_no_generator_is_refused_by_name(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="generate_group"):
        train(tiny_settings(tiny_dir, tmp_path / "a"), generator=object())
    with pytest.raises(SettingsError, match="no_such_module"):
        train(tiny_settings(tiny_dir, tmp_path / "b", "rollout.generator=no_such_module:x"))


def test_a_stopped_run_can_be_stopped_again_by_a_callback(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", "data.eval=[]")
    for step in (1, 2):
        assert train(settings, [StopAt(step)]).steps == step
