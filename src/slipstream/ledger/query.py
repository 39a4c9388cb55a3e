"""SQL over a run: ``query(run_dir, "SELECT ...")``.

Owns: the DuckDB views below.  Refuses: anything but one reading statement; files outside the run directory.

| view | one row per |
|---|---|
| `events` | event: `seq, kind, step, live, incarnation, time, data` (JSON) |
| `metrics` | live step and phase: `step, phase, time`, and one column per metric (`"reward/avg_raw_reward"`) |
| `metric_values` | live metric value: `step, phase, name, value` |
| `trajectories` | trajectory: ids, outcome, disposition, rewards, advantage, lengths, seconds, nested rows; `live` |
| `turns` | turn: action, observations (JSON), finish reason, model and environment seconds, reward |
| `tokens` | token of any origin: `position, token_id, origin, turn, trained, logprob, version, advantage`, .. |

`trajectories`, `turns` and `tokens` hold superseded records too (`live = false`, disposition `superseded`).

>>> query("runs/quickstart", 'SELECT step, "reward/avg_raw_reward" FROM metrics').rows   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from slipstream.errors import DataError, LedgerError
from slipstream.ledger.codec import SCHEMA
from slipstream.ledger.journal import dump_line
from slipstream.ledger.reader import Event, LedgerReader, MetricsRow, TrajectoryFile

VIEWS = ("events", "metrics", "metric_values", "trajectories", "turns", "tokens")


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Column names and rows of plain Python values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def query(run_dir: Path | str, sql: str) -> QueryResult:
    """Run one reading SQL statement over a run's ledger.

    Raises:
        LedgerError: the directory holds no ledger, or one of its files is torn or corrupt.
        DataError: the statement is not valid SQL, does more than read, or names what does not exist.
    """
    reader = LedgerReader(run_dir)
    connection = duckdb.connect(
        ":memory:", config={"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}
    )
    try:
        _check_reading(connection, sql)
        _create_views(connection, reader)
        cursor = connection.execute(sql)
        columns = tuple(str(d[0]) for d in cursor.description or ())
        return QueryResult(columns, tuple(tuple(row) for row in cursor.fetchall()))
    except (duckdb.InvalidInputException, duckdb.IOException) as error:
        if ".parquet" in str(error):
            raise LedgerError(f"{error}; the file is torn or corrupt, restore it") from None
        raise DataError(f"{_first_line(error)}; views: {', '.join(VIEWS)}") from None
    except duckdb.Error as error:
        raise DataError(f"{_first_line(error)}; views: {', '.join(VIEWS)}") from None
    finally:
        connection.close()


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _check_reading(connection: Any, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise DataError(f"want exactly one SQL statement, got {len(statements)}")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise DataError(f"the ledger is read-only: {statements[0].type.name} is refused; use SELECT")


def _create_views(connection: Any, reader: LedgerReader) -> None:
    connection.register("_events", _events_table(reader.events()))
    connection.execute("CREATE VIEW events AS SELECT * REPLACE (data::JSON AS data, clock::JSON AS clock) FROM _events")
    rows = reader.metrics()
    connection.register("metrics", _metrics_table(rows))
    connection.register("metric_values", _values_table(rows))
    _create_trajectory_views(connection, reader.files(live_only=False))
    # From here on nothing outside the run's trajectories can be touched.
    folder = str((reader.run_dir / "trajectories").resolve()).replace("'", "''")
    connection.execute(f"SET allowed_directories = ['{folder}']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _events_table(events: Sequence[Event]) -> pa.Table:
    schema = pa.schema(
        [
            ("seq", pa.int64()),
            ("kind", pa.string()),
            ("step", pa.int64()),
            ("live", pa.bool_()),
            ("incarnation", pa.int64()),
            ("time", pa.float64()),
            ("data", pa.string()),
            ("clock", pa.string()),
        ]
    )
    rows = [
        {
            "seq": e.seq,
            "kind": e.kind,
            "step": e.step,
            "live": e.live,
            "incarnation": e.incarnation,
            "time": e.time,
            "data": dump_line(e.data),
            "clock": dump_line(e.clock),
        }
        for e in events
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _metrics_table(rows: Sequence[MetricsRow]) -> pa.Table:
    names = sorted({name for row in rows for name in row.values} - {"step", "phase", "time"})
    columns: dict[str, pa.Array] = {
        "step": pa.array([r.step for r in rows], pa.int64()),
        "phase": pa.array([r.phase for r in rows], pa.string()),
        "time": pa.array([r.time for r in rows], pa.float64()),
    }
    for name in names:
        columns[name] = pa.array([r.values.get(name) for r in rows], pa.float64())
    return pa.table(columns)


def _values_table(rows: Sequence[MetricsRow]) -> pa.Table:
    schema = pa.schema([("step", pa.int64()), ("phase", pa.string()), ("name", pa.string()), ("value", pa.float64())])
    values = [
        {"step": r.step, "phase": r.phase, "name": name, "value": value}
        for r in rows
        for name, value in r.values.items()
    ]
    return pa.Table.from_pylist(values, schema=schema)


_TRAJECTORIES = """
CREATE VIEW trajectories AS
SELECT t.* EXCLUDE (filename) REPLACE (CASE WHEN f.live THEN t.disposition ELSE 'superseded' END AS disposition),
       f.live AS live
FROM read_parquet({files}, filename = true) t JOIN _files f ON t.filename = f.path
"""

_TURNS = """
CREATE VIEW turns AS
SELECT step, phase, stage, eval_name, live, trajectory_id, group_id, prompt_uid, sample, attempt, data_source,
       disposition, x.turn.index AS turn, x.turn.action AS action, x.turn.observations::JSON AS observations,
       x.turn.finish_reason AS finish_reason, x.turn.stop_reason AS stop_reason,
       x.turn.llm_seconds AS llm_seconds, x.turn.env_seconds AS env_seconds,
       list_sum([r.value for r in rewards if r.turn = x.turn.index]) AS reward
FROM trajectories, LATERAL (SELECT unnest(turns) AS turn) x
"""

_TOKENS = """
CREATE VIEW tokens AS
WITH owned_rows AS (
  SELECT * EXCLUDE (rows), unnest(rows) AS r, generate_subscripts(rows, 1) - 1 AS row_index FROM trajectories
), spans AS (
  SELECT * EXCLUDE (r), unnest(r.spans) AS s FROM owned_rows
), indexed AS (
  SELECT *, unnest(range(len(s.token_ids))) AS i FROM spans
)
SELECT step, phase, stage, eval_name, live, trajectory_id, group_id, prompt_uid, sample, attempt, data_source,
       disposition, row_index AS row, s.start + i AS position, i AS index_in_span, s.token_ids[i + 1] AS token_id,
       s.origin AS origin, s.turn AS turn, s.logprobs[i + 1] AS logprob, s.trainer_logprobs[i + 1] AS trainer_logprob,
       list_filter(s.versions, lambda v: v.start <= i AND i < v."end")[1].version AS version,
       (s.origin = 'sampled' AND disposition = 'trained') AS trained,
       CASE WHEN s.origin = 'sampled' THEN advantage END AS advantage
FROM indexed
"""


def _create_trajectory_views(connection: Any, files: Sequence[TrajectoryFile]) -> None:
    if missing := next((f.path for f in files if not f.path.is_file()), None):
        raise LedgerError(f"{missing} is missing though the ledger refers to it; restore it from a backup")
    if files:
        paths = [str(f.path.resolve()) for f in files]
        connection.register(
            "_files", pa.table({"path": pa.array(paths, pa.string()), "live": pa.array([f.live for f in files])})
        )
        quoted = ", ".join("'" + p.replace("'", "''") + "'" for p in paths)
        connection.execute(_TRAJECTORIES.format(files=f"[{quoted}]"))
    else:
        empty = SCHEMA.append(pa.field("live", pa.bool_())).empty_table()
        connection.register("_no_trajectories", empty)
        connection.execute("CREATE VIEW trajectories AS SELECT * FROM _no_trajectories")
    connection.execute(_TURNS)
    connection.execute(_TOKENS)
