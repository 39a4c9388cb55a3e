"""What the bundled environments read from a data row (``extras``), checked.

Owns: the fields that they share.  Refuses: rows of other environments, which may mean anything by these names.

A null counts as "not given": Parquet fills it in where only other rows have the column.

>>> ground_truth({"reward_spec": {"ground_truth": 42}}, "mine")
42
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from slipstream.errors import DataError


def section(extras: Mapping[str, Any], name: str, env: str) -> Mapping[str, Any]:
    """The mapping in column ``name``, empty when it is not given; raises ``DataError`` when it is something else."""
    value = extras.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{env}: the row's {name} must be a mapping of names to values, got {type(value).__name__}")
    return value


def ground_truth(extras: Mapping[str, Any], env: str) -> Any:
    """``reward_spec.ground_truth``, None when it is not given; raises ``DataError`` as ``section`` does."""
    return section(extras, "reward_spec", env).get("ground_truth")


def turn_limit(extras: Mapping[str, Any], default: int, env: str) -> int:
    """``max_turns``, else ``default``; raises ``DataError`` when it is no whole number from 1 on."""
    given = extras.get("max_turns")
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise DataError(f"{env}: the row's max_turns must be a whole number from 1 on, got {given!r}")
    return int(given)
