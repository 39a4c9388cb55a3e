"""Every setting of a run, typed, frozen and strict.

Owns: the settings tree (one class per room), defaults, and the rules inside one section.
Refuses: torch, engines, and settings that nothing reads (``extra="forbid"``; a test lists the readers).
Rules that span sections live in ``slipstream.config.plan``.

Units are part of a name or of its description: prompts, samples, tokens, seconds, bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]


class Settings(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class ModelSettings(Settings):
    """Which weights are trained."""

    path: str = Field("smollm2-135m-instruct", description="Local directory, hub id, or the bundled name.")
    dtype: Dtype = Field("bfloat16", description="Dtype of forward and backward; master weights are float32.")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    chat_template: str | None = Field(None, description="Jinja file that replaces the tokenizer's own template.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    gradient_checkpointing: bool = False


class LoraSettings(Settings):
    """Low-rank adapters (peft); rank 0 trains all weights."""

    rank: int = Field(0, ge=0)
    alpha: float = 16.0
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"


class OptimizerSettings(Settings):
    """AdamW with a warm-up schedule."""

    lr: float = Field(1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the global gradient norm to this.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warm-up.")
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = Field(None, description="Length of the linear/cosine schedule; filled by the plan.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1)


class TrainingSettings(Settings):
    """The training backend."""

    backend: Literal["torch"] = "torch"
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    max_tokens_per_microbatch: int = Field(8192, ge=1, description="Input tokens; a shared prompt counts once.")
    logprob_chunk_tokens: int = Field(512, ge=1, description="Tokens per chunk of the vocabulary projection.")
    share_prompts: bool = Field(True, description="Compute a group's common prompt once in the update.")
    threads: int | None = Field(None, description="CPU threads of the backend; None leaves torch's choice.")
    determinism: Literal["fast", "exact"] = "fast"


class AlgorithmSettings(Settings):
    """Advantages, loss, reduction, KL, entropy, filters."""

    advantage: str = Field("grpo", description="Registered advantage estimator.")
    normalize_by_std: bool = Field(True, description="GRPO: divide by the group's standard deviation.")
    loss: str = Field("ppo_clip", description="Registered policy loss.")
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    reduction: str = Field("token_mean", description="Registered reduction.")
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    old_logprobs: Literal["sampler", "recompute"] = Field(
        "sampler", description="Anchor of the ratio: the sampler's log-probs, or a forward pass before the update."
    )
    epochs_per_step: int = Field(1, ge=1, description="Passes over a step's batch.")
    minibatches_per_step: int = Field(1, ge=1, description="Optimiser steps per pass; groups are never split.")
    drop_zero_variance: bool = Field(True, description="Leave out groups whose voters all earned the same.")
    zero_variance_tol: float = Field(1e-6, ge=0)
    loss_settings: dict[str, Any] = Field(default_factory=dict, description="Extra settings of the chosen loss.")


class SamplingSettings(Settings):
    """How actions are drawn."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0)
    max_tokens_per_turn: int = Field(256, ge=1)
    stop: tuple[str, ...] = ()


class InferenceSettings(Settings):
    """The engine that samples."""

    engine: Literal["embedded", "http"] = "embedded"
    urls: tuple[str, ...] = Field((), description="Base URLs of running engines (engine=http).")
    dtype: Dtype = "bfloat16"
    max_batch_size: int = Field(64, ge=1, description="Sequences decoded together.")
    max_model_len: int | None = Field(None, description="Context length in tokens; None reads the model's config.")
    kv_cache_tokens: int = Field(65536, ge=1, description="KV-cache capacity in tokens over all sequences.")
    prefix_caching: bool = True
    use_cache_salt: bool = True
    request_timeout_seconds: float = Field(600.0, gt=0)
    pause_mode: Literal["abort", "wait", "keep"] = "wait"
    threads: int | None = None


class FailureBudget(Settings):
    """How many failures are tolerated; there is no unlimited setting."""

    attempts: int = Field(2, ge=1, description="Tries per sample for retryable failures.")
    max_failed_fraction: float = Field(
        0.5, gt=0, le=1, description="Failed share of a step's samples above which the run stops."
    )


class RolloutSettings(Settings):
    """The turn loop."""

    samples_per_prompt: int = Field(8, ge=1)
    max_turns: int = Field(1, ge=1)
    max_prompt_tokens: int = Field(1024, ge=1)
    max_total_tokens: int = Field(2048, ge=2, description="Prompt, actions and observations of one trajectory.")
    sampling: SamplingSettings = SamplingSettings()
    env_workers: int = Field(32, ge=1, description="Environments that may run at once.")
    env_step_seconds: float = Field(30.0, gt=0, description="Deadline of one environment call.")
    concurrency: int = Field(256, ge=1, description="Trajectories in flight at once.")
    failures: FailureBudget = FailureBudget()
    zero_reward_on_non_stop: bool = False
    drop_truncated: bool = Field(False, description="Overlong filtering: truncated samples vote but are not trained.")


class EnvSettings(Settings):
    """Which environment, and its own settings."""

    id: str = "text2sql"
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the environment as env_config.")
    modules: tuple[str, ...] = Field((), description="Modules to import first; they register environments.")


class DataSettings(Settings):
    """Prompts and SFT rows: files (parquet, json, jsonl), hub names, or ``builtin:NAME``."""

    train: tuple[str, ...] = ()
    eval: tuple[str, ...] = ()
    sft: tuple[str, ...] = ()
    shuffle: bool = True
    eval_limit: int | None = Field(None, description="Evaluate on the first N rows only.")


class ScheduleSettings(Settings):
    """Which schedule drives the loop."""

    kind: Literal["sync"] = "sync"
    prompts_per_step: int = Field(16, ge=1)
    steps: int = Field(100, ge=0, description="RL steps (a step ends in one publish).")
    step_deadline_seconds: float = Field(3600.0, gt=0)
    generate_prompts_per_step: int | None = Field(
        None, description="Over-sampling: prompts drawn for a step; the first with spread are kept. None = no more."
    )


class EvalSettings(Settings):
    """Evaluation: greedy by default; its whole spec is saved with each score."""

    before: bool = True
    after: bool = True
    every_steps: int = Field(0, ge=0, description="0 = only before and after.")
    samples_per_prompt: int = Field(1, ge=1)
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)


class SftSettings(Settings):
    """Supervised fine-tuning through the same spans and loss path."""

    steps: int = Field(0, ge=0, description="Optimiser steps; 0 skips the phase.")
    rows_per_step: int = Field(16, ge=1)
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    train_on: Literal["all_assistant_messages", "last_assistant_message"] = "all_assistant_messages"


class CheckpointSettings(Settings):
    """Whole-run checkpoints."""

    every_steps: int = Field(10, ge=0, description="0 = only at the end.")
    keep: int = Field(2, ge=1)
    resume: Literal["auto", "never", "must"] = "auto"


class LoggingSettings(Settings):
    """Metric sinks; several at once."""

    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...] = ("console", "jsonl")
    project: str = "slipstream"
    run_name: str | None = None
    report: bool = Field(True, description="Write report.html at the end.")


class RunSettings(Settings):
    """The whole run."""

    run_dir: Path = Path("runs/run")
    seed: int = 0
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
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _engine_urls(self) -> RunSettings:
        if self.inference.engine == "http" and not self.inference.urls:
            raise ValueError("inference.engine=http needs inference.urls (the base URLs of running engines)")
        return self
