"""Planning of critic and teacher: lengths that follow from the run, and combinations that cannot mean what they say."""

from __future__ import annotations

from slipstream.config import load_settings, make_plan, resolve_settings

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
