"""The embedded engine: ``Engine`` in this process, on its own thread.

Owns: the thread, the async face, loading the model, deadlines, and turning a crash into an error for every waiter.
Refuses: scheduling (``core.py``), the model's arithmetic (runners).

Lifecycle: construct -> ``await start()`` (loads) -> calls -> ``await close()``.  The thread sleeps when nothing runs;
``close`` is its owner.  Calls after ``close`` raise ``InferenceError``; so does whatever is in flight at ``close`` or
when the thread dies (with the cause).

>>> model, tokenizer = tiny_model()
>>> engine = EmbeddedEngine(model, tokenizer, InferenceSettings(dtype="float32"))
>>> await engine.start()
>>> result = await engine.generate(GenerateRequest("r0", tuple(tokenizer.encode("select")), max_tokens=8))
>>> await engine.close()

``determinism="exact"``: each ``generate_many`` call runs alone, in the order of the calls, so that what is batched
with what depends on the calls only and equal calls give equal bits.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from slipstream.config.settings import InferenceSettings
from slipstream.errors import DeadlineError, InferenceError, RequestError, SlipstreamError
from slipstream.inference.embedded.core import EngineCore
from slipstream.inference.embedded.pretrained import load_causal_lm, load_tokenizer
from slipstream.inference.embedded.runner import build_runner
from slipstream.inference.types import EngineInfo, GenerateRequest, GenerateResult, PauseMode
from slipstream.memory import one_heap
from slipstream.openmp import end_idle_workers

T = TypeVar("T")
_JOIN_SECONDS = 60.0  # the longest step is one prefill; a thread that is still busy then is stuck


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id that the generation config, the config and the tokenizer declare."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(int(token) for token in found)


def _context_length(model: Any, asked: int | None) -> int:
    config = model.config
    declared = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if asked is None:
        return int(declared or 2048)
    if declared is not None and asked > declared:
        raise RequestError(f"inference.max_model_len={asked}, but the model has {declared} positions")
    return asked


class EmbeddedEngine:
    """``Engine`` over a transformers causal LM in this process.

    Args:
        model_or_path: a model in eval mode (copied, never changed or aliased), or a path, hub id or bundled name.
        tokenizer: its tokenizer; None loads the path's own, or serves token ids only for a model object.
        settings: dtype, batch size, cache size, threads, prefix caching, deadline.
        weight_version: the version of the initial weights.
        determinism: ``exact`` runs the calls one after another; see the module's docstring.
        model_name: what ``info`` says; requests may name it or ``"policy"``.
        device: where to run a model given by path.
        force_generic: do not use the fast Llama path (for tests and measurements).
    """

    def __init__(
        self,
        model_or_path: Any,
        tokenizer: Any = None,
        settings: InferenceSettings | None = None,
        weight_version: str = "policy/0/0",
        determinism: Literal["fast", "exact"] = "fast",
        *,
        model_name: str | None = None,
        device: str = "cpu",
        force_generic: bool = False,
    ) -> None:
        self._source, self._tokenizer = model_or_path, tokenizer
        self.settings = settings or InferenceSettings()
        self._initial_version, self._exact = weight_version, determinism == "exact"
        by_path = isinstance(model_or_path, str | Path)
        self._name = model_name or (Path(model_or_path).name if by_path else "policy")
        self._device, self._force_generic = device, force_generic
        self._core: EngineCore | None = None
        self._info: EngineInfo | None = None
        self._wake = threading.Condition()
        self._commands: list[tuple[Callable[[EngineCore], Any], Future[Any]]] = []
        self._drained: list[Future[None]] = []
        self._reached: list[tuple[int, Future[None]]] = []
        self._closing = False
        self._died: BaseException | None = None
        self._thread: threading.Thread | None = None

    # ---- lifecycle

    async def start(self) -> None:
        """Load the model and start the thread; raises ``ModelError`` for what cannot be served."""
        if self._closing:
            raise InferenceError("the engine is closed; build a new one")
        if self._thread is not None:
            return
        one_heap()
        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._run, name=f"slipstream-engine-{self._name}", daemon=True)
        self._thread.start()
        atexit.register(_close_quietly, weakref.ref(self))

    def _load(self) -> None:
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        dtype = getattr(torch, self.settings.dtype)
        model, owned = self._source, False
        if isinstance(model, str | Path):
            path = str(model)
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(path)
            model, owned = load_causal_lm(path, self.settings.dtype).to(self._device), True
        elif next(model.parameters()).dtype is not dtype:
            import copy

            model, owned = copy.deepcopy(model).to(dtype), True
        eos = end_tokens(model, self._tokenizer)
        length = _context_length(model, self.settings.max_model_len)
        runner = build_runner(model, owned=owned, force_generic=self._force_generic)
        self._source = None
        self._core = EngineCore(
            runner,
            self._tokenizer,
            self.settings,
            eos=eos,
            max_model_len=length,
            weight_version=self._initial_version,
            exact=self._exact,
        )
        extra = {
            "engine": "embedded",
            "runner": runner.kind,
            "dtype": self.settings.dtype,
            "vocab": runner.vocab_size,
            "routers": runner.routers,
            "determinism": "exact" if self._exact else "fast",
        }
        self._info = EngineInfo(self._name, length, tuple(sorted(eos)), extra)
        end_idle_workers()  # the loading thread's; the pool that lent it keeps it

    async def close(self) -> None:
        """Stop the thread; requests in flight raise ``InferenceError``.  Safe to call twice."""
        self._stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
            if self._thread.is_alive():
                raise InferenceError(f"the engine's thread is still in a step after {_JOIN_SECONDS:g} s")
        self._core = None

    def _stop(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    # ---- the thread

    def _run(self) -> None:
        core = self._core
        assert core is not None
        error: InferenceError
        try:
            if self.settings.threads is not None:
                torch.set_num_threads(self.settings.threads)
            self._loop(core)
            error = InferenceError("the engine was closed while this call was in flight")
        except BaseException as cause:  # noqa: BLE001 - the thread's fault boundary: every waiter gets the cause
            self._died = cause
            error = InferenceError(f"the engine's thread died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._wake:
            commands, self._commands = self._commands, []
            self._closing = True
        core.fail_all(error)
        for future in (*(f for _, f in commands), *self._drained, *(f for _, f in self._reached)):
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _loop(self, core: EngineCore) -> None:
        while True:
            with self._wake:
                if not (self._closing or self._commands or core.runnable):
                    end_idle_workers()
                self._wake.wait_for(lambda: self._closing or self._commands or core.runnable)
                if self._closing:
                    return
                commands, self._commands = self._commands, []
            for function, future in commands:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(function(core))
                except SlipstreamError as error:
                    future.set_exception(error)  # the caller's mistake; nothing was changed
                except BaseException as error:
                    future.set_exception(error)
                    raise  # a bug: the state can no longer be trusted
            if core.runnable:
                core.step()
            if self._reached:
                self._tell_reached(core.totals["steps_total"])
            if not core.running and self._drained:
                drained, self._drained = self._drained, []
                for waiter in drained:
                    if waiter.set_running_or_notify_cancel():
                        waiter.set_result(None)

    def _tell_reached(self, steps: int) -> None:
        waiting, self._reached = self._reached, []
        for step, future in waiting:
            if steps < step:
                self._reached.append((step, future))
            elif future.set_running_or_notify_cancel():
                future.set_result(None)

    def _post(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                if self._died is not None:
                    raise InferenceError(f"the engine's thread died: {self._died!r}") from self._died
                raise InferenceError("the engine is closed; build a new one")
            if self._thread is None:
                raise InferenceError("the engine has not been started; await engine.start() first")
            self._commands.append((function, future))
            self._wake.notify_all()
        return future

    async def _call(self, function: Callable[[EngineCore], T]) -> T:
        return await asyncio.wrap_future(self._post(function))

    # ---- data plane

    async def info(self) -> EngineInfo:
        if self._info is None:
            raise InferenceError("the engine has not been started; await engine.start() first")
        return self._info

    async def health(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._closing

    def _check_model(self, requests: Seq[GenerateRequest]) -> None:
        for request in requests:
            if request.model not in ("policy", self._name):
                raise RequestError(
                    f"request {request.request_id}: no model {request.model!r} here; this engine serves "
                    f"'policy' (also called {self._name!r})"
                )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Seq[GenerateRequest]) -> list[GenerateResult]:
        if not requests:
            return []
        self._check_model(requests)
        # A batch larger than the engine's takes several rounds.
        rounds = -(-len(requests) // self.settings.max_batch_size)
        deadline = self.settings.request_timeout_seconds * rounds
        futures: list[asyncio.Future[GenerateResult]] = []
        try:
            async with asyncio.timeout(deadline):
                sequences = await self._call(lambda core: core.submit(requests))
                futures = [asyncio.wrap_future(s.future) for s in sequences]
                return list(await asyncio.gather(*futures))
        except TimeoutError as error:
            names = requests[0].request_id + (f" and {len(requests) - 1} more" if len(requests) > 1 else "")
            raise DeadlineError(f"generate: {names} not done within {deadline:g} s; aborted") from error
        finally:
            for future in futures:
                future.cancel()  # nothing for a finished one; an unfinished one is dropped at the next step

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        self._check_model([request])
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[GenerateResult | BaseException] = asyncio.Queue()

        def deliver(part: GenerateResult | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's event loop is gone, and so is the caller
                loop.call_soon_threadsafe(parts.put_nowait, part)

        def ended(future: Future[GenerateResult]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                deliver(error)

        sequence = (await self._call(lambda core: core.submit([request], deliver)))[0]
        sequence.future.add_done_callback(ended)
        deadline = loop.time() + self.settings.request_timeout_seconds
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    part = await parts.get()
                if isinstance(part, BaseException):
                    raise part
                yield part
                if part.finished:
                    return
        except TimeoutError as error:
            raise DeadlineError(f"stream: {request.request_id} not done in time; aborted") from error
        finally:
            sequence.future.cancel()

    async def abort(self, request_ids: Seq[str] | None = None) -> None:
        names = None if request_ids is None else set(request_ids)
        await self._call(lambda core: core.abort(names))

    # ---- control plane

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode {mode!r}: choose abort, wait or keep")
        drained: Future[None] = Future()

        def begin(core: EngineCore) -> None:
            core.pause(mode)
            if mode == "wait" and core.running:
                self._drained.append(drained)
            else:
                drained.set_result(None)

        await self._call(begin)
        await asyncio.wrap_future(drained)

    async def resume(self) -> None:
        await self._call(lambda core: core.resume())

    async def is_paused(self) -> bool:
        return await self._call(lambda core: core.paused is not None)

    async def start_weight_update(self) -> None:
        await self._call(lambda core: core.start_update())

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        await self._call(lambda core: core.update(chunk))

    async def finish_weight_update(self, weight_version: str) -> None:
        await self._call(lambda core: core.finish_update(weight_version))

    async def hold_at(self, steps: Seq[int]) -> None:
        """Do not go beyond engine step ``steps[i]`` (``steps_total``) before the i-th update from now has come.

        For repeating a recorded run: its updates then fall where they fell.
        """
        await self._call(lambda core: core.stops.extend(steps))

    async def reach(self, step: int) -> None:
        """Wait until engine step ``step`` is done; the caller sets the deadline."""
        reached: Future[None] = Future()

        def begin(core: EngineCore) -> None:
            self._reached.append((step, reached))

        await self._call(begin)
        await asyncio.wrap_future(reached)

    async def weight_version(self) -> str:
        return await self._call(lambda core: core.version)

    async def checksum(self) -> Mapping[str, str]:
        return await self._call(lambda core: core.checksum())

    async def reset_prefix_cache(self) -> None:
        await self._call(lambda core: core.tree.clear())

    async def metrics(self) -> Mapping[str, float]:
        return await self._call(lambda core: core.metrics())


def _close_quietly(reference: weakref.ref[EmbeddedEngine]) -> None:
    """At interpreter exit: let the thread leave its step before torch is torn down."""
    engine = reference()
    if engine is not None and engine._thread is not None:
        engine._stop()
        engine._thread.join(5.0)
