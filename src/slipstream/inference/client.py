"""One client for every engine that speaks the contract over HTTP.

Owns: ``HttpEngine``: the ``Engine`` protocol over httpx, with a deadline on every call and typed errors that name the
URL and the cause.
Refuses: turning text into sampled ids (the ids and log-probs of an answer are taken from the wire as they are),
retrying (the caller's retry budget decides), knowing which server it speaks to.

A socket, or no socket: the same class talks to a running server by URL, or to an application in this process::

    engine = HttpEngine("http://127.0.0.1:8000")
    engine = HttpEngine.in_process(build_app(other_engine, tokenizer))

Errors: ``RequestError`` (a 4xx: repeating the call cannot help) or its base ``InferenceError`` (5xx, refused
connection, missed deadline, an answer that breaks the contract: another try or replica may do).

Over HTTP ``generate_many`` sends its requests together, in order; the server admits them as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from slipstream.errors import InferenceError, RequestError
from slipstream.inference import wire
from slipstream.inference.transfer.vllm_plugin import READ_BACK
from slipstream.inference.types import EngineInfo, GenerateRequest, GenerateResult, PauseMode

_GENERATION = frozenset({"/inference/v1/generate", "/v1/completions", "/v1/chat/completions"})
# 4xx statuses that a later try may well not get again.
_RETRYABLE_4XX = frozenset({408, 409, 425, 429})


def write_safetensors(path: Path, chunk: Mapping[str, Any]) -> None:
    """Write ``{name: tensor}`` (torch or numpy) as one safetensors file."""
    try:
        if all(type(t).__module__.startswith("numpy") for t in chunk.values()):
            import numpy as np
            from safetensors.numpy import save_file as save_numpy

            save_numpy({name: np.ascontiguousarray(t) for name, t in chunk.items()}, str(path))
        else:
            from safetensors.torch import save_file as save_torch

            # Tied tensors share storage, which the format refuses; a copy each is what the receiver needs anyway.
            seen: set[int] = set()
            flat = {}
            for name, tensor in chunk.items():
                held = tensor.detach().cpu().contiguous()
                flat[name] = held.clone() if held.data_ptr() in seen else held
                seen.add(held.data_ptr())
            save_torch(flat, str(path))
    except ImportError as error:
        raise InferenceError(
            "sending weights needs the package safetensors: pip install 'slipstream[torch]'"
        ) from error


class HttpEngine:
    """An ``Engine`` behind a URL.

    Args:
        base_url: scheme, host and port; in process any name will do.
        model: the served name to ask for; None sends each request's own ``model``.
        adapter: name of the LoRA adapter that requests run with; vLLM takes it in the place of the model's.
        timeout_seconds: deadline of one generation (from sending to the whole answer), and of a pause.
        control_seconds: deadline of every other call.
        transfer_dir: directory that both sides see, through which ``update_weights`` passes files.
        eos_token_ids: end-of-sequence ids, for servers that do not tell.
        transport: an httpx transport (``in_process`` passes one).
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        adapter: str | None = None,
        timeout_seconds: float = 600.0,
        control_seconds: float = 60.0,
        transfer_dir: Path | None = None,
        eos_token_ids: Sequence[int] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._model = model
        self.adapter = adapter
        self._timeout = timeout_seconds
        self._control = control_seconds
        self._transfer_dir = transfer_dir
        self._eos = tuple(eos_token_ids)
        self._transport = transport
        self._http = self._connect()
        self._in_flight: dict[str, asyncio.Task[Any]] = {}
        self._cut: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._closed = False
        self._info: EngineInfo | None = None
        self._has_extension: bool | None = None

    def _connect(self) -> httpx.AsyncClient:
        # Deadlines are set per call, around the whole call; httpx's own are per chunk and would not bound it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncClient(base_url=self.base_url, timeout=None, limits=limits, transport=self._transport)

    @classmethod
    def in_process(cls, app: Any, **options: Any) -> HttpEngine:
        """A client of an ASGI application in this process: same code path, no socket.

        httpx's in-process transport hands a streamed answer over in one piece.
        """
        return cls("http://in-process", transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), **options)

    # ---- lifecycle

    async def start(self) -> None:
        """Check that the server answers, and tell it where weight files will be."""
        await self.info()
        if self._transfer_dir is not None:
            self._transfer_dir.mkdir(parents=True, exist_ok=True)
            body = {"init_info": {"directory": str(self._transfer_dir)}}
            await self.call("POST", "/init_weight_transfer_engine", body)

    async def close(self) -> None:
        """Close the connections; requests in flight raise ``InferenceError``.  The server goes on."""
        if self._closed:
            return
        self._closed = True
        await self._cancel_all()
        await self._http.aclose()

    async def _cancel_all(self) -> None:
        tasks = list(self._in_flight.values())
        self._cut.update(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reconnect(self, base_url: str) -> None:
        """Speak to another server from now on (a replica that came back on another port).

        Requests in flight raise ``InferenceError``; what the old server told about itself is forgotten.
        """
        self._check_open()
        await self._cancel_all()
        old = self._http
        self.base_url, self._info, self._has_extension = base_url.rstrip("/"), None, None
        self._http = self._connect()  # before the old one is closed: calls that come meanwhile find no closed client
        await old.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- one call

    def _where(self, method: str, path: str) -> str:
        return f"{method} {self.base_url}{path}"

    def _check_open(self) -> None:
        if self._closed:
            raise InferenceError(f"the client of {self.base_url} is closed; build a new one")

    def _raise_for(self, where: str, status: int, text: str) -> None:
        if status < 400:
            return
        try:
            payload = json.loads(text)
            inner = payload.get("error", payload)
            message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else str(inner)
        except (ValueError, AttributeError):
            message = text.strip()[:500]
        said = f"{where}: HTTP {status}: {message or 'no message'}"
        if 400 <= status < 500 and status not in _RETRYABLE_4XX:
            raise RequestError(said)
        raise InferenceError(said)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """One request and its JSON (or text, or None when the answer is empty).

        Raises:
            RequestError: a 4xx that a retry cannot mend.
            InferenceError: anything else that is not an answer.
        """
        self._check_open()
        where = self._where(method, path)
        seconds = deadline if deadline is not None else self._control
        request = self._http.build_request(method, path, json=body, params=params, headers=headers)
        try:
            async with asyncio.timeout(seconds):
                try:
                    response = await self._http.send(request)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    # The connection was closed without an answer.  vLLM does so after each error of its own, to
                    # whatever comes next; if it is dead instead, the second try says so.  Control calls may come
                    # twice; a generation may not, since it may have been running.
                    if path in _GENERATION:
                        raise
                    response = await self._http.send(request)
        except TimeoutError as error:
            raise InferenceError(
                f"{where}: no answer within {seconds:g} s; is the server alive or overloaded?"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise InferenceError(f"{where}: {type(error).__name__}: {error}; is the server running?") from error
        self._raise_for(where, response.status_code, response.text)
        if not response.content:
            return None
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise InferenceError(f"{where}: the answer is not JSON ({error})") from error

    async def info(self) -> EngineInfo:
        if self._info is None:
            listing = await self.call("GET", "/v1/models")
            try:
                cards = {card["id"]: card for card in listing["data"]}
                card = cards[self._model] if self._model is not None else next(iter(cards.values()))
                self._info = EngineInfo(
                    model=card["id"],
                    max_model_len=int(card["max_model_len"]),
                    eos_token_ids=tuple(card.get("eos_token_ids") or self._eos),
                    extra={"url": self.base_url, "root": card.get("root")},
                )
            except (KeyError, TypeError, StopIteration) as error:
                raise InferenceError(
                    f"{self._where('GET', '/v1/models')}: model {self._model!r} is not listed ({error!r})"
                ) from error
        return self._info

    async def adopt_model(self) -> None:
        """Ask for the model that the server lists, when none was named."""
        self._model = self._model or (await self.info()).model

    async def health(self) -> bool:
        try:
            await self.call("GET", "/health", deadline=min(self._control, 10.0))
        except InferenceError:
            return False
        return True

    # ---- data plane

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_open()
        work = asyncio.ensure_future(self._generate(request))
        self._in_flight[request.request_id] = work
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work in self._cut and work.cancelled():
                raise InferenceError(
                    f"request {request.request_id}: the client was closed, or moved to another server"
                ) from None
            # Cancelled from outside: cut the connection, at which the server aborts the request.
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            self._in_flight.pop(request.request_id, None)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        path = "/inference/v1/generate"
        where = f"{self._where('POST', path)} (request {request.request_id})"
        answer = await self.call(
            "POST",
            path,
            wire.request_json(request, model=self.adapter or self._model),
            headers=wire.request_headers(request),
            deadline=self._timeout,
        )
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise InferenceError(f"{where}: the answer has no choice") from error
        result = wire.read_choice(request, choice, answer, where)
        wire.check_versions(result, len(result.token_ids), where)
        return result

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        tasks = [asyncio.ensure_future(self.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        """Partial results as the server sends them; the last one carries the version runs of all tokens."""
        self._check_open()
        path = "/inference/v1/generate"
        where = f"{self._where('POST', path)} (request {request.request_id})"
        made = 0
        held: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        async for event in self._events(path, where, request):
            if "error" in event:
                self._raise_for(where, int(event["error"].get("code") or 500), json.dumps(event))
            for choice in event.get("choices", ()):
                if choice.get("finish_reason") is not None:
                    held = (choice, event)
                    continue
                part = wire.read_choice(request, choice, event, where, last=False)
                made += len(part.token_ids)
                yield part
            if held is not None and not event.get("choices"):
                # The usage event comes after the last choice and completes it.
                held = (held[0], event)
        if held is None:
            raise InferenceError(f"{where}: the stream ended before the request was finished")
        result = wire.read_choice(request, *held, where)
        wire.check_versions(result, made + len(result.token_ids), where)
        yield result

    async def _events(self, path: str, where: str, request: GenerateRequest) -> AsyncIterator[dict[str, Any]]:
        body = wire.request_json(request, model=self.adapter or self._model, stream=True)
        ends_at = asyncio.get_running_loop().time() + self._timeout
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout_at(ends_at):
                    response = await stack.enter_async_context(
                        self._http.stream("POST", path, json=body, headers=wire.request_headers(request))
                    )
                    if response.status_code >= 400:
                        await response.aread()
                        self._raise_for(where, response.status_code, response.text)
                lines = response.aiter_lines()
                while True:
                    async with asyncio.timeout_at(ends_at):
                        line = await anext(lines, None)
                    if line is None:
                        return
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data: "))
        except TimeoutError as error:
            raise InferenceError(f"{where}: not finished within {self._timeout:g} s") from error
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            raise InferenceError(f"{where}: {type(error).__name__}: {error}") from error

    # ---- control plane

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is None:
            await self.call("POST", "/abort_requests", {})
        elif request_ids:
            # vLLM knows a request of the token endpoint under a prefixed id; ids that are not in flight are ignored.
            names = [name for rid in request_ids for name in (rid, f"generate-tokens-{rid}")]
            await self.call("POST", "/abort_requests", {"request_ids": names})

    async def pause(self, mode: PauseMode = "abort") -> None:
        # ``wait`` lasts as long as the longest running request.
        await self.call("POST", "/pause", params={"mode": mode}, deadline=self._timeout)

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def is_paused(self) -> bool:
        return bool((await self.call("GET", "/is_paused"))["is_paused"])

    async def start_weight_update(self) -> None:
        await self.call("POST", "/start_weight_update")

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        """Pass the chunk through a file in ``transfer_dir``; the file is gone when this returns."""
        if self._transfer_dir is None:
            raise InferenceError(
                f"{self.base_url}: sending weights over HTTP needs a directory both sides see; set transfer_dir"
            )
        path = self._transfer_dir / f"chunk-{uuid.uuid4().hex}.safetensors"
        try:
            await asyncio.to_thread(write_safetensors, path, chunk)
            await self.call("POST", "/update_weights", {"update_info": {"path": str(path)}}, deadline=self._timeout)
        except OSError as error:
            raise InferenceError(f"cannot write {path}: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    async def world_size(self) -> int:
        """Worker processes of the replica, data-parallel ones included."""
        return int((await self.call("GET", "/get_world_size"))["world_size"])

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Prepare a way for weights to travel; ``info`` is a message of ``slipstream.inference.transfer``."""
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    async def transfer(self, info: Mapping[str, Any]) -> None:
        """Announce weights that travel by themselves (file, shared memory, broadcast, packets); wait for the load."""
        await self.call("POST", "/update_weights", {"update_info": dict(info)}, deadline=self._timeout)

    async def finish_weight_update(self, weight_version: str) -> None:
        await self.call("POST", "/finish_weight_update", {"weight_version": weight_version})

    async def weight_version(self) -> str:
        return str((await self.call("GET", "/weight_info"))["weight_version"])

    async def checksum(self) -> Mapping[str, str]:
        """What the server reports; empty when it cannot tell now (some refuse while paused, with a 409).

        A vLLM with this package's plug-in is asked what its kernels hold; its own checker does not know on a CPU.
        """
        held = await self._read_back()
        if held is not None:
            return held
        try:
            answer = await self.call("POST", "/weight_checker", {"action": "checksum"})
        except RequestError:
            raise
        except InferenceError as error:
            if "HTTP 409" in str(error):
                return {}
            raise
        return {str(name): str(value) for name, value in answer["checksums"].items()}

    async def _read_back(self) -> dict[str, str] | None:
        """Checksums from the plug-in's worker extension; None where there is none.

        A name on which workers disagree gets no checksum of ours, and so counts as unknown.
        """
        if self._has_extension is False:
            return None
        try:
            answer = await self.call("POST", "/collective_rpc", {"method": READ_BACK}, deadline=self._timeout)
        except InferenceError as error:
            # No such route, or no such method; a server that is gone will say so on the next call, too.
            if self._has_extension is None and ("HTTP 404" in str(error) or READ_BACK in str(error)):
                self._has_extension = False
                return None
            raise
        self._has_extension = True
        held: dict[str, str] = {}
        for worker in answer["results"]:
            for name, value in worker.items():
                held[str(name)] = str(value) if held.get(name, value) == value else "workers disagree"
        return held

    async def reset_prefix_cache(self) -> None:
        await self.call("POST", "/reset_prefix_cache")

    async def metrics(self) -> Mapping[str, float]:
        """The server's Prometheus samples by bare name, summed over labels."""
        totals: dict[str, float] = {}
        for line in str(await self.call("GET", "/metrics")).splitlines():
            if not line or line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            bare = name.split("{")[0].removeprefix("vllm:").removeprefix("slipstream:")
            try:
                totals[bare] = totals.get(bare, 0.0) + float(value)
            except ValueError as error:
                raise InferenceError(f"{self._where('GET', '/metrics')}: cannot read {line!r}") from error
        return totals


def scratch_transfer_dir() -> Path:
    """A fresh directory for weight files; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="slipstream-weights-"))
