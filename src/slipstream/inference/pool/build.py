"""``build_pool``: a pool from settings.

Owns: the choice of members (processes that are started, or given URLs) and of the router.
Refuses: starting anything (``await pool.start()`` does).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from slipstream.config.settings import InferenceSettings
from slipstream.errors import SettingsError
from slipstream.inference.client import HttpEngine
from slipstream.inference.launch.engines import ADAPTER, Returned, ServerSpec, embedded_server, vllm_server
from slipstream.inference.pool.member import Member
from slipstream.inference.pool.pool import ReplicaPool


def needs_pool(settings: InferenceSettings) -> bool:
    """False only for the one embedded engine in this process."""
    return settings.engine != "embedded" or settings.replicas > 1


def build_pool(
    settings: InferenceSettings,
    model: str,
    *,
    log_dir: Path,
    weight_version: str = "policy/0/0",
    transfer_dir: Path | None = None,
    weight_transfer: Literal["slipstream", "nccl", "ipc"] | None = None,
    served_model: str | None = None,
    returns: Collection[Returned] = (),
    adapter_rank: int | None = None,
) -> ReplicaPool:
    """The pool that ``settings`` describe.

    Args:
        settings: the section ``inference``.
        model: directory or hub id that the servers load.
        log_dir: one log per process.
        weight_version: name of the weights that are loaded at the start.
        transfer_dir: directory below which embedded servers may read weights; None lets them take none.
        weight_transfer: vLLM's weight-transfer backend.
        served_model: what given servers call the model; None takes the only one they list.
        returns: what started servers return with the tokens, for the trainer to replay.
        adapter_rank: of the LoRA adapter that vLLM servers run requests with; None serves whole weights.

    Raises:
        SettingsError: no pool is needed for these settings.
    """
    if not needs_pool(settings):
        raise SettingsError("one embedded engine needs no pool: build EmbeddedEngine, or set inference.replicas=2")
    seconds = settings.request_timeout_seconds
    adapter = ADAPTER if adapter_rank is not None else None

    def line(url: str, spec: ServerSpec | None) -> HttpEngine:
        name = spec.model if spec is not None else served_model
        return HttpEngine(url, model=name, adapter=adapter, timeout_seconds=seconds)

    members = []
    if settings.engine == "http":
        members = [Member(f"engine-{i}", line(url, None)) for i, url in enumerate(settings.urls)]
    else:
        for i in range(settings.replicas):
            name = f"engine-{i}"
            if settings.engine == "vllm":
                spec = vllm_server(
                    name,
                    model,
                    settings,
                    log_dir=log_dir,
                    weight_transfer=weight_transfer,
                    returns=returns,
                    adapter_rank=adapter_rank,
                )
            else:
                spec = embedded_server(
                    name,
                    model,
                    settings,
                    log_dir=log_dir,
                    weight_version=weight_version,
                    transfer_dir=transfer_dir,
                    returns=returns,
                )
            members.append(Member(name, line("http://127.0.0.1:0", spec), spec))
    wants_router = len(members) > 1 and settings.router.process == "vllm-router"
    return ReplicaPool(
        members,
        policy=settings.router.policy,
        router_log=log_dir / "router.log" if wants_router else None,
        restarts=settings.launch.restarts,
        health_seconds=settings.launch.health_seconds,
        health_failures=settings.launch.health_failures,
        recover_seconds=settings.launch.ready_seconds,
        request_seconds=seconds,
        adapter=adapter,
    )
