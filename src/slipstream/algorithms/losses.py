"""Policy losses: one value per unit, nothing reduced.

Owns: the loss contract, the registry, ``ppo_clip`` and ``cross_entropy``.
Refuses: weights, denominators, masks, padding, micro-batches (the reducer and the compiler own those).

A loss is a function ``(xp, inputs, settings) -> LossValues``.  Its inputs are flat arrays over the *trained*
tokens only, so there is nothing to mask.  It returns one value per unit: ``(N,)`` for unit ``token``,
``(R,)`` for unit ``row``, ``(G,)`` for unit ``group``.  The reducer multiplies by weights that already contain
1/denominator.  A unit is never split: rows are whole by construction, and a batch that cuts a group is refused.

A loss of your own:

>>> @register_loss("reinforce", needs=("advantages",))
... def reinforce(xp, inputs, settings):
...     return LossValues(-inputs.advantages * inputs.logprobs)
>>> LOSSES.remove("reinforce")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.algorithms.kl import MAX_LOG_GAP
from slipstream.algorithms.ops import Array, Ops
from slipstream.algorithms.registry import Registry, did_you_mean
from slipstream.errors import ContractError, SettingsError

Unit = Literal["token", "row", "group"]
Reducer = Literal["mean", "sum", "max", "min"]
Need = Literal["old_logprobs", "behaviour_logprobs", "ref_logprobs", "entropy", "advantages"]


@dataclass
class LossInputs:
    """What a loss sees: N trained tokens of R whole rows, flat, in row order.

    Only ``logprobs`` and ``entropy`` carry gradients.  ``old_logprobs`` is the ratio's anchor;
    ``behaviour_logprobs`` is what the sampler reported; ``weights`` are signed and contain 1/denominator.
    """

    logprobs: Array
    old_logprobs: Array | None
    behaviour_logprobs: Array | None
    ref_logprobs: Array | None
    entropy: Array | None
    advantages: Array
    weights: Array
    row_index: Array
    n_rows: int
    group_index: Array | None = None
    """``(N,)``: the group of each token, ``0 .. G-1``."""
    n_groups: int = 0

    def units(self, unit: Unit) -> int:
        """How many units there are: N, R or G."""
        return {"token": len(self.logprobs), "row": self.n_rows, "group": self.n_groups}[unit]

    def mean(self, xp: Ops, values: Array, unit: Unit) -> Array:
        """Mean over each unit's trained tokens: ``(N,)`` to ``(R,)`` or ``(G,)``."""
        return values if unit == "token" else xp.segment_mean(values, self._index(unit), self.units(unit))

    def sum(self, xp: Ops, values: Array, unit: Unit) -> Array:
        """Sum over each unit's trained tokens: ``(N,)`` to ``(R,)`` or ``(G,)``."""
        return values if unit == "token" else xp.segment_sum(values, self._index(unit), self.units(unit))

    def per_token(self, values: Array, unit: Unit) -> Array:
        """One value per unit, spread over its tokens: to ``(N,)``."""
        return values if unit == "token" else values[self._index(unit)]

    def _index(self, unit: Unit) -> Array:
        if unit == "row":
            return self.row_index
        if self.group_index is None:
            raise ContractError("a loss of unit 'group' needs group_index, which these inputs do not have")
        return self.group_index


@dataclass
class LossMetric:
    """A diagnostic with its own reducer; ``mean`` is weighed by the loss's own weights, never by padding."""

    reducer: Reducer
    values: Array
    """One per ``unit``: ``(N,)``, ``(R,)`` or ``(G,)``."""
    unit: Unit = "token"


@dataclass
class LossValues:
    """One value per unit, and diagnostics by name."""

    values: Array
    metrics: Mapping[str, LossMetric] = field(default_factory=dict)


LossFunction = Callable[[Ops, LossInputs, Mapping[str, Any]], LossValues]


@dataclass(frozen=True)
class Loss:
    """A registered loss: what it needs, its unit, its settings with defaults."""

    name: str
    function: LossFunction
    needs: tuple[Need, ...]
    unit: Unit
    defaults: Mapping[str, Any]
    likelihood: bool = False
    """True for losses that learn given text (TARGET spans) and need no advantage."""

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid by ``given``; an unknown key raises ``SettingsError`` with a suggestion."""
        for key in given:
            if key not in self.defaults:
                known = sorted(self.defaults)
                raise SettingsError(f"loss {self.name!r} has no setting {key!r}.{did_you_mean(key, known)}")
        return {**self.defaults, **given}

    def check(self, inputs: LossInputs) -> None:
        """Raise ``ContractError`` when an array that this loss needs is absent."""
        for need in self.needs:
            if getattr(inputs, need) is None:
                raise ContractError(f"loss {self.name!r} needs {need}, which this batch does not have")


LOSSES: Registry[Loss] = Registry("loss")


def register_loss(
    name: str,
    *,
    needs: tuple[Need, ...] = ("old_logprobs", "advantages"),
    unit: Unit = "token",
    defaults: Mapping[str, Any] | None = None,
    likelihood: bool = False,
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers a loss under ``name``; see the module's example."""

    def add(function: LossFunction) -> LossFunction:
        LOSSES.add(name, Loss(name, function, needs, unit, dict(defaults or {}), likelihood))
        return function

    return add


def log_ratio(xp: Ops, logprobs: Array, anchor: Array) -> Array:
    """``log pi - log anchor`` clamped to +-20, so that its exponential and gradient are finite."""
    return xp.clip(logprobs - xp.stop_gradient(anchor), -MAX_LOG_GAP, MAX_LOG_GAP)


@register_loss("ppo_clip", defaults={"clip_low": 0.2, "clip_high": 0.2})
def ppo_clip(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(log pi - log old)``.

    PPO, 1707.06347; the asymmetric clip is DAPO's, 2503.14476.  ``approx_kl`` is ``r - 1 - log r`` (k3 of
    old against current); ``clip_fraction`` counts tokens whose clipped branch was the smaller one.
    """
    gap = log_ratio(xp, inputs.logprobs, inputs.old_logprobs)
    ratio = xp.exp(gap)
    free = ratio * inputs.advantages
    clipped = xp.clip(ratio, 1.0 - settings["clip_low"], 1.0 + settings["clip_high"]) * inputs.advantages
    metrics = ratio_metrics(xp, gap)
    metrics["clip_fraction"] = LossMetric("mean", xp.as_float(clipped < free, ratio))
    return LossValues(-xp.minimum(free, clipped), metrics)


@register_loss("cross_entropy", needs=(), likelihood=True)
def cross_entropy(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-log pi``: supervised fine-tuning.  ``token_nll`` is its weighed mean in nats."""
    return LossValues(-inputs.logprobs, {"token_nll": LossMetric("mean", -inputs.logprobs)})


def ratio_metrics(xp: Ops, gap: Array) -> dict[str, LossMetric]:
    """Diagnostics that every ratio loss shares, from the clamped log-ratio ``(N,)``."""
    gap = xp.stop_gradient(gap)
    ratio = xp.exp(gap)
    return {
        "ratio_mean": LossMetric("mean", ratio),
        "ratio_max": LossMetric("max", ratio),
        "ratio_min": LossMetric("min", ratio),
        "approx_kl": LossMetric("mean", ratio - 1.0 - gap),
    }
