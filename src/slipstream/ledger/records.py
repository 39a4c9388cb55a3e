"""What the trainer hands to the ledger, and what counts as content.

Owns: ``StepRecord``, ``EvalRecord``, dispositions, and the one rule that tells content from clocks.
Refuses: computing any of it.

Two runs are equal when their *content* is.  Clocks, paths, run ids and machine facts are kept, but apart:
``is_clock`` names them by key, ``split_clock`` takes a mapping apart, ``content`` strips them at every depth.
Of a weight version ``policy/incarnation/counter`` the incarnation is such a run id; policy and counter are content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import ContractError
from slipstream.ledger.conservation import TokenFlow
from slipstream.trajectory import Group, Trajectory

Stage = Literal["start", "sft", "rl"]
DispositionKind = Literal["trained", "filtered", "stale", "failed", "superseded"]

DISPOSITIONS: tuple[str, ...] = ("trained", "filtered", "stale", "failed", "superseded")

_CLOCK_KEYS = frozenset({
    "time", "clock", "date", "run_id", "run_name", "host", "hostname", "pid", "incarnation", "path", "file", "dir",
    "directory", "run_dir", "eta", "tracker_ids", "version_info", "machine", "url", "urls",
})  # fmt: skip
_CLOCK_PATTERN = re.compile(
    r"(^|[/_])(timing|seconds|minutes|latency|duration|elapsed|wall|time|memory|rss|throughput)([/_]|$)"
    r"|_(at|path|dir|ms|url)$|per_second|^perf/"
)
_VERSION = re.compile(r"^([^/]+)/(\d+)/(\d+)$")


def is_clock(key: str) -> bool:
    """Whether a key names a clock, path, run id or machine fact, and not content.

    >>> is_clock("timing/step"), is_clock("llm_seconds"), is_clock("reward/avg_raw_reward")
    (True, True, False)
    """
    return key in _CLOCK_KEYS or _CLOCK_PATTERN.search(key) is not None


def split_clock(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(content, clocks)`` of a mapping, by its top-level keys."""
    data = {k: v for k, v in values.items() if not is_clock(k)}
    return data, {k: v for k, v in values.items() if is_clock(k)}


def content(value: Any) -> Any:
    """``value`` without clocks at any depth, and with weight versions without their incarnation."""
    if isinstance(value, Mapping):
        return {str(k): content(v) for k, v in value.items() if not is_clock(str(k))}
    if isinstance(value, (list, tuple)):
        return [content(v) for v in value]
    if isinstance(value, str) and (match := _VERSION.match(value)):
        return f"{match[1]}/*/{match[3]}"
    return value


def plain(value: Any) -> Any:
    """``value`` as JSON types: dataclasses and pydantic models to objects, paths and enums to strings.

    A float that is not finite becomes its name; anything else becomes its ``repr``, so that recording an event
    never ends a run.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy here
        return plain(value.tolist())
    return repr(value)


def disposition_kind(text: str) -> str:
    """The kind of ``trained``, ``filtered:<reason>``, ``stale``, ``failed``, ``superseded``; else ``ContractError``."""
    kind, _, reason = text.partition(":")
    if kind not in DISPOSITIONS or (kind == "filtered" and not reason):
        raise ContractError(
            f"{text!r} is not a disposition (want one of {', '.join(DISPOSITIONS)}; filtered needs a ':reason')"
        )
    return kind


@dataclass(frozen=True)
class StepRecord:
    """Everything one step leaves behind.

    Args:
        step: the step that consumed these groups, counted from 1.
        groups: the groups consumed: trained, filtered, stale and failed alike.
        dispositions: by trajectory id, one for *every* member; see ``disposition_kind``.
        advantages: by trajectory id, for those that have one.
        trainer_logprobs: by trajectory id: per row, the trainer's log-probs of the row's *own* sampled tokens
            (``None`` for a row that was not scored).
        metrics: whatever the trainer and the backend report (``policy/*``, ...); no NaN is dropped.
        timings: seconds by phase (``generate``, ``update``, ...); stored as ``timing/<phase>``.
        receipts: publish receipts (dataclasses or mappings) of this step.
        weight_version_before: the version that was trained.
        weight_version_after: the version published at the end.
        selected: ids of the groups that the schedule chose to train on (filters may still leave members out).
        unheld: tokens that are settled though no trajectory holds them (of requests that were lost), by kind.
        flow: what the generator and schedule count; without it sampled tokens are counted from ``groups``,
            which still proves that every trajectory has a disposition, but proves less.
    """

    step: int
    groups: Sequence[Group]
    dispositions: Mapping[str, str]
    advantages: Mapping[str, float] = field(default_factory=dict)
    trainer_logprobs: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    receipts: Sequence[Any] = ()
    weight_version_before: str = ""
    weight_version_after: str = ""
    flow: TokenFlow | None = None
    selected: Sequence[str] = ()
    unheld: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ContractError(f"step record: steps count from 1, got {self.step}")
        known: set[str] = set()
        for member in self.members():
            if member.trajectory_id in known:
                raise ContractError(f"step {self.step}: trajectory {member.trajectory_id} appears twice")
            known.add(member.trajectory_id)
            if member.trajectory_id not in self.dispositions:
                raise ContractError(f"step {self.step}: trajectory {member.trajectory_id} has no disposition")
        for name in ("dispositions", "advantages", "trainer_logprobs"):
            if strangers := getattr(self, name).keys() - known:
                raise ContractError(f"step {self.step}: {name} name unknown trajectories: {sorted(strangers)[:3]}")
        for text in self.dispositions.values():
            disposition_kind(text)

    def members(self) -> list[Trajectory]:
        """Every trajectory of the step, group by group."""
        return [member for group in self.groups for member in group.members]

    def settled(self) -> dict[str, int]:
        """Sampled tokens by disposition kind."""
        out: dict[str, int] = dict(self.unheld)
        for member in self.members():
            kind = disposition_kind(self.dispositions[member.trajectory_id])
            out[kind] = out.get(kind, 0) + member.sampled_tokens
        return out


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation: its whole spec, its groups, its scores.

    ``name`` is the evaluation set (``held_out``); ``stage`` tells the untouched model (``start``) and the
    supervised warm start (``sft``) from reinforcement learning (``rl``), so that gains are reported apart.
    ``scores`` use ``eval/<source|all>/<metric>`` names (``slipstream.ledger.metrics.eval_metrics``).
    """

    step: int
    name: str
    spec: Mapping[str, Any]
    groups: Sequence[Group]
    scores: Mapping[str, float]
    stage: Stage = "rl"
    weight_version: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ContractError(f"evaluation {self.name!r}: step {self.step} must be >= 0")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ContractError(f"evaluation name {self.name!r} may hold only letters, digits, '_', '.', '-'")
        if self.stage not in ("start", "sft", "rl"):
            raise ContractError(f"evaluation {self.name!r}: stage {self.stage!r} is not start, sft or rl")


@dataclass(frozen=True)
class TrajectoryRecord:
    """One stored trajectory with all that the ledger knows about it beside the trajectory itself."""

    trajectory: Trajectory
    step: int
    phase: str
    disposition: str
    advantage: float | None
    group_size: int
    incarnation: int
    eval_name: str = ""
    stage: str = "rl"
    trainer_logprobs: tuple[tuple[float, ...] | None, ...] | None = None
    live: bool = True
