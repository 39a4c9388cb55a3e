"""Whole processes at the price of a fork: each drill of a killed trainer is a real process with its own end.

``python drill_forge.py`` imports everything that a run needs, runs nothing, and then forks once per line of standard
input.  A fork makes itself leader of a session, writes to its own log, runs ``MODULE:FUNCTION(**arguments)`` and ends
as any interpreter does.  ``Forge`` is the other side.

    with Forge() as forge:
        ended = forge.run("drill_trainer:command", log, 60.0, arguments=[...])
        ended = forge.run("drill_trainer:command", log, 60.0, kill_after=1.3, arguments=[...])   # signal 9
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

WARM = (
    "slipstream.cli.main", "slipstream.trainers.run", "slipstream.training.torch_backend",
    "slipstream.inference.embedded.engine", "transformers.models.llama.modeling_llama", "pyarrow.parquet", "run_kit",
    "run_env",
)  # fmt: skip
_START_SECONDS, _END_SECONDS = 600.0, 120.0


@dataclass(frozen=True)
class Ended:
    """``status`` is the exit code, negative for a signal; ``killed`` says whether the signal was the drill's."""

    status: int
    killed: bool
    seconds: float
    output: str


class Forge:
    """The side that asks.  ``prefix`` is put before the command: ``("unshare", "-rm")`` gives mounts of its own."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        here = Path(__file__)
        given = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(here.parent), str(here.parent.parent), *([given] if given else [])])
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(_START_SECONDS)

    @property
    def pid(self) -> int:
        """Process id of the one that forks."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def _answer(self, seconds: float) -> dict[str, Any]:
        return self._lines.get(timeout=seconds)

    def run(self, call: str, log: Path, seconds: float, *, kill_after: float | None = None, **arguments: Any) -> Ended:
        """One process, to its end; with ``kill_after`` signal 9 ends it then, if it still runs.

        Raises:
            AssertionError: it was still running after ``seconds``; it is killed, and the message has its output.
        """
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.stdin.write(json.dumps({"call": call, "log": str(log), "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        handle = os.pidfd_open(int(self._answer(60.0)["pid"]))
        killed = False
        try:
            status = int(self._answer(seconds if kill_after is None else kill_after)["status"])
        except queue.Empty:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            status = int(self._answer(_END_SECONDS)["status"])
            killed = status == -signal.SIGKILL
            assert kill_after is not None, f"still running after {seconds:g} s: {log.read_text()}"
        finally:
            os.close(handle)
        return Ended(status, killed, time.monotonic() - began, log.read_text())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the side that forks


def _next() -> dict[str, Any] | None:
    """Fork for every request; the request in the fork, None here when there are no more."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
    return None


def _run(request: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    module, _, name = request["call"].partition(":")
    try:
        getattr(importlib.import_module(module), name)(**request["arguments"])
    except Exception:  # noqa: BLE001 - fault boundary: the log is where the drill reads it
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    for _module in WARM:
        importlib.import_module(_module)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    if (_request := _next()) is not None:
        _run(_request)
