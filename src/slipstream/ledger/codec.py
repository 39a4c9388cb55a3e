"""Trajectories as Parquet rows, and back, without loss.

Owns: the one schema, ``encode`` and ``decode`` (``decode(encode(t)) == t``), reading a file with named errors.
Refuses: deciding what is stored where.

Spans keep their origin, ids, log-probs, version runs, turn and sampling spec as typed nested columns, so that
SQL can reach each token.  Free-form values (messages, side channels) are JSON; tuples, numpy arrays and
``Missing`` inside side channels are tagged so that they come back as they were.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.errors import ContractError, LedgerError
from slipstream.ledger.blobs import LARGE_BYTES, BlobStore
from slipstream.ledger.records import TrajectoryRecord, plain
from slipstream.trajectory import (
    Cancelled,
    Completed,
    Failed,
    Missing,
    Origin,
    Outcome,
    Reward,
    Row,
    SamplingSpec,
    SideChannel,
    Span,
    Trajectory,
    Truncated,
    Turn,
    VersionRun,
)

_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
    ]
)
_SPAN = pa.struct(
    [
        ("origin", pa.string()),
        ("start", pa.int32()),  # position of the first token in its row
        ("turn", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("logprobs_missing", pa.string()),
        ("trainer_logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("versions_missing", pa.string()),
        ("sampling", _SAMPLING),
        ("side", pa.string()),
    ]
)
_ROW = pa.struct([("parent", pa.int32()), ("fork_point", pa.int32()), ("spans", pa.list_(_SPAN))])
_REWARD = pa.struct(
    [
        ("turn", pa.int32()),
        ("component", pa.string()),
        ("value", pa.float64()),
        ("missing", pa.string()),
        ("position", pa.int32()),
    ]
)
_TURN = pa.struct(
    [
        ("index", pa.int32()),
        ("action", pa.string()),
        ("observations", pa.string()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("llm_seconds", pa.float64()),
        ("env_seconds", pa.float64()),
    ]
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("phase", pa.string()),
        ("stage", pa.string()),
        ("eval_name", pa.string()),
        ("incarnation", pa.int32()),
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("group_size", pa.int32()),
        ("prompt_uid", pa.string()),
        ("sample", pa.int32()),
        ("attempt", pa.int32()),
        ("pass_index", pa.int32()),
        ("scheduled_step", pa.int64()),
        ("env_class", pa.string()),
        ("env_revision", pa.string()),
        ("data_source", pa.string()),
        ("outcome", pa.string()),
        ("outcome_reason", pa.string()),
        ("fault", pa.string()),
        ("retryable", pa.bool_()),
        ("disposition", pa.string()),
        ("votes", pa.bool_()),
        ("total_reward", pa.float64()),
        ("advantage", pa.float64()),
        ("sampled_tokens", pa.int64()),
        ("n_turns", pa.int32()),
        ("seconds", pa.float64()),
        ("llm_seconds", pa.float64()),
        ("env_seconds", pa.float64()),
        ("env_metrics", pa.map_(pa.string(), pa.float64())),
        ("prompt", pa.string()),
        ("rewards", pa.list_(_REWARD)),
        ("turns", pa.list_(_TURN)),
        ("rows", pa.list_(_ROW)),
    ]
)

CLOCK_COLUMNS = ("seconds", "llm_seconds", "env_seconds", "incarnation")
SCHEMA_VERSION = b"1"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tag(value: Any, blobs: BlobStore | None = None) -> Any:
    """JSON types with tags for what JSON lacks (tuples, arrays, ``Missing``); large arrays go to ``blobs`` by hash."""
    if isinstance(value, Missing):
        return {"__missing__": value.reason}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise ContractError("side channel: arrays of objects cannot be stored; use numbers")
        if blobs is not None and value.nbytes >= LARGE_BYTES:
            return {"__blob__": blobs.put(value)}
        body = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__array__": [str(value.dtype), list(value.shape), body]}
    if isinstance(value, tuple):
        return {"__tuple__": [tag(v, blobs) for v in value]}
    if isinstance(value, list):
        return [tag(v, blobs) for v in value]
    if isinstance(value, Mapping):
        return {str(k): tag(v, blobs) for k, v in value.items()}
    return plain(value)


def untag(value: Any, blobs: BlobStore | None = None) -> Any:
    """The inverse of ``tag``; without ``blobs`` a large array is ``Missing`` under its hash."""
    if isinstance(value, list):
        return [untag(v, blobs) for v in value]
    if not isinstance(value, dict):
        return value
    if "__missing__" in value:
        return Missing(value["__missing__"])
    if "__tuple__" in value:
        return tuple(untag(v, blobs) for v in value["__tuple__"])
    if "__blob__" in value:
        name = str(value["__blob__"])
        return Missing(f"stored apart as {name}") if blobs is None else blobs.get(name)
    if "__array__" in value:
        dtype, shape, body = value["__array__"]
        return np.frombuffer(base64.b64decode(body), dtype=dtype).reshape(shape).copy()
    return {k: untag(v, blobs) for k, v in value.items()}


def encode_span(
    span: Span, start: int = 0, trainer: Sequence[float] | None = None, blobs: BlobStore | None = None
) -> dict[str, Any]:
    """One span as JSON types; ``start`` is its place in its row, ``trainer`` the trainer's log-probs."""
    logprobs, versions = span.logprobs, span.versions
    side = {name: {"align": c.align, "values": tag(c.values, blobs)} for name, c in span.side.items()}
    return {
        "origin": span.origin.value,
        "start": start,
        "turn": span.turn,
        "token_ids": list(span.token_ids),
        "logprobs": None if logprobs is None or isinstance(logprobs, Missing) else list(logprobs),
        "logprobs_missing": logprobs.reason if isinstance(logprobs, Missing) else None,
        "trainer_logprobs": None if trainer is None else [float(x) for x in trainer],
        "versions": None if versions is None or isinstance(versions, Missing) else [asdict(v) for v in versions],
        "versions_missing": versions.reason if isinstance(versions, Missing) else None,
        "sampling": None if span.sampling is None else asdict(span.sampling),
        "side": _json(side) if side else None,
    }


def _encode_rows(
    trajectory: Trajectory, trainer: Sequence[Sequence[float] | None] | None, blobs: BlobStore | None
) -> list[dict[str, Any]]:
    if trainer is not None and len(trainer) != len(trajectory.rows):
        raise ContractError(
            f"{trajectory.trajectory_id}: trainer log-probs for {len(trainer)} rows, want {len(trajectory.rows)}"
        )
    out = []
    for index, row in enumerate(trajectory.rows):
        scores = None if trainer is None else trainer[index]
        owned = sum(len(s) for s in row.spans if s.origin is Origin.SAMPLED)
        if scores is not None and len(scores) != owned:
            raise ContractError(
                f"{trajectory.trajectory_id} row {index}: {len(scores)} trainer log-probs for {owned} sampled tokens"
            )
        spans, start, used = [], row.fork_point, 0
        for span in row.spans:
            part = None
            if scores is not None and span.origin is Origin.SAMPLED:
                part, used = scores[used : used + len(span)], used + len(span)
            spans.append(encode_span(span, start, part, blobs))
            start += len(span)
        out.append({"parent": row.parent, "fork_point": row.fork_point, "spans": spans})
    return out


def _encode_outcome(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Completed():
            reason, fault, retryable = None, None, None
        case Truncated(reason=reason):
            fault, retryable = None, None
        case Failed(fault=fault, reason=reason, retryable=retryable):
            pass
        case Cancelled(why=reason):
            fault, retryable = None, None
    return {"outcome": outcome.kind, "outcome_reason": reason, "fault": fault, "retryable": retryable}


def _decode_outcome(row: Mapping[str, Any]) -> Outcome:
    kind, reason = row["outcome"], row["outcome_reason"]
    if kind == "completed":
        return Completed()
    if kind == "truncated":
        return Truncated(reason)
    if kind == "failed":
        return Failed(row["fault"], reason, row["retryable"])
    if kind == "cancelled":
        return Cancelled(reason)
    raise ContractError(f"unknown outcome {kind!r}")


def _encode_reward(reward: Reward) -> dict[str, Any]:
    return {
        "turn": reward.turn,
        "component": reward.component,
        "value": None if isinstance(reward.value, Missing) else float(reward.value),
        "missing": reward.value.reason if isinstance(reward.value, Missing) else None,
        "position": reward.position,
    }


def _encode_turn(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "action": turn.action,
        "observations": _json([tag(m) for m in turn.observations]),
        "finish_reason": turn.finish_reason,
        "stop_reason": None if turn.stop_reason is None else _json(turn.stop_reason),
        "llm_seconds": turn.llm_seconds,
        "env_seconds": turn.env_seconds,
    }


def encode(record: TrajectoryRecord, blobs: BlobStore | None = None) -> dict[str, Any]:
    """One Parquet row (a dict of Python values in ``SCHEMA``'s columns); large side channels go to ``blobs``."""
    t = record.trajectory
    return {
        "step": record.step,
        "phase": record.phase,
        "stage": record.stage,
        "eval_name": record.eval_name,
        "incarnation": record.incarnation,
        "trajectory_id": t.trajectory_id,
        "group_id": t.group_id,
        "group_size": record.group_size,
        "prompt_uid": t.prompt_uid,
        "sample": t.sample,
        "attempt": t.attempt,
        "pass_index": t.pass_index,
        "scheduled_step": t.scheduled_step,
        "env_class": t.env_class,
        "env_revision": t.env_revision,
        "data_source": t.data_source,
        **_encode_outcome(t.outcome),
        "disposition": record.disposition,
        "votes": t.votes,
        "total_reward": t.total_reward if t.unscored is None and t.rewards else None,
        "advantage": record.advantage,
        "sampled_tokens": t.sampled_tokens,
        "n_turns": len(t.turns),
        "seconds": t.seconds,
        "llm_seconds": sum(turn.llm_seconds for turn in t.turns),
        "env_seconds": sum(turn.env_seconds for turn in t.turns),
        "env_metrics": [(k, float(v)) for k, v in t.env_metrics.items()],
        "prompt": _json([tag(m) for m in t.prompt]),
        "rewards": [_encode_reward(r) for r in t.rewards],
        "turns": [_encode_turn(turn) for turn in t.turns],
        "rows": _encode_rows(t, record.trainer_logprobs, blobs),
    }


def decode_span(raw: Mapping[str, Any], blobs: BlobStore | None = None) -> Span:
    """The inverse of ``encode_span``; the span's own validation runs again."""
    logprobs: Any = None if raw["logprobs"] is None else tuple(raw["logprobs"])
    versions: Any = None
    if raw["versions"] is not None:
        versions = tuple(VersionRun(v["version"], v["start"], v["end"]) for v in raw["versions"])
    side = {
        name: SideChannel(name, c["align"], untag(c["values"], blobs))
        for name, c in (json.loads(raw["side"]) if raw["side"] else {}).items()
    }
    return Span(
        Origin(raw["origin"]),
        tuple(raw["token_ids"]),
        Missing(raw["logprobs_missing"]) if raw["logprobs_missing"] else logprobs,
        Missing(raw["versions_missing"]) if raw["versions_missing"] else versions,
        None if raw["sampling"] is None else SamplingSpec(**raw["sampling"]),
        raw["turn"],
        side,
    )


def _decode_turn(raw: Mapping[str, Any]) -> Turn:
    return Turn(
        index=raw["index"],
        action=raw["action"],
        observations=tuple(untag(json.loads(raw["observations"]))),
        finish_reason=raw["finish_reason"],
        stop_reason=None if raw["stop_reason"] is None else json.loads(raw["stop_reason"]),
        llm_seconds=raw["llm_seconds"],
        env_seconds=raw["env_seconds"],
    )


def _trainer_logprobs(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[float, ...] | None, ...] | None:
    out: list[tuple[float, ...] | None] = []
    for row in rows:
        parts = [s["trainer_logprobs"] for s in row["spans"] if s["trainer_logprobs"] is not None]
        out.append(tuple(x for part in parts for x in part) if parts else None)
    return tuple(out) if any(r is not None for r in out) else None


def decode(row: Mapping[str, Any], *, live: bool = True, blobs: BlobStore | None = None) -> TrajectoryRecord:
    """The inverse of ``encode``; the trajectory's own validation runs again."""
    trajectory = Trajectory(
        trajectory_id=row["trajectory_id"],
        group_id=row["group_id"],
        prompt_uid=row["prompt_uid"],
        sample=row["sample"],
        attempt=row["attempt"],
        rows=tuple(
            Row(tuple(decode_span(s, blobs) for s in r["spans"]), r["parent"], r["fork_point"]) for r in row["rows"]
        ),
        turns=tuple(_decode_turn(t) for t in row["turns"]),
        rewards=tuple(
            Reward(
                r["turn"],
                Missing(r["missing"]) if r["missing"] is not None else r["value"],
                r["component"],
                r["position"],
            )
            for r in row["rewards"]
        ),
        outcome=_decode_outcome(row),
        scheduled_step=row["scheduled_step"],
        pass_index=row["pass_index"],
        env_class=row["env_class"],
        env_revision=row["env_revision"],
        data_source=row["data_source"],
        prompt=tuple(untag(json.loads(row["prompt"]))),
        env_metrics=dict(row["env_metrics"]),
        seconds=row["seconds"],
    )
    return TrajectoryRecord(
        trajectory=trajectory,
        step=row["step"],
        phase=row["phase"],
        disposition=row["disposition"],
        advantage=row["advantage"],
        group_size=row["group_size"],
        incarnation=row["incarnation"],
        eval_name=row["eval_name"],
        stage=row["stage"],
        trainer_logprobs=_trainer_logprobs(row["rows"]),
        live=live,
    )


def to_parquet(records: Sequence[TrajectoryRecord], blobs: BlobStore | None = None) -> bytes:
    """A whole Parquet file (zstd) of these records, in order."""
    table = pa.Table.from_pylist([encode(r, blobs) for r in records], schema=SCHEMA)
    table = table.replace_schema_metadata({b"slipstream.trajectories": SCHEMA_VERSION})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file as dicts, decoded batch by batch; ``LedgerError`` names a torn or corrupt file."""
    try:
        file = pq.ParquetFile(path)
        if (file.schema_arrow.metadata or {}).get(b"slipstream.trajectories") != SCHEMA_VERSION:
            raise LedgerError(f"{path} is not a trajectory file of this version; re-run with the version that wrote it")
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except FileNotFoundError:
        raise LedgerError(f"{path} is missing though the ledger refers to it; restore it from a backup") from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, LedgerError):
            raise
        raise LedgerError(f"{path} is torn or corrupt ({error}); restore it, or resume from an earlier step") from error
