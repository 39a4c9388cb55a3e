"""Reading a run's record: events, metrics, trajectories, and the digest of their content.

Owns: the *live lineage* (which records a resumed run superseded) and the content digest.
Refuses: writing; a reader may run beside the writer.

Nothing is ever deleted.  A resume appends one ``superseded`` event; a record of step ``s`` by incarnation ``i`` is
superseded when a later incarnation rewound to a step before ``s``.  An evaluation or metric that a later
incarnation repeats is superseded by the repetition.

>>> reader = LedgerReader(Path("runs/quickstart"))                              # doctest: +SKIP
>>> [e.data["dispositions"] for e in reader.events("step")]                     # doctest: +SKIP
>>> record = next(reader.trajectories(step=3))                                  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import LedgerError
from slipstream.ledger.blobs import BlobStore
from slipstream.ledger.codec import CLOCK_COLUMNS, decode, read_parquet
from slipstream.ledger.conservation import TokenAccount
from slipstream.ledger.journal import read_lines
from slipstream.ledger.records import TrajectoryRecord, content, is_clock

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
TOKEN_TEXTS = "tokens.json"
SIDE = "side"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of ``events.jsonl``: ``data`` is content, ``clock`` is not (time, incarnation, paths)."""

    seq: int
    kind: str
    step: int | None
    data: dict[str, Any]
    clock: dict[str, Any]
    live: bool = True

    @property
    def incarnation(self) -> int:
        """Which start of the run wrote it."""
        return int(self.clock.get("incarnation", 0))

    @property
    def time(self) -> float:
        """Seconds since the epoch."""
        return float(self.clock.get("time", 0.0))


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of ``metrics.jsonl``: the metrics of one step of one phase (``train``, ``sft``)."""

    step: int
    phase: str
    values: dict[str, float]
    incarnation: int
    time: float
    live: bool = True


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """One Parquet file of trajectories and what it holds."""

    path: Path
    phase: str
    step: int
    eval_name: str
    stage: str
    incarnation: int
    live: bool


def _superseded_by(rewinds: Sequence[tuple[int, int]], incarnation: int, step: int) -> bool:
    return any(by > incarnation and step > after for by, after in rewinds)


def mark_events(events: Sequence[Event]) -> list[Event]:
    """The same events with ``live`` set by the lineage rule of this module."""
    rewinds = [(e.incarnation, int(e.data["after_step"])) for e in events if e.kind == "superseded"]
    latest_eval = {_eval_key(e): e.seq for e in events if e.kind == "eval"}
    out = []
    for event in events:
        live = event.step is None or not _superseded_by(rewinds, event.incarnation, event.step)
        if event.kind == "eval":
            live = live and latest_eval[_eval_key(event)] == event.seq
        out.append(event if live else replace(event, live=False))
    return out


def _eval_key(event: Event) -> tuple[int | None, str, str]:
    return event.step, str(event.data["name"]), str(event.data["stage"])


class LedgerReader:
    """A read-only view of one run directory; every call reads what is on disk now."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        if not (self.run_dir / EVENTS).is_file():
            raise LedgerError(f"{self.run_dir} holds no ledger ({EVENTS} is missing); is this a run directory?")

    def events(self, kind: str | None = None, *, live_only: bool = False) -> list[Event]:
        """All events in order of writing; ``kind`` filters."""
        path = self.run_dir / EVENTS
        raw: list[Event] = []
        for number, line in enumerate(read_lines(path), 1):
            try:
                raw.append(Event(line["seq"], line["kind"], line["step"], line["data"], line["clock"]))
            except KeyError as error:
                raise LedgerError(f"{path}, line {number}: not an event ({error} is missing)") from None
        marked = mark_events(raw)
        return [e for e in marked if (kind is None or e.kind == kind) and (e.live or not live_only)]

    def metrics(self, phase: str | None = None, *, live_only: bool = True) -> list[MetricsRow]:
        """Metrics by step, in order of writing; with ``live_only`` each ``(phase, step)`` comes once."""
        rewinds = [(e.incarnation, int(e.data["after_step"])) for e in self.events("superseded")]
        path = self.run_dir / METRICS
        rows: list[MetricsRow] = []
        latest: dict[tuple[str, int], int] = {}
        for number, line in enumerate(read_lines(path), 1):
            try:
                row = MetricsRow(
                    line["step"], line["phase"], line["values"], line["clock"]["incarnation"], line["clock"]["time"]
                )
            except KeyError as error:
                raise LedgerError(f"{path}, line {number}: not a metrics line ({error} is missing)") from None
            latest[row.phase, row.step] = len(rows)
            rows.append(row)
        out = []
        for index, row in enumerate(rows):
            dead = row.phase == "train" and _superseded_by(rewinds, row.incarnation, row.step)
            if dead or latest[row.phase, row.step] != index:
                row = replace(row, live=False)
            if (row.live or not live_only) and (phase is None or row.phase == phase):
                out.append(row)
        return out

    def files(self, *, live_only: bool = True) -> list[TrajectoryFile]:
        """The Parquet files that a ``step`` or ``eval`` event committed."""
        out = []
        for event in self.events():
            if event.kind not in ("step", "eval") or (live_only and not event.live):
                continue
            evaluation = event.kind == "eval"
            out.append(
                TrajectoryFile(
                    path=self.run_dir / TRAJECTORIES / event.clock["file"],
                    phase="eval" if evaluation else "train",
                    step=int(event.step or 0),
                    eval_name=str(event.data["name"]) if evaluation else "",
                    stage=str(event.data["stage"]) if evaluation else "rl",
                    incarnation=event.incarnation,
                    live=event.live,
                )
            )
        return out

    def trajectories(
        self,
        *,
        phase: str | None = None,
        step: int | None = None,
        live_only: bool = True,
        where: Callable[[TrajectoryFile], bool] | None = None,
    ) -> Iterator[TrajectoryRecord]:
        """Stored trajectories, file by file, equal to the ones that were recorded.

        Raises ``LedgerError`` naming a missing, torn or corrupt file.  A record that a resume superseded has
        ``live=False`` and the disposition ``superseded``.
        """
        for file in self.files(live_only=live_only):
            if (phase and file.phase != phase) or (step is not None and file.step != step):
                continue
            if where is not None and not where(file):
                continue
            for raw in read_parquet(file.path):
                record = decode(raw, live=file.live, blobs=BlobStore(self.run_dir / SIDE))
                yield record if file.live else replace(record, disposition="superseded")

    def trajectory(self, trajectory_id: str) -> TrajectoryRecord:
        """One trajectory by id (the live one if there are several); ``LedgerError`` when there is none."""
        found = None
        for record in self.trajectories(live_only=False):
            if record.trajectory.trajectory_id == trajectory_id and (found is None or record.live):
                found = record
        if found is None:
            raise LedgerError(f"{self.run_dir}: no trajectory {trajectory_id!r} in the ledger")
        return found

    def account_at(self, step: int) -> TokenAccount:
        """The token account after a live step; the empty account for step 0."""
        account = TokenAccount()
        for event in self.events("step", live_only=True):
            if event.step is not None and event.step <= step:
                account = TokenAccount.from_json(event.data["account"])
        return account

    def token_texts(self) -> dict[int, str]:
        """Text by token id as the run stored it; empty when it did not."""
        path = self.run_dir / TOKEN_TEXTS
        if not path.is_file():
            return {}
        try:
            return {int(k): str(v) for k, v in json.loads(path.read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"{path} is unreadable or corrupt ({error}); delete it, the report then shows token ids"
            ) from None

    def content_digest(self, upto_step: int | None = None, *, without: Sequence[str] = ()) -> str:
        """A hash of the live lineage's content: steps, evaluations, trajectories, metrics.

        Metrics whose names begin with one of ``without`` are left out.

        Clocks, run ids, incarnations and paths are left out, and so is the cumulative account (a resumed run
        has superseded tokens); two runs with the same seed in exact mode, interrupted or not, agree.
        Trajectories are hashed sorted by prompt, pass, sample and attempt.
        """
        digest = _Digest()

        def wanted(step: int | None) -> bool:
            return upto_step is None or (step is not None and step <= upto_step)

        events = [e for e in self.events(live_only=True) if e.kind in ("step", "eval") and wanted(e.step)]
        for event in sorted(events, key=lambda e: (e.step, e.kind, str(e.data.get("stage")), str(e.data.get("name")))):
            self._add_event(digest, event)
        for metrics in sorted(self.metrics(), key=lambda m: (m.phase, m.step)):
            if metrics.phase != "train" or wanted(metrics.step):
                digest.add_metrics(metrics, without)
        return digest.hexdigest()

    def step_digests(self, *, without: Sequence[str] = ()) -> dict[int, str]:
        """The content digest of every live RL step by itself: its event, trajectories and metrics."""
        digests: dict[int, _Digest] = {}
        for event in self.events("step", live_only=True):
            self._add_event(digests.setdefault(int(event.step or 0), _Digest()), event)
        for row in self.metrics("train"):
            if row.step in digests:
                digests[row.step].add_metrics(row, without)
        return {step: digest.hexdigest() for step, digest in digests.items()}

    def _add_event(self, digest: _Digest, event: Event) -> None:
        data = {k: v for k, v in event.data.items() if k != "account"}
        digest.add(event.kind, [event.step, content(data)])
        rows = read_parquet(self.run_dir / TRAJECTORIES / event.clock["file"])
        for row in sorted(rows, key=lambda r: (r["prompt_uid"], r["pass_index"], r["sample"], r["attempt"])):
            row["env_metrics"] = sorted((k, v) for k, v in row["env_metrics"] if not is_clock(k))
            digest.add("trajectory", content({k: v for k, v in row.items() if k not in CLOCK_COLUMNS}))


class _Digest:
    """A running hash of tagged JSON values."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, tag: str, value: Any) -> None:
        text = json.dumps([tag, value], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        self._hash.update(text.encode() + b"\n")

    def add_metrics(self, row: MetricsRow, without: Sequence[str]) -> None:
        values = {k: v for k, v in row.values.items() if not k.startswith(tuple(without))}
        self.add("metrics", [row.phase, row.step, content(values)])

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
