"""Distributions of lengths and durations, written as text.

Owns: sampling from a ``random.Random``, means, parsing and printing.  Refuses: units (the scenario's fields have them).

>>> parse_distribution("lognormal(3000, 0.8, 8192)")
LogNormal(mean=3000.0, cv=0.8, most=8192.0)
>>> str(parse_distribution(2.5)), str(parse_distribution("exponential(4)"))
('2.5', 'exponential(4.0)')
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from random import Random
from statistics import NormalDist
from typing import Any, ClassVar

from slipstream.errors import SettingsError

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Distribution:
    """Non-negative numbers; subclasses map a uniform number in (0, 1) to a value (the inverse of the CDF)."""

    name: ClassVar[str] = ""

    def quantile(self, u: float) -> float:
        """The value below which a share ``u`` of the numbers lies."""
        raise NotImplementedError

    def sample(self, rng: Random) -> float:
        """One number."""
        return self.quantile(rng.random() or 0.5)

    def average(self, points: int = 4000) -> float:
        """The mean, by quadrature over quantiles (also right when values are cut at a maximum)."""
        return sum(self.quantile((i + 0.5) / points) for i in range(points)) / points

    def scaled(self, factor: float) -> Distribution:
        """The same shape, ``factor`` times as large."""
        return Scaled(self, factor)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(getattr(self, f.name)) for f in fields(self))})"


@dataclass(frozen=True)
class Constant(Distribution):
    """Always ``value``."""

    name: ClassVar[str] = "constant"
    value: float

    def quantile(self, u: float) -> float:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Between ``low`` and ``high``."""

    name: ClassVar[str] = "uniform"
    low: float
    high: float

    def quantile(self, u: float) -> float:
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class Exponential(Distribution):
    """Waiting times without memory."""

    name: ClassVar[str] = "exponential"
    mean: float

    def quantile(self, u: float) -> float:
        return -self.mean * math.log1p(-u)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """Long-tailed: mean, coefficient of variation (standard deviation over mean), cut at ``most``.

    ``mean`` and ``cv`` are those before the cut.
    """

    name: ClassVar[str] = "lognormal"
    mean: float
    cv: float
    most: float = math.inf

    def quantile(self, u: float) -> float:
        variance = math.log1p(self.cv**2)
        z = _NORMAL.inv_cdf(min(max(u, 1e-12), 1 - 1e-12))
        return min(self.mean * math.exp(math.sqrt(variance) * z - variance / 2), self.most)


@dataclass(frozen=True)
class Empirical(Distribution):
    """Measured values, each as likely."""

    name: ClassVar[str] = "empirical"
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, u: float) -> float:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def __str__(self) -> str:
        return f"empirical({', '.join(f'{v:.6g}' for v in self.values)})"


@dataclass(frozen=True)
class Scaled(Distribution):
    """``factor`` times another distribution."""

    inner: Distribution
    factor: float

    def quantile(self, u: float) -> float:
        return self.factor * self.inner.quantile(u)

    def __str__(self) -> str:
        return f"{self.factor} * {self.inner}"


_KINDS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Constant, Uniform, Exponential, LogNormal, Empirical)
}
_CALL = re.compile(r"^\s*(?:(?P<factor>[\d.eE+-]+)\s*\*\s*)?(?P<kind>\w+)\s*\((?P<args>[^()]*)\)\s*$")


def parse_distribution(text: Any) -> Distribution:
    """A number, a distribution, a list of measured values, or text such as ``lognormal(mean, cv, most)``.

    Raises:
        SettingsError: it is none of these, or a number in it is negative or not finite.
    """
    if isinstance(text, Distribution):
        return text
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _checked(Constant(float(text)), text)
    if isinstance(text, (list, tuple)) and text:
        return _checked(Empirical(tuple(float(v) for v in text)), text)
    match = _CALL.match(text) if isinstance(text, str) else None
    try:
        if match is None:
            return _checked(Constant(float(str(text))), text)
        kind = _KINDS[match["kind"]]
        numbers = [float(part) for part in match["args"].split(",") if part.strip()]
        made = Empirical(tuple(numbers)) if kind is Empirical else kind(*numbers)
    except (KeyError, TypeError, ValueError):
        raise SettingsError(
            f"{text!r} is no distribution; write a number, constant(x), uniform(low, high), exponential(mean), "
            "lognormal(mean, cv[, most]) or a list of measured values"
        ) from None
    return _checked(made.scaled(float(match["factor"])) if match["factor"] else made, text)


def _checked(made: Distribution, text: Any) -> Distribution:
    numbers = made.values if isinstance(made, Empirical) else [made.quantile(0.001), made.quantile(0.999)]
    if not numbers or any(not math.isfinite(n) or n < 0 for n in numbers):
        raise SettingsError(f"{text!r}: lengths and durations are finite and not negative")
    return made
