"""The loss contract: what a loss sees, what it returns, how it is registered.

Owns: ``LossInputs``, ``LossValues``, ``register_loss``, the registry, and the two helpers every ratio loss uses.
Refuses: weights, denominators, masks, padding, micro-batches (the reducer and the compiler own those).

A loss is a function ``(xp, inputs, settings) -> LossValues``.  Its inputs are flat arrays over the *trained*
tokens only, so there is nothing to mask.  It returns one value per unit: ``(N,)`` for unit ``token``,
``(R,)`` for unit ``row``, ``(G,)`` for unit ``group``.  The reducer multiplies by weights that already contain
1/denominator.  A unit is never split: rows are whole by construction, and a batch that cuts a group is refused.

A loss may declare a *pre-pass*: a function of the whole optimiser step, run in float64 numpy before any gradient, that
returns one constant per token (``inputs.prepass``).  That is the only place for step-wide statistics and for random
choices; ``inputs.noise`` holds one uniform number per token, keyed by the token's identity.

A loss of your own:

>>> @register_loss("reinforce", needs=("advantages",))
... def reinforce(xp, inputs, settings):
...     return LossValues(-inputs.advantages * inputs.logprobs)
>>> LOSSES.remove("reinforce")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from slipstream.algorithms.kl import MAX_LOG_GAP
from slipstream.algorithms.ops import Array, Ops
from slipstream.algorithms.options import Limit, checked
from slipstream.algorithms.registry import Registry
from slipstream.errors import ContractError

Unit = Literal["token", "row", "group"]
Reducer = Literal["mean", "sum", "max", "min"]
Kind = Literal["policy", "likelihood", "value"]
Need = Literal[
    "old_logprobs",
    "behaviour_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "entropy",
    "advantages",
    "values",
    "old_values",
    "returns",
    "lags",
    "noise",
    "top_logprobs",
]

OPTIONAL: tuple[str, ...] = tuple(need for need in get_args(Need) if need != "advantages")
"""Inputs that a loss is given only when it declares them."""


@dataclass
class LossInputs:
    """What a loss sees: N trained tokens of R whole rows, flat, in row order.

    Only the model's outputs carry gradients: ``logprobs``, ``entropy``, ``top_logprobs`` of a policy, ``values`` of a
    critic (which has no ``logprobs``).  All other arrays are constants.  ``old_logprobs`` is the ratio's anchor;
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
    teacher_logprobs: Array | None = None
    """``(N,)``: a teacher's log-prob of each sampled token (on-policy distillation)."""
    values: Array | None = None
    """``(N,)``: a critic's present output, before the token is taken."""
    old_values: Array | None = None
    """``(N,)``: the critic's output when advantages were computed."""
    returns: Array | None = None
    """``(N,)``: the critic's targets."""
    lags: Array | None = None
    """``(N,)``: publishes between the version that sampled the token and the trainer's weights at the step's start."""
    noise: Array | None = None
    """``(N,)``: uniform in [0, 1), keyed by row id and the token's place among the row's trained tokens."""
    top_logprobs: Array | None = None
    """``(N, K)``: the policy's present log-probs of the sampler's K most likely tokens."""
    top_behaviour_logprobs: Array | None = None
    """``(N, K)``: the sampler's log-probs of the same tokens; -inf where fewer than K were reported."""
    live: Array | None = None
    """``(N,)``: 1, and 0 for a token that an off-policy mask dropped: it is scored, weighs nothing, and has no part in
    the mean or sum of a row, a group or the step.  None is 1 everywhere."""
    prepass: Array | None = None
    """``(N,)``: what the loss's pre-pass over the whole step returned."""
    coefficient: Array | None = None
    """``(N,)``: off-policy weight of each token in the policy term; None is 1."""

    @property
    def size(self) -> int:
        """N."""
        return len(self.weights)

    def units(self, unit: Unit) -> int:
        """How many units there are: N, R or G."""
        return {"token": self.size, "row": self.n_rows, "group": self.n_groups}[unit]

    def mean(self, xp: Ops, values: Array, unit: Unit) -> Array:
        """Mean over each unit's live tokens: ``(N,)`` to ``(R,)`` or ``(G,)``; 0 where a unit has none."""
        if unit == "token":
            return values
        if self.live is None:
            return xp.segment_mean(values, self._index(unit), self.units(unit))
        count = xp.segment_sum(self.live, self._index(unit), self.units(unit))
        return self.sum(xp, values, unit) / xp.maximum(count, 1.0)

    def sum(self, xp: Ops, values: Array, unit: Unit) -> Array:
        """Sum over each unit's live tokens: ``(N,)`` to ``(R,)`` or ``(G,)``."""
        if unit == "token":
            return values
        kept = values if self.live is None else xp.where(self.live > 0, values, 0.0)
        return xp.segment_sum(kept, self._index(unit), self.units(unit))

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
Prepass = Callable[[LossInputs, Mapping[str, Any]], Array]
"""``(inputs of the whole step as numpy float64, settings) -> (N,)`` constants."""


@dataclass(frozen=True)
class Loss:
    """A registered loss: what it needs, its unit, its settings with defaults."""

    name: str
    function: LossFunction
    needs: tuple[Need, ...]
    unit: Unit
    defaults: Mapping[str, Any]
    kind: Kind = "policy"
    """``policy`` learns from advantages, ``likelihood`` from given text, ``value`` trains a critic."""
    prepass: Prepass | None = None
    formula: str = ""
    """One line, for ``explain`` and the documentation."""
    source: str = ""
    """The paper or specification of the formula."""
    use: str = ""
    """When to choose it, in a sentence."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Which values of its settings mean something."""

    @property
    def weighs_behaviour(self) -> bool:
        """Whether the loss itself compares with the behaviour policy, so that a second correction would be double."""
        return "behaviour_logprobs" in self.needs

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid by ``given``; ``SettingsError`` on an unknown key and on a value without meaning."""
        return checked(f"loss {self.name!r}", self.defaults, self.limits, given)

    def view(self, inputs: LossInputs) -> LossInputs:
        """What the function is given: no optional array that it does not declare, so that none changes its values by
        being there, and no ``coefficient``, which the reducer applies.
        """
        hidden: dict[str, Any] = {name: None for name in OPTIONAL if name not in self.needs}
        return replace(inputs, coefficient=None, **hidden)

    def check(self, inputs: LossInputs) -> None:
        """Raise ``ContractError`` when an array that this loss needs is absent."""
        for need in self.needs:
            if getattr(inputs, need) is None:
                raise ContractError(f"loss {self.name!r} needs {need}, which this batch does not have")
        if self.prepass is not None and inputs.prepass is None:
            raise ContractError(f"loss {self.name!r} has a pre-pass over the whole step that was not run")


CLIPS: Mapping[str, Limit] = {"clip_low": Limit(above=0), "clip_high": Limit(above=0)}
"""Bounds that are distances from a ratio of 1."""
CLIP_THRESHOLDS: Mapping[str, Limit] = {
    "clip_low_threshold": Limit(least=0),
    "clip_high_threshold": Limit(over="clip_low_threshold"),
}
"""Bounds that are ratios themselves."""

OWN_NEEDS: tuple[Need, ...] = ("old_logprobs", "advantages")
"""What a loss needs that does not say: also one that is given by import path without being registered."""

LOSSES: Registry[Loss] = Registry("loss", wrap=lambda path, function: Loss(path, function, OWN_NEEDS, "token", {}))


def register_loss(
    name: str,
    *,
    needs: tuple[Need, ...] = OWN_NEEDS,
    unit: Unit = "token",
    defaults: Mapping[str, Any] | None = None,
    kind: Kind = "policy",
    prepass: Prepass | None = None,
    formula: str = "",
    source: str = "",
    use: str = "",
    limits: Mapping[str, Limit] | None = None,
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers a loss under ``name``; see the module's example."""

    def add(function: LossFunction) -> LossFunction:
        loss = Loss(
            name, function, needs, unit, dict(defaults or {}), kind, prepass, formula, source, use, dict(limits or {})
        )
        LOSSES.add(name, loss)
        return function

    return add


def log_ratio(xp: Ops, logprobs: Array, anchor: Array) -> Array:
    """``log pi - log anchor`` clamped to +-20, so that its exponential and gradient are finite."""
    return xp.clip(logprobs - xp.stop_gradient(anchor), -MAX_LOG_GAP, MAX_LOG_GAP)


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


def share(xp: Ops, condition: Array, like: Array) -> LossMetric:
    """The weighed share of tokens for which ``condition`` holds."""
    return LossMetric("mean", xp.as_float(condition, xp.stop_gradient(like)))
