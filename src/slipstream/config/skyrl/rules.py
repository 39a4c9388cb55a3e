"""What may become of a key that SkyRL documents.

Owns: the verdict classes and ``View``, through which a conversion sees the other keys.
Refuses: knowing any key (the tables do) and any file (``slipstream.config.load`` does).

Each documented key has one ``Rule``: its SkyRL default and a verdict.

=============  =====================================================================================
``Mapped``     becomes one or more native settings
``Met``        holds by construction here, so there is nothing to set
``Idle``       is read only together with another key, which is itself mapped, met or refused
``Refused``    cannot be honoured in this release; carries the reason and what to do instead
=============  =====================================================================================

>>> rule = Rule("trainer.seed", 42, Mapped("seed"))
>>> rule.verdict.native
('seed',)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class Unsupported(Exception):
    """This *value* cannot be honoured; ``reason`` and ``suggestion`` go to the user."""

    def __init__(self, reason: str, suggestion: str) -> None:
        super().__init__(reason, suggestion)
        self.reason = reason
        self.suggestion = suggestion


@dataclass(frozen=True)
class View:
    """The keys that were given, for conversions that need more than their own value."""

    skyrl: Mapping[str, Any]
    native: Mapping[str, Any]
    defaults: Mapping[str, Any]
    key: str = ""
    """The key that is being converted."""

    def get(self, key: str) -> Any:
        """The value given for a SkyRL key, else SkyRL's default."""
        return self.skyrl.get(key, self.defaults.get(key))


Convert = Callable[[Any, View], Any]


@dataclass(frozen=True)
class Mapped:
    """Becomes ``native``; ``convert`` returns the value (or ``{path: value}`` for several paths).

    ``implied`` holds settings that follow from the key unless they are set natively:
    ``{path: constant or convert}``.  With ``gate`` (a key and the value it must have) it has no effect otherwise.
    """

    to: str
    convert: Convert | None = None
    note: str = ""
    implied: Mapping[str, Any] = field(default_factory=dict)
    gate: tuple[str, Any] | None = None

    def active(self, view: View) -> bool:
        """Whether the key is read at all beside the others."""
        return self.gate is None or same(view.get(self.gate[0]), self.gate[1])

    @property
    def native(self) -> tuple[str, ...]:
        """The native paths, in order."""
        return tuple(self.to.split())


@dataclass(frozen=True)
class Met:
    """Holds here by construction.  ``check`` raises ``Unsupported`` for values that do not."""

    why: str
    check: Callable[[Any, View], None] | None = None


@dataclass(frozen=True)
class Idle:
    """Read only together with ``gate`` (a key and value), which has its own rule."""

    gate: str


@dataclass(frozen=True)
class Refused:
    """Cannot be honoured now; values in ``off`` (and SkyRL's default) ask for nothing and pass."""

    reason: str
    suggestion: str
    off: tuple[Any, ...] = ()


Verdict = Mapped | Met | Idle | Refused


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key; ``status`` is ``differs`` for a default that is not SkyRL's."""

    key: str
    status: Literal["mapped", "met", "no effect", "differs"]
    text: str


@dataclass(frozen=True)
class Rule:
    """One documented key.  A key that ends in ``.*`` stands for everything below it."""

    key: str
    default: Any
    verdict: Verdict


def same(one: Any, other: Any) -> bool:
    """Equality that tells ``True`` from ``1`` and takes a list for a tuple."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# --- conversions -----------------------------------------------------------------------------------


def one_of(choices: Mapping[Any, Any], reason: str, suggestion: str) -> Convert:
    """Translate through a mapping; any other value is unsupported."""

    def convert(value: Any, view: View) -> Any:
        for given, native in choices.items():
            if same(given, value):
                return native
        known = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
        raise Unsupported(f"{reason} (known here: {known})", suggestion)

    return convert


def only(*values: Any, reason: str, suggestion: str) -> Callable[[Any, View], None]:
    """A check for ``Met``: these values hold by construction, others do not."""

    def check(value: Any, view: View) -> None:
        if not any(same(value, allowed) for allowed in values):
            raise Unsupported(reason, suggestion)

    return check


def whole(value: Any, key: str) -> int:
    """``value`` as an integer, or ``Unsupported`` with a readable reason."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unsupported(f"{key} should be an integer, not {value!r}", "correct the value")
    return value


def positive(value: Any, key: str) -> int:
    """``value`` as an integer of at least 1."""
    if whole(value, key) < 1:
        raise Unsupported(f"{key} should be at least 1, not {value!r}", "correct the value")
    return int(value)


def off_is_zero(value: Any, view: View) -> int:
    """SkyRL switches intervals off with -1 or 0; here it is 0."""
    return max(whole(value, "an interval"), 0)


def unless_none(default: Any) -> Convert:
    """``null`` becomes ``default``."""
    return lambda value, view: default if value is None else value
