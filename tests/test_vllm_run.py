"""A short asynchronous training run that samples from a real vLLM; run by ``make test-vllm``."""

# ruff: noqa: E402, F401, F811 - fixtures of the kit, which needs torch

from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

from slipstream.config import load_settings
from slipstream.ledger import LedgerReader
from slipstream.trainers.run import train
from slipstream.trajectory import WeightVersion
from vllm_kit import python

pytestmark = pytest.mark.vllm

RUN = [
    "data.train=builtin:arithmetic/train?n=12",
    "env.id=arithmetic",
    "rollout.samples_per_prompt=2",
    "rollout.sampling.max_tokens_per_turn=24",
    "rollout.max_prompt_tokens=128",
    "rollout.max_total_tokens=192",
    "rollout.failures.attempts=3",
    "schedule.kind=fully_async",
    "schedule.max_staleness_steps=1",
    "schedule.prompts_per_step=2",
    "schedule.steps=3",
    "algorithm.drop_zero_variance=false",
    "training.optimizer.lr=0.00002",
    "training.threads=1",
    "inference.engine=vllm",
    "inference.max_model_len=256",
    "inference.max_batch_size=8",
    "inference.pause_mode=keep",
    "inference.request_timeout_seconds=1800",
    "inference.launch.ready_seconds=2400",
    "inference.launch.health_seconds=60",
    "inference.launch.args=[--enforce-eager,--distributed-executor-backend,uni]",
    "inference.launch.env={VLLM_CPU_KVCACHE_SPACE: '1', VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: '900'}",
    "checkpoint.every_steps=0",
    "logging.sinks=[jsonl]",
    "logging.report=false",
]


def test_an_asynchronous_run_on_vllm(python, tmp_path: Path) -> None:
    settings = load_settings([], [*RUN, f"inference.launch.python={python}", f"run_dir={tmp_path / 'run'}"]).settings
    result = train(settings)
    assert (result.finished, result.steps) == (True, 3)
    reader = LedgerReader(tmp_path / "run")
    # Every publish was verified by what vLLM's kernels hold, and paused it for the time it took to load.
    receipts = [event.data["receipt"] for event in reader.events("receipt")]
    assert len(receipts) == 4
    assert {(r["result"], r["transport"], r["verification"]["kind"]) for r in receipts} == {
        ("published", "memory", "checksum")
    }
    before = {e.step: WeightVersion.parse(e.data["weight_version_before"]).counter for e in reader.events("step")}
    trained = list(reader.trajectories(phase="train"))
    assert len(trained) == 12
    for record in trained:
        for version in record.trajectory.versions():
            assert 0 <= before[record.step] - WeightVersion.parse(version).counter <= 2, version
    for event in reader.events("step"):
        account = event.data["account"]
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled")
    assert not [p for p in psutil.Process().children(recursive=True) if "vllm" in " ".join(p.cmdline())]
    for receipt in receipts:
        print(receipt["version"], receipt["bytes"], receipt["seconds"])


LORA = [
    "schedule.kind=sync",
    "schedule.steps=2",
    "inference.pause_mode=wait",
    "inference.transport=adapter",
    "training.lora.rank=4",
    "training.lora.alpha=6",
    "training.optimizer.lr=0.01",
]


def test_a_run_that_publishes_its_adapter_alone(python, tmp_path: Path) -> None:
    run = [item for item in RUN if not item.startswith("schedule.max_staleness_steps")]
    overrides = [*run, *LORA, f"inference.launch.python={python}", f"run_dir={tmp_path / 'run'}"]
    result = train(load_settings([], overrides).settings)
    assert (result.finished, result.steps) == (True, 2)
    reader = LedgerReader(tmp_path / "run")
    receipts = [event.data["receipt"] for event in reader.events("receipt")]
    # 30 layers, 7 projections, A and B; a few megabytes against the 270 of the whole model.
    assert [(r["result"], r["transport"], r["names"]) for r in receipts] == [("published", "adapter", 420)] * 3
    assert {r["verification"]["kind"] for r in receipts} == {"checksum"}
    assert all(r["bytes"] < 4_000_000 for r in receipts)
    # The sampler ran with the adapter that the trainer holds, also after it has moved.
    steps = reader.metrics(phase="train")
    gaps = [row.values["policy/rollout_train_logprobs_abs_diff_mean"] for row in steps]
    assert len(gaps) == 2
    assert max(gaps) < 0.1, gaps
    assert not list((tmp_path / "run" / "transfer" / "weights").iterdir())
