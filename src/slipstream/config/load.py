"""Loading settings: YAML files, ``a.b=c`` overrides, native keys and SkyRL's, side by side.

Owns: merging, provenance, unknown keys, contradictions, readable errors.
Refuses: the meaning of SkyRL's keys (``slipstream.config.skyrl``), rules between sections
(``slipstream.config.checks``), Hydra's ``+key`` and ``~key``.

Later files win over earlier ones, overrides over files, and all of them over ``base``.  A native key and a
SkyRL key that say different things are an error, wherever they stand.  ``null`` is ``None``; ``${...}`` are
OmegaConf interpolations over everything that was given.

>>> loaded = load_settings([], ["trainer.train_batch_size=4", "rollout.max_turns=2"])
>>> loaded.settings.schedule.prompts_per_step, loaded.origins["schedule.prompts_per_step"]
(4, "trainer.train_batch_size (override 'trainer.train_batch_size=4')")
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from slipstream.config.presets import PRESETS, preset_leaves
from slipstream.config.settings import RunSettings
from slipstream.config.skyrl import TABLE, Note, differing_defaults, merged, rule_for, translate
from slipstream.config.skyrl.rules import same
from slipstream.config.tree import did_you_mean, leaves, nearest, sections, value_at
from slipstream.errors import SettingsError

_KEY = re.compile(r"[^\s=\[\]{}.+~]+(\.[^\s=\[\]{}.+~]+)*")


@dataclass(frozen=True)
class Loaded:
    """Settings, what became of SkyRL's keys, and where each given value came from.

    ``origins`` has an entry only for leaves that a file, an override, SkyRL's key or a preset set.
    """

    settings: RunSettings
    notes: Sequence[Note] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


def load_settings(
    files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    base: RunSettings | Mapping[str, Any] | None = None,
) -> Loaded:
    """Read, merge, translate and validate.

    Args:
        files: YAML files, least important first.
        overrides: ``a.b=c`` strings; values are typed as in YAML.
        base: settings underneath everything else (a preset); they contradict nothing.

    Raises:
        SettingsError: an unknown, refused, contradictory or ill-typed key.  All that are found are named, each
            with the file or override that it came from.
    """
    sources = [(str(file), _read(Path(file))) for file in files]
    sources += [(f"override {text!r}", _override(text)) for text in overrides]
    problems: list[str] = []
    came_from: dict[str, str] = {}
    for label, config in sources:
        for key, _ in _flatten(_container(config, label, resolve=False), label, problems):
            came_from[key] = label
    _raise(problems)
    given = dict(_flatten(_merge(sources), "the merged settings", problems))
    _raise(problems)
    native = {key: value for key, value in given.items() if key in leaves()}
    foreign = {key: value for key, value in given.items() if key not in leaves()}
    values, origins, notes = _combine(native, foreign, came_from, problems)
    _raise(problems)
    settings = _validate(_on_base(base, values), values, origins)
    if any(key.startswith(("trainer.", "generator.")) for key in foreign):
        current = {path: value_at(settings, path) for path in leaves()}
        notes = [*notes, *differing_defaults(foreign, native, current)] if base is None else notes
    return Loaded(settings, tuple(notes), {**_preset_origins(settings), **origins})


def _preset_origins(settings: RunSettings) -> dict[str, str]:
    """Leaves that came from the chosen preset (those that were given as well have an origin of their own)."""
    name = settings.algorithm.preset
    return {} if name is None else dict.fromkeys(preset_leaves(name), f"algorithm.preset={name}")


# --- reading ---------------------------------------------------------------------------------------


def _read(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is no valid YAML ({_one_line(error)})") from error
    if not isinstance(config, DictConfig):
        raise SettingsError(f"{path}: holds a list; settings are a mapping of keys")
    return config


def _override(text: str) -> DictConfig:
    key, equals, value = text.partition("=")
    if key[:1] in ("+", "~"):
        plain = text[1:].lstrip("+~")
        raise SettingsError(
            f"override {text!r}: a leading {key[0]!r} is refused, because every key exists already; write {plain!r}"
        )
    if not equals or not _KEY.fullmatch(key):
        raise SettingsError(f"override {text!r} is not of the form a.b=value")
    if not value.strip():
        raise SettingsError(
            f"override {text!r} has no value; write {key}=null for none, or {key}='\"\"' for empty text"
        )
    try:
        return OmegaConf.from_dotlist([text])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise SettingsError(f"override {text!r}: the value is no valid YAML ({_one_line(error)})") from error


def _container(config: DictConfig, label: str, *, resolve: bool) -> dict[str, Any]:
    try:
        made = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        raise SettingsError(f"{label}: {_one_line(error)}; define the key that is referred to") from error
    return made if isinstance(made, dict) else {}


def _merge(sources: Sequence[tuple[str, DictConfig]]) -> dict[str, Any]:
    try:
        config = OmegaConf.merge(*(config for _, config in sources)) if sources else OmegaConf.create({})
    except OmegaConfBaseException as error:
        raise SettingsError(f"the files and overrides cannot be merged: {_one_line(error)}") from error
    return _container(config, "settings", resolve=True) if isinstance(config, DictConfig) else {}


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=")))
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key else text


# --- keys ------------------------------------------------------------------------------------------


@cache
def _prefixes() -> frozenset[str]:
    keys = [key.removesuffix(".*") for key in (*leaves(), *TABLE)]
    found = set(sections())
    for key in keys:
        parts = key.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(found)


def _known() -> list[str]:
    return [*leaves(), *(key for key in TABLE if not key.endswith(".*"))]


def _flatten(node: Mapping[Any, Any], label: str, problems: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of one source; unknown and misplaced keys go to ``problems``."""
    for name, value in node.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str) or "." in name:
            problems.append(f"{label}: key {path!r} should be nested sections, one name each")
        elif path in leaves():
            yield path, value
        elif isinstance(value, Mapping) and path in _prefixes() and (value or path not in TABLE):
            yield from _flatten(value, label, problems, f"{path}.")
        elif path in TABLE:
            yield path, value
        elif path in _prefixes():
            if value is not None:  # an empty section in YAML reads as null
                problems.append(f"{label}: {path} is a section, not a value; set one of its keys ({_children(path)})")
        elif rule_for(path) is not None:
            if isinstance(value, Mapping):
                yield from _flatten(value, label, problems, f"{path}.")
            else:
                yield path, value
        else:
            problems.append(f"{label}: unknown key {path!r}.{did_you_mean(path, _known())}")


def _children(path: str) -> str:
    inside = dict.fromkeys(key[len(path) + 1 :].split(".")[0] for key in _known() if key.startswith(f"{path}."))
    shown = list(inside)[:4]
    return ", ".join(shown) + (", ..." if len(inside) > len(shown) else "")


# --- combining -------------------------------------------------------------------------------------


def _combine(
    native: Mapping[str, Any], foreign: Mapping[str, Any], came_from: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str], list[Note]]:
    found = translate(foreign, native)
    problems += [f"{key}={foreign[key]!r} (from {came_from.get(key, '?')}): {why}" for key, why in found.refused]
    values = dict(native)
    origins = {key: came_from.get(key, "the merged settings") for key in native}
    for path, (value, keys) in {**found.implied, **found.values}.items():
        first = keys.split(", ")[0]
        origin = f"{keys} ({came_from.get(first, '?')})"
        if path not in native:
            values[path], origins[path] = value, origin
        elif path in found.values:
            clash = _clash(path, native[path], value)
            if clash:
                problems.append(
                    f"{path}={native[path]!r} (from {origins[path]}) contradicts {origin}, "
                    f"which makes it {value!r}; keep one of them"
                )
            elif leaves()[path].open:
                values[path] = merged(native[path] or {}, value)
    return values, origins, found.notes


def _clash(path: str, native: Any, foreign: Any) -> bool:
    if leaves()[path].open and isinstance(native, Mapping) and isinstance(foreign, Mapping):
        return any(
            key in native and not same(native[key], value) and _clash(path, native[key], value)
            for key, value in foreign.items()
        )
    as_list = [[item] if isinstance(item, str) else item for item in (native, foreign)]
    return not same(native, foreign) and not same(*as_list)


def _on_base(base: RunSettings | Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings for validation: ``base`` underneath, given values on top."""
    tree: dict[str, Any] = {}
    if base is not None:
        try:
            made = base if isinstance(base, RunSettings) else RunSettings.model_validate(dict(base))
        except ValidationError as error:
            raise SettingsError(_listed(_readable(error, {}, {}))) from error
        tree = made.model_dump(exclude_unset=True)  # what the preset left to the defaults stays so
        schedule = tree.get("schedule", {})
        if values.get("schedule.epochs") is not None and "schedule.steps" not in values:
            schedule.pop("steps", None)  # a new number of epochs decides the length again
        elif "schedule.steps" in values and "schedule.epochs" not in values:
            schedule.pop("epochs", None)
        if "algorithm.preset" in values:
            _without_preset(tree.get("algorithm", {}))
    for path, value in values.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if leaves()[path].open and isinstance(value, Mapping) and isinstance(node.get(name), Mapping):
            value = merged(node[name], value)
        node[name] = value
    return tree


def _without_preset(algorithm: dict[str, Any]) -> None:
    """Take the old preset's settings out of ``algorithm``, in place, since another preset is chosen on top of it."""
    if algorithm.get("preset") not in PRESETS:
        return
    for path, value in preset_leaves(algorithm.pop("preset")).items():
        _, *parents, name = path.split(".")
        node = algorithm
        for parent in parents:
            node = node.get(parent, {})
        if name in node and same(node[name], value):
            del node[name]


# --- validation ------------------------------------------------------------------------------------


def _validate(tree: Mapping[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]) -> RunSettings:
    flags = [
        f"{path}={str(value).lower()} (from {origins[path]}): should be a number, not true or false"
        for path, value in values.items()
        if leaves()[path].numeric and isinstance(value, bool)
    ]
    _raise(flags)
    try:
        return RunSettings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_listed(_readable(error, values, origins))) from error


def _readable(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """One line per setting, without the validator's own vocabulary."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _leaf_of(item["loc"])
        text = re.sub(r"^(Input|Value error,|Assertion failed,) ?", "", item["msg"])
        if not path:
            lines[text] = text
            continue
        leaf = leaves().get(path)
        shown = f"{path}={values.get(path, item['input'])!r}"
        origin = f" (from {origins[path]})" if path in origins else ""
        mend = ""
        if item["type"] == "extra_forbidden":
            text = "is unknown." + did_you_mean(path, leaves())
        elif leaf is not None and leaf.allowed and isinstance(item["input"], str):
            near = nearest(item["input"], leaf.allowed, n=1)
            mend = f"; did you mean {near[0]}?" if near else ""
        elif item["type"] == "string_type":
            mend = "; put it in quotes to make it text"
        # Members of a union each complain; the first complaint is enough.
        lines.setdefault(path, f"{shown}{origin}: {text}{mend}")
    return list(lines.values())


def _leaf_of(loc: tuple[int | str, ...]) -> str:
    """The leaf that an error is about; its location may go on into the value."""
    parts = [str(part) for part in loc]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in leaves():
            return ".".join(parts[:end])
    return ".".join(parts)


def _listed(lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} settings cannot be used:\n" + "\n".join(f"  - {line}" for line in lines)


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise SettingsError(_listed(list(dict.fromkeys(problems))))
