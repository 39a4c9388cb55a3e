"""Settings that a component declares: their defaults, and which values mean something.

Owns: ``Limit`` and ``checked``, by which losses and estimators refuse a setting before a run starts.
Refuses: the settings that every component shares (``config``); knowing any component.

A default gives a setting its kind: a number, a yes or no, a word, or ``None`` for a number that may be left out.

>>> checked("loss 'mine'", {"tau": 1.0}, {"tau": Limit(above=0)}, {"tau": 0.5})
{'tau': 0.5}
>>> checked("loss 'mine'", {"tau": 1.0}, {"tau": Limit(above=0)}, {"tau": 0})
Traceback (most recent call last):
slipstream.errors.SettingsError: loss 'mine': tau must be a number above 0, got 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.algorithms.registry import did_you_mean
from slipstream.errors import SettingsError


@dataclass(frozen=True)
class Limit:
    """Which values of a setting mean something: a range of numbers, or one of ``choices``."""

    least: float | None = None
    above: float | None = None
    """The value has to be larger than this."""
    most: float | None = None
    over: str | None = None
    """Another setting, which this one has to exceed."""
    choices: tuple[str, ...] = ()
    optional: bool = False
    """``None`` means something, too, though the default is a number."""

    def words(self) -> str:
        """What is asked for, as error messages and the documentation say it; "" without any limit."""
        if self.choices:
            return " or ".join(repr(choice) for choice in self.choices)
        parts = [
            f"above {self.above:g}" if self.above is not None else "",
            f"at least {self.least:g}" if self.least is not None else "",
            f"at most {self.most:g}" if self.most is not None else "",
            f"above {self.over}" if self.over is not None else "",
        ]
        return " and ".join(part for part in parts if part)

    def holds(self, value: Any, settings: Mapping[str, Any]) -> bool:
        """Whether ``value`` is within these limits; ``settings`` holds the others of the component."""
        if self.choices:
            return value in self.choices
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.over is None or value > settings[self.over])
        )


def checked(
    owner: str, defaults: Mapping[str, Any], limits: Mapping[str, Limit], given: Mapping[str, Any]
) -> dict[str, Any]:
    """``defaults`` overlaid by ``given``.

    Raises ``SettingsError`` on a key that is not among the defaults (with the nearest one), on a value of another kind
    than its default, and on one outside its limits.
    """
    for key in given:
        if key not in defaults:
            raise SettingsError(f"{owner} has no setting {key!r}.{did_you_mean(key, sorted(defaults))}")
    settings = {**defaults, **given}
    for key, value in given.items():
        limit = limits.get(key)
        if value is None and limit is not None and limit.optional:
            continue
        if wrong := _wrong(defaults[key], value):
            raise SettingsError(f"{owner}: {key} must be {_wanted(wrong, limit)}, got {value!r}")
    for key, limit in limits.items():
        value = settings[key]
        if value is not None and not limit.holds(value, settings):
            kind = "one of" if limit.choices else "a number"
            raise SettingsError(f"{owner}: {key} must be {_wanted(kind, limit)}, got {value!r}")
    return settings


def _wrong(default: Any, value: Any) -> str:
    """The kind that was wanted, when ``value`` is not of it."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return "" if isinstance(value, str) else "one of"
    if default is None and value is None:
        return ""
    if default is not None and not isinstance(default, (int, float)):
        return ""  # a list or a table of a component of your own
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return "" if number else "a number"


def _wanted(kind: str, limit: Limit | None) -> str:
    words = limit.words() if limit is not None else ""
    return f"{kind} {words}".strip() if kind != "one of" else words or "a word"
