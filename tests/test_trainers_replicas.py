"""Whole runs over replicas: engine servers as processes, a router in front, weights through shared memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from run_kit import tiny_settings
from slipstream.config.checks import check_settings
from slipstream.inference.launch.engines import ADAPTER, vllm_server
from slipstream.inference.launch.router import router_installed
from slipstream.inference.pool.build import build_pool
from slipstream.ledger import LedgerReader
from slipstream.trainers.callbacks import Callback
from slipstream.trainers.run import train
from slipstream.trainers.serving import build_transport
from slipstream.trajectory import Failed

ASYNC = ["schedule.kind=fully_async", "schedule.max_staleness_steps=2", "inference.pause_mode=keep"]
REPLICAS = ["inference.replicas=2", "inference.launch.health_seconds=2", "rollout.failures.attempts=4"]


def servers() -> list[psutil.Process]:
    """Engine servers below this process: each the child of its guard."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if "serve" in p.cmdline() and "guard.py" not in " ".join(p.cmdline())]


class Assassin(Callback):
    """Kills one engine server after the second step."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.running = 0

    def on_step_end(self, info, control) -> None:
        if info.step == 2:
            found = servers()
            self.running = len(found)
            found[0].kill()
            self.killed.append(found[0].pid)


@pytest.mark.slow
@pytest.mark.skipif(not router_installed(), reason="the wheel vllm-router is not installed")
def test_an_asynchronous_run_goes_on_when_a_replica_is_killed(tiny_dir: Path, tmp_path: Path) -> None:
    assassin = Assassin()
    settings = tiny_settings(tiny_dir, tmp_path / "run", *ASYNC, *REPLICAS)
    result = train(settings, [assassin])
    assert result.finished
    assert assassin.running == 2
    reader = LedgerReader(tmp_path / "run")
    records = list(reader.trajectories(phase="train"))
    # Every prompt is trained on once; what was in flight on the replica is an attempt that another one superseded.
    trained = Counter({(r.trajectory.prompt_uid, r.step) for r in records if r.disposition == "trained"})
    assert len(trained) == len({uid for uid, _ in trained}) == 24
    lost = [r.trajectory for r in records if r.disposition == "superseded"]
    assert {(type(t.outcome), t.outcome.fault, t.outcome.retryable) for t in lost} <= {(Failed, "engine_error", True)}
    assert not any(isinstance(r.trajectory.outcome, Failed) for r in records if r.disposition == "trained")
    for event in reader.events("step"):
        account = event.data["account"]
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled")
    receipts = [e.data["receipt"] for e in reader.events("receipt")]
    assert {r["replica"] for r in receipts if r["result"] == "published"} == {"engine-0", "engine-1"}
    assert {r["transport"] for r in receipts} == {"memory"}
    assert {r["verification"]["kind"] for r in receipts if r["result"] == "published"} == {"checksum"}
    told = [event.data["message"] for event in reader.events("warning")]
    assert any("is down engine-" in text and "ended by signal 9" in text for text in told), told
    assert not servers()


VLLM, KEEP = ["inference.engine=vllm"], "inference.pause_mode"


def problems(*overrides: str) -> set[str]:
    settings = tiny_settings(Path("m"), Path("r"), *overrides)
    return {key for p in check_settings(settings) if p.severity == "error" for key in p.keys}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["inference.transport=memory"], "inference.transport"),
        (["inference.replicas=2", "inference.transport=nccl"], "inference.transport"),
        (["inference.engine=http", "inference.urls=http://a:1"], "inference.transport"),
        (["inference.replicas=2", "training.determinism=exact"], "training.determinism"),
        ([*VLLM, "inference.transport=adapter"], "training.lora.rank"),
        ([*VLLM, "inference.transport=adapter", "training.lora.rank=600"], "training.lora.rank"),
        ([*VLLM, "inference.transport=adapter", "training.lora.rank=4", "schedule.kind=one_step_off"], "schedule.kind"),
        ([*VLLM, "inference.transport=adapter", "training.lora.rank=4", "inference.pause_mode=keep"], KEEP),
        (["inference.replicas=2", "inference.transport=adapter", "training.lora.rank=4"], "inference.engine"),
    ],
)
def test_what_cannot_work_is_refused_at_planning(overrides: list[str], key: str) -> None:
    assert key in problems(*overrides)


HTTP = ["inference.engine=http", "inference.urls=http://a:1", "inference.transport=disk"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([*VLLM, "inference.kv_cache_tokens=4096"], {"inference.kv_cache_tokens"}),
        ([*VLLM, "inference.max_batch_size=3", "inference.max_model_len=512", "inference.launch.args=[--x]"], set()),
        (HTTP, set()),
        ([*HTTP, "inference.dtype=float32", "inference.launch.restarts=7", "inference.launch.health_seconds=1"], set()),
        ([*HTTP, "inference.max_batch_size=3", "inference.max_model_len=512"],
         {"inference.max_batch_size", "inference.max_model_len"}),
        ([*HTTP, "inference.prefix_caching=false", "inference.threads=2", "inference.kv_cache_tokens=9"],
         {"inference.prefix_caching", "inference.threads", "inference.kv_cache_tokens"}),
        ([*HTTP, "inference.launch.python=/p", "inference.launch.args=[--x]", "inference.launch.env={A: b}"],
         {"inference.launch.python", "inference.launch.args", "inference.launch.env"}),
        (["inference.replicas=2", "inference.kv_cache_tokens=4096", "inference.launch.args=[--x]"], set()),
    ],
)  # fmt: skip
def test_settings_that_an_engine_is_never_told_of_are_warned_of(overrides: list[str], keys: set[str]) -> None:
    settings = tiny_settings(Path("m"), Path("r"), "inference.threads=null", *overrides)
    found = [p for p in check_settings(settings) if "inference.engine" in p.keys]
    assert {p.severity for p in found} <= {"warning"}
    assert {key for p in found for key in p.keys} - {"inference.engine"} == keys


def test_cuda_handles_are_let_in_where_they_are_sent(tmp_path: Path) -> None:
    inference = tiny_settings(Path("m"), tmp_path, *VLLM, "inference.transport=ipc").inference
    specs = [vllm_server("e", "m", inference, log_dir=tmp_path, weight_transfer=way) for way in ("ipc", "nccl")]
    assert [spec.env.get("VLLM_ALLOW_INSECURE_SERIALIZATION") for spec in specs] == ["1", None]


def test_an_adapter_goes_to_a_vllm_that_runs_it(tmp_path: Path) -> None:
    overrides = [*VLLM, "inference.transport=adapter", "training.lora.rank=12"]
    assert problems(*overrides) == set()
    inference = tiny_settings(Path("m"), tmp_path, *overrides).inference
    spec = vllm_server("engine-0", "m", inference, log_dir=tmp_path, weight_transfer="slipstream", adapter_rank=12)
    command = list(spec.command(8000))
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert "--enable-lora" in command
    assert spec.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert build_transport(tiny_settings(Path("m"), tmp_path, *overrides)).name == "adapter"
    (member,) = build_pool(inference, "m", log_dir=tmp_path, adapter_rank=12).members
    assert member.engine.adapter == ADAPTER


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference.replicas=2"],
        ["inference.engine=vllm", "inference.transport=gloo"],
        ["inference.engine=http", "inference.urls=http://a:1", "inference.transport=disk"],
    ],
)
def test_what_can_work_is_not_refused(overrides: list[str]) -> None:
    assert not {key for key in problems(*overrides) if key.startswith("inference.")}
