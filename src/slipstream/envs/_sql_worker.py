"""The child process of ``slipstream.envs.sqldb``: run untrusted SQL on one read-only SQLite file.

Started as ``python -I -S _sql_worker.py DATABASE LIMITS-JSON``; imports only the standard library.  Reads one JSON
request per line on stdin (``{"sql", "max_ops", "max_rows", "max_bytes"}``), writes one JSON reply per line on
stdout.  Layers, from the inside out:

* an authorizer that allows SELECT, reading columns and deterministic functions, and nothing else; the clock stands
  still at ``NOW``, in UTC, so that no result depends on the moment or the machine;
* ``mode=ro&immutable=1``, ``query_only``, ``trusted_schema=OFF``, temporary storage in memory;
* SQLite's own limits (lengths, columns, no attached databases) and a hard heap limit;
* a budget of virtual-machine operations, the same on every machine;
* operating-system limits: memory, CPU seconds per query, no file may grow, and, once the database is open, no
  further file can be opened at all;
* the parent kills this process when a query outlives its wall-clock limit.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

OPS_STEP = 1000
"""Virtual-machine operations between two looks at the budget."""

NOW = "2014-01-01 00:00:00"
"""What ``'now'`` and ``CURRENT_TIMESTAMP`` mean."""

# Position of the first time value among the arguments; a missing one means now.
_TIME_FUNCTIONS = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1, "timediff": 0}
_TIME_CONSTANTS = {"current_date": "date", "current_time": "time", "current_timestamp": "datetime"}

# Non-deterministic, or reaching outside of the database.
_DENIED_FUNCTIONS = frozenset(
    {"random", "randomblob", "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "sqlite_log"}
    | {"changes", "total_changes", "last_insert_rowid"}
)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_READ):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second is not None and second.lower() not in _DENIED_FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _stop_clock(connection: sqlite3.Connection) -> None:
    """Put functions over SQLite's own that compute the same, but for the present time."""
    plain = sqlite3.connect(":memory:", cached_statements=0)
    known = {name for (name,) in plain.execute("SELECT name FROM pragma_function_list")}

    def stopped(name: str, first: int) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            arguments = [*given, NOW] if len(given) == first else list(given)
            for i in range(first, min(len(arguments), 2)):
                if (i == first or name == "timediff") and _is_now(arguments[i]):
                    arguments[i] = NOW
            marks = ",".join("?" * len(arguments))
            return plain.execute(f"SELECT {name}({marks})", arguments).fetchone()[0]

        return call

    for name, first in _TIME_FUNCTIONS.items():
        if name in known:
            connection.create_function(name, -1, stopped(name, first), deterministic=True)
    for constant, name in _TIME_CONSTANTS.items():
        connection.create_function(constant, 0, stopped(name, 0), deterministic=True)


def _is_now(value: Any) -> bool:
    """Whether SQLite reads a time value as the present: as text up to its first NUL."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return isinstance(text, str) and text.partition("\0")[0].lower() in ("now", "subsec", "subsecond")


def _open(path: str, limits: dict[str, int]) -> sqlite3.Connection:
    from urllib.parse import quote

    # No statement cache: a cached statement keeps its operation counter, which would shift the budget's ticks.
    connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True, cached_statements=0)
    connection.isolation_level = None
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    for pragma in (
        "temp_store=MEMORY",
        "query_only=ON",
        "trusted_schema=OFF",
        "mmap_size=0",
        f"hard_heap_limit={limits['heap_bytes']}",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    for name, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, limits["value_bytes"]),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, limits["sql_bytes"]),
        (sqlite3.SQLITE_LIMIT_COLUMN, 128),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 32),
        (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 32),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(name, value)
    _stop_clock(connection)
    connection.set_authorizer(_authorize)
    return connection


def _lock_down(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["address_space_bytes"],) * 2)
    # The next descriptor that the kernel would hand out; with it as the limit nothing can be opened any more.
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))


def _plain(value: Any) -> tuple[Any, int]:
    """A cell as JSON and its size; a blob becomes ``{"blob": hex}``."""
    if isinstance(value, bytes):
        return {"blob": value.hex()}, 2 * len(value)
    return value, len(value) if isinstance(value, str) else 8


def _classify(message: str, spent: bool) -> tuple[str, str]:
    if spent:
        return "query too expensive", "budget"
    denied = any(word in message for word in ("not authorized", "authorization denied", "prohibited"))
    return message, "denied" if denied else "sql"


def _run(connection: sqlite3.Connection, request: dict[str, Any]) -> dict[str, Any]:
    ticks = 0
    budget = request["max_ops"] // OPS_STEP

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return 1 if ticks > budget else 0

    reply: dict[str, Any] = {"columns": [], "rows": [], "error": None, "kind": None, "truncated": False}
    connection.set_progress_handler(tick, OPS_STEP)
    cursor = connection.cursor()
    size = 0
    try:
        cursor.execute(request["sql"])
        if cursor.description is None:
            raise sqlite3.ProgrammingError("not a query")
        reply["columns"] = [column[0] for column in cursor.description]
        for row in cursor:
            cells = [_plain(value) for value in row]
            size += sum(length for _, length in cells)
            if len(reply["rows"]) >= request["max_rows"] or size > request["max_bytes"]:
                reply["truncated"] = True
                break
            reply["rows"].append([cell for cell, _ in cells])
    except MemoryError:
        reply["error"], reply["kind"] = "out of memory", "memory"
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as failed:
        reply["error"], reply["kind"] = _classify(str(failed), ticks > budget)
    finally:
        cursor.close()
        connection.set_progress_handler(None, 0)
    if reply["error"] is not None:
        reply["rows"], reply["columns"] = [], []
    reply["ops"] = ticks * OPS_STEP
    return reply


def main() -> None:
    """Serve requests until stdin closes."""
    limits = json.loads(sys.argv[2])
    connection = _open(sys.argv[1], limits)
    _lock_down(limits)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b'{"ready":true}\n')
    sink.flush()
    for line in source:
        request = json.loads(line)
        # A guard for the case that the parent is gone and cannot kill a runaway query.
        soft = int(time.process_time()) + limits["cpu_seconds"] + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        sink.write(json.dumps(_run(connection, request)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()
