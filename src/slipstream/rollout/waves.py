"""Lock-step waves: the same requests in the same batches, however long environments take.

Owns: collecting one request from every live episode and submitting them as one ``generate_many`` call, in a fixed
order.  Refuses: deciding what an episode asks; running without knowing who is live.

An engine's numerics depend on what is decoded together.  With ``determinism="exact"`` the batches must therefore not
depend on timing: a wave starts only when *every* live seat has asked for its next turn or has left, and its requests
are sorted by (order in which groups came, sample).

A ``WaveLog`` records the waves of a run, or repeats recorded ones: then a wave starts when exactly its requests are
there, whoever else asks meanwhile.

Lifecycle of a seat: ``gate.join(order)`` before its episode first waits for anything -> ``seat.submit(request)`` per
turn -> ``seat.leave()``.  A seat that neither asks nor leaves would stop the wave, so its owner's other waits
(environment calls) all have deadlines.

>>> gate = WaveGate(engine, seconds=600)                              # doctest: +SKIP
>>> a, b = gate.join((0, 0)), gate.join((0, 1))                       # doctest: +SKIP
>>> await asyncio.gather(a.submit(request_a), b.submit(request_b))    # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.errors import DeadlineError, InferenceError, SlipstreamError
from slipstream.inference.types import Engine, GenerateRequest, GenerateResult

_Future = asyncio.Future[GenerateResult]


@dataclass(frozen=True)
class WaveLog:
    """``on_wave`` is told the request ids of each wave as it starts; ``script`` are those of a recorded run."""

    on_wave: Callable[[Sequence[str]], None] | None = None
    script: Iterator[Sequence[str]] | None = None


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
        log: records the waves, or says what they are.
    """

    def __init__(self, engine: Engine, seconds: float, log: WaveLog | None = None) -> None:
        self._engine, self._seconds = engine, seconds
        self._live: set[Seat] = set()
        self._asking: dict[Seat, tuple[GenerateRequest, _Future]] = {}
        self._waves: set[asyncio.Task[None]] = set()
        self.sizes: list[int] = []
        """Requests of each wave so far."""
        self._log = log or WaveLog()
        self._next: Sequence[str] | None = None
        if self._log.script is not None:
            self._next = next(self._log.script, ())

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

    def _complete(self) -> list[tuple[Seat, tuple[GenerateRequest, _Future]]] | None:
        """The next wave, once all of it is there."""
        if self._next is None:
            if not self._live or len(self._asking) < len(self._live):
                return None
            return sorted(self._asking.items(), key=lambda item: item[0].order)
        by_id = {request.request_id: seat for seat, (request, _) in self._asking.items()}
        if self._waves or not self._next or not by_id.keys() >= set(self._next):
            return None
        assert self._log.script is not None
        seats, self._next = [by_id[name] for name in self._next], next(self._log.script, ())
        return [(seat, self._asking[seat]) for seat in seats]

    def _start_if_complete(self) -> None:
        wave = self._complete()
        if wave is None:
            return
        for seat, _ in wave:
            del self._asking[seat]
        self.sizes.append(len(wave))
        if self._log.on_wave is not None:
            self._log.on_wave([request.request_id for _, (request, _) in wave])
        task = asyncio.get_running_loop().create_task(self._run([entry for _, entry in wave]))
        self._waves.add(task)
        task.add_done_callback(self._wave_ended)
        # A wave whose every asker was cancelled has no owner left.
        open_futures = {future for _, (_, future) in wave}

        def settled(future: _Future) -> None:
            open_futures.discard(future)
            if not open_futures and future.cancelled():
                task.cancel()

        for future in tuple(open_futures):
            future.add_done_callback(settled)

    def _wave_ended(self, task: asyncio.Task[None]) -> None:
        self._waves.discard(task)
        if self._next is not None:
            self._start_if_complete()

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
