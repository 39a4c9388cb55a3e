"""The asynchrony benchmark: its arithmetic, its arms, and that a run waits and counts what it says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.config import load_settings, make_plan
from slipstream.trainers.run import check


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "async_vs_sync.py"
    spec = importlib.util.spec_from_file_location("async_vs_sync", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["async_vs_sync"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def arm(bench: ModuleType, **fields: Any) -> Any:
    """A run of equal steps; ``steps`` and seconds per part may be given."""
    n, step = fields.pop("steps", 10), fields.pop("seconds", 4.0)
    parts = {name: [fields.pop(name, 0.0)] * n for name in ("update", "publish", "engine_idle")}
    base: dict[str, Any] = {
        "ends": [step * (i + 1) for i in range(n)], "step": [step] * n, "group_wait": 0.0, "step_wait": 0.0,
        "tokens": [1.0] * n, "lag": 0.0, "rewards": [0.0] * n, "scores": {"start": 0.1, "rl": 0.9}, "cpu": {},
    }  # fmt: skip
    return bench.Arm(**{**base, **parts, **fields})


def data(bench: ModuleType, folder: Path, count: int = 12) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in bench.rows(0, count, 0, 0.01)))
    return path


def overrides(bench: ModuleType, name: str, model: Path, folder: Path) -> list[str]:
    rows = data(bench, folder)
    places = [f"model.path={model}", f"data.train={rows}", f"data.eval={rows}", f"run_dir={folder / name}"]
    return [*bench.BASE, *bench.ARMS[name], *places]


def test_the_rate_leaves_out_what_fills_and_drains(bench: ModuleType) -> None:
    ends = [10.0, 12.0, 14.0, 15.0, 16.0, 17.0, 17.1]
    assert bench.seconds_per_step(ends, fill=3, drain=1) == pytest.approx(1.0)
    assert bench.seconds_per_step(ends, fill=0, drain=0) == pytest.approx(17.1 / 7)
    assert bench.median_step(ends) == pytest.approx(1.0)


def test_of_a_run_that_is_too_short_the_middle_step_counts(bench: ModuleType) -> None:
    assert bench.seconds_per_step([5.0, 7.0, 8.0], fill=3, drain=3) == pytest.approx(2.0)
    assert bench.seconds_per_step([5.0], fill=3, drain=3) == pytest.approx(5.0)


def test_idle_is_when_neither_computes(bench: ModuleType) -> None:
    # 4 s a step: 1 s of decoding, 1 s of update, half a second of publish; the judge has the rest.
    assert bench.idle_share(arm(bench, engine_idle=3.0, update=1.0, publish=0.5)) == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(
    ("idle", "update", "wait", "cause", "least"),
    [(1.0, 1.0, 0.0, "generation", 3.0), (2.5, 2.5, 0.0, "training", 3.0), (3.0, 0.5, 20.0, "waiting", 7.0)],
)
def test_the_bound_is_the_longest_of_three(
    bench: ModuleType, idle: float, update: float, wait: float, cause: str, least: float
) -> None:
    alone = arm(bench, engine_idle=idle, update=update, publish=0.5)
    found = bench.compare(arm(bench, seconds=6.0), arm(bench, seconds=8.0, group_wait=wait), alone)
    assert found["bound_by"] == cause
    assert found["step_seconds"] == {"sync": 6.0, "async": 8.0, "bound": pytest.approx(least)}
    assert found["speedup"] == pytest.approx(6 / 8)
    assert found["fraction_of_bound"] == pytest.approx(found["speedup"] / found["bound"])


@pytest.mark.parametrize(("gap", "fine"), [(0.0, True), (-0.05, False)])
def test_not_inferior_is_judged_by_the_lower_end(bench: ModuleType, gap: float, fine: bool) -> None:
    seeds = []
    for extra in (-0.01, 0.0, 0.01):
        scores = {"rl": 0.9 + gap + extra}
        seeds.append(bench.compare(arm(bench, engine_idle=1.0), arm(bench, scores=scores), arm(bench)))
    found = bench.summary(seeds)
    half = 4.303 * 0.01 / math.sqrt(3)
    assert found["reward_difference_interval_95"] == pytest.approx([gap - half, gap + half])
    assert found["not_inferior"] is fine


def test_one_seed_shows_nothing(bench: ModuleType) -> None:
    assert not bench.summary([bench.compare(arm(bench), arm(bench), arm(bench))])["not_inferior"]


def test_waits_are_of_the_seed_and_have_a_long_tail(bench: ModuleType) -> None:
    lines = bench.rows(0, 500, 3, 0.1)
    assert lines == bench.rows(0, 500, 3, 0.1)
    assert lines != bench.rows(0, 500, 4, 0.1)
    waits = sorted(w for line in lines for w in line["waits"])
    assert waits[len(waits) // 2] == pytest.approx(0.1, rel=0.1)
    assert waits[-1] > 10 * waits[len(waits) // 2]


def test_the_judge_is_scaled_to_the_share_of_idleness(bench: ModuleType) -> None:
    per_step = min(bench.PROMPTS * bench.SAMPLES, bench.BATCH)
    waits = [w for row in bench.rows(0, 400 * bench.PROMPTS, 7, bench.median_wait(2.0)) for w in row["waits"]]
    slowest = [max(waits[i : i + per_step]) for i in range(0, len(waits), per_step)]
    idle = sum(slowest) / len(slowest)
    assert idle / (idle + 2.0) == pytest.approx(bench.IDLE_SHARE, abs=0.02)


@pytest.mark.parametrize("seen", [0.2, 0.35, 0.5])
def test_waits_are_scaled_by_what_was_seen(bench, seen):
    busy, wait = 1 - seen, seen
    wait *= bench.scale_of_waits(seen)
    assert wait / (wait + busy) == pytest.approx(bench.IDLE_SHARE)


@pytest.mark.parametrize("name", ["sync", "async", "alone"])
def test_every_arm_is_a_run_that_a_plan_accepts(bench: ModuleType, name: str, tiny_dir: Path, tmp_path: Path) -> None:
    from slipstream.envs import deregister, register

    settings = load_settings([], overrides(bench, name, tiny_dir, tmp_path)).settings
    register(bench.ENV, bench.SlowJudge)
    try:
        assert [str(p) for p in (*check(settings).errors, *make_plan(settings).errors)] == []
    finally:
        deregister(bench.ENV)


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_run_waits_as_its_rows_say_and_is_measured(
    bench: ModuleType, name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    small = [
        "schedule.prompts_per_step=2", "schedule.steps=3", "rollout.samples_per_prompt=2", "eval.samples_per_prompt=1",
        "rollout.sampling.max_tokens_per_turn=4", "inference.threads=1", "training.threads=1",
    ]  # fmt: skip
    path = data(bench, tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["waits"] = [0.0, 0.2]
    given = overrides(bench, name, tiny_dir, tmp_path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench.run_arm([*given, *small])
    assert len(found.ends) == 3
    assert found.ends == sorted(found.ends)
    assert found.group_wait >= 0.2
    assert (found.lag > 0) is (name == "async")
    assert 0 < found.scores["rl"] < 1
    assert any("engine" in thread for thread in found.cpu)
    if name == "sync":
        assert 0 < bench.idle_share(found) < 1
