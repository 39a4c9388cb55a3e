"""The plan: arithmetic by hand, memory by hand, and every contradiction refused with its keys and mend."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Problem, RunSettings, load_settings, make_plan, plan_text, read_facts, resolve_settings
from slipstream.config.facts import BUNDLED, ModelFacts, facts_from_config
from slipstream.config.memory import OVERHEAD_BYTES, estimate_memory, trainable_parameters
from slipstream.config.plan import evaluation_points
from slipstream.errors import ModelError, SettingsError

RUNNABLE = ["data.train=builtin:arithmetic", "data.eval=builtin:arithmetic"]


def settings(*overrides: str) -> RunSettings:
    return load_settings([], [*RUNNABLE, *overrides]).settings


def problems(*overrides: str, severity: str = "error", **known: Any) -> list[Problem]:
    return [p for p in make_plan(settings(*overrides), **known).problems if p.severity == severity]


def test_the_default_run_has_no_problem() -> None:
    plan = make_plan(settings(), BUNDLED, 600, 100)
    assert list(plan.problems) == []
    plan.raise_if_refused()


def test_batch_arithmetic() -> None:
    plan = make_plan(
        settings(
            "schedule.prompts_per_step=6",
            "schedule.generate_prompts_per_step=10",
            "rollout.samples_per_prompt=4",
            "algorithm.minibatches_per_step=3",
            "algorithm.epochs_per_step=2",
            "rollout.max_turns=3",
            "rollout.sampling.max_tokens_per_turn=100",
            "rollout.max_prompt_tokens=50",
            "rollout.max_total_tokens=400",
            "training.max_tokens_per_microbatch=1000",
        )
    )
    batch = plan.batch
    assert (batch.prompts_drawn, batch.prompts_trained) == (10, 6)
    assert (batch.samples_per_step, batch.rows_trained) == (40, 24)
    assert batch.optimizer_steps == 6
    assert (batch.groups_per_minibatch, batch.rows_per_minibatch) == (2, 8)
    assert batch.sampled_tokens == 40 * 300
    assert batch.trained_row_tokens == 24 * 400
    assert batch.microbatches_per_minibatch == 4  # two rows of 400 fit into 1000


def test_sampled_tokens_stay_within_the_total() -> None:
    plan = make_plan(settings("rollout.max_turns=100", "rollout.max_total_tokens=2048"))
    assert plan.batch.sampled_tokens == 16 * 8 * 2047


def test_schedule_arithmetic() -> None:
    plan = make_plan(
        settings(
            "schedule.steps=10",
            "schedule.prompts_per_step=4",
            "eval.every_steps=4",
            "eval.samples_per_prompt=2",
            "data.eval_limit=30",
            "checkpoint.every_steps=5",
            "sft.steps=7",
            "data.sft=rows.jsonl",
        ),
        None,
        20,
        50,
    )
    schedule = plan.schedule
    assert (schedule.steps, schedule.optimizer_steps, schedule.sft_steps) == (10, 10, 7)
    assert schedule.passes_over_data == 2.0
    assert schedule.evaluations == 4  # before, 4, 8, after
    assert schedule.evaluation_samples == 4 * 30 * 2
    assert schedule.checkpoints == 2  # 5, 10
    assert schedule.trajectories == 10 * 4 * 8


@pytest.mark.parametrize(
    ("given", "points"),
    [
        ([], [0, 6]),
        (["eval.every_steps=2"], [0, 2, 4, 6]),
        (["eval.every_steps=4", "eval.before=false"], [4, 6]),
        (["eval.before=false", "eval.after=false"], []),
        (["schedule.steps=0"], [0]),
    ],
)
def test_no_step_is_evaluated_twice(given: list[str], points: list[int]) -> None:
    assert evaluation_points(settings("schedule.steps=6", *given)) == points


def test_epochs_become_steps() -> None:
    by_epochs = settings("schedule.epochs=3", "schedule.prompts_per_step=4")
    assert resolve_settings(by_epochs, 21).schedule.steps == 15
    assert resolve_settings(by_epochs, 1).schedule.steps == 1
    capped = settings("schedule.epochs=3", "schedule.steps=2")
    assert resolve_settings(capped, 1000).schedule.steps == 2
    assert resolve_settings(resolve_settings(by_epochs, 21), 21) == resolve_settings(by_epochs, 21)
    with pytest.raises(SettingsError, match=r"schedule\.epochs"):
        resolve_settings(by_epochs, None)
    assert make_plan(by_epochs).schedule.steps is None


def test_total_steps_is_filled_for_schedules_that_need_it() -> None:
    cosine = settings("training.optimizer.scheduler=cosine", "schedule.steps=5", "algorithm.minibatches_per_step=2")
    assert resolve_settings(cosine).training.optimizer.total_steps == 10
    assert resolve_settings(settings()).training.optimizer.total_steps is None
    sft_only = settings("training.optimizer.scheduler=linear", "schedule.steps=0")
    assert resolve_settings(sft_only).training.optimizer.total_steps == 1
    given = settings("training.optimizer.scheduler=cosine", "training.optimizer.total_steps=99")
    assert resolve_settings(given).training.optimizer.total_steps == 99


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["algorithm.minibatches_per_step=17"], "algorithm.minibatches_per_step"),
        (["rollout.max_prompt_tokens=2048"], "rollout.max_total_tokens"),
        (["rollout.sampling.repetition_penalty=1.1"], "rollout.sampling.repetition_penalty"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature"),
        (["algorithm.kl_in=reward"], "algorithm.kl_coef"),
        (
            ["training.determinism=exact", "inference.engine=http", "inference.urls=[http://a:1]", "schedule.steps=0"],
            "training.determinism",
        ),
        (["inference.engine=http", "inference.urls=[http://a:1]"], "inference.engine"),
        (["schedule.generate_prompts_per_step=8"], "schedule.generate_prompts_per_step"),
        (
            ["schedule.generate_prompts_per_step=32", "algorithm.drop_zero_variance=false"],
            "algorithm.drop_zero_variance",
        ),
        (["inference.max_model_len=1000"], "inference.max_model_len"),
        (["inference.kv_cache_tokens=1000"], "inference.kv_cache_tokens"),
        (["training.lora.rank=8", "training.lora.dropout=0.1"], "training.lora.dropout"),
        (["model.attn_implementation=flash_attention_2"], "model.attn_implementation"),
        (["rollout.env_step_seconds=4000"], "rollout.env_step_seconds"),
        (["inference.request_timeout_seconds=4000"], "inference.request_timeout_seconds"),
        (["data.train=[]"], "data.train"),
        (["sft.steps=3"], "data.sft"),
        (["schedule.steps=0", "data.eval=[]"], "schedule.steps"),
    ],
)
def test_contradictions_are_refused(given: list[str], key: str) -> None:
    found = problems(*given)
    assert [key in problem.keys for problem in found] == [True]
    assert found[0].mend
    with pytest.raises(SettingsError, match=key.replace(".", r"\.")):
        make_plan(settings(*given)).raise_if_refused()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["algorithm.minibatches_per_step=3"], "algorithm.minibatches_per_step"),
        (["training.max_tokens_per_microbatch=1024"], "training.max_tokens_per_microbatch"),
        (["eval.samples_per_prompt=4"], "eval.samples_per_prompt"),
        (["eval.every_steps=200"], "eval.every_steps"),
        (["training.optimizer.warmup_steps=100"], "training.optimizer.warmup_steps"),
        (["model.dtype=float32"], "model.dtype"),
        (["algorithm.clip_low=1.5"], "algorithm.clip_low"),
        (["algorithm.clip_low=1.5", "algorithm.loss=dual_clip"], "algorithm.clip_low"),
        (["algorithm.old_logprobs=recompute"], "algorithm.old_logprobs"),
        (["rollout.concurrency=4"], "rollout.concurrency"),
        (["data.eval=[]"], "data.eval"),
        (["data.sft=rows.jsonl"], "sft.steps"),
        (["training.optimizer.lr=0"], "training.optimizer.lr"),
        (["training.optimizer.scheduler=linear", "training.optimizer.total_steps=5"], "training.optimizer.total_steps"),
        (["rollout.sampling.max_tokens_per_turn=1500"], "rollout.max_total_tokens"),
    ],
)
def test_doubtful_settings_warn(given: list[str], key: str) -> None:
    plan = make_plan(settings(*given))
    assert [key in problem.keys for problem in plan.warnings] == [True]
    plan.raise_if_refused()


@pytest.mark.parametrize(
    "given",
    [
        "eval.every_steps=2",
        "checkpoint.rollouts=continue",
        "schedule.kind=one_step_off",
        "schedule.epochs=3",
        "schedule.generate_prompts_per_step=32",
        "schedule.full_batch=true",
        "schedule.max_staleness_steps=1",
    ],
)
def test_what_rl_steps_alone_read_warns_without_them(given: str) -> None:
    supervised = ["schedule.steps=0", "sft.steps=5", "data.sft=rows.jsonl"]
    plan = make_plan(settings(*supervised, given))
    assert [(problem.keys, problem.severity) for problem in plan.problems] == [
        ((given.split("=")[0], "schedule.steps"), "warning")
    ]
    assert not make_plan(settings(*supervised, "checkpoint.every_steps=2", "eval.before=false")).problems


def test_evaluation_may_truncate_and_be_greedy() -> None:
    assert problems("eval.sampling.top_p=0.9", "eval.sampling.temperature=0.7") == []


def test_sampling_rules_hold_only_when_something_is_trained_by_rl() -> None:
    assert problems("schedule.steps=0", "rollout.sampling.temperature=0", "rollout.samples_per_prompt=1") == []


def test_all_errors_come_at_once() -> None:
    plan = make_plan(settings("rollout.sampling.repetition_penalty=1.1", "rollout.max_prompt_tokens=2048"))
    with pytest.raises(SettingsError) as caught:
        plan.raise_if_refused()
    assert "repetition_penalty" in str(caught.value)
    assert "max_prompt_tokens" in str(caught.value)


def test_what_the_data_and_the_model_say_counts() -> None:
    assert [p.keys for p in problems(facts=BUNDLED, severity="error")] == []
    assert "rollout.max_total_tokens" in problems("rollout.max_total_tokens=9000", facts=BUNDLED)[0].keys
    assert "data.train" in problems(n_train_rows=0)[0].keys
    assert "data.train" in problems(n_train_rows=5, severity="warning")[0].keys
    assert "data.eval_limit" in problems("data.eval_limit=9", n_eval_rows=5, severity="warning")[0].keys


def test_problems_of_other_rooms_join_once() -> None:
    ours = Problem(("algorithm.kl_in", "algorithm.kl_coef"), "again", "again")
    new = Problem(("algorithm.loss",), "unknown", "choose")
    plan = make_plan(settings("algorithm.kl_in=reward"), problems=[ours, new])
    assert [problem.keys for problem in plan.errors] == [("algorithm.kl_in", "algorithm.kl_coef"), ("algorithm.loss",)]


TOY = ModelFacts("toy", 4, 8, 2, 2, 1, 2, 10, 64, True, 1000, exact=True)


def test_memory_by_hand() -> None:
    given = settings(
        "schedule.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_total_tokens=16",
        "rollout.max_prompt_tokens=8",
        "training.max_tokens_per_microbatch=32",
        "training.logprob_chunk_tokens=5",
        "inference.kv_cache_tokens=100",
        "inference.max_batch_size=3",
        "algorithm.kl_coef=0.1",
    )
    items = {item.name: item.bytes for item in estimate_memory(given, TOY).items}
    saved = 4 * 4 + 3 * 4 + 4 * 2 + 4 * 8
    assert items == {
        "master weights": 4000,
        "compute weights": 2000,
        "optimiser moments": 8000,
        "gradients": 4000,
        "reference weights": 2000,
        "exported weights": 2000,
        "activations": 32 * saved * 2 * 2,
        "activations of one layer": 32 * saved * 2,
        "logits chunk": 3 * 5 * 10 * 4,
        "engine weights": 2000,
        "KV cache": 100 * (2 * 2 * 1 * 2) * 2,
        "sampling logits": 2 * 3 * 10 * 4,
    }
    memory = estimate_memory(given, TOY)
    assert memory.total("update") == OVERHEAD_BYTES + sum(
        item.bytes for item in memory.items if "update" in item.phases
    )
    assert memory.peak == memory.total("update")


def test_memory_of_adapters_checkpointing_and_http() -> None:
    lora = settings("training.lora.rank=2", "algorithm.kl_coef=0.1")
    widths = 4 + 4 + 4 + 2 + 4 + 2 + 4 + 4 + (4 + 8) * 2 + (8 + 4)
    assert trainable_parameters(lora, TOY) == 2 * 2 * widths
    names = {item.name for item in estimate_memory(lora, TOY).items}
    assert "reference weights" not in names  # the base model without its adapter
    some = settings("training.lora.rank=2", "training.lora.target_modules=[q_proj]")
    assert trainable_parameters(some, TOY) == 2 * 2 * 8
    plain, saving = (
        {item.name: item.bytes for item in estimate_memory(settings(*given), BUNDLED).items}
        for given in ([], ["model.gradient_checkpointing=true"])
    )
    assert saving["activations"] < plain["activations"] / 10
    remote = settings("inference.engine=http", "inference.urls=[http://a:1]")
    assert "KV cache" not in {item.name for item in estimate_memory(remote, BUNDLED).items}


def test_a_plan_that_exceeds_the_machine_warns() -> None:
    assert make_plan(settings(), BUNDLED, memory_bytes=2 * 10**9).warnings
    assert not make_plan(settings(), BUNDLED, memory_bytes=10**12).warnings


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shapes is not None:
        header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
        body = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)
    return folder


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}


def test_facts_are_read_from_a_directory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", GPT2, {"wte": [50, 8], "h.0.w": [8, 8]})
    facts = read_facts(str(folder))
    assert facts is not None
    assert (facts.hidden_size, facts.kv_heads, facts.head_dim, facts.max_positions) == (8, 2, 4, 32)
    assert (facts.parameters, facts.exact) == (464, True)


def test_parameters_are_estimated_without_weights() -> None:
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    assert facts_from_config(config).parameters == BUNDLED.parameters
    assert not facts_from_config(config).exact


def test_a_hub_id_has_no_facts_yet_and_the_bundled_model_has() -> None:
    assert read_facts("someone/some-model") is None
    assert read_facts("smollm2-135m-instruct") == BUNDLED


def test_bad_model_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_facts(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="vocab_size"):
        read_facts(str(write_model(tmp_path / "sizeless", {"n_embd": 8, "n_layer": 2, "n_head": 2})))
    torn = write_model(tmp_path / "torn", GPT2)
    (torn / "model.safetensors").write_bytes(b"\x05\x00")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_facts(str(torn))
    (torn / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no valid JSON"):
        read_facts(str(torn))


def test_the_rendered_plan_shows_figures_verdicts_and_refusals() -> None:
    loaded = load_settings([], [*RUNNABLE, "trainer.train_batch_size=12", "rollout.max_prompt_tokens=2048"])
    text = plan_text(make_plan(loaded.settings, BUNDLED, notes=loaded.notes))
    for part in (
        "prompts trained",
        "12",
        "KV cache",
        "trainer.train_batch_size",
        "mapped",
        "refused:",
        "leaves no room",
    ):
        assert part in text
    assert "unknown until" in plan_text(make_plan(settings()))
