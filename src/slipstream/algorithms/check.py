"""Planning: algorithm settings that cannot mean what they say are refused before any model loads.

Owns: ``check_algorithm``, ``algorithm_problems`` and ``loss_spec`` (settings to a ``LossSpec``).  Refuses: running
anything.

>>> from slipstream.config.settings import AlgorithmSettings, SamplingSettings
>>> check_algorithm(AlgorithmSettings(), SamplingSettings(), samples_per_prompt=8)
[]
>>> [p.keys[0] for p in check_algorithm(AlgorithmSettings(loss="ppo_clp"), SamplingSettings(), samples_per_prompt=8)]
['algorithm.loss']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.check_anchor import check_anchor
from slipstream.algorithms.check_estimation import check_estimation
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.losses import LOSSES, Loss
from slipstream.algorithms.objective import LossSpec, PerRow
from slipstream.algorithms.reduce import REDUCTIONS
from slipstream.algorithms.registry import Registry
from slipstream.config.presets import PRESETS
from slipstream.config.problems import Problem
from slipstream.config.schedule_checks import samples_ahead
from slipstream.config.settings import AlgorithmSettings, RunSettings, SamplingSettings
from slipstream.errors import SettingsError

_SHARED = ("clip_low", "clip_high")
"""Loss settings that have a field of their own in ``AlgorithmSettings``."""

_VLLM_CANDIDATES = 20
"""vLLM's default of ``--max-logprobs``."""

_OTHER_KINDS = {
    "likelihood": ("given text and ignores rewards", "use ppo_clip here; the sft section trains by likelihood"),
    "value": ("returns and trains the critic", "use ppo_clip here; advantage=gae trains a critic by it"),
}


def loss_options(settings: AlgorithmSettings) -> dict[str, Any]:
    """The chosen loss's settings: its defaults, under the shared fields that were given, under ``loss_settings``.

    Raises ``SettingsError`` when the loss is unknown or a setting is none of its own.
    """
    loss = LOSSES.get(settings.loss)
    shared = {key: getattr(settings, key) for key in _SHARED if key in loss.defaults}
    given = {key: value for key, value in shared.items() if value is not None}
    return loss.settings({**given, **settings.loss_settings})


def loss_spec(
    settings: AlgorithmSettings, *, kl_coef: float | None = None, old_logprobs: PerRow = None, **arrays: PerRow
) -> LossSpec:
    """The spec that these settings mean; KL is part of it only when ``kl_in`` is ``loss``.

    ``kl_coef`` replaces the settings' coefficient (a controller's); ``arrays`` are further per-row fields of
    ``LossSpec``.  Raises ``SettingsError`` when the loss is unknown or a setting is none of its own.
    """
    coefficient = settings.kl_coef if kl_coef is None else kl_coef
    return LossSpec(
        settings.loss,
        loss_options(settings),
        kl_coef=coefficient if settings.kl_in == "loss" else 0.0,
        kl_estimator=settings.kl_estimator,
        entropy_coef=settings.entropy_coef,
        old_logprobs=old_logprobs,
        interpolate=settings.old_logprobs == "approximate",
        **arrays,
    )


def reported_tokens(settings: AlgorithmSettings) -> int:
    """How many of the most likely tokens of each place the engine has to report; 0 when the loss reads none."""
    return settings.top_logprobs if "top_logprobs" in LOSSES.get(settings.loss).needs else 0


def check_algorithm(
    settings: AlgorithmSettings,
    sampling: SamplingSettings,
    *,
    samples_per_prompt: int,
    prompts_per_step: int | None = None,
    stale: bool = False,
) -> list[Problem]:
    """Every contradiction between these settings, errors and warnings, none raised.

    ``stale`` says that tokens may have been sampled by older weights than those that are updated.
    """
    problems = list(_check_names(settings))
    if not problems:
        problems += _check_loss(settings)
        problems += check_anchor(settings)
        problems += _check_stale(settings) if stale else ()
        problems += check_estimation(settings, samples_per_prompt=samples_per_prompt)
    problems += _check_kl(settings, prompts_per_step * samples_per_prompt if prompts_per_step is not None else None)
    problems += _check_sampling(sampling)
    if prompts_per_step is not None and settings.minibatches_per_step > prompts_per_step:
        problems.append(
            Problem(
                ("algorithm.minibatches_per_step", "schedule.prompts_per_step"),
                f"{settings.minibatches_per_step} mini-batches cannot be made of {prompts_per_step} whole groups",
                "use at most one mini-batch per prompt",
            )
        )
    return problems


def algorithm_problems(settings: RunSettings) -> list[Problem]:
    """``check_algorithm`` of a whole run, and whether its engine can report what its loss reads."""
    if settings.schedule.steps == 0:
        return []
    problems = check_algorithm(
        settings.algorithm,
        settings.rollout.sampling,
        samples_per_prompt=settings.rollout.samples_per_prompt,
        prompts_per_step=settings.schedule.prompts_per_step,
        stale=samples_ahead(settings.schedule),
    )
    if settings.algorithm.old_logprobs == "approximate" and not samples_ahead(settings.schedule):
        problems.append(
            Problem(
                ("algorithm.old_logprobs", "schedule.kind"),
                "every sample is of the weights that are updated, so that an approximate anchor is the sampler's own "
                "log-probs: it would do nothing",
                "use algorithm.old_logprobs=recompute (or sampler), or a schedule that samples ahead",
            )
        )
    if _refused((), partial(LOSSES.get, settings.algorithm.loss), "") is None:
        problems += _check_reported(settings)
    if 0 < settings.schedule.steps <= settings.algorithm.critic.warmup_steps:
        problems.append(
            Problem(
                ("algorithm.critic.warmup_steps", "schedule.steps"),
                f"the policy waits {settings.algorithm.critic.warmup_steps} steps for its critic and the run has "
                f"{settings.schedule.steps}, so it would never learn",
                "lower the warm-up, or give more steps",
            )
        )
    return problems


def _check_reported(settings: RunSettings) -> Iterator[Problem]:
    """Likely tokens come from the engine: a generator has to pass them on, a server has to be allowed to."""
    count = reported_tokens(settings.algorithm)
    if not count:
        return
    if settings.rollout.generator is not None:
        yield Problem(
            ("rollout.generator", "algorithm.loss"),
            f"loss {settings.algorithm.loss!r} reads the sampler's most likely tokens, which a generator of your own "
            "has to return itself",
            "give each SAMPLED span its side channel top_logprobs",
            "warning",
        )
    engine, args = settings.inference.engine, settings.inference.launch.args
    if engine in ("vllm", "http") and count >= _VLLM_CANDIDATES and "--max-logprobs" not in args:
        yield Problem(
            ("algorithm.top_logprobs", "inference.launch.args"),
            f"vLLM reports at most {_VLLM_CANDIDATES} candidates of a place, the sampled token included, unless it is "
            "started with --max-logprobs",
            f"use at most {_VLLM_CANDIDATES - 1}, or start it with --max-logprobs {count + 1}",
            "error" if engine == "vllm" else "warning",
        )


def _check_stale(settings: AlgorithmSettings) -> Iterator[Problem]:
    """Tokens of older weights need a ratio, or a correction, against the policy that sampled them."""
    needs, off = LOSSES.get(settings.loss).needs, settings.off_policy
    anchored = "old_logprobs" in needs and settings.old_logprobs != "recompute"
    corrected = off.tis != "none" or off.sequence_mask != "none"
    if not (anchored or corrected or "behaviour_logprobs" in needs):
        why = (
            "its ratio is taken against the policy before the update" if "old_logprobs" in needs else "it has no ratio"
        )
        yield Problem(
            ("algorithm.loss", "algorithm.old_logprobs", "schedule.kind"),
            f"samples may be of older weights, and {settings.loss} never sees how likely those made them: {why}",
            "anchor on the sampler (algorithm.old_logprobs=sampler), correct with algorithm.off_policy (tis or a "
            "sequence mask; a mask of tokens weighs none that are left), choose a loss that needs behaviour log-probs, "
            "or train synchronously",
        )


def _check_names(settings: AlgorithmSettings) -> Iterator[Problem]:
    named: tuple[tuple[str, Registry[Any], str], ...] = (
        ("algorithm.advantage", ADVANTAGES, settings.advantage),
        ("algorithm.loss", LOSSES, settings.loss),
        ("algorithm.reduction", REDUCTIONS, settings.reduction),
        ("algorithm.kl_estimator", KL_ESTIMATORS, settings.kl_estimator),
    )
    for key, registry, name in named:
        if problem := _refused((key,), partial(registry.get, name), "choose a known name"):
            yield problem


def _refused(keys: tuple[str, ...], call: Callable[[], Any], mend: str) -> Problem | None:
    """The ``SettingsError`` of ``call`` as a problem, or None when it raises none."""
    try:
        call()
    except SettingsError as error:
        return Problem(keys, str(error), mend)
    return None


def _check_loss(settings: AlgorithmSettings) -> Iterator[Problem]:
    loss: Loss = LOSSES.get(settings.loss)
    keys = ("algorithm.loss_settings", "algorithm.loss")
    if problem := _refused(keys, partial(loss_options, settings), "see docs/algorithms.md for what it takes"):
        yield problem
    for key in _SHARED:
        if key in settings.loss_settings:
            yield Problem(
                (f"algorithm.loss_settings.{key}", f"algorithm.{key}"),
                "the same setting is given in two places",
                f"set algorithm.{key} only",
            )
        elif getattr(settings, key) is not None and key not in loss.defaults:
            own = [name for name in loss.defaults if "clip" in name]
            bounds = f"clips by {', '.join(own)}" if own else "does not clip"
            where = f"algorithm.loss_settings.{own[-1]}" if own else "a clipping loss such as ppo_clip"
            yield Problem(
                (f"algorithm.{key}", "algorithm.loss"),
                f"loss {settings.loss!r} {bounds}, so {key} would do nothing",
                f"set algorithm.{key}=null, and use {where}",
            )
    if loss.kind != "policy":
        learns, mend = _OTHER_KINDS[loss.kind]
        yield Problem(("algorithm.loss",), f"{settings.loss!r} learns {learns}; it is no policy loss", mend)
    if settings.loss in ("gspo", "sapo") and settings.reduction == "token_mean":
        yield Problem(
            ("algorithm.reduction", "algorithm.loss"),
            f"{settings.loss} was derived for sequences that weigh the same; token_mean lets long ones dominate",
            "use reduction=sequence_mean",
            "warning",
        )
    if settings.loss == "gspo":
        yield from _parts_of_sequences(settings)


def _parts_of_sequences(settings: AlgorithmSettings) -> Iterator[Problem]:
    """GSPO weighs a sequence as a whole: its form with tokens equals it where all of them have one advantage."""
    why = "gspo weighs a sequence as a whole"
    estimator = ADVANTAGES.get(settings.advantage)
    if estimator.by_turn or estimator.needs or settings.gamma != 1:
        yield Problem(
            ("algorithm.advantage", "algorithm.loss"),
            f"{why}; {settings.advantage} gives its tokens different advantages, under which it is no longer GSPO",
            "use an estimator with one advantage for each sample (grpo, rloo, maxrl), or loss=ppo_clip",
            "warning",
        )
    if settings.off_policy.tis == "token":
        yield Problem(
            ("algorithm.off_policy.tis", "algorithm.loss"),
            f"{why}; a correction per token weighs its parts differently, under which it is no longer GSPO",
            "use algorithm.off_policy.tis=sequence",
            "warning",
        )


def _check_kl(settings: AlgorithmSettings, trajectories: int | None) -> Iterator[Problem]:
    controller = settings.kl_controller
    if controller.kind == "adaptive" and settings.kl_coef == 0:
        yield Problem(
            ("algorithm.kl_controller.kind", "algorithm.kl_coef"),
            "an adaptive controller multiplies the coefficient, and 0 stays 0",
            "set algorithm.kl_coef > 0",
        )
    unread = [key for key, value in controller if value != getattr(type(controller)(), key)]
    if controller.kind == "fixed" and unread:
        yield Problem(
            tuple(f"algorithm.kl_controller.{key}" for key in unread),
            "only an adaptive controller reads this",
            "set algorithm.kl_controller.kind=adaptive, or remove it",
        )
    if controller.kind == "adaptive" and trajectories is not None and trajectories >= 5 * controller.horizon:
        yield Problem(
            ("algorithm.kl_controller.horizon", "schedule.prompts_per_step"),
            f"with {trajectories} trajectories in a step the coefficient falls to 0, for good, once the KL is small",
            f"use a horizon above {trajectories // 5}, the paper's is 10000",
        )
    preset = PRESETS[settings.preset].values if settings.preset in PRESETS else {}
    of_preset = preset.get("kl_estimator") == settings.kl_estimator
    if settings.kl_coef == 0:
        if settings.kl_in == "reward":
            yield Problem(
                ("algorithm.kl_in", "algorithm.kl_coef"),
                "kl_in=reward with kl_coef=0 asks for a penalty of nothing",
                "set algorithm.kl_coef > 0, or algorithm.kl_in=loss",
            )
        elif settings.kl_estimator != type(settings).model_fields["kl_estimator"].default and not of_preset:
            yield Problem(
                ("algorithm.kl_estimator", "algorithm.kl_coef"),
                "a KL estimator is chosen but kl_coef is 0, so no KL is computed",
                "set algorithm.kl_coef > 0, or remove kl_estimator",
                "warning",
            )
    elif settings.kl_in == "loss" and settings.kl_estimator == "k1":
        yield Problem(
            ("algorithm.kl_estimator", "algorithm.kl_in"),
            "the gradient of k1 in the loss is zero on average, so it restrains nothing",
            "use k2 or k3 in the loss, or kl_in=reward",
            "warning",
        )


def _check_sampling(sampling: SamplingSettings) -> Iterator[Problem]:
    if sampling.temperature == 0:
        yield Problem(
            ("rollout.sampling.temperature",),
            "greedy samples have no distribution to score and cannot be trained on",
            "use a temperature > 0 (1.0 is usual); eval.sampling may be greedy",
        )
    if sampling.repetition_penalty != 1:
        yield Problem(
            ("rollout.sampling.repetition_penalty",),
            f"repetition_penalty={sampling.repetition_penalty} makes the sampler draw from another distribution than "
            "the trainer scores, since a penalty depends on the tokens before; every ratio would be wrong",
            "use repetition_penalty=1 for training; eval.sampling may penalise",
        )
