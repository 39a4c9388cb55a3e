"""SkyRL's ``data`` and ``trainer`` keys (without ``trainer.algorithm``) and what becomes of each.

Owns: the verdicts.  Refuses: reading files.  Every default here is SkyRL's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.config.skyrl.algorithm_keys import ESTIMATOR
from slipstream.config.skyrl.rules import (
    Idle,
    Mapped,
    Met,
    Refused,
    Rule,
    Unsupported,
    View,
    off_is_zero,
    one_of,
    only,
    positive,
    whole,
)
from slipstream.config.skyrl.shared_keys import (
    DROP,
    ONE_PROCESS,
    compile_switches,
    engine_processes,
    fsdp,
    int4,
    lora,
    megatron,
    optimizer,
    parallel,
    profiler,
    sinks,
    under,
)

KEEP_ALL = 1_000_000
"""``checkpoint.keep`` for SkyRL's -1: more checkpoints than any run writes."""

ASYNC = ("trainer.fully_async.enabled", True)
ONE_DIRECTORY = "everything that a run writes lies in one directory"
MEGATRON = "trainer.strategy=megatron"


def sampled_total(value: Any, view: View) -> int:
    """Longest trajectory under SkyRL's rule: a turn may start at the input limit and add a whole turn."""
    prompt = view.skyrl.get("trainer.max_prompt_length", view.native.get("rollout.max_prompt_tokens"))
    prompt = view.defaults["trainer.max_prompt_length"] if prompt is None else prompt
    longest = view.get("generator.max_input_length")
    turn = view.skyrl.get(
        "generator.sampling_params.max_generate_length", view.native.get("rollout.sampling.max_tokens_per_turn")
    )
    turn = view.defaults["generator.sampling_params.max_generate_length"] if turn is None else turn
    start = whole(prompt if longest is None else longest, "generator.max_input_length")
    return start + whole(turn, "generator.sampling_params.max_generate_length")


def _minibatches(value: Any, view: View) -> int:
    size = positive(value, view.key)
    batch = view.skyrl.get("trainer.train_batch_size", view.native.get("schedule.prompts_per_step"))
    if batch is None:
        raise Unsupported("a mini-batch is a part of trainer.train_batch_size", "set trainer.train_batch_size too")
    if positive(batch, "trainer.train_batch_size") % size:
        raise Unsupported(
            f"train_batch_size {batch} is not divisible by {view.key.rpartition('.')[2]} {size}",
            "choose a divisor",
        )
    return int(batch) // size


def _row_budget(value: Any, view: View) -> Any:
    """Rows per micro-batch as the tokens that many full-length rows hold."""
    rows = positive(value, "trainer.micro_train_batch_size_per_gpu")
    given = view.get("trainer.max_tokens_per_microbatch")
    if given is not None and whole(given, "trainer.max_tokens_per_microbatch") > 0:
        return given
    return rows * whole(view.native.get("rollout.max_total_tokens", sampled_total(value, view)), "max_total_tokens")


def _token_budget(value: Any, view: View) -> Any:
    return {} if value is None or whole(value, "trainer.max_tokens_per_microbatch") < 1 else value


def _eval_interval(value: Any, view: View) -> dict[str, Any]:
    every = off_is_zero(value, view)
    return {"eval.every_steps": every, "eval.after": every > 0}


def _epochs(value: Any, view: View) -> Any:
    return positive(value, "trainer.epochs")


def _steps(value: Any, view: View) -> Any:
    return {} if value is None else value


def _keep(value: Any, view: View) -> int:
    return KEEP_ALL if value == -1 else positive(value, "trainer.max_ckpts_to_keep")


def _paths(value: Any, view: View) -> Any:
    return [value] if isinstance(value, str) else value


def _no_entropy_chunk(why: str) -> Refused:
    return Refused(why, "set training.logprob_chunk_tokens", off=(0, None))


def _colocate(value: Any, view: View) -> None:
    if value is not True and not engine_processes(view):
        raise Unsupported(
            "one embedded engine runs in the trainer's process",
            "set inference.engine=vllm or inference.replicas, or leave the key out",
        )


def _same_model(value: Any, view: View) -> None:
    policy = view.skyrl.get("trainer.policy.model.path", view.native.get("model.path"))
    if value is not None and value != policy:
        raise Unsupported("the reference is always the initial policy", "leave trainer.ref.model.path out")


DATA = [
    Rule("data.train_data", ["~/data/gsm8k/train.parquet"], Mapped("data.train", _paths)),
    Rule("data.val_data", ["~/data/gsm8k/validation.parquet"], Mapped("data.eval", _paths)),
    *under(
        "data.dataloader",
        {"num_workers": None, "persistent_workers": False},
        Met("prompts are read once, in the process; their order depends on the seed and the pass only"),
    ),
]

_BATCHES = [
    Rule("trainer.train_batch_size", 1024, Mapped("schedule.prompts_per_step")),
    Rule(
        "trainer.policy_mini_batch_size",
        256,
        Mapped("algorithm.minibatches_per_step", _minibatches, "train_batch_size / policy_mini_batch_size"),
    ),
    Rule(
        "trainer.critic_mini_batch_size",
        256,
        Mapped(
            "algorithm.critic.minibatches_per_step",
            _minibatches,
            "train_batch_size / critic_mini_batch_size",
            gate=ESTIMATOR,
        ),
    ),
    Rule("trainer.update_epochs_per_batch", 1, Mapped("algorithm.epochs_per_step")),
    Rule(
        "trainer.micro_train_batch_size_per_gpu",
        1,
        Mapped(
            "training.max_tokens_per_microbatch",
            lambda value, view: {},
            "rows x rollout.max_total_tokens, unless a token budget is set; results do not depend on it",
            implied={"training.max_tokens_per_microbatch": _row_budget},
        ),
    ),
    Rule(
        "trainer.micro_forward_batch_size_per_gpu",
        1,
        Met("scoring keeps no activations and fits in the update's token budget; results do not depend on it"),
    ),
    Rule(
        "trainer.max_tokens_per_microbatch",
        -1,
        Mapped("training.max_tokens_per_microbatch", _token_budget, "-1 leaves the default"),
    ),
    Rule(
        "trainer.recompute_old_logprobs_per_minibatch",
        True,
        Met("rows are scored without padding, so log-probs do not depend on how rows are batched"),
    ),
    *(
        Rule(
            key,
            True,
            Met(
                "micro-batches are packed and never padded",
                only(True, reason="micro-batches are always packed", suggestion="use a text-only causal LM"),
            ),
        )
        for key in ("trainer.remove_microbatch_padding", "trainer.use_sample_packing")
    ),
    Rule("trainer.epochs", 1, Mapped("schedule.epochs", _epochs, "turned into steps when the data is known")),
    Rule("trainer.max_training_steps", None, Mapped("schedule.steps", _steps)),
    Rule(
        "trainer.max_prompt_length",
        512,
        Mapped("rollout.max_prompt_tokens", implied={"rollout.max_total_tokens": sampled_total}),
    ),
]

_RUNTIME = [
    Rule(
        "trainer.strategy",
        "fsdp",
        Met(
            "one process holds the whole model, which is what FSDP is at world size 1",
            only(
                "fsdp",
                "fsdp2",
                reason="Megatron is not in this release",
                suggestion="use fsdp (the torch backend at world size 1)",
            ),
        ),
    ),
    Rule("trainer.sequence_parallel_backend", "ulysses", Idle("trainer.policy.sequence_parallel_size > 1")),
    Rule("trainer.seed", 42, Mapped("seed")),
    Rule(
        "trainer.bf16",
        True,
        Mapped("model.dtype", one_of({True: "bfloat16", False: "float32"}, "not a dtype switch", "use true or false")),
    ),
    Rule(
        "trainer.flash_attn",
        True,
        Mapped(
            "model.attn_implementation",
            one_of({True: "auto", False: "sdpa"}, "not an attention switch", "set model.attn_implementation"),
            "true leaves the choice to the backend",
        ),
    ),
    Rule("trainer.gradient_checkpointing", True, Mapped("model.gradient_checkpointing")),
    Rule("trainer.gradient_checkpointing_use_reentrant", False, Refused("checkpointing is never reentrant", DROP)),
    Rule("trainer.use_expandable_segments", True, Met("it only tunes the CUDA allocator; results are the same")),
    Rule("trainer.disable_fast_tokenizer", False, Refused("tokenizers are always the fast ones", DROP)),
    Rule(
        "trainer.logprobs_chunk_size",
        1024,
        Mapped("training.logprob_chunk_tokens", lambda value, view: positive(value, "trainer.logprobs_chunk_size")),
    ),
    Rule(
        "trainer.vocab_entropy_chunk_size", 0, _no_entropy_chunk("entropy is computed in the chunks of the log-probs")
    ),
    Rule(
        "trainer.vocab_entropy_chunk_memory_mb",
        512,
        _no_entropy_chunk("chunks are sized in tokens, for log-probs and entropy alike"),
    ),
    Rule(
        "trainer.fused_lm_head_logprob",
        False,
        Refused(
            "the fused Megatron kernel does not exist here; logits never exceed a chunk anyway",
            "set training.logprob_chunk_tokens",
        ),
    ),
    Rule("trainer.fused_lm_head_logprob_backend", "torch", Idle("trainer.fused_lm_head_logprob=true")),
    Rule(
        "trainer.override_entrypoint",
        None,
        Refused("another trainer cannot be swapped in by a key", "write a loop on the public API (examples/)"),
    ),
    Rule(
        "trainer.update_ref_every_epoch",
        False,
        Refused("the reference stays the initial policy", "leave it out; start a new run from the trained model"),
    ),
]

_RECORD = [
    Rule("trainer.ckpt_path", "~/ckpts/", Mapped("run_dir", note="checkpoints and everything else lie beneath it")),
    Rule("trainer.ckpt_interval", 10, Mapped("checkpoint.every_steps", off_is_zero)),
    Rule("trainer.max_ckpts_to_keep", -1, Mapped("checkpoint.keep", _keep, f"-1 becomes {KEEP_ALL}")),
    Rule(
        "trainer.resume_mode",
        "latest",
        Mapped(
            "checkpoint.resume",
            one_of(
                {"none": "never", None: "never", "latest": "auto"},
                "a run resumes in its own directory only",
                "set run_dir to the run to go on with, and checkpoint.resume=must",
            ),
        ),
    ),
    Rule(
        "trainer.resume_path",
        None,
        Refused("a run resumes in its own directory only", "set run_dir to that run, and checkpoint.resume=must"),
    ),
    Rule(
        "trainer.hf_save_interval",
        -1,
        Refused(
            "there is no export every N steps in this release", "checkpoints hold safetensors: export one of them", (0,)
        ),
    ),
    Rule(
        "trainer.export_path", "~/exports/", Refused(ONE_DIRECTORY, "leave it out; set run_dir (or trainer.ckpt_path)")
    ),
    Rule(
        "trainer.log_path",
        "/tmp/skyrl-logs",
        Refused(ONE_DIRECTORY, "leave it out; set run_dir (or trainer.ckpt_path)"),
    ),
    Rule(
        "trainer.eval_batch_size",
        1024,
        Met("evaluation runs as many trajectories as rollout.concurrency allows; scores do not depend on it"),
    ),
    Rule("trainer.eval_before_train", True, Mapped("eval.before")),
    Rule(
        "trainer.eval_interval",
        5,
        Mapped("eval.every_steps eval.after", _eval_interval, "-1 switches the final evaluation off too"),
    ),
    Rule(
        "trainer.logger",
        "wandb",
        Mapped("logging.sinks", sinks, "the console and metrics.jsonl are kept beside it"),
    ),
    Rule("trainer.project_name", "skyrl", Mapped("logging.project")),
    Rule("trainer.run_name", "test_run", Mapped("logging.run_name")),
    Rule("trainer.tags", None, Refused("trackers get no tags in this release", "put them into run_name", off=([],))),
    Rule("trainer.dump_data_batch", False, Met("the ledger keeps every trajectory of every step as Parquet")),
    Rule("trainer.dump_eval_results", True, Met("the ledger keeps every evaluation with its whole spec")),
    *under(
        "trainer",
        {
            "print_example_interval": 1,
            "num_logger_eval_samples": -1,
            "num_logger_train_samples": -1,
            "log_example_interval": -1,
        },
        Refused(
            "trajectories are not printed or sent to trackers",
            "read them in report.html or with 'slipstream ledger'",
            off=(0, -1),
        ),
    ),
    Rule("trainer.enable_ray_gpu_monitor", True, Met("there is no Ray cluster to watch in this release")),
]

_PLACEMENT = [
    Rule(
        "trainer.placement.colocate_all",
        True,
        Met(
            "one embedded engine runs in the trainer's process; engines of any other kind are processes of their own",
            _colocate,
        ),
    ),
    Rule(
        "trainer.placement.colocate_policy_ref",
        True,
        Met(
            "policy and reference share the process",
            only(True, reason=ONE_PROCESS, suggestion="leave the key out"),
        ),
    ),
    *under(
        "trainer.placement",
        {f"{role}_{unit}": 1 for role in ("policy", "critic", "ref") for unit in ("num_nodes", "num_gpus_per_node")},
        Refused(ONE_PROCESS, "leave it at 1"),
    ),
]

_POLICY = [
    Rule("trainer.policy.model.path", "Qwen/Qwen2.5-1.5B-Instruct", Mapped("model.path")),
    *lora("trainer.policy.model.lora"),
    *int4("trainer.policy.model.fake_int4_qat"),
    *optimizer("trainer.policy.optimizer_config", "training.optimizer"),
    *fsdp("trainer.policy.fsdp_config"),
    *parallel("trainer.policy"),
    *compile_switches("trainer.policy."),
    *profiler("trainer.policy.torch_profiler_config"),
    *megatron("trainer.policy.megatron_config", MEGATRON),
    Rule("trainer.policy.language_model_only", False, Met("only the language model of a checkpoint is loaded")),
    Rule(
        "trainer.policy.inference_only_init",
        False,
        Refused("the trainer always loads its weights", "use 'slipstream generate' or 'eval' to sample only"),
    ),
]

_REFERENCE = [
    Rule("trainer.ref.model.path", None, Met("the reference is the initial policy", _same_model)),
    *(Rule(rule.key, rule.default, Idle("trainer.ref.model.path")) for rule in lora("trainer.ref.model.lora")),
    *int4("trainer.ref.model.fake_int4_qat"),
    *fsdp("trainer.ref.fsdp_config"),
    *parallel("trainer.ref"),
    *megatron("trainer.ref.megatron_config", MEGATRON),
    Rule("trainer.ref.language_model_only", False, Met("only the language model of a checkpoint is loaded")),
]

_CRITIC = [
    Rule("trainer.critic.model.path", None, Mapped("algorithm.critic.path", gate=ESTIMATOR)),
    Rule(
        "trainer.critic.model.lora.rank",
        0,
        Refused("all weights of the critic are trained; it has no adapters", "leave it at 0"),
    ),
    *(
        Rule(rule.key, rule.default, Idle("trainer.critic.model.lora.rank"))
        for rule in lora("trainer.critic.model.lora")
        if not rule.key.endswith(".rank")
    ),
    *int4("trainer.critic.model.fake_int4_qat"),
    *(
        replace(
            rule,
            default=5e-6 if rule.key.endswith(".lr") else rule.default,
            verdict=replace(rule.verdict, gate=ESTIMATOR) if isinstance(rule.verdict, Mapped) else rule.verdict,
        )
        for rule in optimizer("trainer.critic.optimizer_config", "algorithm.critic.optimizer")
    ),
    *fsdp("trainer.critic.fsdp_config"),
    *parallel("trainer.critic"),
]

_ASYNC = [
    Rule(
        "trainer.fully_async.enabled",
        False,
        Mapped(
            "schedule.kind",
            one_of({True: "fully_async", False: {}}, "not a switch", "use true or false"),
            "the same capacity rule; in-flight requests are frozen at a publish",
            implied={"inference.pause_mode": lambda value, view: "keep" if value is True else "wait"},
        ),
    ),
    Rule(
        "trainer.fully_async.max_staleness_steps",
        4,
        Mapped("schedule.max_staleness_steps", note="an aggregate bound, as in SkyRL", gate=ASYNC),
    ),
    Rule(
        "trainer.fully_async.num_parallel_generation_workers",
        768,
        Mapped("schedule.max_running_groups", note="one group per worker", gate=ASYNC),
    ),
    Rule(
        "trainer.fully_async.sample_full_batch",
        False,
        Mapped("schedule.full_batch", note="groups that filters refuse are replaced", gate=ASYNC),
    ),
    Rule(
        "trainer.fully_async.clear_kv_cache_on_weight_sync",
        False,
        Refused(
            "frozen requests go on with the KV cache they have",
            "set inference.pause_mode=abort: interrupted answers are computed anew under the new weights",
        ),
    ),
    Rule(
        "trainer.fully_async.simulate_training",
        False,
        Refused("a run always trains", "use 'slipstream simulate', which needs neither a trainer nor engines"),
    ),
    *under(
        "trainer.fully_async",
        {"simulate_training_step_seconds": 30.0, "simulate_weight_sync_seconds": 0.0},
        Idle("trainer.fully_async.simulate_training=true"),
    ),
    Rule(
        "trainer.mtp.enabled",
        False,
        Refused("multi-token prediction heads are not in this release", "leave trainer.mtp.enabled out"),
    ),
    *under("trainer.mtp", {"num_speculative_tokens": 1, "loss_weight": 0.1}, Idle("trainer.mtp.enabled=true")),
]

TRAINER = [*_BATCHES, *_RUNTIME, *_RECORD, *_PLACEMENT, *_POLICY, *_REFERENCE, *_CRITIC, *_ASYNC]
