"""Policy, likelihood and value losses: one value per unit, nothing reduced.

Owns: the loss contract and registry (``contract``) and every bundled loss, by what bounds it: ``clipped``,
``weighted``, ``covariance`` (chosen over the whole step), ``targets`` (no advantage).  Refuses: weights,
denominators, masks.
"""

from slipstream.algorithms.losses import clipped, covariance, targets, weighted
from slipstream.algorithms.losses.contract import (
    LOSSES,
    Kind,
    Loss,
    LossFunction,
    LossInputs,
    LossMetric,
    LossValues,
    Need,
    Prepass,
    Reducer,
    Unit,
    log_ratio,
    ratio_metrics,
    register_loss,
    share,
)

__all__ = [
    "LOSSES",
    "Kind",
    "Loss",
    "LossFunction",
    "LossInputs",
    "LossMetric",
    "LossValues",
    "Need",
    "Prepass",
    "Reducer",
    "Unit",
    "clipped",
    "covariance",
    "log_ratio",
    "ratio_metrics",
    "register_loss",
    "share",
    "targets",
    "weighted",
]
