"""``Member``: one replica of a pool.

Owns: the replica's engine (the direct line, never through the router), its process, its state and its gate.
Refuses: deciding when to restart (``pool``); loading weights (a publisher does, through ``engine``).

States: ``starting`` -> ``up`` <-> ``down`` -> ... -> ``failed``.  Beside the state stands the gate, which belongs to
whoever is responsible for the weights: a member is routed to only while it is ``up`` and ``admitted``.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import InferenceError
from slipstream.inference.client import HttpEngine
from slipstream.inference.launch.engines import ServerSpec
from slipstream.inference.launch.process import Child, free_port
from slipstream.inference.types import Engine

State = Literal["starting", "up", "down", "failed"]
_PORT_TRIES = 3


@dataclass
class Member:
    """See the module.  ``spec`` is None for a server that others run, and for an engine in this process."""

    name: str
    engine: Engine
    spec: ServerSpec | None = None
    state: State = "starting"
    reason: str = ""
    admitted: bool = True
    held: bool = False
    """A weight update is open: answers that arrive now are withheld."""
    tainted: int = 0
    """How often its weights turned out to be wrong; answers that began before are discarded."""
    versions: list[str] = field(default_factory=list)
    """What was verified there, in order, the present one last; empty before the first publish."""
    wrong: str = ""
    """Why it cannot hold what was published; its watcher then takes it for lost."""
    restarts: int = 0
    running: int = 0
    """Requests that the client has sent and not yet had answered (when it routes by itself)."""
    child: Child | None = None
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request failed and the member may be down: its watcher then looks at once."""

    @property
    def routable(self) -> bool:
        """Whether new requests go to it."""
        return self.state == "up" and self.admitted

    @property
    def url(self) -> str:
        """Its base URL, or its name when it lives in this process."""
        return self.engine.base_url if isinstance(self.engine, HttpEngine) else self.name

    async def launch(self) -> None:
        """Start its process and wait until it answers; without a process, only wait for an answer.

        Raises:
            InferenceError: it ended, or was not ready in time; the message has the end of its log.
        """
        if self.spec is None:
            await self.engine.start()
            if isinstance(self.engine, HttpEngine):
                await self.engine.adopt_model()
            return
        assert isinstance(self.engine, HttpEngine)
        for attempt in range(_PORT_TRIES):
            port = free_port()
            self.child = Child(self.name, self.spec.command(port), self.spec.env, log=self.spec.log)
            await self.engine.reconnect(f"http://127.0.0.1:{port}")
            await self.child.start()
            try:
                await self.child.ready(self.engine.health, self.spec.ready_seconds)
                await self.engine.start()
                return
            except InferenceError as error:
                await self.child.stop()
                # Another process may take the port between choosing and binding it.
                if "ddress already in use" not in str(error) or attempt == _PORT_TRIES - 1:
                    raise

    async def end(self) -> None:
        """Close the line and end the process, if it is ours."""
        with contextlib.suppress(InferenceError):
            await self.engine.close()
        if self.child is not None:
            await self.child.stop()
