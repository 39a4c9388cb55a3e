"""Filling in what the settings leave open: run length, learning-rate schedule, lengths that follow from others.

Owns: epochs into steps, ``optimizer.total_steps``, the constants that default to the most tokens a trajectory may
sample.  Refuses: changing anything that was set.

A trainer resolves once, when the number of training prompts is known, and reads only the result.

>>> settings = RunSettings.model_validate({"schedule": {"epochs": 2, "prompts_per_step": 8}})
>>> resolve_settings(settings, n_train_rows=100).schedule.steps
25
"""

from __future__ import annotations

from slipstream.config.settings import NO_LIMIT, AlgorithmSettings, RolloutSettings, RunSettings
from slipstream.errors import SettingsError


def prompts_drawn(settings: RunSettings) -> int:
    """Prompts that are sampled for one step, over-sampling included."""
    schedule = settings.schedule
    return schedule.generate_prompts_per_step or schedule.prompts_per_step


def optimizer_steps(settings: RunSettings) -> int:
    """Optimiser steps of one RL step (at most: a step with too few groups takes fewer)."""
    return settings.algorithm.epochs_per_step * settings.algorithm.minibatches_per_step


def most_sampled_tokens(rollout: RolloutSettings) -> int:
    """The most tokens that the policy may sample in one trajectory; a prompt has at least one token."""
    return min(rollout.max_turns * rollout.sampling.max_tokens_per_turn, rollout.max_total_tokens - 1)


def resolve_settings(settings: RunSettings, n_train_rows: int | None = None) -> RunSettings:
    """Settings with a definite length.

    ``schedule.epochs`` passes over ``n_train_rows`` prompts become steps (rounded down, at least one; prompts
    that do not fill a last step are left); ``schedule.steps`` stays an upper bound.  Linear and cosine
    schedules without ``total_steps`` get the run's optimiser steps.  Where they are used,
    ``algorithm.reduction_tokens`` and the lengths of ``algorithm.overlong`` are filled in.

    Raises:
        SettingsError: epochs are the only limit and the number of rows is unknown or zero.
    """
    steps = settings.schedule.steps
    if settings.schedule.epochs is not None:
        if n_train_rows:
            steps = min(steps, max(1, settings.schedule.epochs * n_train_rows // prompts_drawn(settings)))
        elif steps == NO_LIMIT:
            raise SettingsError("schedule.epochs needs training prompts to count; set data.train, or schedule.steps")
    schedule = settings.schedule.model_copy(update={"steps": steps})
    rl, sft = settings.training.optimizer, settings.sft.optimizer
    if rl.total_steps is None and rl.scheduler != "constant":  # a run without RL steps still builds the optimiser
        rl = rl.model_copy(update={"total_steps": max(1, steps * optimizer_steps(settings))})
    if sft.total_steps is None and sft.scheduler != "constant" and settings.sft.steps > 0:
        sft = sft.model_copy(update={"total_steps": settings.sft.steps})
    return settings.model_copy(
        update={
            "schedule": schedule,
            "algorithm": _lengths(settings.algorithm, settings.rollout, steps),
            "training": settings.training.model_copy(update={"optimizer": rl}),
            "sft": settings.sft.model_copy(update={"optimizer": sft}),
        }
    )


def _lengths(algorithm: AlgorithmSettings, rollout: RolloutSettings, steps: int) -> AlgorithmSettings:
    """Constants that are null because they follow from the rollout's limits, or from the run's length."""
    found: dict[str, object] = {}
    if algorithm.reduction == "seq_mean_token_sum_norm" and algorithm.reduction_tokens is None:
        found["reduction_tokens"] = most_sampled_tokens(rollout)
    critic = algorithm.critic
    if critic.optimizer.total_steps is None and critic.optimizer.scheduler != "constant":
        total = max(1, steps * critic.epochs_per_step * critic.minibatches_per_step)
        optimizer = critic.optimizer.model_copy(update={"total_steps": total})
        found["critic"] = critic.model_copy(update={"optimizer": optimizer})
    overlong = algorithm.overlong
    if overlong.factor > 0:
        limit = overlong.max_tokens or most_sampled_tokens(rollout)
        buffer = overlong.buffer_tokens or max(1, limit // 5)
        found["overlong"] = overlong.model_copy(update={"max_tokens": limit, "buffer_tokens": buffer})
    return algorithm.model_copy(update=found) if found else algorithm
