"""Planning: the ratio's anchor, off-policy corrections, and what a loss needs.

Owns: the contradictions between ``loss``, ``old_logprobs`` and ``off_policy``.  Refuses: running anything.

>>> from slipstream.config.settings import AlgorithmSettings
>>> problems = check_anchor(AlgorithmSettings(off_policy={"tis": "token"}))
>>> problems[0].keys
('algorithm.off_policy', 'algorithm.old_logprobs')
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.algorithms.corrections import corrects, masks
from slipstream.algorithms.losses import LOSSES, Loss
from slipstream.config.algorithm import AlgorithmSettings, OffPolicySettings
from slipstream.config.problems import Problem

_SWITCHES = {
    "tis_token_cap": ("tis", "token"),
    "tis_sequence_cap": ("tis", "sequence"),
    "geometric_low": ("sequence_mask", "geometric"),
    "geometric_high": ("sequence_mask", "geometric"),
    "product_low": ("sequence_mask", "product"),
    "product_high": ("sequence_mask", "product"),
}
"""Settings that one value of another switches on."""

_BOUNDS = ("geometric", "product", "token_mask", "outlier")


def check_anchor(settings: AlgorithmSettings) -> list[Problem]:
    """Every contradiction, none raised.  The loss's name must be known already."""
    loss = LOSSES.get(settings.loss)
    return [*_needs(settings, loss), *_anchor(settings, loss), *_corrections(settings, loss)]


def _needs(settings: AlgorithmSettings, loss: Loss) -> Iterator[Problem]:
    teacher = settings.teacher.path is not None or bool(settings.teacher.urls)
    if "teacher_logprobs" in loss.needs and not teacher:
        yield Problem(
            ("algorithm.loss", "algorithm.teacher"),
            f"loss {settings.loss!r} needs a teacher's log-probs, and there is no teacher",
            "set algorithm.teacher.path or algorithm.teacher.urls",
        )
    for need in ("values", "old_values", "returns"):
        if need in loss.needs and loss.kind == "policy":
            yield Problem(
                ("algorithm.loss",),
                f"loss {settings.loss!r} needs {need}, which a critic's loss is given and a policy's is not",
                "learn from advantages (algorithm.advantage=gae brings the critic's judgement into them)",
            )
    if "top_logprobs" not in loss.needs and settings.top_logprobs != AlgorithmSettings().top_logprobs:
        yield Problem(
            ("algorithm.top_logprobs", "algorithm.loss"),
            f"loss {settings.loss!r} does not read the sampler's most likely tokens, so they would not be asked for",
            "remove it, or choose a loss that reads them (score_centering)",
        )


def _anchor(settings: AlgorithmSettings, loss: Loss) -> Iterator[Problem]:
    keys = ("algorithm.old_logprobs", "algorithm.loss")
    if settings.old_logprobs != "sampler" and "old_logprobs" not in loss.needs and not corrects(settings.off_policy):
        yield Problem(
            keys,
            f"loss {settings.loss!r} compares with the sampler and reads no other anchor, so "
            f"{settings.old_logprobs} would do nothing",
            "leave algorithm.old_logprobs=sampler",
        )
    if settings.old_logprobs == "sampler" and loss.weighs_behaviour and "old_logprobs" in loss.needs:
        yield Problem(
            keys,
            f"loss {settings.loss!r} tells the policy before the update from the sampler; with the sampler as anchor "
            "they are one and its weight is always 1",
            "use algorithm.old_logprobs=recompute, or approximate where the schedule samples ahead",
        )


def _corrections(settings: AlgorithmSettings, loss: Loss) -> Iterator[Problem]:
    off_policy = settings.off_policy
    yield from _unread(off_policy)
    if settings.reduction == "sum" and off_policy.denominator != OffPolicySettings().denominator and masks(off_policy):
        yield Problem(
            ("algorithm.off_policy.denominator", "algorithm.reduction"),
            "a plain sum has no denominator, so this would do nothing",
            "remove it, or use another reduction",
        )
    for name in _BOUNDS:
        low, high = getattr(off_policy, f"{name}_low"), getattr(off_policy, f"{name}_high")
        if low is not None and high is not None and low >= high:
            keys = (f"algorithm.off_policy.{name}_low", f"algorithm.off_policy.{name}_high")
            yield Problem(keys, f"no ratio lies between {low:g} and {high:g}", "give low < high")
    if not corrects(off_policy):
        return
    if loss.weighs_behaviour and off_policy.tis != "none":
        yield Problem(
            ("algorithm.off_policy.tis", "algorithm.loss"),
            f"loss {settings.loss!r} weighs samples against the sampler itself; a second weight would count it twice",
            "remove algorithm.off_policy.tis (masks may stay), or use a loss with an anchor such as ppo_clip",
        )
    elif settings.old_logprobs != "recompute":
        reason = {
            "sampler": "with the sampler as anchor there is nothing to compare it with, and every ratio is 1",
            "approximate": "an approximate anchor is known only inside the loss",
        }[settings.old_logprobs]
        yield Problem(
            ("algorithm.off_policy", "algorithm.old_logprobs"),
            f"corrections compare the policy before the update with the sampler; {reason}",
            "set algorithm.old_logprobs=recompute",
        )


def _unread(off_policy: OffPolicySettings) -> Iterator[Problem]:
    given = {key for key, value in off_policy if value != getattr(OffPolicySettings(), key)}
    for key, (switch, value) in _SWITCHES.items():
        if key in given and getattr(off_policy, switch) != value:
            yield Problem(
                (f"algorithm.off_policy.{key}", f"algorithm.off_policy.{switch}"),
                f"read only with {switch}={value}",
                f"set algorithm.off_policy.{switch}={value}, or remove it",
            )
    if "denominator" in given and not masks(off_policy):
        yield Problem(
            ("algorithm.off_policy.denominator",),
            "no mask is on, so every trained token is counted either way",
            "switch a mask on, or remove it",
        )
