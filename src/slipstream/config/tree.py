"""The settings tree, read back from its own classes.

Owns: the list of leaves (dotted path, type, default, description, allowed values) that loading, ``explain``
and the generated reference share.  Refuses: values; a leaf says what may be set, not what is.

A *leaf* is a field that is not itself a section.  An open dictionary (``env.kwargs``) is one leaf.

>>> leaf = leaves()["schedule.prompts_per_step"]
>>> leaf.type_text, leaf.default, leaf.bounds
('int', 16, '>= 1')
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from slipstream.config.settings import RunSettings, Settings


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: where it is, what it may hold, what it means."""

    path: str
    section: type[Settings]
    default: Any
    description: str
    type_text: str
    allowed: tuple[str, ...]
    bounds: str
    open: bool
    numeric: bool
    nullable: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit(".", 1)[-1]


@cache
def leaves() -> Mapping[str, Leaf]:
    """Every leaf of ``RunSettings`` by dotted path, in the order of the classes."""
    return {leaf.path: leaf for leaf in _walk(RunSettings, RunSettings(), "")}


@cache
def sections() -> Mapping[str, type[Settings]]:
    """Every section by dotted path, outermost first."""
    return dict(_walk_sections(RunSettings, ""))


def value_at(settings: RunSettings, path: str) -> Any:
    """The value of a leaf or section; ``KeyError`` when there is none."""
    node: Any = settings
    for part in path.split("."):
        if not isinstance(node, Settings) or part not in type(node).model_fields:
            raise KeyError(path)
        node = getattr(node, part)
    return node


def nearest(path: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Known keys that the user may have meant, best first."""
    keys = list(known)
    last = path.rsplit(".", 1)[-1]
    same_name = [key for key in keys if key.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(path, keys, n=n, cutoff=0.6)
    names: dict[str, list[str]] = {}
    for key in keys:
        names.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    by_name = [key for name in difflib.get_close_matches(last, names, n=n, cutoff=0.75) for key in names[name]]
    # Most of a key's meaning is in its last part; among equals the nearest section wins.
    ranked = sorted(dict.fromkeys(same_name + by_name + close), key=lambda key: -_likeness(path, key))
    return ranked[:n]


def did_you_mean(path: str, known: Iterable[str]) -> str:
    """`` Did you mean x?``, or nothing when no known key is near."""
    found = nearest(path, known)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _likeness(one: str, other: str) -> float:
    whole = difflib.SequenceMatcher(None, one, other).ratio()
    return whole + difflib.SequenceMatcher(None, one.rsplit(".", 1)[-1], other.rsplit(".", 1)[-1]).ratio()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _walk(section: type[Settings], defaults: Settings, prefix: str) -> Iterable[Leaf]:
    for name, info in section.model_fields.items():
        path, default = f"{prefix}{name}", getattr(defaults, name)
        if _is_section(info.annotation):
            yield from _walk(type(default), default, f"{path}.")
        else:
            yield _leaf(path, section, info, default)


def _walk_sections(section: type[Settings], prefix: str) -> Iterable[tuple[str, type[Settings]]]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield f"{prefix}{name}", info.annotation
            yield from _walk_sections(info.annotation, f"{prefix}{name}.")


def _leaf(path: str, section: type[Settings], info: FieldInfo, default: Any) -> Leaf:
    members = _members(info.annotation)
    return Leaf(
        path=path,
        section=section,
        default=default,
        description=info.description or "",
        type_text=_type_text(info.annotation),
        allowed=_allowed(info.annotation),
        bounds=_bounds(info.metadata),
        open=any(get_origin(member) is dict for member in members),
        numeric=bool({int, float} & set(members)) and bool not in members,
        nullable=type(None) in members,
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in _members(arg))
    return (annotation,)


def _allowed(annotation: Any) -> tuple[str, ...]:
    found: list[str] = []
    for member in _members(annotation):
        if get_origin(member) is Literal:
            found += [str(value) for value in get_args(member)]
        elif get_origin(member) is tuple:
            found += [value for arg in get_args(member) if arg is not ... for value in _allowed(arg)]
    return tuple(dict.fromkeys(found))


def _bounds(metadata: Iterable[Any]) -> str:
    signs = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
    found = [
        f"{sign} {getattr(item, name):g}" for item in metadata for kind, name, sign in signs if isinstance(item, kind)
    ]
    return ", ".join(found)


def _type_text(annotation: Any) -> str:
    parts: list[str] = []
    for member in _members(annotation):
        origin, args = get_origin(member), get_args(member)
        if origin is Literal:
            parts.append(" | ".join(str(value) for value in args))
        elif origin is tuple and args[-1:] == (...,):
            parts.append(f"list of {_plural(args[0])}")
        elif origin is tuple:
            parts.append(f"[{', '.join(_type_text(arg) for arg in args)}]")
        elif origin is list:
            parts.append(f"list of {_plural(args[0])}")
        elif origin is dict:
            parts.append("mapping")
        else:
            parts.append(
                {type(None): "null", str: "text", Path: "path"}.get(member, getattr(member, "__name__", "any"))
            )
    return " | ".join(parts)


def _plural(annotation: Any) -> str:
    return "texts" if annotation is str else f"({_type_text(annotation)})"
