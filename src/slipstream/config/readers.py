"""Who reads a setting: found in the source, not kept in a list.

Owns: a scan of the package for attribute access.  Refuses: importing the rooms that it scans.

A module reads ``rollout.max_turns`` when it accesses ``max_turns`` of something called ``rollout`` (an attribute, a
name, or a name that was assigned one), or of anything where it names the section's class (``RolloutSettings``).
Showing it in a message does not count, nor does writing its name in a comment or a docstring; a string counts where
the module looks attributes up by name (``getattr`` with a computed name).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slipstream.config.tree import Leaf, leaves

PACKAGE = Path(__file__).resolve().parent.parent
RESOLVED_HERE = "config/resolve.py"
"""The one module of this room that consumes settings on behalf of the others."""


@dataclass(frozen=True)
class _Module:
    room: str
    attributes: frozenset[str]
    owned: frozenset[tuple[str, str]]
    """``(owner, attribute)``."""
    names: frozenset[str]


def readers(leaf: Leaf, package: Path = PACKAGE) -> tuple[str, ...]:
    """Rooms whose code reads this leaf, sorted; ``config`` counts only where settings are resolved."""
    parent = leaf.path.split(".")[-2] if "." in leaf.path else ""
    found = {
        module.room
        for module in _modules(package)
        if (parent, leaf.name) in module.owned
        or (leaf.name in module.attributes and leaf.section.__name__ in module.names)
    }
    return tuple(sorted(found))


def unread(package: Path = PACKAGE) -> list[str]:
    """Leaves that no room reads; one with a single allowed value is dealt with when it is validated."""
    return [path for path, leaf in leaves().items() if not _single(leaf) and not readers(leaf, package)]


def _single(leaf: Leaf) -> bool:
    return len(leaf.allowed) == 1 and not leaf.nullable


@cache
def _modules(package: Path) -> tuple[_Module, ...]:
    return tuple(_scan(package))


def _scan(package: Path) -> Iterable[_Module]:
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        if relative.startswith("config/") and relative != RESOLVED_HERE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        nodes = list(ast.walk(tree))
        accesses = _accesses(nodes)
        attributes = {node.attr for node in accesses} | _looked_up(nodes)
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        # Annotations that are strings or come from imports only.
        names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        room = relative.split("/")[0].removesuffix(".py")
        yield _Module(room, frozenset(attributes), frozenset(_owned(nodes, accesses)), frozenset(names))


def _accesses(nodes: Sequence[ast.AST]) -> list[ast.Attribute]:
    """Attributes that the module loads, but for those in f-strings, which show them."""
    shown = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    return [
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in shown
    ]


def _owned(nodes: Sequence[ast.AST], accesses: Iterable[ast.Attribute]) -> Iterable[tuple[str, str]]:
    """``(owner, attribute)`` of the accesses; a name stands for what was assigned to it as well."""
    stands_for: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for name, value in _pairs(node):
                if isinstance(name, ast.Name):
                    stands_for.setdefault(name.id, set()).add(_called(value))
    for access in accesses:
        owner = _called(access.value)
        yield owner, access.attr
        if isinstance(access.value, ast.Name):
            yield from ((other, access.attr) for other in stands_for.get(owner, ()))


def _pairs(node: ast.Assign) -> Iterable[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _called(node: ast.expr) -> str:
    """The last name in an expression like ``settings.rollout``; empty for any other."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _looked_up(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of attributes that the module looks up by name."""
    lookups = [
        node.args[1]
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) > 1
    ]
    texts: list[ast.AST] = [name for name in lookups if isinstance(name, ast.Constant)]
    if len(texts) < len(lookups):
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts += [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    return {text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}


def readers_by_leaf(package: Path = PACKAGE) -> Mapping[str, tuple[str, ...]]:
    """``readers`` of every leaf."""
    return {path: readers(leaf, package) for path, leaf in leaves().items()}
