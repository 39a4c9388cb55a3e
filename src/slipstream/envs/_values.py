"""Reading what user code returns: values of any type, without an exception.

Owns: what counts as a number, as text and as equal.  Refuses: judging a value (the caller has the name and the mend).
"""

from __future__ import annotations

import math
import numbers
from typing import Any


def plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python value; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def as_number(value: Any) -> float | None:
    """A real number (scalars of numpy and torch too) as a float, None for anything else.

    One that is too large for a float is infinite.

    >>> as_number(10**400), as_number("1"), as_number([1.0])
    (inf, None, None)
    """
    value = plain(value)
    if not isinstance(value, numbers.Number) or isinstance(value, complex):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def as_text(value: Any) -> str:
    """``repr(value)``, or a note where that raises."""
    try:
        return repr(value)
    # Fault boundary: the value's class is a user's, and its repr may raise anything.
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__} without repr: {type(error).__name__}>"


def same(a: Any, b: Any) -> bool:
    """``a == b``, by text where they cannot be compared (an array has no one truth value)."""
    try:
        return bool(a == b)
    # Fault boundary: as above.
    except Exception:  # noqa: BLE001
        return as_text(a) == as_text(b)
