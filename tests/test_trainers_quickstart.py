"""The quickstart around the run: its directory, the link, the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import slipstream
from slipstream.config.settings import RunSettings
from slipstream.errors import LedgerError, SettingsError
from slipstream.trainers import quickstart as module
from slipstream.trainers.progress import RunResult
from slipstream.trainers.quickstart import quickstart, quickstart_settings


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunSettings]:
    """The settings of every run that was asked for; none is made, all end well."""
    asked: list[RunSettings] = []

    def train(settings: RunSettings) -> RunResult:
        asked.append(settings)
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        accuracy = {"start": 0.1, "sft": 0.2, "rl": 0.3}
        return RunResult(run_dir=settings.run_dir, accuracy=accuracy, steps=14, seconds=60.0, peak_memory_gb=1.0,
                         eval_prompts=9, report=None, finished=True, stop_reason=None)  # fmt: skip

    monkeypatch.setattr(module, "train", train)
    return asked


@pytest.mark.parametrize("name", ["my #1", "a: b", "[1", "null", "1e3", "${seed}", "a=b", " x"])
def test_the_run_lies_where_the_command_line_says(trained: list[RunSettings], tmp_path: Path, name: str) -> None:
    """A path is no YAML."""
    run_dir = tmp_path / name
    done = slipstream("quickstart", "--run-dir", run_dir)
    assert done.exit_code == 0, done.output
    assert [settings.run_dir for settings in trained] == [run_dir]
    assert json.loads((run_dir / "summary.json").read_text())["accuracy_after"] == 0.3
    assert [path.name for path in run_dir.iterdir()] == ["summary.json"]


def test_a_relative_place_and_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quickstart_settings(run_dir=Path("null")).run_dir == Path("null")
    assert quickstart_settings(run_dir=Path("~/run")).run_dir == tmp_path / "run"
    assert quickstart_settings(seed=3, full=True).run_dir == Path("runs/quickstart-full-seed3")


def test_the_link_names_the_run_that_was_started_last(
    trained: list[RunSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        quickstart(seed=seed)
        assert (Path("runs") / "quickstart").resolve() == tmp_path / "runs" / f"quickstart-seed{seed}"


@pytest.mark.parametrize("place", ["runs", "runs/quickstart"])
def test_a_link_that_cannot_be_made_is_named_before_anything_runs(
    trained: list[RunSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).write_text("mine")
    with pytest.raises(SettingsError, match=r"runs/quickstart .*--run-dir"):
        quickstart()
    assert (trained, Path(place).read_text()) == ([], "mine")


def test_a_summary_that_cannot_be_written_is_named(trained: list[RunSettings], tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(LedgerError, match=rf"cannot write {tmp_path}/summary\.json: .*free space"):
        quickstart(run_dir=tmp_path)
