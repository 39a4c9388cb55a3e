"""``Replica``: an engine behind a gate that the publisher holds.

Owns: whether the engine may answer.  Refuses: loading or verifying weights (the publisher's business).

Data-plane callers go through the replica, which is itself an ``Engine``.  States:

* ``serving``: calls pass.
* ``held``: an update is open.  New calls wait; answers that arrive are withheld until the publisher settles.
* ``parked``: healthy, but behind the others: calls are refused until a publish brings it up to date.
* ``quarantined``: its weights are unknown or it is dead.  It never answers: calls are refused, and answers of requests
  that were in flight are discarded.

A refusal is an ``InferenceError`` (another replica, or another try, may do).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from slipstream.errors import InferenceError
from slipstream.inference.types import Engine, EngineInfo, GenerateRequest, GenerateResult, PauseMode

State = Literal["serving", "held", "parked", "quarantined"]


class Replica:
    """One engine and its gate.

    Args:
        engine: any ``Engine``; after this it should be called through the replica only.
        name: how receipts and errors call it.
        hold_seconds: longest a call waits for a publish to settle.
    """

    def __init__(self, engine: Engine, name: str = "replica-0", *, hold_seconds: float = 3600.0) -> None:
        self.engine = engine
        self.name = name
        self.state: State = "serving"
        self.reason = ""
        self.holds: str | None = None
        """The version last verified here; None before the first publish, and when it is not known."""
        self._hold_seconds = hold_seconds
        self._settled = asyncio.Event()
        self._settled.set()
        self._tainted = 0

    @property
    def routable(self) -> bool:
        """True when calls are answered, now or once the open update has settled."""
        return self.state in ("serving", "held")

    # ---- the publisher's side

    def hold(self) -> None:
        """Withhold answers until the next ``serve``, ``park`` or ``quarantine``."""
        self.state = "held"
        self._settled.clear()

    def serve(self, version: str) -> None:
        """Open the gate: ``version`` has been verified."""
        self.state, self.reason, self.holds = "serving", "", version
        self._settled.set()

    def park(self, version: str, reason: str) -> None:
        """Out of routing with known weights; answers made before stay good."""
        self.state, self.reason, self.holds = "parked", reason, version
        self._settled.set()

    def quarantine(self, reason: str) -> None:
        """Out of routing with unknown weights; whatever is in flight is discarded."""
        self.state, self.reason, self.holds = "quarantined", reason, None
        self.taint()
        self._settled.set()

    def taint(self) -> None:
        """Tokens may have been sampled by wrong weights: discard all that is in flight."""
        self._tainted += 1

    # ---- the gate

    def _refuse(self) -> None:
        if self.state in ("parked", "quarantined"):
            raise InferenceError(f"replica {self.name} is {self.state}: {self.reason}")

    async def _wait_settled(self) -> None:
        if self._settled.is_set():
            return
        try:
            async with asyncio.timeout(self._hold_seconds):
                await self._settled.wait()
        except TimeoutError as error:
            raise InferenceError(
                f"replica {self.name}: a weight update has not settled within {self._hold_seconds:g} s"
            ) from error

    async def _enter(self) -> int:
        await self._wait_settled()
        self._refuse()
        return self._tainted

    async def _leave(self, entered: int) -> None:
        await self._wait_settled()
        if self._tainted != entered:
            raise InferenceError(
                f"replica {self.name}: the answer is discarded, since weights that failed verification may have made "
                "part of it; ask again"
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        entered = await self._enter()
        result = await self.engine.generate(request)
        await self._leave(entered)
        return result

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        entered = await self._enter()
        results = await self.engine.generate_many(requests)
        await self._leave(entered)
        return results

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        entered = await self._enter()
        async for part in self.engine.stream(request):
            await self._leave(entered)
            yield part

    # ---- everything else is the engine's

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    async def info(self) -> EngineInfo:
        return await self.engine.info()

    async def health(self) -> bool:
        return self.routable and await self.engine.health()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(request_ids)

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        """Resume the engine; refused while the gate is closed, since that is the publisher's decision."""
        if self.state == "held":
            raise InferenceError(f"replica {self.name}: a weight update is open; its publisher resumes it")
        self._refuse()
        await self.engine.resume()

    async def is_paused(self) -> bool:
        return await self.engine.is_paused()

    async def start_weight_update(self) -> None:
        await self.engine.start_weight_update()

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        await self.engine.update_weights(chunk)

    async def finish_weight_update(self, weight_version: str) -> None:
        await self.engine.finish_weight_update(weight_version)

    async def weight_version(self) -> str:
        return await self.engine.weight_version()

    async def checksum(self) -> Mapping[str, str]:
        return await self.engine.checksum()

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def metrics(self) -> Mapping[str, float]:
        return await self.engine.metrics()
