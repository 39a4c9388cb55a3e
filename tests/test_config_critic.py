"""Planning of critic and teacher: lengths that follow from the run, and combinations that cannot mean what they say."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import load_settings, make_plan, read_facts, resolve_settings
from slipstream.config.facts import BUNDLED
from slipstream.config.memory import estimate_memory
from slipstream.inference.embedded.tiny import tiny_model_dir

GIVEN = ["data.train=builtin:arithmetic", "data.eval=builtin:arithmetic"]


def test_a_critics_schedule_has_its_own_number_of_steps() -> None:
    settings = load_settings(
        [],
        [
            *GIVEN, "algorithm.preset=ppo", "schedule.steps=10", "algorithm.critic.epochs_per_step=2",
            "algorithm.critic.minibatches_per_step=3", "algorithm.critic.optimizer.scheduler=cosine",
        ],
    ).settings  # fmt: skip
    assert resolve_settings(settings).algorithm.critic.optimizer.total_steps == 60


def errors(*overrides: str) -> set[str]:
    plan = make_plan(load_settings([], [*GIVEN, *overrides]).settings)
    return {key for problem in plan.errors for key in problem.keys}


def test_a_served_teacher_wants_samples_at_temperature_one() -> None:
    served = ("algorithm.preset=distill", "algorithm.teacher.urls=http://127.0.0.1:1")
    assert "algorithm.teacher.urls" not in errors(*served)
    assert "algorithm.teacher.urls" in errors(*served, "rollout.sampling.temperature=0.7")
    assert "algorithm.teacher.urls" in errors(*served, "rollout.sampling.top_k=20")
    local = ("algorithm.preset=distill", "algorithm.teacher.path=somewhere")
    assert not errors(*local, "rollout.sampling.temperature=0.7", "rollout.sampling.top_k=20")


def test_models_beside_the_policy_are_in_the_memory_plan(tmp_path: Path) -> None:
    def item(name: str, *overrides: str) -> int:
        settings = load_settings([], [*GIVEN, *overrides]).settings
        return sum(i.bytes for i in estimate_memory(settings, BUNDLED).items if i.name == name)

    n = BUNDLED.parameters
    assert item("critic weights", "algorithm.preset=ppo") == n * 6  # float32 and bfloat16
    assert item("critic moments", "algorithm.preset=ppo") == n * 8
    assert item("critic weights", "algorithm.preset=ppo", "algorithm.critic.backbone=shared") == 0
    assert item("critic weights") == item("teacher weights") == 0
    tiny = tiny_model_dir(tmp_path / "teacher")
    facts = read_facts(str(tiny))
    assert facts is not None
    given = ("algorithm.preset=distill", f"algorithm.teacher.path={tiny}", "algorithm.teacher.dtype=float32")
    assert item("teacher weights", *given) == facts.parameters * 4
