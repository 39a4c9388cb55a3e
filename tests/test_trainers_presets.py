"""Every preset drives a whole step of a real run: rollout, filters, advantages, update, publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_kit import tiny_settings
from slipstream.config.presets import PRESETS
from slipstream.ledger import LedgerReader
from slipstream.trainers.run import train

SMALL = [
    "schedule.steps=1",
    "schedule.prompts_per_step=3",
    "rollout.max_turns=1",
    "eval.before=false",
    "eval.after=false",
    "checkpoint.every_steps=0",
]


def last_metrics(run_dir: Path) -> dict[str, float]:
    return dict(LedgerReader(run_dir).metrics("train")[-1].values)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_a_step(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    given = [f"algorithm.preset={name}", *SMALL]
    if name == "distill":
        given.append(f"algorithm.teacher.path={tiny_dir}")
    if "dynamic_sampling" in PRESETS[name].values:
        given += ["algorithm.drop_zero_variance=true", "algorithm.dynamic_sampling.max_rounds=4"]
    result = train(tiny_settings(tiny_dir, tmp_path, *given))
    metrics = last_metrics(tmp_path)
    assert (result.steps, metrics["policy/optimizer_steps"], metrics["policy/refused_steps"]) == (1, 1, 0)
    assert metrics["policy/trained_tokens"] > 0


def test_groups_that_stand_in_are_told(tiny_dir: Path, tmp_path: Path) -> None:
    """The step takes the good groups there are (rewards spread by 0.12 to 0.7) and repeats them."""
    more = ["schedule.prompts_per_step=6", "algorithm.drop_zero_variance=true", "algorithm.zero_variance_tol=0.35"]
    more += ["algorithm.dynamic_sampling.kind=replace", "algorithm.dynamic_sampling.min_good_fraction=0.0"]
    train(tiny_settings(tiny_dir, tmp_path, *SMALL, *more))
    metrics = last_metrics(tmp_path)
    left_out = sum(value for name, value in metrics.items() if name.startswith("schedule/left_out_"))
    assert left_out > 0, "the fixture has groups without spread"
    assert metrics["policy/stand_in_groups"] == left_out
