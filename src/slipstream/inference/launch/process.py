"""``Child``: one server process of ours.

Owns: starting a command under the guard, its log file, waiting until it is ready, noticing its end, ending it.
Refuses: knowing what the command serves; restarting (``inference.pool`` decides).

Lifecycle: ``await start()`` -> ``await ready(probe, seconds)`` -> ... -> ``await stop()``.  ``exited`` is set the
moment the process ends, by whatever cause; ``why_ended`` then says how, with the end of its log.  When this process
dies, also by SIGKILL, the guard ends the child and everything below it.

    child = Child("engine-0", command, env, log=run_dir / "engine-0.log")
    await child.start()
    await child.ready(client.health, seconds=120)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from slipstream.errors import InferenceError
from slipstream.inference.launch import guard

_LOG_LINES = 15
_FIRST_PROBE, _LAST_PROBE = 0.05, 1.0


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now.  Another process may take it first: who starts a server on it tries again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = _LOG_LINES) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log {path} cannot be read: {error})"
    return "\n".join(text.splitlines()[-lines:])


class Child:
    """See the module.

    Args:
        name: how errors call it.
        command: program and arguments.
        env: added to this process's environment; an empty value removes the variable.
        log: file that takes its output, anew at each start.
        grace_seconds: between SIGTERM and SIGKILL when it is stopped.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        log: Path,
        grace_seconds: float = 10.0,
    ) -> None:
        self.name, self.log = name, log
        self.exited = asyncio.Event()
        self._command, self._grace = list(command), grace_seconds
        self._env = {**os.environ, **(env or {})}
        for key in [key for key, value in (env or {}).items() if value == ""]:
            del self._env[key]
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id of the guard, whose child is the server; None before the start."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the command; raises ``InferenceError`` when the guard itself cannot be started."""
        if self._process is not None:
            raise InferenceError(f"{self.name} has been started already; build a new one")
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as sink:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", guard.__file__, str(self._grace), "--", *self._command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=sink,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._env,
                    # A group of its own: the terminal's Ctrl-C is for the parent, which stops its children in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise InferenceError(f"{self.name} cannot be started: {error}") from error
        self._watch = asyncio.create_task(self._wait(self._process), name=f"watch {self.name}")

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self.exited.set()

    @property
    def why_ended(self) -> str:
        """One line on how it ended, then the end of its log."""
        status = self._status
        if status is None:
            return f"{self.name} is running"
        how = f"by signal {self.signal}" if self.signal else f"with status {status}"
        return f"{self.name} ended {how}; the end of {self.log}:\n{_tail(self.log)}"

    @property
    def signal(self) -> int:
        """The signal that ended it; 0 when it runs, or ended by itself."""
        return max((self._status or 0) - 128, 0)

    @property
    def _status(self) -> int | None:
        code = self._process.returncode if self._process is not None else None
        return code if code is None or code >= 0 else 128 - code  # negative: of the guard itself

    async def ready(self, probe: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Wait until ``probe`` answers true.

        Raises:
            InferenceError: the process ended first, or was not ready in time (it is then stopped).
        """
        pause = _FIRST_PROBE
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self.exited.is_set():
                        raise InferenceError(self.why_ended)
                    if await probe():
                        return
                    # A server says nothing when it becomes ready, so it is asked; its end ends the pause.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.exited.wait(), pause)
                    pause = min(pause * 1.5, _LAST_PROBE)
        except TimeoutError:
            await self.stop()
            raise InferenceError(
                f"{self.name} was not ready after {seconds:g} s; the end of {self.log}:\n{_tail(self.log)}"
            ) from None

    async def stop(self) -> None:
        """End it and everything below it; returns when all are gone."""
        process = self._process
        if process is None:
            return
        if not self._stopping and process.stdin is not None:
            self._stopping = True
            process.stdin.close()
        try:
            async with asyncio.timeout(self._grace + 10):
                await self.exited.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel then ends the command
            await self.exited.wait()
        if self._watch is not None:
            await self._watch
