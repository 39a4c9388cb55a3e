"""The control plane over HTTP: pause, abort, weights, caches, sleep.

Owns: the routes that the publisher and the schedulers call, and the disk transfer backend: ``/update_weights`` reads
one safetensors file below the directory that the server was started with.
Refuses: reading any other path, and weight transfer when no directory was allowed.

The order of an update is pause -> start -> update (any number) -> finish(version) -> resume; a call out of order
is a 409 and changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from slipstream.errors import RequestError
from slipstream.inference.types import PauseMode
from slipstream.inference.wire import Wire

if TYPE_CHECKING:
    from slipstream.inference.server import Service


class AbortBody(Wire):
    """``/abort_requests``; no ids means all."""

    request_ids: list[str] | None = None


class InitInfo(Wire):
    """The disk backend's ``init_info``: where the files will be."""

    directory: str


class InitBody(Wire):
    """``/init_weight_transfer_engine``."""

    init_info: InitInfo


class UpdateInfo(Wire):
    """The disk backend's ``update_info``: one safetensors file in checkpoint names."""

    path: str


class UpdateBody(Wire):
    """``/update_weights``."""

    update_info: UpdateInfo


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


def read_safetensors(path: Path) -> Mapping[str, Any]:
    """All tensors of a file: torch tensors where torch is installed (it knows bfloat16), else numpy arrays."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RequestError("reading weights needs the package safetensors: pip install 'slipstream[torch]'") from error
    framework = "pt" if importlib.util.find_spec("torch") else "np"
    try:
        with safe_open(str(path), framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path}: not a readable safetensors file ({error})") from error


def allowed(root: Path | None, given: str) -> Path:
    """``given`` as a real path below ``root``; anything else is refused."""
    if root is None:
        raise RequestError("this server takes no weights from disk; start it with a transfer directory")
    path, base = Path(os.path.realpath(given)), Path(os.path.realpath(root))
    if path != base and base not in path.parents:
        raise RequestError(f"{given}: outside the transfer directory {base}")
    return path


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

    @router.post("/init_weight_transfer_engine")
    async def init(body: InitBody) -> dict[str, str]:
        directory = allowed(service.transfer_root, body.init_info.directory)
        if not directory.is_dir():
            raise RequestError(f"{directory}: not a directory that this server can see")
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update")
    async def start() -> dict[str, str]:
        await _need_paused(service, "start_weight_update")
        await engine.start_weight_update()
        return {"message": "Weight update started"}

    @router.post("/update_weights")
    async def update(body: UpdateBody) -> dict[str, str]:
        path = allowed(service.transfer_root, body.update_info.path)
        await _need_paused(service, "update_weights")
        tensors = await asyncio.to_thread(read_safetensors, path)
        await engine.update_weights(tensors)
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish(body: FinishBody) -> dict[str, str]:
        await _need_paused(service, "finish_weight_update")
        await engine.finish_weight_update(body.weight_version)
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
            "weight_transfer": "disk" if service.transfer_root is not None else None,
            **describe_engine(await service.engine.info()),
        }

    return router
