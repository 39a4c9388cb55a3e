"""Contradictions between settings, found before any model loads.

Owns: the rules that span sections.  Refuses: rules inside one section (the settings classes have them) and
what an algorithm's registry knows (``slipstream.algorithms`` reports the same ``Problem`` records).

Each rule is a small generator of problems; ``check_settings`` runs them all, so that a user sees every one at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.config.algorithm import OffPolicySettings
from slipstream.config.base import Settings
from slipstream.config.facts import ModelFacts
from slipstream.config.problems import Problem
from slipstream.config.resolve import most_sampled_tokens, optimizer_steps, prompts_drawn
from slipstream.config.schedule_checks import READ_BY, check_schedule, samples_ahead
from slipstream.config.settings import RunSettings, SamplingSettings
from slipstream.config.tree import leaves, value_at

_MOST_LORA_RANK = 512
"""vLLM's largest ``--max-lora-rank``."""


_RL_ONLY = (
    "eval.every_steps",
    "checkpoint.rollouts",
    "schedule.kind",
    "schedule.epochs",
    *(f"schedule.{name}" for name in READ_BY),
)
"""What RL steps alone read, of sections that a supervised run reads too."""


@dataclass(frozen=True)
class Known:
    """What is known about the data and the model when the plan is made; None is unknown."""

    facts: ModelFacts | None = None
    n_train_rows: int | None = None
    n_eval_rows: int | None = None


_CLIPS_BELOW = ("ppo_clip", "dual_clip", "clip_cov", "decoupled_ppo", "gspo", "rollout_is")
"""Losses whose ratio is bounded from below by ``1 - clip_low``, by intent: cispo's default is no bound."""
_READ_SAMPLER = ("decoupled_ppo", "dppo", "rollout_is", "score_centering")
"""Losses that compare with the sampler itself, whatever the anchor is."""


def check_settings(settings: RunSettings, known: Known | None = None) -> list[Problem]:
    """Every contradiction, errors first."""
    known = known or Known()
    rules = (
        _phases,
        _batches,
        _schedule,
        _without_rl,
        _lengths,
        _context,
        _training_sampling,
        _routing_replay,
        _teacher,
        _evaluation,
        _algorithm,
        _trainer,
        _engine,
        _unread,
        _time,
    )
    found = [problem for rule in rules for problem in rule(settings, known)]
    return sorted(found, key=lambda problem: problem.severity != "error")


def _warn(keys: tuple[str, ...], message: str, mend: str) -> Problem:
    return Problem(keys, message, mend, "warning")


def _rl(settings: RunSettings) -> bool:
    return settings.schedule.steps > 0


def _phases(settings: RunSettings, known: Known) -> Iterator[Problem]:
    data = settings.data
    if _rl(settings) and not data.train:
        yield Problem(
            ("data.train", "schedule.steps"),
            f"{settings.schedule.steps} RL steps, but no training prompts",
            "set data.train (files, a hub name or builtin:NAME), or schedule.steps=0",
        )
    if known.n_train_rows == 0 and _rl(settings):
        yield Problem(("data.train",), "holds no usable prompt", "look at the rows that were left out, and why")
    if settings.sft.steps > 0 and not data.sft:
        yield Problem(("data.sft", "sft.steps"), "SFT steps, but no chat rows", "set data.sft, or sft.steps=0")
    if settings.sft.steps == 0 and data.sft:
        yield _warn(("data.sft", "sft.steps"), "chat rows are given but sft.steps is 0", "set sft.steps")
    evaluates = settings.eval.before or settings.eval.after or settings.eval.every_steps > 0
    if evaluates and not data.eval:
        yield _warn(("data.eval",), "no evaluation prompts, so nothing is evaluated", "set data.eval")
    if not _rl(settings) and settings.sft.steps == 0 and not (evaluates and data.eval):
        yield Problem(
            ("schedule.steps", "sft.steps", "data.eval"),
            "nothing is trained and nothing is evaluated",
            "set schedule.steps, sft.steps or data.eval",
        )


def _batches(settings: RunSettings, known: Known) -> Iterator[Problem]:
    if not _rl(settings):
        return
    schedule, algorithm = settings.schedule, settings.algorithm
    prompts, parts, drawn = schedule.prompts_per_step, algorithm.minibatches_per_step, prompts_drawn(settings)
    keys = ("algorithm.minibatches_per_step", "schedule.prompts_per_step")
    if parts > prompts:
        yield Problem(
            keys,
            f"{prompts} groups cannot fill {parts} mini-batches, and a group is never split",
            f"set algorithm.minibatches_per_step to at most {prompts}",
        )
    elif prompts % parts:
        yield _warn(keys, f"{prompts} groups make {parts} mini-batches of unequal size", "choose a divisor")
    over = ("schedule.generate_prompts_per_step", "schedule.prompts_per_step")
    if drawn < prompts:
        yield Problem(over, f"{drawn} prompts are drawn, but a step trains on {prompts}", f"draw at least {prompts}")
    elif drawn > prompts and not algorithm.drop_zero_variance:
        yield Problem(
            (over[0], "algorithm.drop_zero_variance"),
            "more prompts are drawn, but no group is ever left out",
            "set algorithm.drop_zero_variance=true, or do not over-sample",
        )
    if known.n_train_rows and known.n_train_rows < drawn:
        yield _warn(
            ("schedule.prompts_per_step", "data.train"),
            f"a step draws {drawn} prompts from {known.n_train_rows} rows, so some come twice in one step",
            "draw fewer, or give more rows",
        )
    per_step = drawn * settings.rollout.samples_per_prompt
    if settings.rollout.concurrency < settings.rollout.samples_per_prompt:
        yield _warn(
            ("rollout.concurrency", "rollout.samples_per_prompt"),
            f"one group of {settings.rollout.samples_per_prompt} is larger than the {settings.rollout.concurrency} "
            f"trajectories in flight (a step has {per_step})",
            "raise rollout.concurrency",
        )


def _schedule(settings: RunSettings, known: Known) -> Iterator[Problem]:
    if _rl(settings):
        yield from check_schedule(settings, known.n_train_rows)


def _without_rl(settings: RunSettings, known: Known) -> Iterator[Problem]:
    if _rl(settings):
        return
    for path in _RL_ONLY:
        if value_at(settings, path) != leaves()[path].default:
            yield _warn(
                (path, "schedule.steps"),
                "RL steps alone read it, and there are none",
                "leave it out, or set schedule.steps",
            )


def _lengths(settings: RunSettings, known: Known) -> Iterator[Problem]:
    rollout = settings.rollout
    if rollout.max_prompt_tokens >= rollout.max_total_tokens:
        yield Problem(
            ("rollout.max_prompt_tokens", "rollout.max_total_tokens"),
            f"a prompt of {rollout.max_prompt_tokens} tokens leaves no room in {rollout.max_total_tokens}",
            "raise max_total_tokens or lower max_prompt_tokens",
        )
    elif rollout.max_prompt_tokens + rollout.sampling.max_tokens_per_turn > rollout.max_total_tokens:
        room = rollout.max_total_tokens - rollout.max_prompt_tokens
        yield _warn(
            ("rollout.sampling.max_tokens_per_turn", "rollout.max_total_tokens"),
            f"the longest prompt leaves {room} tokens for a turn of {rollout.sampling.max_tokens_per_turn}",
            "raise max_total_tokens",
        )
    if settings.training.max_tokens_per_microbatch < rollout.max_total_tokens and _rl(settings):
        yield _warn(
            ("training.max_tokens_per_microbatch", "rollout.max_total_tokens"),
            f"a trajectory of up to {rollout.max_total_tokens} tokens is never split, so it exceeds the budget of "
            f"{settings.training.max_tokens_per_microbatch}",
            "raise the budget to bound memory as planned",
        )


def _context(settings: RunSettings, known: Known) -> Iterator[Problem]:
    total, inference = settings.rollout.max_total_tokens, settings.inference
    if inference.max_model_len is not None and inference.max_model_len < total:
        yield Problem(
            ("inference.max_model_len", "rollout.max_total_tokens"),
            f"the engine's context of {inference.max_model_len} is shorter than a trajectory of {total}",
            "raise one or lower the other",
        )
    positions = known.facts.max_positions if known.facts else None
    longest = max(total, inference.max_model_len or 0)
    if positions is not None and positions < longest:
        yield Problem(
            ("rollout.max_total_tokens", "inference.max_model_len", "model.path"),
            f"the model has {positions} positions, fewer than {longest}",
            f"use at most {positions} tokens",
        )
    if inference.engine == "embedded" and inference.kv_cache_tokens < total:
        yield Problem(
            ("inference.kv_cache_tokens", "rollout.max_total_tokens"),
            f"one trajectory of {total} tokens does not fit into a cache of {inference.kv_cache_tokens}",
            f"set inference.kv_cache_tokens to at least {total}",
        )


def truncations(sampling: SamplingSettings) -> list[str]:
    """Names of the options that cut or reshape the sampler's support."""
    active = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k != -1,
        "min_p": sampling.min_p > 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
    }
    return [name for name, on in active.items() if on]


def _training_sampling(settings: RunSettings, known: Known) -> Iterator[Problem]:
    sampling = settings.rollout.sampling
    if not _rl(settings):
        return
    cut = truncations(sampling)
    if "repetition_penalty" in cut:
        yield Problem(
            ("rollout.sampling.repetition_penalty",),
            "a penalty depends on the tokens before, so the update would score another distribution than was sampled",
            "switch it off for training (eval.sampling may use it)",
        )
        cut.remove("repetition_penalty")
    if cut:
        yield from _sampler_replay(settings, tuple(f"rollout.sampling.{name}" for name in cut))
    if sampling.temperature == 0:
        yield Problem(
            ("rollout.sampling.temperature",),
            "greedy samples cannot be trained on: the group would be one sample, and its ratio is not defined",
            "use a temperature above 0 (eval.sampling.temperature=0 is fine)",
        )


def _sampler_replay(settings: RunSettings, cut: tuple[str, ...]) -> Iterator[Problem]:
    """The kept sets of a truncated sampler have to come back from the engine."""
    if settings.rollout.generator is not None:
        yield _warn(
            ("rollout.generator", *cut),
            "samples come from a truncated distribution; a generator of your own has to return the kept sets itself",
            "give each SAMPLED span its side channel kept_sets, or switch the truncation off",
        )
    if settings.inference.engine in ("http", "vllm"):
        evaluated = bool(settings.data.eval) and (
            settings.eval.before or settings.eval.after or settings.eval.every_steps
        )
        for who, sampling, used in (
            ("rollout", settings.rollout.sampling, True),
            ("eval", settings.eval.sampling, evaluated),
        ):
            if used and (sampling.top_k == -1 or sampling.temperature == 0):
                yield Problem(
                    (f"{who}.sampling.top_k", f"{who}.sampling.temperature", *cut),
                    "vLLM returns kept sets (--return-sampling-mask) only where every request has top_k > 0 and a "
                    "temperature above 0",
                    f"set {who}.sampling.top_k and a temperature, or switch the truncation of training off",
                )
    elif settings.rollout.sampling.top_k == -1:
        yield _warn(
            cut,
            "without top_k a kept set may hold most of the vocabulary, and one is kept for every sampled token",
            "set rollout.sampling.top_k to bound it",
        )


def _routing_replay(settings: RunSettings, known: Known) -> Iterator[Problem]:
    """The experts have to exist, and to come back from the engine."""
    if not (settings.training.routing_replay and _rl(settings)):
        return
    if known.facts is not None and known.facts.experts == 0:
        yield Problem(
            ("training.routing_replay", "model.path"),
            f"{known.facts.model_type} is a dense model: there is no routing to replay",
            "switch it off",
        )
    if settings.rollout.generator is not None:
        yield _warn(
            ("training.routing_replay", "rollout.generator"),
            "a generator of your own has to return the experts itself",
            "give every token its side channel routed_experts, or switch routing replay off",
        )


def _teacher(settings: RunSettings, known: Known) -> Iterator[Problem]:
    """Servers score prompts at temperature 1 over the whole vocabulary."""
    sampling = settings.rollout.sampling
    if _rl(settings) and settings.algorithm.teacher.urls and (sampling.temperature != 1 or truncations(sampling)):
        yield Problem(
            ("algorithm.teacher.urls", "rollout.sampling"),
            "a teacher behind a server scores at temperature 1 over the whole vocabulary; the student samples "
            "otherwise",
            "sample at temperature 1 without truncation, or use a local teacher (algorithm.teacher.path)",
        )


def _evaluation(settings: RunSettings, known: Known) -> Iterator[Problem]:
    evaluation = settings.eval
    if evaluation.sampling.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield _warn(
            ("eval.samples_per_prompt", "eval.sampling.temperature"),
            f"{evaluation.samples_per_prompt} greedy samples of one prompt are the same sample",
            "set one sample, or a temperature above 0",
        )
    if evaluation.every_steps > settings.schedule.steps > 0:
        yield _warn(
            ("eval.every_steps", "schedule.steps"),
            f"the run ends before step {evaluation.every_steps}",
            "evaluate more often, or rely on eval.after",
        )
    if settings.data.eval_limit and known.n_eval_rows and settings.data.eval_limit > known.n_eval_rows:
        yield _warn(
            ("data.eval_limit", "data.eval"),
            f"there are only {known.n_eval_rows} evaluation prompts",
            "lower or drop the limit",
        )


def _algorithm(settings: RunSettings, known: Known) -> Iterator[Problem]:
    algorithm = settings.algorithm
    if not _rl(settings):
        return
    overlong, most = algorithm.overlong, most_sampled_tokens(settings.rollout)
    if overlong.factor > 0:
        limit = overlong.max_tokens or most
        buffer = overlong.buffer_tokens or max(1, limit // 5)
        if buffer > limit:
            given = "" if overlong.max_tokens else ", which is the most tokens that a trajectory may sample"
            yield Problem(
                ("algorithm.overlong.buffer_tokens", "algorithm.overlong.max_tokens"),
                f"the buffer of {buffer} tokens is longer than the limit of {limit}{given}, so even an empty answer "
                "would be penalised",
                "lower the buffer",
            )
        elif limit - buffer >= most:
            yield _warn(
                ("algorithm.overlong.max_tokens", "rollout.sampling.max_tokens_per_turn"),
                f"an answer has at most {most} tokens, and the penalty begins above {limit - buffer}",
                "lower it, or leave it null",
            )
    if algorithm.kl_in == "reward" and algorithm.kl_coef == 0:
        yield Problem(
            ("algorithm.kl_in", "algorithm.kl_coef"),
            "a KL term in the reward with weight 0 does nothing",
            "set algorithm.kl_coef above 0, or algorithm.kl_in=loss",
        )
    if algorithm.clip_low is not None and algorithm.clip_low >= 1 and algorithm.loss in _CLIPS_BELOW:
        yield _warn(
            ("algorithm.clip_low",),
            f"a ratio is never below 1 - {algorithm.clip_low:g}, so it is never clipped from below",
            "choose a value below 1",
        )
    one_step = algorithm.epochs_per_step * algorithm.minibatches_per_step == 1
    compared = algorithm.loss in _READ_SAMPLER or algorithm.off_policy != OffPolicySettings()
    if one_step and algorithm.old_logprobs == "recompute" and not compared:
        yield _warn(
            ("algorithm.old_logprobs",),
            "with one optimiser step per batch a recomputed anchor makes every ratio 1, and nothing is clipped",
            "use algorithm.old_logprobs=sampler: it saves a forward pass",
        )


def _trainer(settings: RunSettings, known: Known) -> Iterator[Problem]:
    training, optimizer = settings.training, settings.training.optimizer
    steps = settings.schedule.steps * optimizer_steps(settings)
    if training.determinism == "exact" and (settings.inference.engine != "embedded" or settings.inference.replicas > 1):
        yield Problem(
            ("training.determinism", "inference.engine", "inference.replicas"),
            "a server batches requests as they arrive, so its samples are not reproducible to the bit",
            "use inference.engine=embedded with one replica, or training.determinism=fast",
        )
    if training.lora.rank > 0 and training.lora.dropout > 0 and _rl(settings):
        yield Problem(
            ("training.lora.dropout",),
            "dropout makes the trainer score tokens under another policy than the one that sampled them",
            "set it to 0",
        )
    if _rl(settings) and optimizer.warmup_steps >= steps:
        yield _warn(
            ("training.optimizer.warmup_steps", "schedule.steps"),
            f"the warm-up of {optimizer.warmup_steps} optimiser steps never ends: the run takes {steps}",
            "shorten it",
        )
    if optimizer.total_steps is not None and optimizer.scheduler != "constant" and optimizer.total_steps < steps:
        yield _warn(
            ("training.optimizer.total_steps", "schedule.steps"),
            f"the learning rate reaches its end after {optimizer.total_steps} of {steps} optimiser steps",
            "leave total_steps null",
        )
    if settings.model.attn_implementation == "flash_attention_2":
        yield Problem(
            ("model.attn_implementation",),
            "flash_attention_2 cannot compute a group's shared prompt once",
            "use auto, which packs rows without padding",
        )
    if optimizer.lr == 0 and _rl(settings):
        yield _warn(("training.optimizer.lr",), "a learning rate of 0 trains nothing", "set it above 0")


def _engine(settings: RunSettings, known: Known) -> Iterator[Problem]:
    inference = settings.inference
    trains = _rl(settings) or settings.sft.steps > 0
    if inference.engine == "http" and trains and inference.transport in ("auto", "memory"):
        yield Problem(
            ("inference.transport", "inference.engine"),
            "servers that were started elsewhere cannot be assumed to share this machine's memory",
            "set inference.transport to disk, delta or adapter (with inference.transfer_dir), gloo or nccl",
        )
    in_process = inference.engine == "embedded" and inference.replicas == 1
    if in_process and inference.transport != "auto":
        yield Problem(
            ("inference.transport",),
            "one embedded engine takes its weights in this process",
            "leave inference.transport at auto, or start engines with inference.replicas or inference.engine=vllm",
        )
    if inference.engine == "embedded" and inference.transport in ("nccl", "ipc"):
        yield Problem(
            ("inference.transport", "inference.engine"),
            f"{inference.transport} is vLLM's own weight transfer",
            "use inference.transport=auto, or inference.engine=vllm",
        )
    if inference.transport == "adapter":
        yield from _adapter(settings)
    if settings.model.dtype != inference.dtype:
        yield _warn(
            ("model.dtype", "inference.dtype"),
            f"the trainer scores in {settings.model.dtype} what the engine samples in {inference.dtype}, "
            "so their log-probs differ by rounding",
            "use one dtype, or watch the gap in the ledger",
        )


def _adapter(settings: RunSettings) -> Iterator[Problem]:
    """The adapter alone travels: there has to be one, and an engine that runs with it."""
    inference, rank = settings.inference, settings.training.lora.rank
    if rank == 0:
        yield Problem(
            ("inference.transport", "training.lora.rank"),
            "there is no adapter: all weights are trained",
            "set training.lora.rank, or leave inference.transport at auto",
        )
    if rank > _MOST_LORA_RANK:
        yield Problem(
            ("training.lora.rank", "inference.transport"),
            f"vLLM runs adapters of rank {_MOST_LORA_RANK} at most",
            "lower the rank, or use another transport, which sends merged weights",
        )
    if inference.engine == "embedded" and inference.replicas > 1:
        yield Problem(
            ("inference.transport", "inference.engine"),
            "the embedded engine runs merged weights and no adapters",
            "use inference.transport=auto, or inference.engine=vllm",
        )
    if samples_ahead(settings.schedule):
        yield Problem(
            ("inference.transport", "schedule.kind"),
            "vLLM looks an adapter up when a request arrives, so requests that arrive while the next one is loaded "
            "would run with the old one under the new version's name",
            "use schedule.kind=sync, or another transport, which sends merged weights",
        )
    if inference.pause_mode == "keep":
        yield Problem(
            ("inference.pause_mode", "inference.transport"),
            "in vLLM a kept request goes on with the adapter that it began with, under the new version's name",
            "use inference.pause_mode=wait or abort",
        )


def _unread(settings: RunSettings, known: Known) -> Iterator[Problem]:
    """Settings of engines that this engine is never told of."""
    inference, launch = settings.inference, settings.inference.launch
    if inference.engine == "vllm" and _changed(inference, "kv_cache_tokens"):
        yield _warn(
            ("inference.kv_cache_tokens", "inference.engine"),
            "vLLM sizes its KV cache by itself",
            "set --kv-cache-memory-bytes or --gpu-memory-utilization in inference.launch.args",
        )
    if inference.engine == "http":
        names = ("max_batch_size", "max_model_len", "kv_cache_tokens", "prefix_caching", "threads")
        keys = [f"inference.{name}" for name in names if _changed(inference, name)]
        keys += [f"inference.launch.{name}" for name in ("python", "args", "env") if _changed(launch, name)]
        if keys:
            yield _warn(
                (*keys, "inference.engine"),
                "servers that run already are as they were started",
                "start them so, and leave the settings at their defaults",
            )


def _changed(section: Settings, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))


def _time(settings: RunSettings, known: Known) -> Iterator[Problem]:
    if settings.schedule.time_limit_minutes is not None and settings.training.determinism == "exact":
        yield Problem(
            ("schedule.time_limit_minutes", "training.determinism"),
            "exact mode promises the same run twice, and a clock would decide how many steps it has",
            "set schedule.steps alone, or training.determinism=fast",
        )
    deadline = settings.schedule.step_deadline_seconds
    for key, seconds in (
        ("rollout.env_step_seconds", settings.rollout.env_step_seconds),
        ("inference.request_timeout_seconds", settings.inference.request_timeout_seconds),
    ):
        if seconds > deadline:
            yield Problem(
                (key, "schedule.step_deadline_seconds"),
                f"one call may take {seconds:g} s, longer than a whole step ({deadline:g} s)",
                "raise the step's deadline or lower the call's",
            )
