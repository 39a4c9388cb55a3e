"""``RouterProcess``: the real ``vllm-router`` as a child process.

Owns: its command line, its list of workers, telling it that a session has ended.
Refuses: judging health and retrying.  The pool knows when a replica is down and takes it out; a request that was lost
with a replica is the caller's to retry, under another attempt, and must not be sampled again behind its back.

Lifecycle: ``await start(urls)`` -> ``set_workers`` / ``finish_session`` -> ``await stop()``.  ``exited`` is set when
the router ends; ``start`` may then be called again (on a new port: ask ``url``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path

from slipstream.errors import InferenceError
from slipstream.inference.client import HttpEngine
from slipstream.inference.launch.process import Child, free_port

_MODULE = "vllm_router"
_READY_SECONDS = 60.0
_PORT_TRIES = 3


def router_installed() -> bool:
    """Whether the wheel ``vllm-router`` is installed here."""
    return importlib.util.find_spec(_MODULE) is not None


class RouterProcess:
    """See the module.

    Args:
        policy: one of ``inference.routing.POLICIES``.
        log: file for its output.
        request_seconds: longest that one request may take.
        session_ttl_seconds: idle sessions are forgotten after this.
    """

    def __init__(
        self, policy: str, log: Path, *, request_seconds: float = 1800.0, session_ttl_seconds: float = 7200.0
    ) -> None:
        self.policy = policy
        self._log = log
        self._request_seconds, self._ttl = request_seconds, session_ttl_seconds
        self._child: Child | None = None
        self._http: HttpEngine | None = None
        self._workers: set[str] = set()
        self._none = asyncio.Event()
        self._none.set()

    @property
    def exited(self) -> asyncio.Event:
        """Set when there is no process, or none any more."""
        return self._child.exited if self._child is not None else self._none

    @property
    def why_ended(self) -> str:
        """How the process ended, with the end of its log; empty when there is none."""
        return self._child.why_ended if self._child is not None else ""

    @property
    def url(self) -> str:
        """Base URL of the data plane."""
        return self._client.base_url

    @property
    def child(self) -> Child:
        """The process; raises ``InferenceError`` before the start."""
        if self._child is None:
            raise InferenceError("the router has not been started")
        return self._child

    @property
    def _client(self) -> HttpEngine:
        if self._http is None:
            raise InferenceError("the router has not been started")
        return self._http

    def _command(self, port: int, urls: Collection[str]) -> list[str]:
        options = {
            "--host": "127.0.0.1",
            "--port": port,
            "--policy": self.policy,
            "--request-timeout-secs": int(self._request_seconds),
            # The pool judges health; the router's own view would only lag behind it.
            "--health-check-interval-secs": 86400,
            # Every router wants a metrics port; the default one can be held once per machine.
            "--prometheus-port": free_port(),
            "--log-level": "error",
        }
        flat = [str(part) for pair in options.items() for part in pair]
        off = ["--disable-retries", "--disable-circuit-breaker"]
        return [sys.executable, "-m", f"{_MODULE}.launch_router", *flat, *off, "--worker-urls", *urls]

    async def start(self, urls: Collection[str]) -> None:
        """Start it over these workers, which must be healthy.

        Raises:
            InferenceError: the wheel is missing, or the router did not come up.
        """
        if not router_installed():
            raise InferenceError(
                "the package vllm-router is not installed: pip install 'slipstream[router]', or set "
                "inference.router.process=client to route in the client with the same policies"
            )
        await self.stop()
        env = {"VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S": str(int(self._ttl))}
        for attempt in range(_PORT_TRIES):
            port = free_port()
            child = Child("router", self._command(port, urls), env, log=self._log, grace_seconds=5)
            client = HttpEngine(f"http://127.0.0.1:{port}", control_seconds=30.0)
            await child.start()

            async def answers(client: HttpEngine = client) -> bool:
                with contextlib.suppress(InferenceError):
                    return bool((await client.call("GET", "/list_workers", deadline=5.0))["urls"] is not None)
                return False

            try:
                await child.ready(answers, _READY_SECONDS)
            except InferenceError:
                await client.close()
                if not child.exited.is_set() or child.signal or attempt == _PORT_TRIES - 1:
                    raise
                continue  # another process took the port between choosing and binding it
            except BaseException:  # cancelled: nobody else knows of this process yet
                await client.close()
                await child.stop()
                raise
            self._child, self._http, self._workers = child, client, set(urls)
            return

    async def workers(self) -> list[str]:
        """The workers in the router's own order, on which round robin and ties depend."""
        return [str(worker["url"]) for worker in (await self._client.call("GET", "/workers"))["workers"]]

    async def set_workers(self, urls: Collection[str]) -> None:
        """Route to exactly these; removals come first."""
        for url in sorted(self._workers - set(urls)):
            await self._client.call("POST", "/remove_worker", params={"url": url})
            self._workers.discard(url)
        for url in sorted(set(urls) - self._workers):
            await self._client.call("POST", "/add_worker", params={"url": url})
            self._workers.add(url)

    async def finish_session(self, session_id: str) -> None:
        """No more requests of this session follow: its replica counts one less."""
        await self._client.call("POST", "/finish_session", params={"session_id": session_id})

    async def stop(self) -> None:
        """End the process; a no-op when there is none."""
        if self._http is not None:
            await self._http.close()
        if self._child is not None:
            await self._child.stop()
        self._child = self._http = None
        self._workers = set()
