"""The four admission checks: what they find, and what they let pass."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import slipstream
from run_kit import BASE, tiny_settings
from slipstream.envs import BaseTextEnv, register
from slipstream.errors import SlipstreamError
from slipstream.ledger import LedgerReader
from slipstream.trainers import admission
from slipstream.trainers.run import train


class Coin(BaseTextEnv):
    """Its reward is a coin toss: it varies, and means nothing."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": random.SystemRandom().random(), "done": True, "metadata": {}}


class Constant(Coin):
    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


register(id="coin_test", entry_point=Coin)
register(id="constant_test", entry_point=Constant)


def smoke(tiny_dir: Path, run_dir: Path, *overrides: str) -> tuple[Any, LedgerReader, list[Any]]:
    """A smoke run inside this process, and its records."""
    small = admission.smoke_settings(tiny_settings(tiny_dir, run_dir, *overrides), run_dir)
    train(small)
    reader = LedgerReader(run_dir)
    return small, reader, list(reader.trajectories(phase="train"))


def rows_for(env: str, path: Path) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "env_class": env} for i in range(16)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"data.train={path}"


def test_a_sound_smoke_job_passes_every_question_about_it(tiny_dir: Path, tmp_path: Path) -> None:
    small, reader, records = smoke(tiny_dir, tmp_path / "r", "schedule.kind=fully_async")
    assert (small.schedule.prompts_per_step, small.schedule.steps) == (2, 3)
    found = [*admission._reward(small, records), *admission._weights(small, reader)]
    assert {f.verdict for f in found} == {"ok", "warn"}
    warnings = [f.evidence for f in found if f.verdict == "warn"]
    assert warnings == ["components reward; the environment names no env_revision"]
    assert any("held the published version" in f.evidence for f in found)
    bounds = list(admission._bounds(small, small, reader))
    assert bounds[0].verdict == "ok"
    assert "at most 10 groups outstanding" in bounds[0].evidence
    assert bounds[-1].verdict == "warn", "no rule ends this run"


def test_rules_are_compared_with_the_metrics_of_the_smoke_job(tiny_dir: Path, tmp_path: Path) -> None:
    small, reader, _ = smoke(tiny_dir, tmp_path / "r")
    body = (
        "[{metric: reward/avg_raw_rewards, below: 0.1}, {metric: policy/final_loss, above: 9}, {metric: %s, below: 0}]"
    )
    rules = f"rules={body % 'eval/all/avg_score'}"
    for evaluates, unknown in (("eval.every_steps=2", 1), ("eval.every_steps=0", 2)):
        settings = tiny_settings(tiny_dir, tmp_path / "s", rules, evaluates)
        first, *others = [
            f for f in admission._bounds(settings, small, reader) if "rule" in f.evidence or f.verdict != "ok"
        ]
        assert (first.verdict, others) == ("warn", [])
        assert "reward/avg_raw_rewards has not come (there is reward/avg_raw_reward" in first.evidence
        assert first.evidence.count("has not come") == unknown
        assert "policy/final_loss" not in first.evidence


def test_a_reward_that_does_not_repeat_is_found(tiny_dir: Path, tmp_path: Path) -> None:
    small, _, records = smoke(tiny_dir, tmp_path / "r", rows_for("coin_test", tmp_path / "d.jsonl"))
    bad = [f for f in admission._reward(small, records) if f.verdict == "fail"]
    assert len(bad) == 4
    assert "earned reward=" in bad[0].evidence


def test_a_reward_that_cannot_vary_is_found(tiny_dir: Path, tmp_path: Path) -> None:
    small, _, records = smoke(tiny_dir, tmp_path / "r", rows_for("constant_test", tmp_path / "d.jsonl"))
    first = next(iter(admission._reward(small, records)))
    assert first.verdict == "fail"
    assert "did not vary" in first.evidence


def test_a_replica_that_held_another_version_is_found(tiny_dir: Path, tmp_path: Path) -> None:
    small, reader, _ = smoke(tiny_dir, tmp_path / "r")
    path = tmp_path / "r" / "events.jsonl"
    lines = path.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if '"kind":"receipt"' in line)
    lines[last] = lines[last].replace('"holds":"policy/0/4"', '"holds":"policy/0/3"')
    path.write_text("\n".join(lines) + "\n")
    verdicts = {f.verdict: f.evidence for f in admission._weights(small, reader)}
    assert "holds policy/0/3" in verdicts["fail"]


def test_every_owner_of_weights_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    small, reader, _ = smoke(tiny_dir, tmp_path / "r")
    settings = tiny_settings(
        tiny_dir,
        tmp_path / "s",
        "algorithm.preset=ppo",
        "algorithm.kl_coef=0.1",
        "algorithm.critic.backbone=own",
        f"algorithm.teacher.path={tiny_dir}",
    )
    owners = next(iter(admission._weights(settings, reader))).evidence
    for owner in (
        "policy: trained",
        "reference: the initial policy",
        "critic: a model of its own",
        "teacher: ",
        "sampling: ",
    ):
        assert owner in owners
    assert "critic" not in next(iter(admission._weights(small, reader))).evidence


def test_an_existing_folder_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="exists"):
        admission.check_run(tiny_settings(tiny_dir, tmp_path / "r"), tmp_path)


@pytest.mark.proof
def test_the_command_kills_and_resumes_a_smoke_job_and_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    items = [*BASE, f"model.path={tiny_dir}", f"run_dir={tmp_path / 'r'}", "schedule.kind=fully_async"]
    done = slipstream("check", "run", *items, "--folder", str(tmp_path / "check"))
    print(done.output)
    assert done.exit_code == 0, done.output
    assert "verdict: admitted (0 failed" in done.output
    assert "killed after rl-00000" in done.output
