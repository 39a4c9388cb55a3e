"""What makes two settings the same run: dump, hash, difference, and what may change on resume.

Owns: the YAML form of resolved settings (a round trip), a stable hash, and the resume rules.
Refuses: reading checkpoints; a checkpoint keeps the dump and hands it in.

>>> old = RunSettings()
>>> new = old.model_copy(update={"seed": 1})
>>> [(change.path, change.allowed) for change in diff_settings(old, new)]
[('seed', False)]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from slipstream.config.settings import RunSettings
from slipstream.config.tree import leaves
from slipstream.errors import SettingsError

WHERE = ("run_dir", "logging.")
"""Where a run is kept and shown; no part of its hash."""

FREE = (
    *WHERE,
    "checkpoint.",
    "rules",
    "eval.",
    "data.eval",
    "data.eval_limit",
    "schedule.steps",
    "schedule.epochs",
    "schedule.step_deadline_seconds",
    "schedule.time_limit_minutes",
    "rollout.failures.",
    "inference.request_timeout_seconds",
    "inference.urls",
    "inference.replicas",
    "inference.router.",
    "inference.launch.",
    "inference.transport",
    "inference.transfer_dir",
    "inference.transfer_host",
    "training.heap_growth",
)
"""May change on resume: nothing that was trained depends on them."""

FAST = (
    "model.attn_implementation",
    "model.gradient_checkpointing",
    "training.max_tokens_per_microbatch",
    "training.logprob_chunk_tokens",
    "training.share_prompts",
    "training.threads",
    "inference.max_batch_size",
    "inference.kv_cache_tokens",
    "inference.prefix_caching",
    "inference.pause_mode",
    "inference.threads",
    "rollout.env_workers",
    "rollout.env_step_seconds",
    "rollout.concurrency",
)
"""May change on resume unless bit-equality is claimed: they move rounding or batch composition."""


FILLED = (
    "training.optimizer.total_steps",
    "sft.optimizer.total_steps",
    "algorithm.critic.optimizer.total_steps",
    "algorithm.reduction_tokens",
    "algorithm.overlong.max_tokens",
    "algorithm.overlong.buffer_tokens",
    "training.threads",
    "inference.threads",
)
"""What a run fills in where it is null (``resolve_settings``, and threads by the machine); checkpoints hold it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One leaf that differs; ``allowed`` says whether a run may go on with it, ``why`` why not."""

    path: str
    old: Any
    new: Any
    allowed: bool
    why: str = ""


def dump_settings(settings: RunSettings) -> str:
    """All settings as YAML, defaults included; ``load_settings`` reads the same settings back."""
    tree = _escaped(settings.model_dump(mode="json"))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def settings_hash(settings: RunSettings) -> str:
    """SHA-256 over every leaf but ``run_dir`` and ``logging``; equal settings have equal hashes everywhere."""
    kept = {path: value for path, value in _flat(settings).items() if not _matches(path, WHERE)}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def diff_settings(old: RunSettings, new: RunSettings) -> list[Change]:
    """Every leaf that differs, in the order of the settings, and whether a run may resume with it."""
    before, after = _flat(old), _flat(new)
    return [_change(path, before[path], after[path], old, new) for path in before if before[path] != after[path]]


def check_resume(old: RunSettings, new: RunSettings, *, resolved: bool = True) -> list[Change]:
    """The changes that a resumed run takes over; ``SettingsError`` names those that it cannot.

    ``old`` is a checkpoint's.  With ``resolved=False`` those of ``new`` may still be null where a run fills them in:
    they are compared once it has.
    """
    changes = diff_settings(old, new)
    if not resolved:
        changes = [change for change in changes if not (change.path in FILLED and change.new is None)]
    refused = [change for change in changes if not change.allowed]
    if refused:
        lines = "\n".join(f"  - {c.path}: {c.old!r} -> {c.new!r}: {c.why}" for c in refused)
        raise SettingsError(
            f"the run cannot go on with other settings:\n{lines}\nrestore these, or start a new run in another run_dir"
        )
    return changes


def _change(path: str, before: Any, after: Any, old: RunSettings, new: RunSettings) -> Change:
    if _matches(path, FREE):
        return Change(path, before, after, True)
    if _matches(path, FAST):
        exact = "exact" in (old.training.determinism, new.training.determinism)
        why = "training.determinism=exact promises the bits of an uninterrupted run" if exact else ""
        return Change(path, before, after, not exact, why)
    if path.endswith("optimizer.total_steps"):
        scheduler = path.replace("total_steps", "scheduler")
        constant = _flat(old)[scheduler] == _flat(new)[scheduler] == "constant"
        why = (
            "" if constant else f"the learning-rate schedule was laid out for {before} optimiser steps; set it to that"
        )
        return Change(path, before, after, constant, why)
    return Change(path, before, after, False, "steps already taken were trained with the old value")


def _flat(settings: RunSettings) -> Mapping[str, Any]:
    dumped = settings.model_dump(mode="json")
    flat: dict[str, Any] = {}
    for path in leaves():
        node = dumped
        for part in path.split("."):
            node = node[part]
        flat[path] = node
    return flat


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(path.startswith(pattern) if pattern.endswith(".") else path == pattern for pattern in patterns)


def _escaped(node: Any) -> Any:
    """Literal ``${`` is written so that no interpolation is read back."""
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", node)
    return node


__all__ = ["FAST", "FREE", "Change", "check_resume", "diff_settings", "dump_settings", "settings_hash"]
