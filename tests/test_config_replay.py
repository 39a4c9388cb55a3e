"""Planning of replay: what has to come back from the engine is asked for, or refused before a model loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.algorithms import algorithm_problems
from slipstream.config import Problem, load_settings, make_plan, read_facts
from slipstream.inference.embedded.tiny import tiny_model_dir

CUT = "rollout.sampling.top_p=0.9"
HTTP = ("inference.engine=http", "inference.urls=http://127.0.0.1:1", "data.eval=builtin:text2sql")


def problems(*overrides: str, severity: str = "error") -> list[Problem]:
    given = ["data.train=builtin:text2sql", "data.eval=builtin:text2sql", *overrides]
    settings = load_settings([], given).settings
    plan = make_plan(settings, read_facts(settings.model.path))
    return list(plan.errors if severity == "error" else plan.warnings)


def named(found: list[Problem], key: str) -> list[Problem]:
    return [problem for problem in found if key in problem.keys]


def test_the_embedded_engine_replays_every_truncation() -> None:
    assert problems(CUT, "rollout.sampling.top_k=20", "rollout.sampling.min_p=0.01") == []


def test_kept_sets_without_a_bound_are_warned_about() -> None:
    assert named(problems(CUT, severity="warning"), "rollout.sampling.top_p")
    assert not named(problems(CUT, "rollout.sampling.top_k=20", severity="warning"), "rollout.sampling.top_p")


@pytest.mark.parametrize("engine", [HTTP, ("inference.engine=vllm",)])
def test_vllm_returns_kept_sets_only_for_requests_with_top_k_and_a_temperature(engine: tuple[str, ...]) -> None:
    training = [p for p in problems(*engine, CUT) if "vLLM returns kept sets" in p.message]
    assert {p.keys[0] for p in training} == {"rollout.sampling.top_k", "eval.sampling.top_k"}
    fine = (CUT, "rollout.sampling.top_k=20", "eval.sampling.temperature=0.5", "eval.sampling.top_k=50")
    assert not [p for p in problems(*engine, *fine) if "vLLM returns kept sets" in p.message]


def test_a_generator_of_ones_own_has_to_return_them() -> None:
    own = ("rollout.generator=my.module:thing", "training.routing_replay=true", CUT)
    assert len(named(problems(*own, severity="warning"), "rollout.generator")) == 2


@pytest.mark.parametrize(("arch", "refused"), [("llama", True), ("qwen3_moe", False), ("mixtral", False)])
def test_routing_replay_needs_a_mixture_of_experts(tmp_path: Path, arch: str, refused: bool) -> None:
    path = tiny_model_dir(tmp_path / arch, arch=arch)
    limits = ("rollout.max_total_tokens=256", "rollout.max_prompt_tokens=64", "rollout.sampling.max_tokens_per_turn=64")
    found = problems(f"model.path={path}", "training.routing_replay=true", *limits)
    assert bool(named(found, "training.routing_replay")) == refused


def reported(*overrides: str) -> list[tuple[str, str]]:
    given = ["data.train=builtin:text2sql", "algorithm.loss=score_centering", *overrides]
    return [(p.severity, p.keys[0]) for p in algorithm_problems(load_settings([], given).settings)]


def test_a_loss_that_reads_likely_tokens_needs_an_engine_that_reports_as_many() -> None:
    assert reported() == reported("inference.engine=vllm") == []
    many = ("algorithm.top_logprobs=20", "inference.engine=vllm")
    assert reported(*many) == [("error", "algorithm.top_logprobs")]
    assert reported(*many, "inference.launch.args=[--max-logprobs,'21']") == []
    assert reported("algorithm.top_logprobs=20") == []
    assert reported("rollout.generator=my.module:thing") == [("warning", "rollout.generator")]


def test_skyrls_key_means_routing_replay() -> None:
    loaded = load_settings([], ["generator.inference_engine.enable_return_routed_experts=true"])
    assert loaded.settings.training.routing_replay
