"""Every setting of a run, typed, frozen and strict.

Owns: the settings tree (one class per room), defaults, and the rules inside one section.
Refuses: torch, engines, and settings that nothing reads (``extra="forbid"``; a test lists the readers).
Rules that span sections live in ``slipstream.config.checks``; files and overrides in ``slipstream.config.load``.

Units are part of a name or of its description: prompts, samples, tokens, seconds, bytes.

>>> settings = RunSettings.model_validate({"schedule": {"prompts_per_step": 4}})
>>> settings.schedule.prompts_per_step, settings.rollout.samples_per_prompt
(4, 8)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from slipstream.config.algorithm import AlgorithmSettings
from slipstream.config.base import (
    Dtype,
    OptimizerSettings,
    RunDir,
    Settings,
    Strings,
    TopK,
    Urls,
    one_or_many,
    section_defaults,
)

__all__ = [
    "NO_LIMIT",
    "AlgorithmSettings",
    "CheckpointSettings",
    "DataSettings",
    "Dtype",
    "EnvSettings",
    "EvalSettings",
    "FailureBudget",
    "InferenceSettings",
    "LoggingSettings",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RolloutSettings",
    "RuleSettings",
    "RunSettings",
    "SamplingSettings",
    "ScheduleSettings",
    "Settings",
    "SftSettings",
    "Strings",
    "TopK",
    "TrainingSettings",
    "Urls",
]

NO_LIMIT = 2**31 - 1
"""``schedule.steps`` when only ``schedule.epochs`` was given."""


class ModelSettings(Settings):
    """Which weights are trained."""

    path: str = Field(
        "smollm2-135m-instruct", min_length=1, description="Local directory, hub id, or the bundled name."
    )
    dtype: Dtype = Field("bfloat16", description="Dtype of forward and backward; master weights are float32.")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention kernel of the trainer; auto takes the packed kernel that fits the device."
    )
    chat_template: str | None = Field(None, description="Jinja file that replaces the tokenizer's own template.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables of the chat template, such as enable_thinking."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in backward: less memory, about a third more arithmetic."
    )


class LoraSettings(Settings):
    """Low-rank adapters (peft); rank 0 trains all weights."""

    rank: int = Field(0, ge=0, description="Rank of the adapters; 0 trains all weights.")
    alpha: float = Field(16.0, gt=0, description="Scale of the adapters: their output is multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability on the adapters' input.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Module names that get an adapter, or all-linear (every linear layer but the head)."
    )


class TrainingSettings(Settings):
    """The training backend."""

    backend: Literal["torch"] = Field("torch", description="Training backend.")
    optimizer: OptimizerSettings = Field(OptimizerSettings(), description="Optimiser of the RL phase.")
    lora: LoraSettings = Field(LoraSettings(), description="Low-rank adapters.")
    max_tokens_per_microbatch: int = Field(
        8192, ge=1, description="Input tokens of one forward/backward; a shared prompt counts once."
    )
    logprob_chunk_tokens: int = Field(512, ge=1, description="Tokens per chunk of the vocabulary projection.")
    share_prompts: bool = Field(True, description="Compute what rows begin with in common once in the update.")
    routing_replay: bool = Field(
        False, description="Mixture of experts: the update sends each token to the experts that the engine chose (R3)."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the backend; null leaves torch's choice.")
    heap_growth: float = Field(
        1.2,
        ge=1,
        description="Around an update and after a publish, freed memory goes back to the system if the process has "
        "grown by this factor since it last did. 1 holds least and is slower: always, and staged weights too.",
    )
    determinism: Literal["fast", "exact"] = Field(
        "fast", description="exact: the same seed gives bit-equal losses, weights and ledger content."
    )


class SamplingSettings(Settings):
    """How actions are drawn."""

    temperature: float = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy, for evaluation only.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 is off.")
    top_k: TopK = Field(-1, description="Most likely tokens kept; -1 is off.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Least probability, relative to the most likely token; 0 is off.")
    repetition_penalty: float = Field(1.0, gt=0, description="Divides the logits of tokens seen before; 1 is off.")
    max_tokens_per_turn: int = Field(256, ge=1, description="New tokens of one turn.")
    stop: Strings = Field((), description="Strings that end a turn; the whole last token is kept.")


class RouterSettings(Settings):
    """Which replica answers a request."""

    policy: Literal["sticky_least_loaded", "consistent_hash", "cache_aware", "round_robin"] = Field(
        "sticky_least_loaded",
        description="sticky_least_loaded: a trajectory stays where it began, on the replica with the fewest open ones.",
    )
    process: Literal["vllm-router", "client"] = Field(
        "vllm-router",
        description="vllm-router: the Rust router in front of several replicas; client: the same policies without it.",
    )


class LaunchSettings(Settings):
    """How engine servers are started and kept alive."""

    python: str | None = Field(
        None, min_length=1, description="Interpreter of the engine's virtual environment; null is this one."
    )
    args: tuple[str, ...] = Field((), description="Further arguments of the server's command line, as they are.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables added to the server's environment.")
    ready_seconds: float = Field(600.0, gt=0, description="Deadline of a server's start in seconds.")
    restarts: int = Field(3, ge=0, description="Restarts of one replica in a run before it is given up.")
    health_seconds: float = Field(10.0, gt=0, description="Pause between health checks in seconds.")
    health_failures: int = Field(3, ge=1, description="Failed checks in a row after which a replica is down.")


class InferenceSettings(Settings):
    """The engine that samples."""

    engine: Literal["embedded", "vllm", "http"] = Field(
        "embedded",
        description="embedded: this package's engine, in this process when there is one replica; vllm: vLLM servers "
        "that are started here; http: running servers that speak vLLM's API.",
    )
    replicas: int = Field(1, ge=1, description="Engine replicas that are started (embedded, vllm).")
    urls: Urls = Field((), description="Base URLs of running engines (engine=http), one per replica.")
    router: RouterSettings = Field(RouterSettings(), description="Routing of several replicas.")
    launch: LaunchSettings = Field(LaunchSettings(), description="Starting engine servers.")
    transport: Literal["auto", "memory", "disk", "delta", "gloo", "nccl", "ipc", "adapter"] = Field(
        "auto",
        description="How weights reach engine servers: shared memory (auto, on one machine), a file, changed bytes "
        "in files, a Gloo broadcast, vLLM's own NCCL and CUDA IPC engines, or the LoRA adapter alone (vLLM).",
    )
    transfer_dir: Path | None = Field(
        None, description="Directory that trainer and engines see (disk, delta, adapter); null lies in run_dir."
    )
    transfer_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of this machine that engines reach (gloo, nccl)."
    )
    dtype: Dtype = Field("bfloat16", description="Dtype of the engine's weights and KV cache.")
    max_batch_size: int = Field(64, ge=1, description="Sequences decoded together.")
    max_model_len: int | None = Field(None, ge=2, description="Context in tokens; null reads the model's config.")
    kv_cache_tokens: int = Field(65536, ge=1, description="KV-cache capacity in tokens over all sequences.")
    prefix_caching: bool = Field(True, description="Reuse the KV cache of prefixes seen before.")
    use_cache_salt: bool = Field(True, description="Never share cached prefixes between weight versions.")
    request_timeout_seconds: float = Field(600.0, gt=0, description="Deadline of one request in seconds.")
    pause_mode: Literal["abort", "wait", "keep"] = Field(
        "wait", description="Running requests at a publish: abort ends them, wait finishes them, keep freezes them."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null leaves torch's choice.")


class FailureBudget(Settings):
    """How many failures are tolerated; there is no unlimited setting."""

    attempts: int = Field(2, ge=1, description="Tries per sample for retryable failures.")
    max_failed_fraction: float = Field(
        0.5, gt=0, le=1, description="Failed share of a step's samples above which the run stops."
    )


class RolloutSettings(Settings):
    """The turn loop."""

    samples_per_prompt: int = Field(8, ge=1, description="Samples of one prompt: the size of a group.")
    max_turns: int = Field(1, ge=1, description="Model turns per trajectory.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are left out at load, and counted.")
    max_total_tokens: int = Field(
        2048, ge=2, description="Prompt, actions and observations of one trajectory; longer SFT rows are left out."
    )
    sampling: SamplingSettings = Field(SamplingSettings(), description="How training samples are drawn.")
    env_workers: int = Field(32, ge=1, description="Environments that may run at once.")
    env_step_seconds: float = Field(30.0, gt=0, description="Deadline of one environment call in seconds.")
    concurrency: int = Field(256, ge=1, description="Trajectories in flight at once.")
    generator: str | None = Field(
        None, description="Import path MODULE:NAME of a generator of your own, or of a function that builds it."
    )
    failures: FailureBudget = Field(FailureBudget(), description="Failures that are tolerated.")


class EnvSettings(Settings):
    """Which environment, and its own settings."""

    id: str = Field("text2sql", min_length=1, description="Registered environment of rows without env_class.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the environment env.id as env_config.")
    modules: Strings = Field((), description="Modules to import first; they register environments.")


class DataSettings(Settings):
    """Prompts and SFT rows: files (parquet, json, jsonl), hub names, or ``builtin:NAME``."""

    train: Strings = Field((), description="Training prompts.")
    eval: Strings = Field((), description="Evaluation prompts; scores are reported per data_source too.")
    sft: Strings = Field((), description="Chat rows for supervised fine-tuning.")
    shuffle: bool = Field(True, description="Shuffle prompts in every pass, keyed by the seed and the pass.")
    eval_limit: int | None = Field(None, ge=1, description="Evaluate on the first N rows only.")


class ScheduleSettings(Settings):
    """Which schedule drives the loop, and for how long."""

    kind: Literal["sync", "one_step_off", "fully_async", "bounded", "windowed"] = Field(
        "sync",
        description="sync: sample, train, publish in turn; one_step_off: the next batch is sampled while one is "
        "trained; fully_async: SkyRL's capacity rule; bounded: no group older than max_staleness_steps; windowed: in "
        "order, but for overtake.",
    )
    prompts_per_step: int = Field(16, ge=1, description="Prompts (groups) that one step trains on.")
    steps: int = Field(
        100, ge=0, description="RL steps (a step ends in one publish). With epochs, whichever comes first."
    )
    epochs: int | None = Field(
        None, ge=1, description="Passes over the training prompts; turned into steps when the data is known."
    )
    step_deadline_seconds: float = Field(3600.0, gt=0, description="Deadline of one step in seconds.")
    time_limit_minutes: float | None = Field(
        None,
        gt=0,
        description="Wall-clock minutes for the run as a whole, every phase and start counted: after the first, no RL "
        "step is begun that would not leave time for the last evaluation, and the run is finished. null = no limit.",
    )
    generate_prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="Over-sampling: prompts drawn for a step; the first with spread are kept. null = no more. "
        "Of sync and one_step_off.",
    )
    max_staleness_steps: int = Field(
        4, ge=0, description="Steps that sampling may run ahead: (this + 1) x prompts_per_step groups are outstanding."
    )
    max_running_groups: int | None = Field(
        None, ge=1, description="Groups that are sampled at once; null leaves it to max_staleness_steps."
    )
    full_batch: bool = Field(
        False, description="Groups that the filters refuse are replaced at once, so that a step is never short."
    )
    max_batches_per_step: int = Field(
        30,
        ge=1,
        description="A step gives up when this many batches of groups have been refused or have failed. With "
        "`algorithm.dynamic_sampling.kind=filter` its `max_rounds` count instead, and the step trains what it has.",
    )
    on_stale: Literal["wait", "drop", "requeue"] = Field(
        "wait", description="Of bounded: a step waits for groups that are due, or too old groups are dropped or redone."
    )
    overtake: int | None = Field(
        None, ge=0, description="Of windowed: later groups that may overtake a running one; null is prompts_per_step."
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, data: Any) -> Any:
        """``epochs`` without ``steps`` means that only the epochs end the run."""
        if isinstance(data, dict) and data.get("epochs") is not None and "steps" not in data:
            return {**data, "steps": NO_LIMIT}
        return data


class EvalSettings(Settings):
    """Evaluation: greedy by default; its whole spec is saved with each score."""

    before: bool = Field(True, description="Evaluate before the first step.")
    after: bool = Field(True, description="Evaluate after the last step.")
    every_steps: int = Field(0, ge=0, description="Evaluate every N steps; 0 = only before and after.")
    samples_per_prompt: int = Field(1, ge=1, description="Samples per evaluation prompt.")
    sampling: Annotated[SamplingSettings, section_defaults(temperature=0.0)] = Field(
        SamplingSettings(temperature=0.0), description="How they are drawn."
    )


class SftSettings(Settings):
    """Supervised fine-tuning through the same spans and loss path."""

    steps: int = Field(0, ge=0, description="Optimiser steps; 0 skips the phase.")
    rows_per_step: int = Field(16, ge=1, description="Chat rows per optimiser step.")
    optimizer: Annotated[OptimizerSettings, section_defaults(lr=1e-5)] = Field(
        OptimizerSettings(lr=1e-5), description="Optimiser of the SFT phase."
    )
    train_on: Literal["all_assistant_messages", "last_assistant_message"] = Field(
        "all_assistant_messages", description="Which assistant messages are learnt."
    )


class CheckpointSettings(Settings):
    """Whole-run checkpoints."""

    every_steps: int = Field(10, ge=0, description="Save every N steps; 0 = only at the end.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description="auto: go on where run_dir stands; never: refuse a run_dir that holds a run; must: fail without a "
        "checkpoint.",
    )
    rollouts: Literal["auto", "continue", "restart"] = Field(
        "auto",
        description="Unfinished rollouts after a resume: continue keeps completed turns; restart samples them anew; "
        "auto restarts in a synchronous exact run only, where that gives the bits of an uninterrupted one.",
    )
    rollbacks: int = Field(
        1,
        ge=0,
        description="How often a run goes back to an earlier checkpoint by itself (rules, callbacks) and on from "
        "there; the next time it ends there.",
    )


class RuleSettings(Settings):
    """One rule that ends a run: the mean of a metric over the last steps has left its bounds."""

    metric: str = Field(min_length=1, description="A metric of the ledger, such as reward/avg_raw_reward.")
    above: float | None = Field(None, description="Ends the run when the mean is above this.")
    below: float | None = Field(None, description="Ends the run when the mean is below this.")
    window: int = Field(1, ge=1, description="Values (steps, or evaluations) that the mean is taken of.")
    action: Literal["stop", "rollback"] = Field(
        "stop",
        description="stop: save and end; rollback: go on from an earlier checkpoint, checkpoint.rollbacks times.",
    )
    to: str | None = Field(
        None, description="Of rollback: the checkpoint's name; null takes the newest from before the window."
    )

    @model_validator(mode="after")
    def _bounded(self) -> RuleSettings:
        if self.above is None and self.below is None:
            raise ValueError(f"the rule on {self.metric} has no bound; set above or below")
        if self.to is not None and self.action != "rollback":
            raise ValueError(f"the rule on {self.metric} names a checkpoint; that is read with action=rollback only")
        return self


class LoggingSettings(Settings):
    """Metric sinks; several at once."""

    sinks: Annotated[
        tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...],
        BeforeValidator(one_or_many),
    ] = Field(("console", "jsonl"), description="Where metrics go.")
    project: str = Field("slipstream", description="Project name at the trackers.")
    run_name: str | None = Field(None, description="Run name at the trackers; null takes run_dir's name.")
    report: bool = Field(True, description="Write report.html at the end.")


class RunSettings(Settings):
    """The whole run."""

    run_dir: RunDir = Field(Path("runs/run"), description="Everything that a run writes lies in this directory.")
    seed: int = Field(0, ge=0, description="Keys the sampling noise, the shuffles and every initialisation.")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    env: EnvSettings = EnvSettings()
    rollout: RolloutSettings = RolloutSettings()
    inference: InferenceSettings = InferenceSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    sft: SftSettings = SftSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    rules: tuple[RuleSettings, ...] = Field((), description="When a run ends by itself; see docs/resume.md.")
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _engine_urls(self) -> RunSettings:
        if self.inference.engine == "http" and not self.inference.urls:
            raise ValueError("inference.engine=http needs inference.urls (the base URLs of running engines)")
        if self.inference.engine != "http" and self.inference.urls:
            raise ValueError("inference.urls is read only with inference.engine=http; set both or neither")
        if self.inference.engine == "http" and self.inference.replicas != 1:
            raise ValueError("inference.replicas counts engines that are started; with engine=http urls names them")
        return self
