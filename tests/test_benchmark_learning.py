"""The learning benchmark: every registered preset is a run that a plan accepts, and its interval is Student's."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.config import load_settings, make_plan
from slipstream.config.presets import PRESETS
from slipstream.trainers.run import check


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "learning.py"
    spec = importlib.util.spec_from_file_location("learning", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["learning"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def errors(overrides: list[str]) -> list[str]:
    settings = load_settings([], overrides).settings
    return [str(p) for p in (*check(settings).errors, *make_plan(settings).errors)]


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_takes_part_without_code_of_its_own(learning: ModuleType, name: str, tiny_dir: Path) -> None:
    assert errors([*learning.BASE, f"model.path={tiny_dir}", *learning.preset_overrides(name, tiny_dir)]) == []


def test_every_correction_is_a_run_that_a_plan_accepts(learning: ModuleType, tiny_dir: Path) -> None:
    for overrides in learning.CORRECTIONS.values():
        assert errors([*learning.BASE, f"model.path={tiny_dir}", *overrides]) == []


def test_the_interval_is_students_over_seeds(learning: ModuleType) -> None:
    runs = [learning.Outcome(0.0, gain, 1.0, 3) for gain in (0.1, 0.2, 0.3, 0.4, 0.5)]
    found = learning.summary(runs)
    half = 2.776 * math.sqrt(0.025 / 5)
    assert found["gain_interval_95"] == pytest.approx([0.3 - half, 0.3 + half], abs=1e-4)
    assert found["learns"]
    assert not learning.summary([learning.Outcome(0.3, 0.2, 1.0, 3), learning.Outcome(0.3, 0.5, 1.0, 3)])["learns"]


def test_the_page_shows_the_record_and_every_preset_in_it_learns(learning: ModuleType) -> None:
    root = Path(__file__).parent.parent
    record = json.loads((root / "benchmarks" / "results" / "learning.json").read_text())
    assert list(record["presets"]) == list(PRESETS)
    assert all(entry["seeds"] >= 5 and entry["learns"] for entry in record["presets"].values())
    staleness = record["staleness"]
    assert staleness["settings"] == {name: list(given) for name, given in learning.CORRECTIONS.items()}
    assert list(staleness["tasks"]) == list(learning.TASKS)
    cells = [
        cell for task in staleness["tasks"].values() for by_lag in task["gains"].values() for cell in by_lag.values()
    ]
    assert all(cell["seeds"] >= 5 for cell in cells)
    assert learning.tables(record) in (root / "docs" / "algorithms.md").read_text()


def test_a_cell_that_was_not_measured_shows_as_a_dash(learning: ModuleType) -> None:
    found = learning.summary([learning.Outcome(0.1, 0.5, 1.0, 3), learning.Outcome(0.1, 0.4, 1.0, 3)])
    tasks = {"early": {"steps": 3, "lr": 0.1, "gains": {"tis": {"2": found}}}}
    lines = learning.tables({"presets": {"grpo": found}, "staleness": {"tasks": tasks}}).splitlines()
    assert [line for line in lines if line.startswith("| `tis`")] == ["| `tis` | – | +0.35 [-0.29, +0.99] | – |"]
    assert "| task `early`, 3 steps at a rate of 0.1 | lag 0 | lag 2 | lag 8 |" in lines


async def test_a_run_learns_from_weights_that_are_two_publishes_old(learning: ModuleType, tiny_dir: Path) -> None:
    outcome = await learning.run(tiny_dir, learning.CORRECTIONS["tis"], seed=0, steps=3, lag=2)
    assert outcome.applied == 3
    assert 0 < outcome.before < 1
