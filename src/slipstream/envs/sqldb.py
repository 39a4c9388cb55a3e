"""Sandboxed, read-only execution of untrusted SQL on a SQLite file.

Owns: ``SqlSandbox`` (a small pool of killable child processes), ``SqlResult``.
Refuses: writing, attaching, PRAGMA, anything but one statement that reads (SELECT, VALUES, WITH, or EXPLAIN of one of
them); comparing results (see ``sql_compare``).

Lifecycle: children start on first use, serve many queries, are replaced when killed, and end with ``close()``, with
the object, or with the interpreter.  ``shared_sandbox(path)`` hands out one sandbox per file and process.

    with SqlSandbox("music.sqlite") as db:
        db.execute("SELECT count(*) FROM track").rows    # [(3503,)]
        db.execute("ATTACH 'x' AS y").error              # 'not authorized'

The limit that counts is that of virtual-machine operations: the same query is refused on every machine (kind
``budget``).  It does not bind a query whose single operations are slow, so time has two limits besides:

* *Processor time* of the child, ``wall_seconds``: the query is too expensive (kind ``killed``).  What else runs on the
  machine does not use it up.  It is an error of the query and not a fault of the environment, although it is not
  counted in operations: a fault is absent from its group, so a model that writes such queries could take back samples
  that would lose, and end the run by its failure budget.
* *The clock*, ``PATIENCE`` times as long: the machine did not let the query run.  That is ``EnvironmentFault``, which
  is tried again and never becomes a reward.

A child that ends in the middle of a query is replaced, and the query runs once more.  When that one ends too, SIGKILL
is ``EnvironmentFault``, since it comes from outside (a kernel short of memory); any other end is the query's doing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from slipstream.envs import _sql_worker
from slipstream.errors import DataError, DeadlineError, EnvironmentFault

ErrorKind = Literal["sql", "denied", "budget", "memory", "killed"]
PATIENCE = 5.0
"""Seconds on the clock that a query may take for each second of processor time that it may use."""


@dataclass(frozen=True, slots=True)
class SqlResult:
    """What one query gave.

    ``error`` is None on success; ``kind`` says what sort of error it is.  ``truncated`` means that rows beyond the
    row or byte cap were left out.  ``ops`` is the number of virtual-machine operations, rounded down to thousands.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    error: str | None = None
    kind: ErrorKind | None = None
    truncated: bool = False
    ops: int = 0

    @property
    def ok(self) -> bool:
        """True when the query ran."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Caps of one sandbox; bytes, seconds and virtual-machine operations as named.

    ``wall_seconds`` is processor time of one query: what it takes on a machine that does nothing else.
    """

    max_ops: int = 5_000_000
    max_rows: int = 10_000
    max_bytes: int = 1_000_000
    wall_seconds: float = 2.0
    sql_bytes: int = 10_000
    value_bytes: int = 200_000
    heap_bytes: int = 64 << 20
    address_space_bytes: int = 512 << 20
    queue_seconds: float = 120.0
    """How long a caller waits for a free child before ``DeadlineError``."""


class _Spent(Exception):
    """Internal signal: the query used up its processor time."""


class _Ended(Exception):
    """Internal signal: the child ended without an answer; ``outside`` says that it was killed."""

    def __init__(self, outside: bool) -> None:
        super().__init__(outside)
        self.outside = outside


class _Child:
    """One worker process and its pipes; used by one thread at a time."""

    def __init__(self, path: Path, limits: SqlLimits) -> None:
        self._path = path
        settings = {
            "heap_bytes": limits.heap_bytes,
            "value_bytes": limits.value_bytes,
            "sql_bytes": limits.sql_bytes,
            "address_space_bytes": limits.address_space_bytes,
            "cpu_seconds": int(4 * limits.wall_seconds) + 1,
        }
        command = [sys.executable, "-I", "-S", _sql_worker.__file__, str(path), json.dumps(settings)]
        # An empty environment: nothing of the parent's (proxies, tokens, LD_PRELOAD) reaches the child.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "TZ": "UTC0"},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the parent only, which then closes the children in order.
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        try:
            self._status = psutil.Process(self.process.pid)
            self._read_line(30.0, math.inf)
        except (EnvironmentFault, _Ended, psutil.NoSuchProcess):
            self.kill()
            raise EnvironmentFault(
                f"the SQL sandbox for {path} did not start (exit code {self.process.returncode}); "
                "check that the file is a readable SQLite database"
            ) from None

    def _read_line(self, seconds: float, processor_seconds: float) -> dict[str, Any]:
        """The next reply; raises ``_Spent``, ``_Ended``, or ``EnvironmentFault`` after ``seconds`` on the clock."""
        parts: list[bytes] = []
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        began = used = self._used()
        until = time.monotonic() + seconds
        while True:
            # A child has one thread, so its processor time cannot run ahead of the clock while we wait.
            left = min(until - time.monotonic(), began + processor_seconds - used)
            if poller.poll(1 + 1000 * max(left, 0.0)):
                chunk = os.read(self._fd, 1 << 16)
                if not chunk:
                    raise self._ended()
                parts.append(chunk)
                if chunk.endswith(b"\n"):
                    reply: dict[str, Any] = json.loads(b"".join(parts))
                    return reply
                continue
            used = self._used()
            if used - began >= processor_seconds:
                raise _Spent
            if time.monotonic() >= until:
                raise EnvironmentFault(
                    f"an SQL child for {self._path.name} got {used - began:.2f} s of processor time in {seconds:g} s; "
                    "the machine is overloaded: run less beside it, or lower rollout.concurrency"
                )

    def _used(self) -> float:
        """Processor seconds of the child since it started."""
        try:
            times = self._status.cpu_times()
        except psutil.NoSuchProcess:  # it was ended just now, as the pipe will say
            return 0.0
        return times.user + times.system

    def _ended(self) -> _Ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # the pipe closes a moment before the exit code is known
        return _Ended(outside=self.process.returncode == -signal.SIGKILL)

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """The reply to a query that may take ``seconds`` of processor time; raises as ``_read_line`` does."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request)
        except (BrokenPipeError, ValueError):
            raise _Ended(outside=True) from None
        return self._read_line(PATIENCE * seconds, seconds)

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


class _Pool:
    """Idle children of one sandbox; separate from it so that a finalizer can hold it."""

    def __init__(self, size: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.slots = threading.BoundedSemaphore(size)
        self.idle: list[_Child] = []
        self.busy: set[_Child] = set()
        self.closed = False

    def shut(self) -> None:
        """Kill every child; queries that are running see a dead child."""
        if self.pid != os.getpid():
            return  # A forked copy: the children belong to the parent.
        with self.lock:
            self.closed = True
            children = [*self.idle, *self.busy]
            self.idle.clear()
            for child in children:
                if child in self.busy:
                    child.process.kill()  # Its thread closes the pipes.
                else:
                    child.kill()


class SqlSandbox:
    """Runs untrusted SQL on one database file; see the module's contract.  Thread safe.

    Args:
        db_path: an SQLite file that nobody writes to while the sandbox lives.
        limits: caps; the defaults suit databases of a few megabytes.
        children: processes at most; they start on demand.
    """

    def __init__(self, db_path: str | Path, limits: SqlLimits | None = None, children: int = 2) -> None:
        self.path = Path(db_path).resolve()
        if not self.path.is_file():
            raise DataError(f"database {self.path} does not exist; give the path of an SQLite file")
        if children < 1:
            raise ValueError(f"children must be >= 1, got {children}")
        self.limits = limits or SqlLimits()
        self._children = children
        self._start_pool()

    def _start_pool(self) -> None:
        self._pool = _Pool(self._children)
        # Runs when the sandbox is collected and at interpreter exit.
        self._finalizer = weakref.finalize(self, self._pool.shut)

    def execute(
        self, sql: str, *, max_rows: int | None = None, max_ops: int | None = None, wall_seconds: float | None = None
    ) -> SqlResult:
        """Run one statement that reads.

        A refused, wrong or too expensive query is a result with ``error`` set, never an exception.

        Raises:
            EnvironmentFault: the sandbox is closed, a child cannot be started, was killed twice, or was not run by the
                machine; see the module's contract.
            DeadlineError: no child became free within ``limits.queue_seconds``.
        """
        if "\x00" in sql:
            return SqlResult(error="the query contains a NUL character", kind="sql")
        text = sql.encode("utf-8", "replace")
        if len(text) > self.limits.sql_bytes:
            return SqlResult(error=f"query longer than {self.limits.sql_bytes} bytes", kind="sql")
        request = {
            "sql": text.decode("utf-8"),
            "max_ops": self.limits.max_ops if max_ops is None else max_ops,
            "max_rows": self.limits.max_rows if max_rows is None else max_rows,
            "max_bytes": self.limits.max_bytes,
        }
        line = json.dumps(request).encode() + b"\n"
        seconds = self.limits.wall_seconds if wall_seconds is None else wall_seconds
        try:
            try:
                reply = self._ask(line, seconds)
            except _Ended:
                reply = self._ask(line, seconds)
        except _Spent:
            return SqlResult(error="query too expensive", kind="killed")
        except _Ended as ended:
            if not ended.outside:
                return SqlResult(error="query too expensive", kind="killed")
            raise EnvironmentFault(
                f"two SQL children for {self.path.name} were killed in the middle of a query; "
                "look for an out-of-memory killer"
            ) from None
        return SqlResult(
            columns=tuple(reply["columns"]),
            rows=tuple(tuple(_cell(value) for value in row) for row in reply["rows"]),
            error=reply["error"],
            kind=reply["kind"],
            truncated=reply["truncated"],
            ops=reply["ops"],
        )

    def _ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        if self._pool.pid != os.getpid():
            self._start_pool()  # After a fork the parent keeps its children; this process starts its own.
        pool = self._pool
        if not pool.slots.acquire(timeout=self.limits.queue_seconds):
            raise DeadlineError(
                f"no SQL child for {self.path.name} became free within {self.limits.queue_seconds:.0f} s "
                f"({self._children} children); raise `children` or lower the load"
            )
        try:
            child = self._take(pool)
            healthy = False
            try:
                reply = child.ask(line, seconds)
                healthy = True
                return reply
            finally:
                self._give_back(pool, child, healthy)
        finally:
            pool.slots.release()

    def _take(self, pool: _Pool) -> _Child:
        with pool.lock:
            if pool.closed:
                raise EnvironmentFault(f"the SQL sandbox for {self.path} is closed")
            while pool.idle:
                child = pool.idle.pop()
                if child.process.poll() is None:
                    pool.busy.add(child)
                    return child
                child.kill()  # it was ended while it was idle, which is no fault of this query
        child = _Child(self.path, self.limits)  # Outside of the lock: starting takes tens of milliseconds.
        with pool.lock:
            pool.busy.add(child)
        return child

    @staticmethod
    def _give_back(pool: _Pool, child: _Child, healthy: bool) -> None:
        with pool.lock:
            pool.busy.discard(child)
            keep = healthy and not pool.closed
            if keep:
                pool.idle.append(child)
        if not keep:
            child.kill()

    def pids(self) -> list[int]:
        """Process ids of the living children."""
        with self._pool.lock:
            return [child.process.pid for child in (*self._pool.idle, *self._pool.busy)]

    def close(self) -> None:
        """End all children; closing twice has no effect."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cell(value: Any) -> Any:
    return bytes.fromhex(value["blob"]) if isinstance(value, dict) else value


_shared: dict[tuple[Path, SqlLimits], SqlSandbox] = {}
_shared_lock = threading.Lock()


def shared_sandbox(db_path: str | Path, limits: SqlLimits | None = None) -> SqlSandbox:
    """The process-wide sandbox of a file and its limits, so that many environments share two children."""
    key = Path(db_path).resolve(), limits or SqlLimits()
    with _shared_lock:
        sandbox = _shared.get(key)
        if sandbox is None or sandbox._pool.closed:
            sandbox = _shared[key] = SqlSandbox(*key)
        return sandbox


def close_shared_sandboxes() -> None:
    """End all shared sandboxes; the next ``shared_sandbox`` starts afresh."""
    with _shared_lock:
        for sandbox in _shared.values():
            sandbox.close()
        _shared.clear()
