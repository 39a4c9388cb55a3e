"""``explain``: everything there is to say about one key, native or SkyRL's.

Owns: gathering type, default, value, origin, readers and SkyRL names; presets (``algorithm.preset=NAME``) with their
formula and what they set.  Refuses: changing anything.

>>> told = explain("schedule.prompts_per_step")
>>> told.default, told.skyrl
('16', ('trainer.train_batch_size',))
>>> dict(explain("algorithm.preset=dapo").inside)["algorithm.clip_high"]
'0.28'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.config.presets import PRESETS, preset_leaves
from slipstream.config.readers import readers
from slipstream.config.settings import RunSettings
from slipstream.config.skyrl import TABLE, Idle, Mapped, Met, Verdict, rule_for
from slipstream.config.tree import Leaf, did_you_mean, leaves, sections, value_at
from slipstream.errors import SettingsError


@dataclass(frozen=True)
class Explanation:
    """What is known about a key.  Empty fields do not apply (a section has no type, SkyRL's key no reader)."""

    path: str
    kind: str
    description: str
    type_text: str = ""
    allowed: str = ""
    default: str = ""
    value: str = ""
    origin: str = ""
    rooms: tuple[str, ...] = ()
    skyrl: tuple[str, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()


def explain(path: str, settings: RunSettings | None = None, origins: Mapping[str, str] | None = None) -> Explanation:
    """Explain a setting, a section, or a key of SkyRL's.

    Args:
        path: dotted; ``algorithm.preset=NAME`` for a preset.
        settings: to show the current value; None shows the default only.
        origins: ``Loaded.origins``, to show where the value came from.

    Raises:
        SettingsError: there is no such key; the nearest ones are named.
    """
    name, equals, value = path.partition("=")
    if equals and name == "algorithm.preset":
        return _preset(value, settings, origins or {})
    if path in leaves():
        return _leaf(leaves()[path], settings, origins or {})
    if path in sections():
        inside = tuple((key, leaf.description) for key, leaf in leaves().items() if key.startswith(f"{path}."))
        return Explanation(path, "section", (sections()[path].__doc__ or "").strip(), inside=inside)
    rule = rule_for(path)
    if rule is not None:
        return Explanation(path, "SkyRL key", verdict_text(rule.verdict), default=show(rule.default))
    below = tuple((key, verdict_text(r.verdict)) for key, r in TABLE.items() if key.startswith(f"{path}."))
    if below:
        return Explanation(path, "SkyRL section", "keys that SkyRL documents", inside=below)
    known = [*leaves(), *sections(), *TABLE]
    raise SettingsError(f"unknown key {path!r}.{did_you_mean(path, known)}")


def _leaf(leaf: Leaf, settings: RunSettings | None, origins: Mapping[str, str]) -> Explanation:
    value = leaf.default if settings is None else value_at(settings, leaf.path)
    origin = origins.get(leaf.path, "default" if value == leaf.default else "settings")
    return Explanation(
        path=leaf.path,
        kind="setting",
        description=leaf.description,
        type_text=leaf.type_text,
        allowed=", ".join(leaf.allowed) or leaf.bounds,
        default=show(leaf.default),
        value=show(value),
        origin=origin,
        rooms=readers(leaf),
        skyrl=skyrl_names().get(leaf.path, ()),
    )


def _preset(name: str, settings: RunSettings | None, origins: Mapping[str, str]) -> Explanation:
    """What the preset sets and, under settings that were given, what became of it and what lies beside it."""
    if name not in PRESETS:
        raise SettingsError(f"unknown preset {name!r}.{did_you_mean(name, PRESETS)} Known: {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    text = "\n".join(
        [f"{preset.title} ({preset.source})", "", *(f"    {line}" for line in preset.formula), "", preset.when]
        + [f"Figures: {preset.figures}"]
        + ([f"Needs {preset.needs} besides."] if preset.needs else [])
    )
    values = {path: show(value) for path, value in preset_leaves(name).items()}
    if settings is not None:
        for path in leaves():
            if path.startswith("algorithm.") and path != "algorithm.preset" and path in origins:
                now, own = show(value_at(settings, path)), values.get(path)
                values[path] = now if own in (None, now) else f"{now} (the preset: {own})"
    inside = tuple(values.items())
    return Explanation(f"algorithm.preset={name}", "preset", text, inside=inside)


@cache
def skyrl_names() -> Mapping[str, tuple[str, ...]]:
    """SkyRL's keys that set each native leaf, also by implication."""
    found: dict[str, list[str]] = {}
    for key, rule in TABLE.items():
        if isinstance(rule.verdict, Mapped):
            for path in dict.fromkeys((*rule.verdict.native, *rule.verdict.implied)):
                found.setdefault(path, []).append(key)
    return {path: tuple(keys) for path, keys in found.items()}


def verdict_text(verdict: Verdict) -> str:
    """A verdict in one sentence."""
    if isinstance(verdict, Mapped):
        implied = f"; implies {', '.join(verdict.implied)} unless set" if verdict.implied else ""
        note = f" ({verdict.note})" if verdict.note else ""
        return f"becomes {', '.join(verdict.native)}{note}{implied}"
    if isinstance(verdict, Met):
        only = " (for some values; others are refused)" if verdict.check is not None else ""
        return f"met: {verdict.why}{only}"
    if isinstance(verdict, Idle):
        return f"no effect: read only with {verdict.gate}"
    return f"refused: {verdict.reason}; {verdict.suggestion}"


def show(value: Any) -> str:
    """A value as it is written in YAML, near enough."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return str(value)


def render_explanation(told: Explanation) -> RenderableType:
    """An explanation as a small table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    rows = (
        ("type", told.type_text),
        ("allowed", told.allowed),
        ("default", told.default),
        ("value", f"{told.value}  ({told.origin})" if told.value else ""),
        ("read by", ", ".join(told.rooms)),
        ("SkyRL", "\n".join(told.skyrl)),
    )
    for name, text in rows:
        if text:
            table.add_row(name, Text(text))
    for key, text in told.inside:
        table.add_row(key, Text(text))
    return Group(Text.assemble((told.path, "bold"), f"  {told.kind}"), Text(told.description), table)


__all__ = ["Explanation", "explain", "render_explanation", "show", "skyrl_names", "verdict_text"]
