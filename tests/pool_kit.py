"""Pools over fake engines: in this process, and as real server processes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from slipstream.inference.client import HttpEngine
from slipstream.inference.fake import FakeEngine
from slipstream.inference.launch.engines import ServerSpec
from slipstream.inference.pool.member import Member
from slipstream.inference.pool.pool import ReplicaPool
from slipstream.inference.types import GenerateRequest

SERVER = Path(__file__).parent / "serve_fake.py"


def request(name, session=None, **fields):
    base = {"max_tokens": 4, "seed": 1, "ignore_eos": True, "session_id": session, **fields}
    return GenerateRequest(name, (1, 2, 3), **base)


def near_pool(count=2, step=0.0, **options):
    """Engines in this process, routed by the client."""
    members = [Member(f"r{i}", FakeEngine(300, scale=1.0, step_seconds=step)) for i in range(count)]
    return ReplicaPool(members, **{"health_seconds": 0.05, "recover_seconds": 5.0, **options})


def server_member(name, tmp_path, step=0.002, model="policy"):
    def command(port):
        return [sys.executable, str(SERVER), str(port), str(step), str(tmp_path)]

    spec = ServerSpec(name, command, tmp_path / f"{name}.log", {}, ready_seconds=90.0, model=model)
    return Member(name, HttpEngine("http://127.0.0.1:0", model=model, timeout_seconds=60), spec)


def far_pool(tmp_path, count=2, step=0.002, router=True, **options):
    """Server processes, behind ``vllm-router`` or routed by the client."""
    members = [server_member(f"r{i}", tmp_path, step) for i in range(count)]
    log = tmp_path / "router.log" if router else None
    return ReplicaPool(members, **{"router_log": log, "health_seconds": 0.5, "recover_seconds": 90.0, **options})


def server_process(member):
    """The server itself: the guard's child."""
    return psutil.Process(member.child.pid).children()[0]


def family(pool):
    """Every process below the pool's children."""
    pids = [m.child.pid for m in pool.members if m.child is not None]
    if pool.router is not None:
        pids.append(pool.router.child.pid)
    found = [psutil.Process(pid) for pid in pids]
    return found + [child for process in found for child in process.children(recursive=True)]
