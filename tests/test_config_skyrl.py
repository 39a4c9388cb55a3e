"""SkyRL's keys: every documented one has a verdict, and the verdict is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.algorithms.check_anchor import check_anchor
from slipstream.config import load_settings
from slipstream.config.settings import NO_LIMIT, ScheduleSettings
from slipstream.config.skyrl import DEFAULTS, TABLE, VARIABLES, Idle, Mapped, Met, Refused, environment_notes, rule_for
from slipstream.config.tree import leaves
from slipstream.errors import SettingsError

KEYS = [
    line
    for line in (Path(__file__).parent / "data" / "skyrl_keys.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

SKETCH = """
trainer:
  train_batch_size: 1
  policy_mini_batch_size: 1
  algorithm:
    advantage_estimator: grpo
    policy_loss_type: rollout_is
    zero_variance_filter: true
    dynamic_sampling:
      type: null
  placement:
    colocate_all: false
  fully_async:
    enabled: true
    max_staleness_steps: 2
    num_parallel_generation_workers: 3
    sample_full_batch: true
    clear_kv_cache_on_weight_sync: false
generator:
  batched: false
  n_samples_per_prompt: 4
  use_cache_salt: true
  inference_engine:
    backend: vllm
environment:
  env_class: text2sql
"""


def load(**given: Any) -> Any:
    return load_settings([], [f"{key.replace('__', '.')}={value}" for key, value in given.items()])


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings([], overrides)
    return str(caught.value)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def test_every_documented_key_has_a_rule_or_is_native() -> None:
    assert len(KEYS) > 500
    assert [key for key in KEYS if rule_for(key) is None and key not in leaves()] == []


def test_the_table_names_only_documented_keys() -> None:
    extra = [key for key in TABLE if key not in KEYS and not key.endswith((".*", "fsdp_config.mixed_precision"))]
    assert extra == []


def test_every_rule_is_well_formed() -> None:
    for key, rule in TABLE.items():
        verdict = rule.verdict
        if isinstance(verdict, Mapped):
            for path in (*verdict.native, *verdict.implied):
                assert path in leaves(), f"{key} maps to {path}, which is no setting"
        elif isinstance(verdict, Met):
            assert verdict.why
        elif isinstance(verdict, Idle):
            gate = verdict.gate.split("=")[0].split(" ")[0]
            assert gate in TABLE, f"{key} waits for {gate}, which has no rule"
        else:
            assert isinstance(verdict, Refused)
            assert verdict.reason
            assert verdict.suggestion


@pytest.mark.parametrize("key", [k for k, r in TABLE.items() if isinstance(r.verdict, Refused)])
def test_refused_key_passes_at_its_default_and_is_named_otherwise(key: str, tmp_path: Path) -> None:
    rule = TABLE[key]
    path = tmp_path / "skyrl.yaml"
    if not (isinstance(rule.default, dict) and rule.default):
        path.write_text(yaml.safe_dump(nested({key: rule.default})))
        load_settings([path])
    other: Any = 7 if isinstance(rule.default, bool) or rule.default is None else "something else"
    path.write_text(yaml.safe_dump(nested({key: other})))
    with pytest.raises(SettingsError) as caught:
        load_settings([path])
    message = str(caught.value)
    assert key in message
    assert isinstance(rule.verdict, Refused)
    assert rule.verdict.reason in message
    assert rule.verdict.suggestion in message
    assert str(path) in message


def test_all_defaults_of_skyrl_at_once_are_understood(tmp_path: Path) -> None:
    flat = {
        key: default
        for key, default in DEFAULTS.items()
        if key.split(".")[0] in ("trainer", "generator", "environment", "data")
        and not key.endswith(("mixed_precision", "delta_weight_sync"))
    }
    path = tmp_path / "defaults.yaml"
    path.write_text(yaml.safe_dump(nested(flat)))
    loaded = load_settings([path])
    assert loaded.settings.schedule.prompts_per_step == 1024
    assert loaded.settings.algorithm.minibatches_per_step == 4
    assert loaded.settings.algorithm.kl_coef == 0.001
    assert loaded.settings.rollout.max_total_tokens == 512 + 1024
    assert loaded.settings.algorithm.old_logprobs == "recompute"
    told = {note.key for note in loaded.notes}
    assert told >= set(flat)
    assert not [note for note in loaded.notes if note.status == "differs"]


def test_the_asynchronous_sketch_is_understood_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "sketch.yaml"
    path.write_text(SKETCH)
    with pytest.raises(SettingsError) as caught:
        load_settings([path])
    message = str(caught.value)
    assert "unknown key" not in message
    assert "trainer.placement.colocate_all" in message
    assert "\n  - " not in message, "one refusal only"
    here = yaml.safe_load(SKETCH)
    apart = load_settings([path], ["inference.engine=vllm"])  # engines are processes of their own
    assert {note.key: note.status for note in apart.notes}["trainer.placement.colocate_all"] == "met"
    del here["trainer"]["placement"]
    path.write_text(yaml.safe_dump(here))
    settings = load_settings([path]).settings
    assert apart.settings == settings.model_copy(update={"inference": apart.settings.inference})
    schedule = settings.schedule
    assert (settings.algorithm.loss, settings.algorithm.old_logprobs) == ("rollout_is", "sampler")
    assert (schedule.kind, schedule.max_staleness_steps, schedule.max_running_groups) == ("fully_async", 2, 3)
    assert schedule.full_batch is True
    assert settings.inference.pause_mode == "keep"
    here["trainer"]["fully_async"]["enabled"] = False
    path.write_text(yaml.safe_dump(here))
    loaded = load_settings([path])
    assert loaded.settings.schedule == ScheduleSettings(prompts_per_step=1)
    assert loaded.settings.algorithm.minibatches_per_step == 1
    assert loaded.settings.algorithm.drop_zero_variance is True
    assert loaded.settings.rollout.samples_per_prompt == 4
    assert loaded.settings.env.id == "text2sql"
    status = {note.key: note.status for note in loaded.notes}
    assert status["trainer.fully_async.max_staleness_steps"] == "no effect"
    assert status["generator.inference_engine.backend"] == "met"
    assert status["trainer.algorithm.dynamic_sampling.type"] == "mapped"


def test_the_documented_command_line_is_read() -> None:
    loaded = load_settings(
        [],
        [
            "data.train_data=['data/train.parquet']",
            "data.val_data=['data/eval.parquet']",
            "environment.env_class=agentenv",
            "environment.skyrl_gym.max_env_workers=64",
            "generator.batched=false",
            "generator.max_turns=4",
            "generator.chat_template_kwargs.enable_thinking=false",
            "generator.max_input_length=8192",
            "trainer.max_prompt_length=3072",
            "trainer.policy.model.lora.rank=32",
            "trainer.policy.model.lora.alpha=64",
            "trainer.policy.optimizer_config.lr=2e-5",
            "trainer.policy.optimizer_config.scheduler=cosine",
            "trainer.policy.optimizer_config.num_warmup_steps=3",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "generator.n_samples_per_prompt=8",
            "generator.sampling_params.temperature=1.1",
            "trainer.eval_interval=20",
            "generator.eval_sampling_params.temperature=1.1",
        ],
    ).settings
    assert loaded.data.train == ("data/train.parquet",)
    assert loaded.data.eval == ("data/eval.parquet",)
    assert loaded.env.id == "agentenv"
    assert loaded.rollout.env_workers == 64
    assert loaded.rollout.max_turns == 4
    assert loaded.model.chat_template_kwargs == {"enable_thinking": False}
    assert loaded.rollout.max_prompt_tokens == 3072
    assert loaded.rollout.max_total_tokens == 8192 + 1024
    assert (loaded.training.lora.rank, loaded.training.lora.alpha) == (32, 64)
    assert loaded.training.optimizer.scheduler == "cosine"
    assert loaded.training.optimizer.warmup_steps == 3
    assert loaded.eval.every_steps == 20
    assert loaded.eval.sampling.temperature == loaded.rollout.sampling.temperature == 1.1


def test_native_and_skyrl_keys_mix() -> None:
    loaded = load(trainer__train_batch_size=8, rollout__max_turns=3).settings
    assert (loaded.schedule.prompts_per_step, loaded.rollout.max_turns) == (8, 3)


def test_agreeing_native_and_mapped_keys_pass_and_contradicting_ones_name_both() -> None:
    assert load(trainer__train_batch_size=8, schedule__prompts_per_step=8).settings.schedule.prompts_per_step == 8
    message = refusal("trainer.train_batch_size=8", "schedule.prompts_per_step=4")
    assert "trainer.train_batch_size" in message
    assert "schedule.prompts_per_step=4" in message
    assert "contradicts" in message


def test_two_skyrl_keys_that_disagree_are_refused() -> None:
    message = refusal("train_datasets=[a]", "dataset_name=b")
    assert "train_datasets" in message
    assert "dataset_name" in message


def test_implied_settings_give_way_to_native_ones() -> None:
    loaded = load(trainer__algorithm__policy_loss_type="regular", algorithm__old_logprobs="sampler").settings
    assert loaded.algorithm.old_logprobs == "sampler"
    assert load(trainer__algorithm__policy_loss_type="regular").settings.algorithm.old_logprobs == "recompute"


@pytest.mark.parametrize(
    ("given", "coef", "where"),
    [
        (["kl_loss_coef=0.05"], 0.05, "loss"),
        (["use_kl_loss=true"], 0.001, "loss"),
        (["use_kl_loss=false", "kl_loss_coef=0.05"], 0.0, "loss"),
        (["use_kl_loss=false", "use_kl_in_reward=true", "kl_loss_coef=0.05"], 0.05, "reward"),
    ],
)
def test_kl_keys_make_one_term(given: list[str], coef: float, where: str) -> None:
    loaded = load_settings([], [f"trainer.algorithm.{text}" for text in given]).settings
    assert (loaded.algorithm.kl_coef, loaded.algorithm.kl_in) == (coef, where)


def test_kl_in_loss_and_reward_is_refused() -> None:
    assert "at once" in refusal("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.use_kl_in_reward=true")


def test_entropy_coefficient_counts_only_when_the_term_is_on() -> None:
    off = load(trainer__algorithm__entropy_loss_coef=0.2).settings
    on = load(trainer__algorithm__entropy_loss_coef=0.2, trainer__algorithm__use_entropy_loss="true").settings
    assert (off.algorithm.entropy_coef, on.algorithm.entropy_coef) == (0.0, 0.2)


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        (["trainer.epochs=20"], "schedule.epochs", 20),
        (["trainer.epochs=20"], "schedule.steps", NO_LIMIT),
        (["trainer.epochs=20", "trainer.max_training_steps=7"], "schedule.steps", 7),
        (["trainer.eval_interval=-1"], "eval.after", False),
        (["trainer.eval_interval=5"], "eval.every_steps", 5),
        (["trainer.ckpt_interval=-1"], "checkpoint.every_steps", 0),
        (["trainer.max_ckpts_to_keep=-1"], "checkpoint.keep", 1_000_000),
        (["trainer.resume_mode=none"], "checkpoint.resume", "never"),
        (["trainer.resume_mode=latest"], "checkpoint.resume", "auto"),
        (["trainer.logger=wandb"], "logging.sinks", ("console", "jsonl", "wandb")),
        (["trainer.logger=['tensorboard','console']"], "logging.sinks", ("console", "jsonl", "tensorboard")),
        (["trainer.bf16=false"], "model.dtype", "float32"),
        (["trainer.flash_attn=false"], "model.attn_implementation", "sdpa"),
        (["trainer.max_tokens_per_microbatch=-1"], "training.max_tokens_per_microbatch", 8192),
        (["trainer.max_tokens_per_microbatch=4096"], "training.max_tokens_per_microbatch", 4096),
        (["trainer.micro_train_batch_size_per_gpu=2"], "training.max_tokens_per_microbatch", 2 * (512 + 1024)),
        (
            ["trainer.micro_train_batch_size_per_gpu=2", "trainer.max_tokens_per_microbatch=999"],
            "training.max_tokens_per_microbatch",
            999,
        ),
        (["environment.skyrl_gym.max_env_workers=0"], "rollout.env_workers", 1),
        (["generator.sampling_params.stop=['</a>']"], "eval.sampling.stop", ("</a>",)),
        (["generator.sampling_params.max_generate_length=77"], "eval.sampling.max_tokens_per_turn", 77),
        (["generator.sampling_params.stop=null"], "rollout.sampling.stop", ()),
        (["generator.eval_sampling_params=null"], "eval.sampling.temperature", 0.0),
        (
            ["generator.inference_engine.external_server_urls=['http://a:1']"],
            "inference.engine",
            "http",
        ),
        (
            ["environment.env_class=mine", "environment.skyrl_gym.mine.depth.x=2"],
            "env.kwargs",
            {"depth": {"x": 2}},
        ),
        (["trainer.algorithm.advantage_estimator=reinforce++"], "algorithm.advantage", "reinforce_pp"),
        (["trainer.algorithm.advantage_estimator=maxrl"], "algorithm.advantage", "maxrl"),
        (["trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.lambd=0.9"], "algorithm.gae_lambda", 0.9),
        (["trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.gamma=0.9"], "algorithm.gamma", 0.9),
        (["trainer.algorithm.gamma=0.9"], "algorithm.gamma", 1.0),
        (["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=m"], "algorithm.critic.path", "m"),
        (["trainer.critic.model.path=m"], "algorithm.critic.path", None),
        (
            ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.optimizer_config.lr=1e-5"],
            "algorithm.critic.optimizer.lr",
            1e-5,
        ),
        (["trainer.algorithm.policy_loss_type=gspo"], "algorithm.loss", "gspo"),
        (["trainer.algorithm.policy_loss_type=gspo"], "algorithm.old_logprobs", "recompute"),
        (["trainer.algorithm.policy_loss_type=dppo"], "algorithm.old_logprobs", "sampler"),
        (
            ["trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.cispo.cispo_anchor=rollout"],
            "algorithm.old_logprobs",
            "sampler",
        ),
        (
            [
                "trainer.algorithm.policy_loss_type=cispo",
                "trainer.algorithm.cispo.cispo_eps_clip_high=3.0",
                "trainer.algorithm.eps_clip_high=0.3",
            ],
            "algorithm.clip_high",
            3.0,
        ),
        (
            ["trainer.algorithm.policy_loss_type=sapo", "trainer.algorithm.sapo.tau_neg=1.2"],
            "algorithm.loss_settings",
            {"tau_negative": 1.2},
        ),
        (["trainer.algorithm.sapo.tau_neg=1.2"], "algorithm.loss_settings", {}),
        (
            ["trainer.algorithm.policy_loss_type=dppo", "trainer.algorithm.dppo.dppo_type=binary_kl"],
            "algorithm.loss_settings",
            {"divergence": "kl"},
        ),
        (
            ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "trainer.algorithm.max_seq_len=512"],
            "algorithm.reduction_tokens",
            512,
        ),
        (["trainer.algorithm.max_seq_len=512"], "algorithm.reduction_tokens", None),
        (["trainer.algorithm.advantage_batch_normalize=true"], "algorithm.normalize_batch", True),
        (["trainer.algorithm.advantage_batch_normalize=false"], "algorithm.normalize_batch", None),
        (
            ["trainer.algorithm.kl_ctrl.type=adaptive", "trainer.algorithm.kl_ctrl.horizon=5"],
            "algorithm.kl_controller.horizon",
            5,
        ),
        (["trainer.algorithm.off_policy_correction.tis_ratio_type=token"], "algorithm.off_policy.tis", "token"),
        (
            [
                "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
                "trainer.algorithm.off_policy_correction.geo_mask_low=0.9",
            ],
            "algorithm.off_policy.geometric_low",
            0.9,
        ),
        (["trainer.algorithm.off_policy_correction.geo_mask_low=0.9"], "algorithm.off_policy.geometric_low", 0.99),
        (
            ["trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.1"],
            "algorithm.off_policy.token_mask_low",
            0.1,
        ),
        (
            ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3"],
            "algorithm.off_policy.tis_token_cap",
            3.0,
        ),
        (["trainer.algorithm.dynamic_sampling.type=filter"], "algorithm.dynamic_sampling.kind", "filter"),
        (["trainer.algorithm.dynamic_sampling.type=filter"], "algorithm.drop_zero_variance", True),
        (
            ["trainer.algorithm.dynamic_sampling.type=filter", "trainer.algorithm.zero_variance_filter=false"],
            "algorithm.drop_zero_variance",
            True,
        ),
        (
            [
                "trainer.algorithm.dynamic_sampling.type=replace",
                "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.5",
            ],
            "algorithm.dynamic_sampling.min_good_fraction",
            0.5,
        ),
        (["generator.apply_overlong_filtering=true"], "algorithm.drop_truncated", True),
        (["trainer.policy.optimizer_config.adam_betas=[0.9,0.95]"], "training.optimizer.betas", (0.9, 0.95)),
        (["num_steps=30", "batch_size=8"], "sft.steps", 30),
        (["train_datasets=[rows.jsonl]", "optimizer_config.lr=1e-4"], "data.sft", ("rows.jsonl",)),
        (
            ["train_datasets=[a/b, c/d]", "train_dataset_splits=['train[:9]', dev]"],
            "data.sft",
            ("a/b:train[:9]", "c/d:dev"),
        ),
        (["dataset_name=a/b", "dataset_split=dev"], "data.sft", ("a/b:dev",)),
        (["train_on_what=last_assistant_message"], "sft.train_on", "last_assistant_message"),
        (["generator.inference_engine.weight_sync_backend=delta"], "inference.transport", "delta"),
        (["generator.inference_engine.weight_sync_backend=nccl"], "inference.transport", "auto"),
        (
            ["generator.inference_engine.weight_sync_backend=nccl", "inference.transport=gloo"],
            "inference.transport",
            "gloo",
        ),
        (
            [
                "generator.inference_engine.weight_sync_backend=delta",
                "generator.inference_engine.delta_weight_sync.sync_dir=/shared/sync",
            ],
            "inference.transfer_dir",
            Path("/shared/sync"),
        ),
        (["generator.inference_engine.delta_weight_sync.sync_dir=/shared/sync"], "inference.transfer_dir", None),
    ],
)
def test_values_are_translated(given: list[str], path: str, value: Any) -> None:
    node: Any = load_settings([], given).settings
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value


def test_a_mask_beside_a_loss_against_the_sampler_scores_the_policy_too() -> None:
    """The asynchronous recipe of SkyRL: rollout_is with a geometric mask."""
    correction = "trainer.algorithm.off_policy_correction"
    loss = "trainer.algorithm.policy_loss_type=rollout_is"
    mask = f"{correction}.sequence_mask_metric=geometric"
    given = ["data.train=builtin:text2sql", loss]
    masked = load_settings([], [*given, mask]).settings.algorithm
    assert (masked.loss, masked.off_policy.sequence_mask, masked.old_logprobs) == (
        "rollout_is", "geometric", "recompute"
    )  # fmt: skip
    assert check_anchor(masked) == []
    plain = load_settings([], given).settings.algorithm
    assert (plain.old_logprobs, check_anchor(plain)) == ("sampler", [])
    weighed = load_settings([], [*given, mask, f"{correction}.tis_ratio_type=token"]).settings.algorithm
    (problem,) = check_anchor(weighed)
    assert problem.keys[0] == "algorithm.off_policy.tis"
    assert "count it twice" in problem.message


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["trainer.strategy=megatron"], "Megatron"),
        (["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=3"], "not divisible"),
        (["trainer.policy_mini_batch_size=3"], "set trainer.train_batch_size too"),
        (["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=x"], "integer"),
        (["trainer.algorithm.dynamic_sampling.type=none"], "write null"),
        (
            [
                "trainer.algorithm.dynamic_sampling.type=filter",
                "trainer.algorithm.dynamic_sampling.max_sample_batches=-1",
            ],
            "no unlimited number",
        ),
        (["trainer.algorithm.dynamic_sampling.type=swap"], "'filter' or 'replace'"),
        (["trainer.algorithm.loss_reduction=token_mean_legacy"], "use token_mean"),
        (["trainer.algorithm.policy_loss_type=dppo", "trainer.algorithm.dppo.dppo_type=other"], "binary_tv"),
        (["trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.cispo.cispo_anchor=x"], "'old' or 'rollout'"),
        (["trainer.critic.model.lora.rank=8"], "no adapters"),
        (
            ["trainer.algorithm.off_policy_correction.tis_ratio_type=sequence", "trainer.algorithm.use_tis=true"],
            "leave use_tis out",
        ),
        (["trainer.algorithm.temperature=0.7"], "temperature that sampled them (1.0)"),
        (["trainer.ref.model.path=other"], "initial policy"),
        (["generator.max_turns=3", "generator.batched=true"], "one turn only"),
        (["generator.inference_engine.run_engines_locally=false"], "inference.urls"),
        (["generator.inference_engine.weight_sync_backend=gloo"], "nccl, delta"),
        (
            [
                "generator.inference_engine.weight_sync_backend=delta",
                "generator.inference_engine.delta_weight_sync.sync_dir=s3://bucket/sync",
            ],
            "not an object store",
        ),
        (["trainer.placement.colocate_all=false"], "set inference.engine=vllm or inference.replicas"),
        (["inference.replicas=1", "trainer.placement.colocate_all=false"], "inference.engine=vllm"),
        (["trainer.remove_microbatch_padding=false"], "always packed"),
        (["trainer.logger=swanlab"], "no sink"),
        (["trainer.resume_mode=from_path"], "run_dir"),
        (["environment.env_class=a", "environment.skyrl_gym.b.x=1"], "environment.env_class=b"),
        (["trainer.max_ckpts_to_keep=0"], "at least 1"),
        (["generator.chat_template.name_or_path=qwen3_with_thinking"], "source=file"),
        (["strategy=megatron"], "fsdp"),
        (["num_epochs=3"], "sft.steps"),
        (["train_dataset_splits=[a]"], "set train_datasets too"),
        (["train_datasets=[x/y]", "train_dataset_splits=[a, b]"], "2 splits for 1 datasets"),
        (["max_length=512"], "rollout.max_total_tokens"),
        (["trainer.policy.optimizer_config.lr=fast"], "trainer.policy.optimizer_config.lr"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(given: list[str], part: str) -> None:
    message = refusal(*given)
    assert part in message
    assert given[-1].split("=")[0] in message


def test_a_key_of_skyrl_with_a_bad_value_is_named_by_its_own_name() -> None:
    message = refusal("generator.n_samples_per_prompt=many")
    assert "generator.n_samples_per_prompt" in message
    assert "integer" in message


def test_users_own_losses_pass_through() -> None:
    assert load(trainer__algorithm__policy_loss_type="mine").settings.algorithm.loss == "mine"


def test_defaults_that_differ_are_told() -> None:
    notes = {note.key: note.text for note in load(trainer__train_batch_size=8).notes if note.status == "differs"}
    assert "0.001" in notes["algorithm.kl_coef"]
    assert "schedule.prompts_per_step" not in notes
    assert not load(schedule__steps=1).notes


@pytest.mark.parametrize(
    "engines",
    [
        "inference.engine=vllm",
        "inference.replicas=2",
        "generator.inference_engine.num_engines=2",
        "generator.inference_engine.external_server_urls=['http://a:1']",
        "generator.inference_engine.external_proxy_url=http://a:1",
    ],
)
def test_engines_that_are_processes_of_their_own_are_not_colocated(engines: str) -> None:
    loaded = load_settings([], [engines, "trainer.placement.colocate_all=false"])
    assert {note.key: note.status for note in loaded.notes}["trainer.placement.colocate_all"] == "met"


def test_what_stands_in_for_an_environment_variable_is_a_setting() -> None:
    named = {name: re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", text) for name, text in VARIABLES.items()}
    assert named["SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S"] == ["inference.launch.ready_seconds"]
    assert [path for paths in named.values() for path in paths if path not in leaves()] == []
    assert "run_dir/engines" in VARIABLES["SKYRL_DUMP_INFRA_LOG_TO_STDOUT"]


def test_environment_variables_are_not_ignored_in_silence() -> None:
    notes = environment_notes({"SKYRL_HTTP_CONNECTION_LIMIT": "9", "SKYRL_NEW": "1", "PATH": "/bin"})
    assert [note.key for note in notes] == ["SKYRL_HTTP_CONNECTION_LIMIT", "SKYRL_NEW"]
    assert "rollout.concurrency" in notes[0].text


def test_mapped_algorithms_are_registered() -> None:
    """The names that SkyRL's become exist in this release."""
    from slipstream.algorithms.advantages import ADVANTAGES
    from slipstream.algorithms.losses import LOSSES
    from slipstream.algorithms.reduce import REDUCTIONS

    def becomes(key: str, *values: str) -> set[str]:
        found = [load_settings([], [f"trainer.algorithm.{key}={value}"]).settings.algorithm for value in values]
        field = {"policy_loss_type": "loss", "advantage_estimator": "advantage", "loss_reduction": "reduction"}[key]
        return {getattr(algorithm, field) for algorithm in found}

    losses = "regular dual_clip gspo cispo sapo rollout_is dppo clip_cov kl_cov cross_entropy importance_sampling"
    assert becomes("policy_loss_type", *losses.split()) <= set(LOSSES.names())
    assert becomes("advantage_estimator", "grpo", "rloo", "maxrl", "reinforce++", "gae") <= set(ADVANTAGES.names())
    reductions = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
    assert becomes("loss_reduction", *reductions) <= set(REDUCTIONS.names())


def test_mapped_settings_of_a_loss_are_its_own() -> None:
    """Every option of SkyRL's losses becomes a setting that the loss has, so that no key is refused later."""
    from slipstream.algorithms.losses import LOSSES

    for key, rule in TABLE.items():
        if not (isinstance(rule.verdict, Mapped) and rule.verdict.native == ("algorithm.loss_settings",)):
            continue
        assert rule.verdict.gate is not None
        loss = rule.verdict.gate[1]
        made = load_settings([], [f"trainer.algorithm.policy_loss_type={loss}", f"{key}={rule.default}"]).settings
        LOSSES.get(loss).settings(made.algorithm.loss_settings)
