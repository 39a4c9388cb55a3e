"""Named components: estimators, losses, reductions, filters.

Owns: one small registry class, used by every kind of component; components by import path.
Refuses: knowing what it holds.

A name is registered once; an unknown name raises ``SettingsError`` with the nearest known one.  A name with a colon
is an import path, ``my_pkg.module:function``: the function is imported, and found under its registered name if its
module registers it, else wrapped as a component with the kind's defaults.

>>> shapes = Registry[int]("shape")
>>> shapes.add("square", 4)
>>> shapes.get("square")
4
>>> functions = Registry("function", wrap=lambda path, function: function)
>>> functions.get("math:floor")(2.5)
2
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from slipstream.errors import SettingsError

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """``" Did you mean 'x'?"`` when one of ``known`` is close to ``name``, plus the whole list."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(known) or 'none'}."


def import_function(path: str, kind: str = "function") -> Callable[..., Any]:
    """The function at ``my_pkg.module:name``; ``SettingsError`` says which part of the path does not lead on."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Fault boundary: a user's module may raise anything while it is imported.
    except Exception as error:
        raise SettingsError(
            f"{kind} {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "run from the directory that holds it, or install it"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingsError(
            f"{kind} {path!r}: {module_name} has no function {attribute!r}.{did_you_mean(attribute, known)}"
        )
    return function  # type: ignore[no-any-return]


class Registry(Generic[T]):
    """Names to components of one ``kind`` (the word that error messages use)."""

    def __init__(self, kind: str, wrap: Callable[[str, Callable[..., Any]], T] | None = None) -> None:
        self.kind = kind
        self._wrap = wrap
        self._items: dict[str, T] = {}
        self._imported: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        """Register ``item``; raises ``SettingsError`` when the name is taken by another one."""
        if name in self._items and self._items[name] is not item:
            raise SettingsError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item

    def get(self, name: str) -> T:
        """The component, or ``SettingsError`` with a suggestion; an import path is imported once."""
        if name in self._items:
            return self._items[name]
        if ":" not in name:
            raise SettingsError(f"unknown {self.kind} {name!r}.{did_you_mean(name, self.names())}")
        if name not in self._imported:
            self._imported[name] = self._import(name)
        return self._imported[name]

    def _import(self, path: str) -> T:
        function = import_function(path, self.kind)
        for item in self._items.values():
            if item is function or getattr(item, "function", None) is function:
                return item
        if self._wrap is None:
            raise SettingsError(f"{self.kind} {path!r}: this kind takes registered names only")
        return self._wrap(path, function)

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
