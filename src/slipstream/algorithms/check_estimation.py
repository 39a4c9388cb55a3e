"""Planning: estimator, reduction, filters, critic and teacher that cannot mean what they say.

Owns: the contradictions around advantages and filters.  Refuses: losses, KL and sampling (``check`` has them).

>>> from slipstream.config.settings import AlgorithmSettings
>>> check_estimation(AlgorithmSettings(), samples_per_prompt=8)
[]
>>> [str(p.keys[0]) for p in check_estimation(AlgorithmSettings(advantage="rloo", gamma=0.9), samples_per_prompt=8)]
['algorithm.gamma']
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.algorithms.advantages import ADVANTAGES, Estimator
from slipstream.algorithms.filters import FILTERS
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.reduce import REDUCTIONS
from slipstream.config.algorithm import AlgorithmSettings
from slipstream.config.base import Settings
from slipstream.config.presets import PRESETS
from slipstream.config.problems import Problem
from slipstream.errors import SettingsError

_SWITCHED = {"zero_variance": "drop_zero_variance", "truncated": "drop_truncated"}
"""Bundled filters and the settings that switch them."""

_ESTIMATOR_FIELDS = ("normalize_by_std", "baseline", "gamma", "gae_lambda")
"""Fields of ``AlgorithmSettings`` that only some estimators read."""


def check_estimation(settings: AlgorithmSettings, *, samples_per_prompt: int) -> list[Problem]:
    """Every contradiction, none raised.  Names must be known already (``check_algorithm`` looks at them first)."""
    estimator = ADVANTAGES.get(settings.advantage)
    return [
        *_estimator(settings, estimator, samples_per_prompt),
        *_rewards(settings, estimator),
        *_zero_variance(settings, estimator),
        *_models(settings, estimator),
        *_reduction(settings),
        *_filters(settings),
        *_overlong(settings),
        *_dynamic_sampling(settings),
        *_preset(settings),
    ]


def _differs(settings: Settings, name: str) -> bool:
    """Whether a field has another value than its default: a run's own record names every field."""
    return bool(getattr(settings, name) != type(settings).model_fields[name].get_default(call_default_factory=True))


def _estimator(settings: AlgorithmSettings, estimator: Estimator, samples_per_prompt: int) -> Iterator[Problem]:
    name = settings.advantage
    if estimator.group_relative and samples_per_prompt < 2:
        yield Problem(
            ("algorithm.advantage", "rollout.samples_per_prompt"),
            f"{name!r} compares the samples of one prompt; with one sample every advantage is 0",
            "use rollout.samples_per_prompt >= 2",
        )
    for key in _ESTIMATOR_FIELDS:
        if _differs(settings, key) and key not in estimator.defaults:
            readers = [other for other in ADVANTAGES.names() if key in ADVANTAGES.get(other).defaults]
            preset, default = settings.preset, type(settings).model_fields[key].default
            given = preset is not None and PRESETS[preset].values.get(key) == getattr(settings, key)
            mend = f"leave the preset {preset} out, which sets it, or set {key}={default}" if given else f"remove {key}"
            yield Problem(
                (f"algorithm.{key}", "algorithm.advantage"),
                f"{name!r} does not read {key}, so this would do nothing",
                f"{mend}, or use {' or '.join(readers)}",
            )
    try:
        estimator.settings(settings)
    except SettingsError as error:
        yield Problem(("algorithm.advantage_settings", "algorithm.advantage"), str(error), "remove or rename it")
    if "std_eps" in settings.advantage_settings and not settings.normalize_by_std:
        yield Problem(
            ("algorithm.advantage_settings.std_eps", "algorithm.normalize_by_std"),
            "nothing is divided by a standard deviation, so its epsilon would do nothing",
            "remove it, or set algorithm.normalize_by_std=true",
        )
    penalised = settings.overlong.factor > 0 or (settings.kl_in == "reward" and settings.kl_coef > 0)
    if name == "maxrl" and penalised:
        yield Problem(
            ("algorithm.advantage", "algorithm.overlong.factor", "algorithm.kl_in"),
            "'maxrl' needs rewards >= 0, and a penalty in the reward makes them negative",
            "use algorithm.kl_in=loss and no overlong penalty, or another estimator",
        )


def _rewards(settings: AlgorithmSettings, estimator: Estimator) -> Iterator[Problem]:
    """What changes rewards changes nothing for an estimator that does not read them."""
    if estimator.uses_rewards:
        return
    unread = {
        "algorithm.kl_in": settings.kl_in == "reward" and settings.kl_coef > 0,
        "algorithm.overlong.factor": settings.overlong.factor > 0,
        "algorithm.zero_reward_on_non_stop": settings.zero_reward_on_non_stop,
    }
    for key, given in unread.items():
        if given:
            yield Problem(
                (key, "algorithm.advantage"),
                f"{settings.advantage!r} does not read rewards, so a change of them would do nothing",
                "use algorithm.kl_in=loss" if key == "algorithm.kl_in" else "remove it, or use another estimator",
            )


def _zero_variance(settings: AlgorithmSettings, estimator: Estimator) -> Iterator[Problem]:
    keys = ("algorithm.drop_zero_variance", "algorithm.advantage")
    if not settings.drop_zero_variance:
        if _differs(settings, "zero_variance_tol"):
            yield Problem(
                ("algorithm.zero_variance_tol", "algorithm.drop_zero_variance"),
                "no group is left out, so nothing reads the tolerance",
                "remove it, or set algorithm.drop_zero_variance=true",
            )
        return
    if not estimator.uses_rewards:
        yield Problem(
            keys,
            f"{settings.advantage!r} does not read rewards, so groups must not be left out for theirs",
            "set algorithm.drop_zero_variance=false",
        )
    elif not estimator.group_relative:
        yield Problem(
            keys,
            f"{settings.advantage!r} learns from groups in which all earned the same, too, and they are left out",
            "set algorithm.drop_zero_variance=false",
            "warning",
        )


def _models(settings: AlgorithmSettings, estimator: Estimator) -> Iterator[Problem]:
    """Critic and teacher: there when they are needed, and only then."""
    needs = {*estimator.needs, *LOSSES.get(settings.loss).needs}
    if "values" not in needs and _differs(settings, "critic"):
        yield Problem(
            ("algorithm.critic", "algorithm.advantage"),
            f"{settings.advantage!r} needs no values, so there is no critic to set up",
            "remove algorithm.critic, or use algorithm.advantage=gae",
        )
    if "values" in needs and settings.critic.backbone == "shared":
        for name in ("path", "optimizer", "minibatches_per_step", "epochs_per_step", "warmup_steps"):
            if _differs(settings.critic, name):
                yield Problem(
                    (f"algorithm.critic.{name}", "algorithm.critic.backbone"),
                    "a critic on the policy's backbone moves with the policy, so this would do nothing",
                    "remove it, or use algorithm.critic.backbone=own",
                )
    elif "values" in needs and _differs(settings.critic, "value_coef"):
        yield Problem(
            ("algorithm.critic.value_coef", "algorithm.critic.backbone"),
            "a critic with an optimiser of its own needs no weight beside the policy's loss",
            "remove it, or use algorithm.critic.backbone=shared",
        )
    teacher = settings.teacher
    if "teacher_logprobs" in needs and not teacher.path and not teacher.urls:
        yield Problem(
            ("algorithm.teacher", "algorithm.advantage"),
            "on-policy distillation has no teacher",
            "set algorithm.teacher.path (local weights) or algorithm.teacher.urls (running servers)",
        )
    if "teacher_logprobs" not in needs and (teacher.path or teacher.urls):
        yield Problem(
            ("algorithm.teacher", "algorithm.advantage"),
            "a teacher is given, but neither the estimator nor the loss reads its scores",
            "use algorithm.preset=distill, or remove algorithm.teacher",
        )
    if not teacher.path and _differs(teacher, "dtype"):
        why = "a running server has its own dtype" if teacher.urls else "there is no teacher"
        yield Problem(
            ("algorithm.teacher.dtype", "algorithm.teacher.path"), f"{why}, so this would do nothing", "remove it"
        )
    if teacher.path and teacher.urls:
        yield Problem(
            ("algorithm.teacher.path", "algorithm.teacher.urls"),
            "two teachers are given",
            "keep one of them",
        )


def _reduction(settings: AlgorithmSettings) -> Iterator[Problem]:
    if settings.reduction_tokens is not None and "reduction_tokens" not in REDUCTIONS.get(settings.reduction).defaults:
        yield Problem(
            ("algorithm.reduction_tokens", "algorithm.reduction"),
            f"{settings.reduction!r} divides by no constant, so this would do nothing",
            "remove it, or use algorithm.reduction=seq_mean_token_sum_norm",
        )


def _filters(settings: AlgorithmSettings) -> Iterator[Problem]:
    for name in settings.filters:
        if (switch := _SWITCHED.get(name)) is not None and not getattr(settings, switch):
            yield Problem(
                ("algorithm.filters", f"algorithm.{switch}"),
                f"the filter {name!r} comes with this package and is switched by algorithm.{switch}, which is off",
                f"set algorithm.{switch}=true; algorithm.filters names your own",
            )
            continue
        try:
            FILTERS.get(name)
        except SettingsError as error:
            yield Problem(("algorithm.filters",), str(error), "choose a known name or an import path")


def _overlong(settings: AlgorithmSettings) -> Iterator[Problem]:
    overlong = settings.overlong
    if overlong.factor == 0 and (overlong.max_tokens is not None or overlong.buffer_tokens is not None):
        yield Problem(
            ("algorithm.overlong.factor",),
            "lengths of the overlong penalty are given, but its factor is 0, so nothing is penalised",
            "set algorithm.overlong.factor above 0, or remove the lengths",
        )


def _dynamic_sampling(settings: AlgorithmSettings) -> Iterator[Problem]:
    dynamic = settings.dynamic_sampling
    if dynamic.kind != "off" and not settings.drop_zero_variance:
        yield Problem(
            ("algorithm.dynamic_sampling.kind", "algorithm.drop_zero_variance"),
            "groups without spread are to be drawn anew, but none is ever left out",
            "set algorithm.drop_zero_variance=true",
        )
    for key, used_by in (("max_rounds", ("filter", "replace")), ("min_good_fraction", ("replace",))):
        given = getattr(dynamic, key) != type(dynamic).model_fields[key].default
        if given and dynamic.kind not in used_by:
            yield Problem(
                (f"algorithm.dynamic_sampling.{key}", "algorithm.dynamic_sampling.kind"),
                f"kind={dynamic.kind} does not read {key}",
                f"remove it, or set kind={' or '.join(used_by)}",
            )


def _preset(settings: AlgorithmSettings) -> Iterator[Problem]:
    """A preset of which the method itself was changed is no longer that method."""
    if settings.preset is None:
        return
    values = PRESETS[settings.preset].values
    for key in ("advantage", "loss", "reduction"):
        if key in values and getattr(settings, key) != values[key]:
            yield Problem(
                ("algorithm.preset", f"algorithm.{key}"),
                f"preset {settings.preset} stands for {key}={values[key]}, and {getattr(settings, key)} replaces it",
                "that is allowed; leave the preset out if the run should not bear its name",
                "warning",
            )
