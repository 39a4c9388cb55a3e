"""Lock-step waves: the same requests in the same batches, however long environments take.

Owns: collecting one request from every live episode and submitting them as one ``generate_many`` call, in a fixed
order.  Refuses: deciding what an episode asks; running without knowing who is live.

An engine's numerics depend on what is decoded together.  With ``determinism="exact"`` the batches must therefore not
depend on timing: a wave starts only when *every* live seat has asked for its next turn or has left, and its requests
are sorted by (order in which groups came, sample).

Lifecycle of a seat: ``gate.join(order)`` before its episode first waits for anything -> ``seat.submit(request)`` per
turn -> ``seat.leave()``.  A seat that neither asks nor leaves would stop the wave, so its owner's other waits
(environment calls) all have deadlines.

>>> gate = WaveGate(engine, seconds=600)                              # doctest: +SKIP
>>> a, b = gate.join((0, 0)), gate.join((0, 1))                       # doctest: +SKIP
>>> await asyncio.gather(a.submit(request_a), b.submit(request_b))    # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from slipstream.errors import DeadlineError, InferenceError, SlipstreamError
from slipstream.inference.types import Engine, GenerateRequest, GenerateResult

_Future = asyncio.Future[GenerateResult]


class Line(Protocol):
    """An episode's line to the engine."""

    async def submit(self, request: GenerateRequest) -> GenerateResult: ...

    def leave(self) -> None: ...


class DirectLine:
    """Each request goes to the engine at once."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds

    async def submit(self, request: GenerateRequest) -> GenerateResult:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._engine.generate(request)
        except TimeoutError as error:
            raise _late(request.request_id, self._seconds) from error

    def leave(self) -> None:
        """Nothing to leave."""


class Seat:
    """One episode's place in the waves of a ``WaveGate``."""

    def __init__(self, gate: WaveGate, order: tuple[int, int]) -> None:
        self._gate, self.order = gate, order

    async def submit(self, request: GenerateRequest) -> GenerateResult:
        """Wait for the others of the wave, then for the engine."""
        return await self._gate._submit(self, request)

    def leave(self) -> None:
        """This episode asks no more; idempotent."""
        self._gate._leave(self)


class WaveGate:
    """See the module's docstring.

    Args:
        engine: gets one ``generate_many`` per wave.
        seconds: deadline of one wave.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._live: set[Seat] = set()
        self._asking: dict[Seat, tuple[GenerateRequest, _Future]] = {}
        self._waves: set[asyncio.Task[None]] = set()
        self.sizes: list[int] = []
        """Requests of each wave so far."""

    def join(self, order: tuple[int, int]) -> Seat:
        """Take part in every wave from the next one on.  ``order`` is (group's number, sample)."""
        seat = Seat(self, order)
        self._live.add(seat)
        return seat

    async def _submit(self, seat: Seat, request: GenerateRequest) -> GenerateResult:
        if seat not in self._live:
            raise SlipstreamError(f"request {request.request_id}: its seat has left the waves")
        future: _Future = asyncio.get_running_loop().create_future()
        self._asking[seat] = (request, future)
        self._start_if_complete()
        try:
            return await future
        finally:
            self._asking.pop(seat, None)

    def _leave(self, seat: Seat) -> None:
        self._live.discard(seat)
        self._asking.pop(seat, None)
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if not self._live or len(self._asking) < len(self._live):
            return
        wave = sorted(self._asking.items(), key=lambda item: item[0].order)
        self._asking.clear()
        self.sizes.append(len(wave))
        task = asyncio.get_running_loop().create_task(self._run([entry for _, entry in wave]))
        self._waves.add(task)
        task.add_done_callback(self._waves.discard)
        # A wave whose every asker was cancelled has no owner left.
        open_futures = {future for _, (_, future) in wave}

        def settled(future: _Future) -> None:
            open_futures.discard(future)
            if not open_futures and future.cancelled():
                task.cancel()

        for future in tuple(open_futures):
            future.add_done_callback(settled)

    async def _run(self, wave: list[tuple[GenerateRequest, _Future]]) -> None:
        error: BaseException | None = None
        results: list[GenerateResult] = []
        try:
            async with asyncio.timeout(self._seconds):
                results = await self._engine.generate_many([request for request, _ in wave])
            if len(results) != len(wave):
                error = InferenceError(f"generate_many answered {len(results)} of {len(wave)} requests")
        except TimeoutError:
            error = _late(wave[0][0].request_id, self._seconds)
        except asyncio.CancelledError:
            error = InferenceError("the wave was cancelled")
        except Exception as caught:  # noqa: BLE001 - fault boundary: every asker gets the cause
            error = caught
        for i, (_, future) in enumerate(wave):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(results[i])


def _late(request_id: str, seconds: float) -> DeadlineError:
    return DeadlineError(f"the engine has not answered {request_id} within {seconds:g} s")
