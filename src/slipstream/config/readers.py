"""Who reads a setting: found in the source, not kept in a list.

Owns: a scan of the package for attribute access.  Refuses: importing the rooms that it scans.

A module reads ``rollout.max_turns`` when it accesses an attribute ``max_turns`` and also handles its section,
that is, names the section's class (``RolloutSettings``) or accesses an attribute ``rollout``.  Writing an
attribute's name in a comment or a docstring does not count; a string counts where the module looks attributes up
by name (``getattr`` with a computed name).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
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
    names: frozenset[str]


def readers(leaf: Leaf, package: Path = PACKAGE) -> tuple[str, ...]:
    """Rooms whose code reads this leaf, sorted; ``config`` counts only where settings are resolved."""
    parent = leaf.path.split(".")[-2] if "." in leaf.path else ""
    found = {
        module.room
        for module in _modules(package)
        if leaf.name in module.attributes and (leaf.section.__name__ in module.names or parent in module.attributes)
    }
    return tuple(sorted(found))


def unread(package: Path = PACKAGE) -> list[str]:
    """Leaves that no room reads."""
    return [path for path, leaf in leaves().items() if not readers(leaf, package)]


@cache
def _modules(package: Path) -> tuple[_Module, ...]:
    return tuple(_scan(package))


def _scan(package: Path) -> Iterable[_Module]:
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        if relative.startswith("config/") and relative != RESOLVED_HERE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        attributes = _attributes(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        # Annotations that are strings or come from imports only.
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        room = relative.split("/")[0].removesuffix(".py")
        yield _Module(room, frozenset(attributes), frozenset(names))


def _attributes(tree: ast.Module) -> set[str]:
    """Names of attributes that the module loads, written out or looked up."""
    nodes = list(ast.walk(tree))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
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
    return found | {str(text.value) for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}


def readers_by_leaf(package: Path = PACKAGE) -> Mapping[str, tuple[str, ...]]:
    """``readers`` of every leaf."""
    return {path: readers(leaf, package) for path, leaf in leaves().items()}
