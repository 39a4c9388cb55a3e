"""SkyRL's documented keys, read directly.

Owns: the one table of keys (``TABLE``) and ``translate``, which turns given keys into native settings.
Refuses: reading files, and guessing: a key without a rule is unknown.

>>> found = translate({"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4}, {})
>>> {path: value for path, (value, key) in found.values.items()}
{'schedule.prompts_per_step': 8, 'algorithm.minibatches_per_step': 2}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config.skyrl.algorithm_keys import ALGORITHM
from slipstream.config.skyrl.environment import VARIABLES, environment_notes
from slipstream.config.skyrl.generator_keys import GENERATOR
from slipstream.config.skyrl.rules import Idle, Mapped, Met, Note, Refused, Rule, Unsupported, Verdict, View, same
from slipstream.config.skyrl.sft_keys import SFT
from slipstream.config.skyrl.trainer_keys import DATA, TRAINER

GROUPS: Mapping[str, list[Rule]] = {
    "Data": DATA,
    "Trainer": TRAINER,
    "Algorithm": ALGORITHM,
    "Generator, engine and environment": GENERATOR,
    "Supervised fine-tuning (top level)": SFT,
}

TABLE: Mapping[str, Rule] = {rule.key: rule for rules in GROUPS.values() for rule in rules}
"""Every documented key."""

DEFAULTS: Mapping[str, Any] = {key: rule.default for key, rule in TABLE.items() if not key.endswith(".*")}
"""SkyRL's own defaults."""

_LOCAL = (
    "run_dir",
    "data.",
    "model.path",
    "env.",
    "inference.",
    "checkpoint.",
    "logging.",
    "training.max_tokens_per_microbatch",
    "training.logprob_chunk_tokens",
    "rollout.env_workers",
)
"""Where a run lies and how it is fed: no one expects these to be SkyRL's."""


_CLIP = {"algorithm.clip_low", "algorithm.clip_high"}
_CLIPPED_AT_TWO_TENTHS = {"ppo_clip", "dual_clip", "clip_cov"}
"""Losses whose own clip, which null stands for, is SkyRL's default."""


@dataclass
class Translation:
    """``values`` and ``implied`` hold ``native path -> (value, SkyRL key)``; implied ones give way to native keys."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    implied: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """``(key, reason; suggestion)``."""


def rule_for(key: str) -> Rule | None:
    """The rule of a key, exact or through a ``.*`` entry; None when SkyRL does not document it."""
    if key in TABLE:
        return TABLE[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        rule = TABLE.get(".".join(parts[:end]) + ".*")
        if rule is not None:
            return rule
    return None


def translate(given: Mapping[str, Any], native: Mapping[str, Any]) -> Translation:
    """Apply each key's rule.

    Args:
        given: SkyRL's keys, dotted; every one must have a rule (``rule_for``).
        native: the native keys that were given beside them, dotted.

    Returns:
        Native values, notes, and what was refused; nothing is raised, so that all refusals are seen at once.
    """
    out = Translation()
    for key, value in given.items():
        rule = rule_for(key)
        if rule is None:
            raise KeyError(key)
        view = View(given, native, DEFAULTS, key)
        try:
            _apply(out, replace(rule, key=key), value, view)
        except Unsupported as error:
            out.refused.append((key, f"{error.reason}; {error.suggestion}"))
    return out


def _apply(out: Translation, rule: Rule, value: Any, view: View) -> None:
    verdict = rule.verdict
    if isinstance(verdict, Mapped) and not verdict.active(view):
        key, wanted = verdict.gate or ("", None)
        out.notes.append(Note(rule.key, "no effect", f"read only with {key}={str(wanted).lower()}"))
    elif isinstance(verdict, Mapped):
        made = _convert(verdict, value, view)
        for path, item in made.items():
            _put(out.values, path, item, rule.key)
        for path, convert in verdict.implied.items():
            if (implied := convert(value, view)) != {}:
                out.implied.setdefault(path, (implied, rule.key))
        shown = ", ".join(f"{path}={item!r}" for path, item in made.items()) or "the default stays"
        out.notes.append(Note(rule.key, "mapped", shown))
    elif isinstance(verdict, Met):
        if verdict.check is not None:
            verdict.check(value, view)
        out.notes.append(Note(rule.key, "met", verdict.why))
    elif isinstance(verdict, Idle):
        out.notes.append(Note(rule.key, "no effect", f"read only with {verdict.gate}"))
    elif same(value, rule.default) or any(same(value, off) for off in verdict.off):
        out.notes.append(Note(rule.key, "met", f"asks for nothing: {verdict.reason}"))
    else:
        raise Unsupported(verdict.reason, verdict.suggestion)


def _convert(verdict: Mapped, value: Any, view: View) -> dict[str, Any]:
    made = value if verdict.convert is None else verdict.convert(value, view)
    if verdict.convert is not None and isinstance(made, dict):
        return made
    return {verdict.native[0]: made}


def _put(values: dict[str, tuple[Any, str]], path: str, item: Any, key: str) -> None:
    if path not in values:
        values[path] = (item, key)
        return
    before, other = values[path]
    if isinstance(before, dict) and isinstance(item, dict):
        values[path] = (merged(before, item), f"{other}, {key}")
    elif not same(before, item):
        raise Unsupported(f"contradicts {other}, which makes {path} {before!r}, not {item!r}", "keep one of them")


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings as one; the second wins where both have a value."""
    out = dict(one)
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def differing_defaults(given: Mapping[str, Any], native: Mapping[str, Any], current: Mapping[str, Any]) -> list[Note]:
    """Settings that nobody gave and whose default is not SkyRL's.

    Args:
        given: SkyRL's keys that were given.
        native: native keys that were given.
        current: the resolved value of every native leaf.
    """
    taken = translate(given, native)
    notes: dict[str, Note] = {}
    for key, rule in TABLE.items():
        if key in given or not key.startswith(("trainer.", "generator.")) or not isinstance(rule.verdict, Mapped):
            continue
        view = View(given, native, DEFAULTS, key)
        if not rule.verdict.active(view):
            continue
        try:
            # A default is read beside the keys that were given, as SkyRL would read it.
            made = _convert(rule.verdict, rule.default, view)
        except Unsupported:
            continue
        for path, value in made.items():
            known = path in native or path in taken.values or path in taken.implied
            if known or path.startswith(_LOCAL) or path not in current or same(current[path], value):
                continue
            if current[path] is None and path in _CLIP and current["algorithm.loss"] in _CLIPPED_AT_TWO_TENTHS:
                continue
            notes.setdefault(path, Note(path, "differs", f"{current[path]!r} here; SkyRL's {key} gives {value!r}"))
    return list(notes.values())


__all__ = [
    "DEFAULTS",
    "GROUPS",
    "TABLE",
    "VARIABLES",
    "Idle",
    "Mapped",
    "Met",
    "Note",
    "Refused",
    "Rule",
    "Translation",
    "Verdict",
    "differing_defaults",
    "environment_notes",
    "merged",
    "rule_for",
    "translate",
]
