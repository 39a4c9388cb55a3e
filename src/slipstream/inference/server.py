"""The HTTP face of an engine: vLLM's data plane and control plane over any ``Engine``.

Owns: routes, strict bodies, error statuses, streaming (server-sent events), Prometheus text, the socket.
Refuses: sampling, models, and text-to-ids for sampled tokens (only prompts are ever tokenised).

Statuses: 400 the request is wrong (the message names the key), 404 an unknown model, 409 the engine is in the
wrong state, 500 the engine failed, 503 it is closed.  Errors are ``{"error": {"message", "type", "code"}}``.

>>> from slipstream.inference.fake import FakeEngine
>>> app = build_app(FakeEngine(300), tokenizer=None, model_name="policy")
>>> "/inference/v1/generate" in app.openapi()["paths"]
True

``serve`` binds its socket first, so that a port in use is an error before any model is asked for work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError

from slipstream.errors import ContractError, InferenceError, RequestError, SlipstreamError
from slipstream.inference import wire
from slipstream.inference.metrics import Counters, prometheus_text
from slipstream.inference.transfer.receiver import Receiver
from slipstream.inference.types import Engine, EngineInfo, GenerateRequest, GenerateResult


class EngineStateError(InferenceError):
    """The engine is in the wrong state for this call (HTTP 409)."""


@dataclass
class Service:
    """What the routes share: one engine, its tokenizer, the names it is served under."""

    engine: Engine
    tokenizer: Any
    model_name: str
    receiver: Receiver | None = None
    """Takes weights from other processes; None refuses them."""
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    counters: Counters = field(default_factory=Counters)
    children: dict[str, list[str]] = field(default_factory=dict)
    """Request ids in flight: the caller's id -> the engine's ids (several for ``n > 1``)."""
    sleeping: bool = False
    started: float = field(default_factory=time.time)
    _token_text: dict[int, str] = field(default_factory=dict)

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return str(self.need_tokenizer().decode(list(ids), skip_special_tokens=False))

    def need_tokenizer(self) -> Any:
        """The tokenizer; its absence is the caller's mistake on a token-only server."""
        if self.tokenizer is None:
            raise RequestError("this server has no tokenizer: send token ids to /inference/v1/generate")
        return self.tokenizer

    def token_texts(self, result: GenerateResult) -> list[str]:
        """Each token's own text (decoding one id costs tens of microseconds, so it is done once per id)."""
        known = self._token_text
        for token in result.token_ids:
            if token not in known:
                known[token] = self.text([token])
        return [known[token] for token in result.token_ids]

    def render(
        self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool, kwargs: dict[str, Any]
    ) -> list[int]:
        """Prompt ids of a chat: the template's text, then one encoding of it."""
        tokenizer = self.need_tokenizer()
        extra = {"tools": tools} if tools else {}
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt, **extra, **kwargs
            )
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error
        return self.encode(text, special=False)

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a prompt text."""
        return [int(t) for t in self.need_tokenizer().encode(text, add_special_tokens=special)]

    async def context(
        self, http: Request, given: str | None, prefix: str, prompt: Sequence[int]
    ) -> wire.RequestContext:
        """Ids, headers and the room left in the context window; a prompt that fills it is refused."""
        info = await self.engine.info()
        room = info.max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {info.max_model_len}: "
                "shorten it, or serve with a larger max_model_len"
            )
        request_id = given or http.headers.get("X-Request-Id") or wire.new_id(prefix)
        if request_id in self.children:
            raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
        return wire.RequestContext(
            request_id,
            self.model_name,
            room,
            http.headers.get(wire.SESSION_HEADER),
            http.headers.get(wire.GROUP_HEADER),
            self.return_sampling_mask,
            self.return_routed_experts,
        )

    def served_names(self) -> tuple[str, ...]:
        """Names a request may give as ``model``."""
        return (self.model_name,)

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Abort by the caller's ids (or all); returns how many requests that were in flight."""
        if request_ids is None:
            count = sum(map(len, self.children.values()))
            await self.engine.abort(None)
            return count
        names = [child for rid in request_ids for child in self.children.get(rid, ())]
        if names:
            await self.engine.abort(names)
        return len(names)

    @contextlib.asynccontextmanager
    async def in_flight(self, request_id: str, requests: Sequence[GenerateRequest]) -> AsyncIterator[None]:
        """Register the requests; whatever interrupts them aborts them in the engine."""
        names = [r.request_id for r in requests]
        self.children[request_id] = names
        try:
            yield
        except BaseException:
            # The caller went away or an answer failed: the engine must not decode for nobody.
            with contextlib.suppress(InferenceError):
                await asyncio.shield(self.engine.abort(names))
            raise
        finally:
            self.children.pop(request_id, None)

    async def run(self, http: Request, request_id: str, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Finish the requests, or abort them when the client disconnects."""
        async with self.in_flight(request_id, requests):
            work = asyncio.ensure_future(
                self.engine.generate_many(requests) if len(requests) > 1 else self._one(requests[0])
            )
            gone = asyncio.ensure_future(_disconnected(http))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise InferenceError(f"request {request_id}: the client disconnected")
                results = work.result()
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
        for result in results:
            self.counters.finished(result)
        return results

    async def _one(self, request: GenerateRequest) -> list[GenerateResult]:
        return [await self.engine.generate(request)]

    async def stream(
        self, request_id: str, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[tuple[int, GenerateResult, bool]]:
        """Partial results of several requests as they come: ``(choice, new tokens, is it the last)``."""
        queue: asyncio.Queue[tuple[int, GenerateResult | BaseException, bool]] = asyncio.Queue()

        async def pump(index: int, request: GenerateRequest) -> None:
            held: GenerateResult | None = None
            try:
                # One result is held back, so that the last one is known to be the last.
                async for result in self.engine.stream(request):
                    if held is not None:
                        queue.put_nowait((index, held, False))
                    held = result
                if held is None:
                    raise InferenceError(f"request {request.request_id}: the engine's stream was empty")
                queue.put_nowait((index, held, True))
            except SlipstreamError as error:
                queue.put_nowait((index, error, True))

        async with self.in_flight(request_id, requests):
            pumps = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
            try:
                open_choices = len(pumps)
                while open_choices:
                    # The pumps own this wait: each puts a last item, or its error.
                    index, item, last = await queue.get()
                    if isinstance(item, BaseException):
                        raise item
                    open_choices -= last
                    if last:
                        self.counters.finished(item)
                    yield index, item, last
            finally:
                for task in pumps:
                    task.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def error_response(status: int, message: str, kind: str) -> JSONResponse:
    """The error form of OpenAI and vLLM."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def status_of(error: Exception, healthy: bool = True) -> int:
    """HTTP status of a typed error."""
    if isinstance(error, wire.UnknownModelError):
        return 404
    if isinstance(error, EngineStateError):
        return 409
    if isinstance(error, RequestError | ContractError | ValidationError | RequestValidationError):
        return 400
    return 500 if healthy else 503


def sse(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Server-sent events: one JSON object each, then ``[DONE]``; a failure is an event with ``error``."""

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except SlipstreamError as error:
            code = status_of(error)
            payload = {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": code}}
            yield f"data: {json.dumps(payload)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _generate_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/inference/v1/generate", response_model=None)
    async def generate(body: wire.GenerateBody, http: Request) -> Response:
        wire.refuse_model(body.model, service.served_names())
        context = await service.context(http, body.request_id, "generate-tokens", body.token_ids)
        requests = body.requests(context)
        logprobs = body.sampling_params.logprobs is not None
        as_text = body.output_mode == "text"

        def choice(index: int, result: GenerateResult, last: bool) -> dict[str, Any]:
            texts = service.token_texts(result) if as_text and logprobs and service.tokenizer is not None else None
            if as_text and texts is None:
                texts = [wire.placeholder(token) for token in result.token_ids]
            return wire.generate_choice(result, index, logprobs=logprobs, token_text=texts, last=last)

        def envelope(choices: list[dict[str, Any]]) -> dict[str, Any]:
            return {
                "request_id": context.request_id,
                "model": context.model,
                "output_mode": body.output_mode,
                "choices": choices,
            }

        if body.stream:

            async def chunks() -> AsyncIterator[dict[str, Any]]:
                ends: list[GenerateResult] = []
                made = 0
                async for index, result, last in service.stream(context.request_id, requests):
                    made += len(result.token_ids)
                    ends += [result] if last else []
                    yield envelope([choice(index, result, last)])
                if body.stream_options and body.stream_options.include_usage:
                    usage = wire.usage_json(len(body.token_ids), ends)
                    usage |= {"completion_tokens": made, "total_tokens": len(body.token_ids) + made}
                    prompt = wire.prompt_logprobs_json(body.token_ids, ends[0])
                    yield {**envelope([]), "usage": usage, "prompt_logprobs": prompt}

            return sse(chunks())
        results = await service.run(http, context.request_id, requests)
        answer = envelope([choice(i, result, True) for i, result in enumerate(results)])
        answer["created"] = int(time.time())
        answer["usage"] = wire.usage_json(len(body.token_ids), results)
        answer["prompt_logprobs"] = wire.prompt_logprobs_json(body.token_ids, results[0])
        answer["prompt_token_ids"] = body.token_ids if body.return_token_ids else None
        answer["kv_transfer_params"] = None
        return JSONResponse(answer)

    return router


def _utility_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        info = await service.engine.info()
        card = {
            "id": service.model_name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "slipstream",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
            # Not in vLLM's card: what a token-only client needs to know when a turn is over.
            "eos_token_ids": list(info.eos_token_ids),
        }
        return {"object": "list", "data": [card]}

    @router.post("/tokenize")
    async def tokenize(body: wire.TokenizeBody) -> dict[str, Any]:
        wire.refuse_model(body.model, service.served_names())
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("tokenize wants either 'prompt' or 'messages'")
        if body.messages is not None:
            ids = service.render(body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
        else:
            ids = service.encode(body.prompt or "", body.add_special_tokens)
        info = await service.engine.info()
        return {"tokens": ids, "count": len(ids), "max_model_len": info.max_model_len, "token_strs": None}

    @router.post("/detokenize")
    async def detokenize(body: wire.DetokenizeBody) -> dict[str, Any]:
        wire.refuse_model(body.model, service.served_names())
        return {"prompt": service.text(body.tokens)}

    @router.get("/health", response_model=None)
    async def health() -> Response:
        if await service.engine.health():
            return Response(status_code=200)
        return error_response(503, "the engine is dead or closed", "InferenceError")

    @router.get("/ping", response_model=None)
    async def ping() -> Response:
        return await health()

    @router.get("/version")
    async def version() -> dict[str, str]:
        from slipstream import __version__

        return {"version": __version__}

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        text = prometheus_text(await service.engine.metrics(), service.counters, service.model_name)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def typed(_: Request, error: Exception) -> JSONResponse:
        healthy = True
        if isinstance(error, InferenceError):
            with contextlib.suppress(InferenceError):
                healthy = await service.engine.health()
        return error_response(status_of(error, healthy), str(error), type(error).__name__)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(400, wire.describe_errors(error.errors()), "RequestError")

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        # The fault boundary of the server: the caller learns the cause, the log gets the traceback.
        return error_response(500, f"{type(error).__name__}: {error}", type(error).__name__)

    app.add_exception_handler(SlipstreamError, typed)
    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(RequestValidationError, invalid)


def build_app(
    engine: Engine,
    tokenizer: Any,
    *,
    model_name: str = "policy",
    transfer_root: Path | None = None,
    own_engine: bool = False,
    return_sampling_mask: bool = False,
    return_routed_experts: bool = False,
) -> FastAPI:
    """The application over an engine.

    Args:
        engine: any ``Engine``.
        tokenizer: anything with ``encode``, ``decode`` and ``apply_chat_template``; None serves tokens only.
        model_name: what requests call the model.
        transfer_root: directory below which files of weights may lie; None refuses weights by every way.
        own_engine: start the engine with the application and close it with it.
        return_sampling_mask: the token endpoint returns the kept set of every token of a truncated request.
        return_routed_experts: the token endpoint returns the experts of every token fed (mixture of experts only).
    """
    from slipstream.inference.server_control import control_routes
    from slipstream.inference.server_openai import openai_routes

    receiver = Receiver(transfer_root) if transfer_root is not None else None
    service = Service(engine, tokenizer, model_name, receiver, return_sampling_mask, return_routed_experts)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if own_engine:
            await engine.start()
        try:
            yield
        finally:
            if own_engine:
                await engine.close()
            if receiver is not None:
                receiver.close()

    from slipstream import __version__

    app = FastAPI(title="Slipstream inference", version=__version__, lifespan=lifespan)
    app.state.service = service
    _add_error_handlers(app, service)
    for routes in (_generate_routes, openai_routes, _utility_routes, control_routes):
        app.include_router(routes(service))
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises ``InferenceError`` that names a port in use and the mend."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listening here, not in uvicorn, makes a second server on the port fail at once.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise InferenceError(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what uses the port, or choose another with --port"
        ) from error
    return sock


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    tokenizer: Any = None,
    model_name: str = "policy",
    transfer_root: Path | None = None,
    log_level: str = "info",
    ready: Callable[[str], None] | None = None,
    **returns: bool,
) -> None:
    """Serve until interrupted; blocks.

    The port is bound before the engine starts.  Ctrl-C or SIGTERM closes the engine, which ends requests in flight
    with an error, and returns (a SIGTERM is raised again, for the caller's own handler).  ``port=0`` takes a free port;
    ``ready`` is called with the base URL once the socket listens; ``returns`` are ``build_app``'s ``return_*`` flags.

    Raises:
        InferenceError: the port is in use, or the server could not start.
        SlipstreamError: what kept the engine from starting.
    """
    import uvicorn

    sock = bind(host, port)
    try:
        app = build_app(
            engine, tokenizer, model_name=model_name, transfer_root=transfer_root, own_engine=True, **returns
        )
        config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5, lifespan="on")

        class Server(uvicorn.Server):
            fault: Exception | None = None
            interrupted = False

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                # The engine goes first here too: its error is the caller's, not a traceback in uvicorn's log.
                try:
                    await engine.start()
                except Exception as error:  # noqa: BLE001 - fault boundary: raised again once the server has ended
                    self.fault = error
                self.interrupted = self.should_exit  # by a signal, while the model was loaded
                if self.fault is None and not self.interrupted:
                    await super().startup(sockets)
                else:
                    self.should_exit = True
                    await engine.close()

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # The engine goes first: requests in flight then end at once, with a typed error, not by cancellation.
                await engine.close()
                await super().shutdown(sockets)

        server = Server(config)
        if ready is not None:
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{sock.getsockname()[1]}")
        with contextlib.suppress(KeyboardInterrupt):
            # uvicorn shuts down cleanly, then raises the captured signal again.
            server.run(sockets=[sock])
        if server.fault is not None:
            raise server.fault
        if not server.started and not server.interrupted:
            raise InferenceError(f"the server did not start; its error is above (serving {host}:{port})")
    finally:
        sock.close()


def describe_engine(info: EngineInfo) -> dict[str, Any]:
    """``EngineInfo`` as JSON."""
    return {
        "model": info.model,
        "max_model_len": info.max_model_len,
        "eos_token_ids": list(info.eos_token_ids),
        "extra": {key: value for key, value in info.extra.items() if isinstance(value, str | int | float | bool)},
    }
