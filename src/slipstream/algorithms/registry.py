"""Named components: estimators, losses, reductions, filters.

Owns: one small registry class, used by every kind of component.  Refuses: knowing what it holds.

A name is registered once; an unknown name raises ``SettingsError`` with the nearest known one.

>>> shapes = Registry[int]("shape")
>>> shapes.add("square", 4)
>>> shapes.get("square")
4
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from slipstream.errors import SettingsError

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """``" Did you mean 'x'?"`` when one of ``known`` is close to ``name``, plus the whole list."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(known) or 'none'}."


class Registry(Generic[T]):
    """Names to components of one ``kind`` (the word that error messages use)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        """Register ``item``; raises ``SettingsError`` when the name is taken by another one."""
        if name in self._items and self._items[name] is not item:
            raise SettingsError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item

    def get(self, name: str) -> T:
        """The component, or ``SettingsError`` with a suggestion."""
        try:
            return self._items[name]
        except KeyError:
            raise SettingsError(f"unknown {self.kind} {name!r}.{did_you_mean(name, self.names())}") from None

    def remove(self, name: str) -> None:
        """Forget a name (tests and notebooks that redefine a component)."""
        self._items.pop(name, None)

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
