"""Algorithms: advantages, losses, KL, filters, and the one reducer, each behind a registry.

Owns: how rewards become advantages, rows become a ``Batch``, and log-probs become an objective.
Refuses: models, processes, HTTP.  Imports without torch; losses run on torch and numpy from one source.

    result = apply_filters(groups, algorithm, rollout)               # who is trained, and why not
    advantages = compute_advantages(result.groups, algorithm)        # voters only
    reduction = reduction_spec(algorithm)
    batch = compile_batch(result.groups, advantages, reduction, excluded=result.excluded, copies=result.copies)
    backend.forward_backward("policy", batch, loss_spec(algorithm))  # sums; weights contain 1/denominator
"""

from slipstream.algorithms import estimators as _estimators  # noqa: F401  (registers the bundled ones)
from slipstream.algorithms.advantages import (
    ScoredGroup,
    compute_advantages,
    critic_targets,
    register_advantage,
    rewards_with_kl,
    scalar_advantage,
    token_rewards,
    turn_slots,
)
from slipstream.algorithms.batch import Batch, BatchRow
from slipstream.algorithms.check import algorithm_problems, check_algorithm, loss_spec
from slipstream.algorithms.compile import Minibatch, compile_batch, row_segments, split_minibatches
from slipstream.algorithms.filters import (
    Decision,
    FilterResult,
    apply_filters,
    dispositions,
    register_filter,
    stand_ins,
    token_split,
)
from slipstream.algorithms.kl import apply_kl_to_rewards, entropy_from_logits, kl_values
from slipstream.algorithms.losses import LossInputs, LossMetric, LossValues, log_ratio, register_loss
from slipstream.algorithms.objective import (
    LossSpec,
    Metric,
    MetricAccumulator,
    loss_inputs,
    objective,
    run_prepass,
)
from slipstream.algorithms.ops import Ops, numpy_ops, torch_ops
from slipstream.algorithms.recursions import gae_compacted, returns_compacted
from slipstream.algorithms.reduce import ReductionSpec, reduction_spec, register_reduction, reweigh, token_weights

__all__ = [
    "Batch",
    "BatchRow",
    "Decision",
    "FilterResult",
    "LossInputs",
    "LossMetric",
    "LossSpec",
    "LossValues",
    "Metric",
    "MetricAccumulator",
    "Minibatch",
    "Ops",
    "ReductionSpec",
    "ScoredGroup",
    "algorithm_problems",
    "apply_filters",
    "apply_kl_to_rewards",
    "check_algorithm",
    "compile_batch",
    "compute_advantages",
    "critic_targets",
    "dispositions",
    "entropy_from_logits",
    "gae_compacted",
    "kl_values",
    "log_ratio",
    "loss_inputs",
    "loss_spec",
    "numpy_ops",
    "objective",
    "reduction_spec",
    "register_advantage",
    "register_filter",
    "register_loss",
    "register_reduction",
    "returns_compacted",
    "rewards_with_kl",
    "reweigh",
    "row_segments",
    "run_prepass",
    "scalar_advantage",
    "split_minibatches",
    "stand_ins",
    "token_rewards",
    "token_split",
    "token_weights",
    "torch_ops",
    "turn_slots",
]
