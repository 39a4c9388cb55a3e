"""KL estimators and entropy: values and gradients that stay finite.

Owns: the estimators ``k1``, ``k2``, ``k3``, ``abs``; the KL penalty on rewards; the coefficient's controller; entropy
from logits.  Refuses: deciding how terms are weighed (the reducer's weights do that, as for the policy loss).

With ``d = log pi - log ref`` for a token drawn from pi (Schulman, "Approximating KL divergence", 2020):
``k1 = d`` (unbiased value), ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d``, ``abs = |d|``.  ``k3`` clamps ``d`` to
+-20 *before* the exponential (clamping only afterwards leaves a NaN gradient) and its value at 10.

>>> float(kl_values(numpy_ops(), np.array([0.0]), np.array([-1.0]), "k3")[0].round(4))
0.3679
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.algorithms.batch import FloatArray
from slipstream.algorithms.ops import Array, Ops, numpy_ops
from slipstream.algorithms.registry import Registry
from slipstream.config.algorithm import AlgorithmSettings
from slipstream.errors import CheckpointError, ContractError

MAX_LOG_GAP = 20.0
"""Log-ratios are clamped to +- this before any exponential; exp(20) is 4.9e8."""
MAX_KL = 10.0
"""A k3 value is capped here, so that one outlier token cannot own the step; a capped token has no KL gradient."""

KlEstimator = Callable[[Ops, Array], Array]
KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator")


def _k3(xp: Ops, d: Array) -> Array:
    bounded = xp.clip(d, -MAX_LOG_GAP, MAX_LOG_GAP)
    return xp.clip(xp.exp(-bounded) - 1.0 + bounded, None, MAX_KL)


KL_ESTIMATORS.add("k1", lambda xp, d: d)
KL_ESTIMATORS.add("k2", lambda xp, d: 0.5 * d * d)
KL_ESTIMATORS.add("k3", _k3)
KL_ESTIMATORS.add("abs", lambda xp, d: xp.abs(d))


def kl_values(xp: Ops, logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    """KL per token, shape ``(N,)``, differentiable in ``logprobs``; ``SettingsError`` on an unknown estimator."""
    return KL_ESTIMATORS.get(estimator)(xp, logprobs - xp.stop_gradient(ref_logprobs))


def apply_kl_to_rewards(
    rewards: FloatArray, logprobs: FloatArray, ref_logprobs: FloatArray, coef: float, estimator: str = "k1"
) -> FloatArray:
    """Token rewards minus ``coef * KL``; all arrays are ``(S,)``, a trajectory's sampled tokens in order.

    This is KL *in the reward* (InstructGPT, 2203.02155): values only, no gradient flows.  Raises
    ``ContractError`` when lengths differ or a log-prob is not finite.
    """
    if not len(rewards) == len(logprobs) == len(ref_logprobs):
        raise ContractError(f"KL in reward: {len(rewards)} rewards, {len(logprobs)} and {len(ref_logprobs)} log-probs")
    if not (np.all(np.isfinite(logprobs)) and np.all(np.isfinite(ref_logprobs))):
        raise ContractError("KL in reward: a log-prob is not finite")
    return np.asarray(rewards - coef * kl_values(numpy_ops(), logprobs, ref_logprobs, estimator), dtype=np.float64)


class KlController(Protocol):
    """How the KL coefficient moves; ``update`` once per step, after the step's KL was measured."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, trajectories: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedKl:
    """The coefficient stays what it was set to, also after a resume with another setting."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, trajectories: int) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save: the settings hold it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to read."""


class AdaptiveKl:
    """``beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)``, n trajectories per step (1909.08593).

    >>> controller = AdaptiveKl(0.1, target=0.5, horizon=100)
    >>> controller.update(1.0, trajectories=10)
    >>> round(controller.coef, 6)
    0.102
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, trajectories: int) -> None:
        """Move towards the target; a measurement that is not finite is refused."""
        if not math.isfinite(kl):
            raise ContractError(f"the KL controller was given {kl}, which is no measurement")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= max(0.0, 1.0 + error * trajectories / self.horizon)

    def state_dict(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved coefficient; raises ``CheckpointError`` when it is none."""
        coef = state.get("coef")
        if not isinstance(coef, int | float) or not math.isfinite(coef) or coef < 0:
            raise CheckpointError(f"the checkpoint's KL controller is unreadable: {dict(state)!r}")
        self.coef = float(coef)


def kl_controller(settings: AlgorithmSettings) -> KlController:
    """The controller that ``algorithm.kl_controller`` describes, at ``algorithm.kl_coef``."""
    controller = settings.kl_controller
    if controller.kind == "adaptive":
        return AdaptiveKl(settings.kl_coef, controller.target, controller.horizon)
    return FixedKl(settings.kl_coef)


def entropy_from_logits(xp: Ops, logits: Array) -> Array:
    """Entropy in nats over the last axis: ``(..., V)`` to ``(...,)``.

    Entries of -inf (ids that a head masks) add 0 to value and gradient: they are replaced *before* the
    exponential, because ``0 * -inf`` is NaN and a ``where`` afterwards does not repair the gradient.
    """
    live = xp.isfinite(logits)
    # float64 cannot be assumed; a floor far below any live logit keeps the maximum right.
    top = xp.stop_gradient(xp.max(xp.where(live, logits, -1e30), axis=-1, keepdims=True))
    shifted = xp.where(live, logits, top) - top
    mass = xp.where(live, xp.exp(shifted), 0.0)
    total = xp.sum(mass, axis=-1, keepdims=True)
    log_p = shifted - xp.log(total)
    return -xp.sum(mass / total * log_p, axis=-1)
