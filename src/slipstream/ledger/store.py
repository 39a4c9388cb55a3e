"""``Ledger``: the append-only record of one run.

Owns: ``events.jsonl``, ``metrics.jsonl``, ``trajectories/*.parquet`` and ``tokens.json`` in a run directory; the
token account, asserted at every step; what a resume supersedes.
Refuses: computing what it records; deleting anything.

Lifecycle: construct with the run directory and this start's incarnation (one more than the last, see
``next_incarnation``) -> on resume ``rewind(step)`` -> ``event`` / ``record_step`` / ``record_eval`` -> ``close``.
A step is committed by its event, which is written last: whatever a kill leaves before it belongs to no lineage.

    with Ledger(run_dir, next_incarnation(run_dir)) as ledger:
        ledger.event("run_started", settings=settings)
        metrics = ledger.record_step(StepRecord(step=1, groups=groups, dispositions=fates))
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from slipstream.errors import ContractError, LedgerError
from slipstream.ledger.blobs import BlobStore
from slipstream.ledger.codec import to_parquet
from slipstream.ledger.conservation import TokenAccount, TokenFlow
from slipstream.ledger.journal import Journal, dump_line, write_atomically
from slipstream.ledger.metrics import step_metrics
from slipstream.ledger.reader import EVENTS, METRICS, SIDE, TOKEN_TEXTS, TRAJECTORIES, LedgerReader
from slipstream.ledger.records import EvalRecord, StepRecord, TrajectoryRecord, plain, split_clock

Fsync = Literal["always", "step", "never"]

REQUIRED_FIELDS: dict[str, frozenset[str]] = {
    "run_started": frozenset({"settings"}),
    "run_resumed": frozenset({"step"}),
    "run_finished": frozenset(),
    "publish": frozenset({"version"}),
    "receipt": frozenset({"receipt"}),
    "checkpoint": frozenset({"step"}),
    "warning": frozenset({"message"}),
    "error": frozenset({"message"}),
    "note": frozenset({"message"}),
}
"""Kinds with a fixed meaning and the fields they must carry; other kinds are free."""

_RESERVED = frozenset({"step", "eval", "superseded", "repaired"})
_DRIFT_STEPS = 5


def next_incarnation(run_dir: Path | str) -> int:
    """The incarnation that the next start of this run gets: 0 for a new run."""
    if not (Path(run_dir) / EVENTS).is_file():
        return 0
    return max((e.incarnation for e in LedgerReader(run_dir).events()), default=-1) + 1


class Ledger:
    """The writer.  Thread-safe; one writer per run directory at a time.

    Args:
        run_dir: created when missing.
        incarnation: which start of the run this is; must be larger than any in the ledger.
        fsync: ``step`` forces data to disk at every step, evaluation and checkpoint; ``always`` at every event;
            ``never`` leaves it to the operating system (a killed process still loses nothing).

    Raises:
        ContractError: the incarnation was used before.
        LedgerError: the directory cannot be made, or an existing file is damaged (a torn last line is repaired, and
            recorded as ``repaired``).
    """

    def __init__(self, run_dir: Path | str, incarnation: int, *, fsync: Fsync = "step") -> None:
        self.run_dir = Path(run_dir)
        self.incarnation = incarnation
        self._fsync = fsync
        self._lock = threading.RLock()
        known = next_incarnation(self.run_dir)
        if incarnation < known:
            raise ContractError(
                f"{self.run_dir}: incarnation {incarnation} is already in the ledger; use {known} (next_incarnation)"
            )
        try:
            (self.run_dir / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"{self.run_dir} cannot be written ({error}); choose another directory") from error
        self._events = Journal(self.run_dir / EVENTS)
        self._metrics = Journal(self.run_dir / METRICS)
        self._blobs = BlobStore(self.run_dir / SIDE)
        self.reader = LedgerReader(self.run_dir)
        past = self.reader.events()
        self._seq = past[-1].seq + 1 if past else 0
        self._live_steps = {e.step for e in past if e.kind == "step" and e.live and e.step is not None}
        accounts = [e.data["account"] for e in past if e.kind in ("step", "superseded")]
        self._account = TokenAccount.from_json(accounts[-1]) if accounts else TokenAccount()
        self._early_lengths = self._read_early_lengths()
        for journal in (self._events, self._metrics):
            if journal.repaired_bytes:
                self._append("repaired", None, {"journal": journal.path.name}, {"bytes": journal.repaired_bytes})

    # -- events ------------------------------------------------------------------------------------------------

    def event(self, kind: str, step: int | None = None, **fields: Any) -> int:
        """Append one event and return its sequence number.

        Fields that name clocks, paths or run ids (``records.is_clock``) are kept apart from content.  Values may
        be dataclasses, settings, paths or numpy scalars.  Raises ``ContractError`` when a known kind lacks a field.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", kind) or kind in _RESERVED:
            raise ContractError(f"event kind {kind!r} is reserved, or is not lower_snake_case")
        present = set(fields) | ({"step"} if step is not None else set())
        if missing := REQUIRED_FIELDS.get(kind, frozenset()) - present:
            raise ContractError(f"event {kind}: field(s) missing: {', '.join(sorted(missing))}")
        data, clock = split_clock({k: plain(v) for k, v in fields.items()})
        return self._append(kind, step, data, clock, sync=kind in ("checkpoint", "error", "run_finished"))

    def _append(
        self, kind: str, step: int | None, data: Mapping[str, Any], clock: Mapping[str, Any], *, sync: bool = False
    ) -> int:
        with self._lock:
            seq = self._seq
            stamp = {"time": time.time(), "incarnation": self.incarnation, **clock}
            self._events.append({"seq": seq, "kind": kind, "step": step, "data": data, "clock": stamp})
            self._seq += 1
            if self._fsync == "always" or (sync and self._fsync == "step"):
                self._events.sync()
            return seq

    # -- steps and evaluations ---------------------------------------------------------------------------------

    def record_step(self, record: StepRecord) -> dict[str, float]:
        """Commit one step: trajectories, metrics, receipts, and the token account, which must balance.

        Returns the step's metrics: those computed from the groups, then the record's own, then ``timing/*``.
        Raises ``ContractError`` when tokens are not conserved or the step was recorded before; nothing is
        written then.
        """
        with self._lock:
            if record.step in self._live_steps:
                raise ContractError(
                    f"step {record.step} is already in the ledger of {self.run_dir}; after a resume call rewind() first"
                )
            settled = record.settled()
            flow = record.flow or TokenFlow(sum(settled.values()), self._account.buffered, self._account.in_flight)
            account = self._account.after_step(flow, settled)
            account.check(f"step {record.step}")
            metrics = {
                **step_metrics(record, early_lengths=self._early_lengths),
                **{k: float(v) for k, v in record.metrics.items()},
                **{f"timing/{k}": float(v) for k, v in record.timings.items()},
            }
            rows = self._train_rows(record)
            file = self._write_trajectories(f"step-{record.step:06d}", rows)
            self._append_metrics(record.step, metrics, "train")
            counts: dict[str, int] = {}
            for text in record.dispositions.values():
                counts[text] = counts.get(text, 0) + 1
            data = {
                "groups": len(record.groups),
                "trajectories": len(rows),
                "selected": list(record.selected),
                "dispositions": dict(sorted(counts.items())),
                "settled": dict(sorted(settled.items())),
                "account": asdict(account),
                "weight_version_before": record.weight_version_before,
                "weight_version_after": record.weight_version_after,
                "receipts": plain(list(record.receipts)),
            }
            self._append("step", record.step, data, {"file": file}, sync=True)
            self._account = account
            self._live_steps.add(record.step)
            self._note_length(metrics)
            return metrics

    def _train_rows(self, record: StepRecord) -> list[TrajectoryRecord]:
        return [
            TrajectoryRecord(
                trajectory=member,
                step=record.step,
                phase="train",
                disposition=record.dispositions[member.trajectory_id],
                advantage=record.advantages.get(member.trajectory_id),
                group_size=group.size,
                incarnation=self.incarnation,
                trainer_logprobs=_frozen(record.trainer_logprobs.get(member.trajectory_id)),
            )
            for group in record.groups
            for member in group.members
        ]

    def record_eval(self, record: EvalRecord) -> dict[str, float]:
        """Commit one evaluation with its whole spec; a repetition (same step, name, stage) supersedes the earlier."""
        with self._lock:
            rows = [
                TrajectoryRecord(member, record.step, "eval", "eval", None, group.size, self.incarnation, record.name,
                                 record.stage)
                for group in record.groups
                for member in group.members
            ]  # fmt: skip
            file = self._write_trajectories(f"eval-{record.step:06d}-{record.stage}-{record.name}", rows)
            scores = {k: float(v) for k, v in record.scores.items()}
            data = {
                "name": record.name,
                "stage": record.stage,
                "spec": plain(record.spec),
                "scores": plain(scores),
                "prompts": len(record.groups),
                "weight_version": record.weight_version,
            }
            clock = {"file": file, "timing": {k: float(v) for k, v in record.timings.items()}}
            self._append("eval", record.step, data, clock, sync=True)
            return scores

    def record_metrics(self, step: int, metrics: Mapping[str, float], phase: str = "sft") -> None:
        """Metrics of a step that has no groups (supervised steps, probes)."""
        if phase == "train":
            raise ContractError("metrics of an RL step are written by record_step, together with its trajectories")
        with self._lock:
            self._append_metrics(step, {k: float(v) for k, v in metrics.items()}, phase)

    def _append_metrics(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        clock = {"time": time.time(), "incarnation": self.incarnation}
        self._metrics.append({"step": step, "phase": phase, "values": metrics, "clock": clock})
        if self._fsync != "never":
            self._metrics.sync()

    def _write_trajectories(self, stem: str, rows: Sequence[TrajectoryRecord]) -> str:
        folder = self.run_dir / TRAJECTORIES
        suffix = f".i{self.incarnation}" if self.incarnation else ""
        name, again = f"{stem}{suffix}.parquet", 1
        while (folder / name).exists():  # an evaluation repeated within one incarnation
            again += 1
            name = f"{stem}{suffix}.r{again}.parquet"
        write_atomically(folder / name, to_parquet(rows, self._blobs))
        return name

    # -- resume ------------------------------------------------------------------------------------------------

    @property
    def account(self) -> TokenAccount:
        """Where every token sampled so far is."""
        return self._account

    @property
    def last_step(self) -> int:
        """The last live step; 0 when there is none."""
        return max(self._live_steps, default=0)

    def rewind(self, step: int, *, buffered: int | None = None, in_flight: int = 0) -> dict[str, int]:
        """Resume after ``step``: what dead incarnations did later is superseded, never deleted.

        ``buffered`` and ``in_flight`` are the sampled tokens of unrecorded work that the resumed run goes on with
        (finished groups, and parts of groups); by default what was buffered at ``step``.

        Returns how many steps, trajectories and sampled tokens are superseded.  Calling it when there is nothing later
        is harmless.  Raises ``ContractError`` when the ledger has no live record of ``step``.
        """
        with self._lock:
            if step != 0 and step not in self._live_steps:
                raise ContractError(
                    f"{self.run_dir}: cannot rewind to step {step}; the ledger's last live step is {self.last_step}"
                )
            later = [e for e in self.reader.events("step", live_only=True) if e.step is not None and e.step > step]
            if any(e.incarnation >= self.incarnation for e in later):
                raise ContractError(f"rewind({step}): this incarnation has already recorded later steps")
            kept = self.reader.account_at(step)
            account = self._account.rewound_to(kept, buffered, in_flight)
            account.check(f"rewind to step {step}")
            counts = {
                "steps": len(later),
                "trajectories": sum(int(e.data["trajectories"]) for e in later),
                "tokens": account.superseded - kept.superseded,
            }
            if later or self.incarnation > 0:
                data = {"after_step": step, **counts, "account": asdict(account)}
                self._append("superseded", None, data, {}, sync=True)
            self._account = account
            self._live_steps = {s for s in self._live_steps if s <= step}
            self._early_lengths = self._read_early_lengths()
            return counts

    # -- the rest ----------------------------------------------------------------------------------------------

    def store_token_texts(self, texts: Mapping[int, str]) -> None:
        """Write ``tokens.json`` (text by token id), so that the report can show tokens without a tokenizer."""
        body = dump_line({str(k): v for k, v in texts.items()})
        write_atomically(self.run_dir / TOKEN_TEXTS, body.encode("utf-8", "surrogatepass"))

    def content_digest(self, upto_step: int | None = None) -> str:
        """``LedgerReader.content_digest`` of this run."""
        return self.reader.content_digest(upto_step)

    def _read_early_lengths(self) -> list[float]:
        key = "generate/avg_assistant_tokens"
        return [m.values[key] for m in self.reader.metrics("train") if key in m.values][:_DRIFT_STEPS]

    def _note_length(self, metrics: Mapping[str, float]) -> None:
        length = metrics.get("generate/avg_assistant_tokens")
        if length is not None and len(self._early_lengths) < _DRIFT_STEPS:
            self._early_lengths.append(length)

    def close(self) -> None:
        """Sync and close both journals; closing twice is harmless."""
        with self._lock:
            self._events.close()
            self._metrics.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _frozen(rows: Sequence[Sequence[float] | None] | None) -> tuple[tuple[float, ...] | None, ...] | None:
    if rows is None:
        return None
    return tuple(None if row is None else tuple(float(x) for x in row) for row in rows)


__all__ = ["Fsync", "Ledger", "next_incarnation"]
