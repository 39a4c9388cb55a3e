"""Aggregation of episode metrics.

Owns: the default rule (mean per numeric key) and the dispatch to an environment's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Rule = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


def default_aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of numeric and boolean values per key, over the episodes that have the key; the rest is dropped."""
    collected: dict[str, list[float]] = {}
    for episode in metrics:
        for key, value in episode.items():
            if isinstance(value, bool | int | float):
                collected.setdefault(key, []).append(float(value))
    return {key: sum(values) / len(values) for key, values in collected.items()}


_DEFAULTS = ("slipstream.envs.core", "skyrl_gym.envs.base_text_env")
"""Modules whose rule is the default one."""


def own_rule(env_name: str) -> Rule | None:
    """The rule that the class registered as ``env_name`` defines itself; None where it is the default one."""
    from slipstream.envs import error
    from slipstream.envs.registration import load_env_creator, spec

    try:
        entry_point = spec(env_name).entry_point
        creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (error.Error, ImportError):  # a ledger may be read where the environment is not
        return None
    owner = next((c for c in getattr(creator, "__mro__", ()) if "aggregate_metrics" in vars(c)), None)
    if owner is None or owner.__module__ in _DEFAULTS:
        return None
    rule: Rule = creator.aggregate_metrics
    return rule


def aggregate_for_environment(env_name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregate with the rule of the class registered as ``env_name``; raises ``ValueError`` for an unknown id."""
    from slipstream.envs import error
    from slipstream.envs.registration import load_env_creator, spec

    try:
        entry_point = spec(env_name).entry_point
    except error.Error as missing:
        raise ValueError(f"No registered env with id: {env_name}") from missing
    creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    # A factory function has no rule of its own.
    rule = getattr(creator, "aggregate_metrics", default_aggregate_metrics)
    aggregated: dict[str, Any] = rule(metrics)
    return aggregated
