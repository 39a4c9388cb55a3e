"""The control plane over HTTP: pause, abort, weights, caches, sleep.

Owns: the routes that the publisher and the schedulers call.  ``/update_weights`` takes weights by every way that
``slipstream.inference.transfer`` knows: files and delta packets below the directory that the server was started with,
shared memory, a Gloo broadcast.
Refuses: reading any other path, and all weight transfer when no directory was allowed.

The order of an update is pause -> start -> update (any number) -> finish(version) -> resume; a call out of order
is a 409 and changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from slipstream.errors import RequestError
from slipstream.inference.transfer.messages import parse_shipment
from slipstream.inference.transfer.raw import Raw
from slipstream.inference.transfer.receiver import Receiver
from slipstream.inference.types import PauseMode
from slipstream.inference.wire import Wire

if TYPE_CHECKING:
    from slipstream.inference.server import Service


class AbortBody(Wire):
    """``/abort_requests``; no ids means all."""

    request_ids: list[str] | None = None


class InitBody(Wire):
    """``/init_weight_transfer_engine``; see ``slipstream.inference.transfer.messages``."""

    init_info: dict[str, Any]


class UpdateBody(Wire):
    """``/update_weights``; see ``slipstream.inference.transfer.messages``."""

    update_info: dict[str, Any]


class FinishBody(Wire):
    """``/finish_weight_update``."""

    weight_version: str = Field(min_length=1)


class VersionBody(Wire):
    """``/update_weight_version``: a new name for the weights held now."""

    new_version: str = Field(min_length=1)


class CheckerBody(Wire):
    """``/weight_checker``."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


def as_tensor(raw: Raw) -> Any:
    """A torch view where torch is installed (it knows bfloat16), else a numpy view."""
    return raw.torch() if importlib.util.find_spec("torch") else raw.numpy()


def _require_query(http: Request, *names: str) -> None:
    unknown = sorted(set(http.query_params) - set(names))
    if unknown:
        raise RequestError(
            f"unknown query parameter {', '.join(map(repr, unknown))}; known: {', '.join(names) or 'none'}"
        )


async def _need_paused(service: Service, what: str) -> None:
    from slipstream.inference.server import EngineStateError

    if not await service.engine.is_paused():
        raise EngineStateError(f"{what} needs a paused engine; POST /pause first")


def _scheduling_routes(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    @router.post("/pause")
    async def pause(http: Request, mode: PauseMode = "abort") -> dict[str, str]:
        _require_query(http, "mode")
        await engine.pause(mode)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume(http: Request) -> dict[str, str]:
        _require_query(http)
        await engine.resume()
        service.sleeping = False
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await engine.is_paused()}

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> dict[str, Any]:
        ids = body.request_ids if body is not None else None
        return {"status": "aborted", "aborted": await service.abort(ids or None)}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, str]:
        await engine.reset_prefix_cache()
        return {"status": "reset"}

    @router.post("/sleep")
    async def sleep(http: Request, level: Literal["1", "2"] = "1", mode: PauseMode = "abort") -> dict[str, str]:
        # The engines here keep their weights in place, so sleeping frees the prefix cache and stops work.
        _require_query(http, "level", "mode")
        if level == "2":
            raise RequestError("sleep level 2 (discarding the weights) is not offered; use level 1")
        await engine.pause(mode)
        await engine.reset_prefix_cache()
        service.sleeping = True
        return {"status": "sleeping"}

    @router.post("/wake_up")
    async def wake_up(http: Request) -> dict[str, str]:
        _require_query(http)
        if service.sleeping:
            await engine.resume()
            service.sleeping = False
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": service.sleeping}

    return router


def _weight_routes(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    def receiver() -> Receiver:
        if service.receiver is None:
            raise RequestError("this server takes no weights; start it with a transfer directory")
        return service.receiver

    @router.post("/init_weight_transfer_engine")
    async def init(body: InitBody) -> dict[str, str]:
        await asyncio.to_thread(receiver().init, body.init_info)
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update")
    async def start() -> dict[str, str]:
        await _need_paused(service, "start_weight_update")
        await engine.start_weight_update()
        if service.receiver is not None:
            service.receiver.begin()
        return {"message": "Weight update started"}

    @router.post("/update_weights")
    async def update(body: UpdateBody) -> dict[str, str]:
        parse_shipment(body.update_info)  # a wrong body is said first, whatever the server allows
        taker = receiver()
        taker.check(body.update_info)
        await _need_paused(service, "update_weights")
        try:
            found = await asyncio.to_thread(taker.receive, body.update_info)
            await engine.update_weights({name: as_tensor(raw) for name, raw in found.items()})
        except BaseException:
            taker.release()
            raise
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish(body: FinishBody) -> dict[str, str]:
        await _need_paused(service, "finish_weight_update")
        await engine.finish_weight_update(body.weight_version)
        if service.receiver is not None:
            service.receiver.release()  # the engine holds copies
        return {"message": "Weight update finished"}

    @router.post("/update_weight_version")
    async def rename(body: VersionBody) -> dict[str, Any]:
        # An update without chunks: same weights, new name.
        await _need_paused(service, "update_weight_version")
        await engine.start_weight_update()
        await engine.finish_weight_update(body.new_version)
        return {"success": True, "new_version": body.new_version}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": await engine.weight_version()}

    @router.post("/weight_checker")
    async def weight_checker(body: CheckerBody) -> dict[str, Any]:
        held = dict(await engine.checksum())
        if body.action == "checksum":
            return {"checksums": held}
        if body.baseline is None:
            raise RequestError("action 'compare' needs 'baseline', an object of checksums by name")
        names = sorted(held.keys() | body.baseline.keys())
        wrong = [name for name in names if held.get(name) != body.baseline.get(name)]
        return {"match": not wrong, "mismatches": wrong}

    return router


def control_routes(service: Service) -> APIRouter:
    """All control-plane routes over a service."""
    from slipstream.inference.server import describe_engine

    router = APIRouter()
    router.include_router(_scheduling_routes(service))
    router.include_router(_weight_routes(service))

    @router.get("/get_world_size")
    async def get_world_size(http: Request, include_dp: bool = True) -> dict[str, int]:
        _require_query(http, "include_dp")
        return {"world_size": 1}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        from slipstream import __version__

        return {
            "engine": "slipstream",
            "version": __version__,
            "served_model": service.model_name,
            "weight_version": await service.engine.weight_version(),
            "weight_transfer": "slipstream" if service.receiver is not None else None,
            **describe_engine(await service.engine.info()),
        }

    return router
