"""Dump, hash and difference: a round trip, stable across processes, and strict about resuming."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from slipstream.config import (
    RunSettings,
    check_resume,
    diff_settings,
    dump_settings,
    load_settings,
    resolve_settings,
    settings_hash,
)
from slipstream.config.identity import FAST, FREE
from slipstream.config.tree import leaves, sections
from slipstream.errors import SettingsError


def settings(*overrides: str) -> RunSettings:
    return load_settings([], overrides).settings


def reread(folder: Path, value: RunSettings) -> RunSettings:
    path = folder / "settings.yaml"
    path.write_text(dump_settings(value))
    return load_settings([path]).settings


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["schedule.epochs=3"],
        ["schedule.epochs=3", "schedule.steps=5"],
        ["inference.engine=http", "inference.urls=[http://a:1,http://b:2]"],
        ["training.lora.target_modules=[q_proj]", "rollout.sampling.stop=['\\n', \"</a>\"]"],
        ["logging.run_name='123'", "run_dir=runs/null", "env.kwargs={'on': 'yes', n: null, list: [1, {a: 2}]}"],
    ],
)
def test_the_dump_is_read_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    value = settings(*overrides)
    assert reread(tmp_path, value) == value


@budget(max_examples=40, deadline=None)
@given(st.text(alphabet="${}\\a:#'\"\n ", max_size=8).filter(bool))
def test_any_text_survives_the_dump(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    value = RunSettings.model_validate({"env": {"kwargs": {"text": text}}})
    assert reread(tmp_path_factory.mktemp("dump"), value) == value


def test_the_hash_is_equal_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(dump_settings(settings("seed=5", "env.kwargs={b: 1, a: 2}")))
    code = (
        "import sys; from slipstream.config import load_settings, settings_hash;"
        "print(settings_hash(load_settings([sys.argv[1]]).settings))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == settings_hash(settings("env.kwargs={a: 2, b: 1}", "seed=5"))


def test_the_hash_leaves_out_where_a_run_is_kept() -> None:
    assert settings_hash(settings("run_dir=elsewhere", "logging.run_name=x")) == settings_hash(RunSettings())


@pytest.mark.parametrize("path", ["seed", "schedule.steps", "eval.before", "training.optimizer.lr", "data.shuffle"])
def test_the_hash_covers_everything_else(path: str) -> None:
    old = leaves()[path].default
    value = str(not old).lower() if isinstance(old, bool) else 3
    assert settings_hash(settings(f"{path}={value}")) != settings_hash(RunSettings())


def test_no_difference_between_equal_settings() -> None:
    assert diff_settings(settings("seed=1"), settings("seed=1")) == []


@pytest.mark.parametrize(
    "override",
    ["schedule.steps=500", "eval.every_steps=3", "logging.sinks=[jsonl]", "checkpoint.keep=9", "run_dir=moved"],
)
def test_length_evaluation_and_records_may_change(override: str) -> None:
    changes = check_resume(RunSettings(), settings(override))
    assert [change.path for change in changes] == [override.split("=")[0]]


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "model.path=other",
        "training.optimizer.lr=1e-3",
        "rollout.samples_per_prompt=4",
        "algorithm.loss=mine",
        "data.train=[x]",
        "schedule.prompts_per_step=3",
        "training.determinism=exact",
        "env.kwargs.a=1",
    ],
)
def test_what_was_trained_with_may_not(override: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_resume(RunSettings(), settings(override))
    message = str(caught.value)
    assert override.split("=")[0].removesuffix(".a") in message
    assert message.endswith("start a new run in another run_dir")


def test_batching_may_change_only_without_exact_determinism() -> None:
    change = "inference.max_batch_size=7"
    assert check_resume(RunSettings(), settings(change))
    with pytest.raises(SettingsError, match="exact"):
        check_resume(settings("training.determinism=exact"), settings("training.determinism=exact", change))


def test_a_longer_run_keeps_the_learning_rate_schedule() -> None:
    old = resolve_settings(settings("training.optimizer.scheduler=cosine", "schedule.steps=10"))
    longer = resolve_settings(settings("training.optimizer.scheduler=cosine", "schedule.steps=20"))
    with pytest.raises(SettingsError, match="10 optimiser steps"):
        check_resume(old, longer)
    kept = settings("training.optimizer.scheduler=cosine", "schedule.steps=20", "training.optimizer.total_steps=10")
    assert [change.path for change in check_resume(old, resolve_settings(kept))] == ["schedule.steps"]


def test_all_refused_changes_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        check_resume(RunSettings(), settings("seed=1", "model.path=other"))
    assert "seed: 0 -> 1" in str(caught.value)
    assert "model.path" in str(caught.value)


@pytest.mark.parametrize("pattern", [*FREE, *FAST])
def test_resume_rules_name_settings(pattern: str) -> None:
    assert pattern in leaves() or pattern.removesuffix(".") in sections()
