"""Whole runs on a tiny model: determinism, resume, stopping, conservation, versions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.config import dump_settings
from slipstream.envs import BaseTextEnv, register
from slipstream.errors import BudgetExceededError, CheckpointError, LedgerError, SettingsError
from slipstream.ledger import LedgerReader
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.run import train
from slipstream.trainers.saving import Saver


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if info.phase == "rl" and info.step == self.step:
            control.stop("enough")


def trained_prompts(run_dir: Path) -> Counter[tuple[str, int]]:
    """(prompt, pass) of every group of the live lineage, once per group."""
    reader = LedgerReader(run_dir)
    groups = {
        (r.trajectory.prompt_uid, r.trajectory.pass_index, r.step) for r in reader.trajectories(phase="train") if r.live
    }
    return Counter((uid, turn) for uid, turn, _ in groups)


@pytest.fixture(scope="module")
def uninterrupted(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    assert train(tiny_settings(tiny_dir, run_dir, *EXACT)).finished
    return run_dir


def test_the_same_seed_twice_is_bit_equal_in_weights_losses_and_ledger(
    uninterrupted: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    train(tiny_settings(tiny_dir, tmp_path / "again", *EXACT))
    assert weights_digest(tmp_path / "again") == weights_digest(uninterrupted)
    first, second = LedgerReader(uninterrupted), LedgerReader(tmp_path / "again")
    assert first.content_digest() == second.content_digest()
    losses = [[m.values["policy/final_loss"] for m in r.metrics("train")] for r in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_directory_that_another_process_writes_is_refused_and_not_touched(
    uninterrupted: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    """Also its last bytes: two writers would interleave one ledger. The lock ends with a process that is killed."""
    run_dir = tmp_path / "held"
    run_dir.mkdir()
    code = """
import sys, time, pathlib
from slipstream.ledger.lock import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match=rf"another process \(process {holder.pid} on .*\); wait for it"):
            train(tiny_settings(tiny_dir, run_dir, *EXACT))
        assert [file.name for file in run_dir.iterdir()] == ["run.lock"]
    finally:
        holder.kill()
        holder.communicate()
    assert train(tiny_settings(tiny_dir, run_dir, *EXACT)).finished
    assert weights_digest(run_dir) == weights_digest(uninterrupted)


def test_another_seed_differs(uninterrupted: Path, tiny_dir: Path, tmp_path: Path) -> None:
    train(tiny_settings(tiny_dir, tmp_path / "other", *EXACT, "seed=1"))
    assert weights_digest(tmp_path / "other") != weights_digest(uninterrupted)


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_stopping_and_resuming_is_bit_equal_to_the_uninterrupted_run(
    uninterrupted: Path, tiny_dir: Path, tmp_path: Path, stop: int
) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r", *EXACT)
    first = train(settings, [StopAt(stop)])
    assert (first.finished, first.steps, first.stop_reason) == (False, stop, "enough")
    assert train(settings).finished
    assert weights_digest(tmp_path / "r") == weights_digest(uninterrupted)
    assert LedgerReader(tmp_path / "r").metrics("train")[-1].values["trainer/global_step"] == 6
    counts = trained_prompts(tmp_path / "r")
    assert set(counts.values()) == {1}
    assert counts == trained_prompts(uninterrupted)


def test_a_finished_run_does_nothing_more(uninterrupted: Path, tiny_dir: Path) -> None:
    before = weights_digest(uninterrupted)
    result = train(tiny_settings(tiny_dir, uninterrupted, *EXACT))
    assert result.finished
    assert result.steps == 6
    assert weights_digest(uninterrupted) == before
    assert len(LedgerReader(uninterrupted).metrics("train")) == 6


def test_every_trained_token_carries_the_version_that_sampled_it(uninterrupted: Path) -> None:
    reader = LedgerReader(uninterrupted)
    published = [e.data["weight_version_before"] for e in reader.events("step")]
    for record in reader.trajectories(phase="train"):
        versions = set(record.trajectory.versions())
        assert versions == {published[record.step - 1]}, "staleness 0: sampled by the weights that the step began with"
    assert len(set(published)) == 6


def test_tokens_are_conserved_against_the_engines_own_count(uninterrupted: Path) -> None:
    accounts = [e.data["account"] for e in LedgerReader(uninterrupted).events("step")]
    last = accounts[-1]
    assert last["sampled"] > 0
    assert last["sampled"] == sum(v for k, v in last.items() if k != "sampled")


def test_supervised_steps_then_rl_resume_inside_the_first_phase(tiny_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "chat.jsonl"
    chats = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(4)
        for b in range(4)
    ]
    rows.write_text("\n".join(json.dumps(c) for c in chats))
    sft = [f"data.sft={rows}", "sft.steps=4", "sft.rows_per_step=4", "sft.optimizer.lr=0.01", "schedule.steps=2"]

    class StopSft(Callback):
        def on_step_end(self, info: StepInfo, control: Control) -> None:
            if info.phase == "sft" and info.step == 3:
                control.stop("sft")

    whole = tiny_settings(tiny_dir, tmp_path / "whole", *EXACT, *sft)
    assert set(train(whole).accuracy) == {"start", "sft", "rl"}
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *EXACT, *sft)
    assert train(broken, [StopSft()]).stop_reason == "sft"
    assert train(broken).finished
    assert weights_digest(tmp_path / "broken") == weights_digest(tmp_path / "whole")
    numbers = [[e.data["version"].split("/")[-1] for e in LedgerReader(run).events("publish")]
               for run in (tmp_path / "whole", tmp_path / "broken")]  # fmt: skip
    assert numbers[0] == numbers[1] == ["1", "2", "3", "4"], "the untouched model, the warm start, and two steps"
    losses = [m.values["sft/loss_metrics/token_nll"] for m in LedgerReader(tmp_path / "whole").metrics("sft")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_kl_reference_minibatches_and_epochs_run_and_resume(tiny_dir: Path, tmp_path: Path) -> None:
    more = [
        "algorithm.kl_coef=0.05", "algorithm.entropy_coef=0.01", "algorithm.minibatches_per_step=2",
        "algorithm.epochs_per_step=2", "schedule.steps=3", "checkpoint.every_steps=1",
    ]  # fmt: skip
    train(tiny_settings(tiny_dir, tmp_path / "whole", *EXACT, *more))
    settings = tiny_settings(tiny_dir, tmp_path / "r", *EXACT, *more)
    train(settings, [StopAt(1)])
    train(settings)
    assert weights_digest(tmp_path / "r") == weights_digest(tmp_path / "whole")
    last = LedgerReader(tmp_path / "r").metrics("train")[-1].values
    assert last["policy/optimizer_steps"] == 4
    assert last["policy/policy_kl"] > 0
    assert last["policy/policy_entropy"] > 0


def test_an_adaptive_kl_coefficient_goes_on_where_it_was(tiny_dir: Path, tmp_path: Path) -> None:
    controller = [f"algorithm.kl_controller.{value}" for value in ("kind=adaptive", "target=0.001", "horizon=20")]
    given = [*EXACT, "algorithm.kl_coef=0.1", *controller, "schedule.steps=4", "data.eval=[]"]

    def coefficients(name: str) -> list[float]:
        return [row.values["policy/kl_coef"] for row in LedgerReader(tmp_path / name).metrics("train")]

    train(tiny_settings(tiny_dir, tmp_path / "whole", *given))
    settings = tiny_settings(tiny_dir, tmp_path / "cut", *given)
    train(settings, [StopAt(3)])
    train(settings)
    assert coefficients("cut") == coefficients("whole")
    assert coefficients("whole")[0] == 0.1
    assert len(set(coefficients("whole"))) == 4, "the coefficient moved at every step"


def test_other_settings_are_refused_on_resume_by_name(uninterrupted: Path, tiny_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"training\.optimizer\.lr"):
        train(tiny_settings(tiny_dir, uninterrupted, *EXACT, "training.optimizer.lr=0.5"))


def test_changed_data_is_refused_on_resume(tiny_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_spec": {"ground_truth": "2"}}
    data.write_text("\n".join(json.dumps({**row, "uid": f"u{i}"}) for i in range(8)))
    settings = tiny_settings(tiny_dir, tmp_path / "r", *EXACT, f"data.train={data}")
    train(settings, [StopAt(2)])
    data.write_text("\n".join(json.dumps({**row, "uid": f"v{i}"}) for i in range(8)))
    with pytest.raises(CheckpointError, match="data has changed"):
        train(settings)


def test_lr_zero_gives_a_ratio_of_one_at_another_temperature(tiny_dir: Path, tmp_path: Path) -> None:
    train(
        tiny_settings(
            tiny_dir, tmp_path / "r", "training.optimizer.lr=0", "rollout.sampling.temperature=0.7", "schedule.steps=2"
        )
    )
    for row in LedgerReader(tmp_path / "r").metrics("train"):
        assert row.values["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row.values["policy/loss_metrics/ratio_max"] == pytest.approx(1.0, abs=1e-4)


class Flaky(BaseTextEnv):
    """Raises for one sample in four, else rewards digits."""

    calls = 0

    def __init__(self, env_config: object, extras: dict[str, object]) -> None:
        super().__init__()

    def step(self, action: str):
        type(self).calls += 1
        if type(self).calls % 4 == 0:
            raise RuntimeError("the sandbox is gone")
        return {"observations": [], "reward": float(any(c.isdigit() for c in action)), "done": True, "metadata": {}}


class Broken(Flaky):
    def step(self, action: str):
        raise RuntimeError("always")


class Interrupted(BaseTextEnv):
    """Two turns; the server behind the first instances goes away under the second turn."""

    made = 0

    def __init__(self, env_config: object, extras: dict[str, object]) -> None:
        super().__init__()
        type(self).made += 1
        self.lost = type(self).made <= 3

    def step(self, action: str):
        self.turns += 1
        if self.turns == 2 and self.lost:
            raise ConnectionError("the server went away")
        observations = [{"role": "user", "content": "again"}] if self.turns == 1 else []
        return {"observations": observations, "reward": 0.5, "done": self.turns == 2, "metadata": {}}


register(id="interrupted_test", entry_point=Interrupted)
register(id="flaky_test", entry_point=Flaky)
register(id="broken_test", entry_point=Broken)


def rows_for(env: str, path: Path) -> Path:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "env_class": env} for i in range(16)]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


def test_a_failing_environment_costs_members_not_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    data = rows_for("flaky_test", tmp_path / "d.jsonl")
    result = train(tiny_settings(tiny_dir, tmp_path / "r", f"data.train={data}", "schedule.steps=3", "data.eval=[]"))
    assert result.finished
    records = LedgerReader(tmp_path / "r").trajectories(phase="train")
    kinds = Counter(r.disposition for r in records)
    assert kinds["superseded"] > 0, "a retryable failure was tried again"
    for record in records:
        if record.disposition == "failed":
            assert record.advantage is None


def test_a_lost_environment_costs_no_completed_turn_and_the_ledger_tells_of_it(tiny_dir: Path, tmp_path: Path) -> None:
    data = rows_for("interrupted_test", tmp_path / "d.jsonl")
    Interrupted.made = 0
    train(tiny_settings(tiny_dir, tmp_path / "r", f"data.train={data}", "schedule.steps=1", "data.eval=[]"))
    reader = LedgerReader(tmp_path / "r")
    told = [event.data for event in reader.events("recovered")]
    assert [(event["turn"], event["fault"]) for event in told] == [(1, "env_raised")] * 3
    assert all("went away" in event["reason"] for event in told)
    records = list(reader.trajectories(phase="train"))
    assert {event["trajectory"] for event in told} <= {r.trajectory.trajectory_id for r in records}
    assert {(r.disposition, r.trajectory.attempt) for r in records} == {("trained", 0)}
    assert all(len(r.trajectory.turns) == 2 for r in records)


def test_the_ledger_tells_of_what_an_evaluation_before_training_recovered(tiny_dir: Path, tmp_path: Path) -> None:
    data = rows_for("interrupted_test", tmp_path / "d.jsonl")
    Interrupted.made = 0
    overrides = [f"data.train={data}", f"data.eval={data}", "schedule.steps=1", "eval.before=true", "eval.after=false"]
    train(tiny_settings(tiny_dir, tmp_path / "r", *overrides))
    reader = LedgerReader(tmp_path / "r")
    told = [event.data["trajectory"] for event in reader.events("recovered")]
    assert len(told) == 3
    assert not set(told) & {r.trajectory.trajectory_id for r in reader.trajectories(phase="train")}


def test_a_hopeless_environment_stops_the_run_naming_the_fault(tiny_dir: Path, tmp_path: Path) -> None:
    data = rows_for("broken_test", tmp_path / "d.jsonl")
    with pytest.raises(BudgetExceededError, match="always"):
        train(tiny_settings(tiny_dir, tmp_path / "r", f"data.train={data}", "data.eval=[]"))
    errors = LedgerReader(tmp_path / "r").events("error")
    assert "BudgetExceededError" in errors[-1].data["message"]


class Dull(BaseTextEnv):
    """The first groups all earn the same; later ones have a spread."""

    made = 0

    def __init__(self, env_config: object, extras: dict[str, object]) -> None:
        super().__init__()
        type(self).made += 1
        self.reward = 1.0 if type(self).made <= 6 else float(type(self).made % 2)

    def step(self, action: str):
        return {"observations": [], "reward": self.reward, "done": True, "metadata": {}}


register(id="dull_test", entry_point=Dull)


@pytest.mark.parametrize("kind", ["filter", "replace"])
@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_a_first_round_without_a_spread_is_followed_by_another(
    tiny_dir: Path, tmp_path: Path, kind: str, schedule: str
) -> None:
    data = rows_for("dull_test", tmp_path / "d.jsonl")
    Dull.made = 0
    given = [
        f"data.train={data}", "data.eval=[]", "schedule.steps=1", f"schedule.kind={schedule}",
        "schedule.prompts_per_step=2", "algorithm.drop_zero_variance=true",
        f"algorithm.dynamic_sampling.kind={kind}", "schedule.step_deadline_seconds=60",
        "inference.request_timeout_seconds=60",
    ]  # fmt: skip
    result = train(tiny_settings(tiny_dir, tmp_path / "r", *given))
    assert (result.finished, result.steps) == (True, 1)
    assert Dull.made > 6


@pytest.mark.parametrize("schedule", ["fully_async", "bounded", "windowed"])
def test_steps_of_a_queue_that_find_no_spread_train_nothing_and_the_run_goes_on(
    tiny_dir: Path, tmp_path: Path, schedule: str
) -> None:
    """After ``max_rounds`` batches of refused groups a step takes what it has, if only that is nothing."""
    data = rows_for("dull_test", tmp_path / "d.jsonl")
    Dull.made = -10_000  # the same reward for everyone
    given = [
        f"data.train={data}", "data.eval=[]", "schedule.steps=2", f"schedule.kind={schedule}",
        "schedule.max_staleness_steps=1", "schedule.prompts_per_step=2", "algorithm.drop_zero_variance=true",
        "algorithm.dynamic_sampling.kind=filter", "algorithm.dynamic_sampling.max_rounds=2",
        "schedule.step_deadline_seconds=60", "inference.request_timeout_seconds=60",
    ]  # fmt: skip
    result = train(tiny_settings(tiny_dir, tmp_path / "r", *given))
    assert (result.finished, result.steps) == (True, 2)
    records = list(LedgerReader(tmp_path / "r").trajectories(phase="train"))
    assert {record.disposition for record in records} == {"filtered:zero_variance"}
    groups = {record.trajectory.group_id for record in records}
    assert 2 * 4 <= len(groups) <= 2 * (4 + 2), "two batches of two groups a step, and what ran beside them"


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tiny_dir: Path, tmp_path: Path) -> None:
    short = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=2", "data.eval=[]")
    assert train(short).steps == 2
    longer = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=4", "data.eval=[]")
    result = train(longer)
    assert (result.finished, result.steps) == (True, 4)
    assert set(trained_prompts(tmp_path / "r").values()) == {1}


def test_a_longer_run_does_not_stretch_a_learning_rate_that_falls(tiny_dir: Path, tmp_path: Path) -> None:
    falls = ["training.optimizer.scheduler=cosine", "data.eval=[]"]
    train(tiny_settings(tiny_dir, tmp_path / "r", *falls, "schedule.steps=4"), [StopAt(2)])
    with pytest.raises(SettingsError, match="laid out for 4 optimiser steps"):
        train(tiny_settings(tiny_dir, tmp_path / "r", *falls, "schedule.steps=8"))
    kept = [*falls, "schedule.steps=5", "training.optimizer.total_steps=4"]
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *kept)).steps == 5


def test_an_evaluation_that_is_switched_on_later_is_not_of_the_untouched_model(tiny_dir: Path, tmp_path: Path) -> None:
    first = tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=4", "data.eval=[]")
    train(first, [StopAt(2)])
    train(tiny_settings(tiny_dir, tmp_path / "r", "schedule.steps=4", "eval.before=true"))
    stages = {event.data["stage"] for event in LedgerReader(tmp_path / "r").events("eval")}
    assert stages == {"rl"}


def test_work_from_before_the_first_checkpoint_is_of_the_same_settings(tiny_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_dir, tmp_path / "r")
    (tmp_path / "r" / "rollouts").mkdir(parents=True)
    (tmp_path / "r" / "rollouts" / "after-start.jsonl").write_text('{"kind": "gone", "group": "g"}\n')
    (tmp_path / "r" / "settings.yaml").write_text(dump_settings(settings))
    Saver(settings.run_dir, settings).find()
    other = settings.model_copy(update={"seed": 1})
    with pytest.raises(SettingsError, match="seed: 0 -> 1"):
        Saver(settings.run_dir, other).find()
    never = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"resume": "never"})})
    with pytest.raises(CheckpointError, match="already holds a run"):
        Saver(settings.run_dir, never).find()


def test_adapters_that_were_warmed_up_are_their_own_reference(tiny_dir: Path, tmp_path: Path) -> None:
    """KL is measured against the model after its supervised phase, also where only adapters are trained."""
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    chats.write_text(json.dumps(row) + "\n")
    given = [
        f"data.sft={chats}", "sft.steps=2", "sft.rows_per_step=1", "sft.optimizer.lr=0.05", "training.lora.rank=4",
        "algorithm.kl_coef=0.1", "schedule.steps=2", "data.eval=[]", *EXACT, "checkpoint.every_steps=1",
    ]  # fmt: skip
    train(tiny_settings(tiny_dir, tmp_path / "whole", *given))
    first, second = (m.values["policy/policy_kl"] for m in LedgerReader(tmp_path / "whole").metrics("train"))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-6
    broken = tiny_settings(tiny_dir, tmp_path / "broken", *given)
    train(broken, [StopAt(1)])
    train(broken)
    again = [m.values["policy/policy_kl"] for m in LedgerReader(tmp_path / "broken").metrics("train")]
    assert again == [first, second]


def test_kl_in_the_reward_survives_a_step_without_groups(tiny_dir: Path, tmp_path: Path) -> None:
    Dull.made = -1_000_000  # all earn the same
    given = [
        "algorithm.kl_coef=0.01", "algorithm.kl_in=reward", "algorithm.drop_zero_variance=true", "schedule.steps=1",
        "data.eval=[]", f"data.train={rows_for('dull_test', tmp_path / 'd.jsonl')}",
    ]  # fmt: skip
    assert train(tiny_settings(tiny_dir, tmp_path / "r", *given)).steps == 1
    (metrics,) = LedgerReader(tmp_path / "r").metrics("train")
    assert metrics.values["policy/optimizer_steps"] == 0


def test_callbacks_save_and_evaluate_in_the_supervised_phase_too(tiny_dir: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    chats.write_text(json.dumps(row) + "\n")

    class Asks(Callback):
        def on_step_end(self, info, control) -> None:
            if (info.phase, info.step) == ("sft", 1):
                control.save()
                control.evaluate()

    given = [
        f"data.sft={chats}", "sft.steps=3", "sft.rows_per_step=1", "schedule.steps=0", "checkpoint.every_steps=0",
        "eval.before=false", "checkpoint.keep=9",
    ]  # fmt: skip
    train(tiny_settings(tiny_dir, tmp_path / "r", *given), [Asks()])
    reader = LedgerReader(tmp_path / "r")
    assert next(event.data["name"] for event in reader.events("checkpoint")) == "sft-000001"
    assert [(e.step, e.data["stage"]) for e in reader.events("eval")] == [(1, "sft"), (0, "sft")]


class Counted(BaseTextEnv):
    """Says how its episodes' metrics are put together."""

    def __init__(self, env_config: object, extras: dict[str, object]) -> None:
        super().__init__()

    def step(self, action: str):
        return {"observations": [], "reward": float(len(action) % 2), "done": True, "metadata": {}}

    def get_metrics(self):
        return {"wins": 2}

    @staticmethod
    def aggregate_metrics(metrics):
        if metrics[0]["wins"] != 2:
            raise AssertionError(metrics)
        return {"wins_total": sum(m["wins"] for m in metrics), "note": "text is left out", "nothing": float("nan")}


register(id="counted_test", entry_point=Counted)


def test_an_environments_own_rule_puts_its_metrics_together(tiny_dir: Path, tmp_path: Path) -> None:
    data = rows_for("counted_test", tmp_path / "d.jsonl")
    train(tiny_settings(tiny_dir, tmp_path / "r", f"data.train={data}", "schedule.steps=1", "data.eval=[]"))
    (metrics,) = LedgerReader(tmp_path / "r").metrics("train")
    found = {name: value for name, value in metrics.values.items() if name.startswith("environment/")}
    assert found == {"environment/wins_total": 24.0}
