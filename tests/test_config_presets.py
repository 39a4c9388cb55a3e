"""Presets: every one plans, explains itself, and lies underneath what is given."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.algorithms import check_algorithm
from slipstream.algorithms.reference import generated, updated
from slipstream.config import RunSettings, explain, load_settings, render_explanation, resolve_settings
from slipstream.config.identity import dump_settings, settings_hash
from slipstream.config.presets import PRESETS, overlay, preset_leaves
from slipstream.config.tree import leaves, value_at
from slipstream.errors import ContractError, SettingsError

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
METHODS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "maxrl", "ppo"]
METHODS += ["dppo", "rollout_is", "decoupled_ppo", "distill"]
TEACHER = ["algorithm.teacher.path=some/model"]


def settings(name: str, *given: str) -> RunSettings:
    return load_settings([], [f"algorithm.preset={name}", *given]).settings


def test_every_method_has_a_preset() -> None:
    assert list(PRESETS) == METHODS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_known_settings_and_has_all_its_texts(name: str) -> None:
    preset = PRESETS[name]
    assert all((preset.title, preset.formula, preset.when, preset.source, preset.figures))
    chosen = settings(name)
    for path, value in preset_leaves(name).items():
        assert path in leaves()
        assert value_at(chosen, path) == value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_contradicts_nothing(name: str) -> None:
    chosen = resolve_settings(settings(name, *(TEACHER if PRESETS[name].needs else [])), 100)
    problems = check_algorithm(chosen.algorithm, chosen.rollout.sampling, samples_per_prompt=8, prompts_per_step=16)
    assert problems == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_explained_without_any_file(name: str) -> None:
    told = explain(f"algorithm.preset={name}")
    for line in (*PRESETS[name].formula, PRESETS[name].when, PRESETS[name].source, PRESETS[name].figures):
        assert line in told.description
    assert dict(told.inside).keys() == preset_leaves(name).keys()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_explanation(told))
    assert PRESETS[name].formula[0] in console.export_text()


def test_what_is_given_wins_over_the_preset_key_by_key() -> None:
    chosen = settings("dapo", "algorithm.clip_high=0.5", "algorithm.overlong.max_tokens=100").algorithm
    assert (chosen.clip_high, chosen.clip_low) == (0.5, 0.2)
    assert (chosen.overlong.factor, chosen.overlong.max_tokens) == (1.0, 100)


def test_skyrl_keys_win_over_the_preset_too() -> None:
    chosen = settings("grpo", "trainer.algorithm.eps_clip_high=0.3", "trainer.algorithm.use_kl_loss=false").algorithm
    assert (chosen.clip_high, chosen.kl_coef) == (0.3, 0.0)


def test_values_say_that_they_came_from_the_preset() -> None:
    loaded = load_settings([], ["algorithm.preset=dapo", "algorithm.clip_low=0.1"])
    assert loaded.origins["algorithm.clip_high"] == "algorithm.preset=dapo"
    assert "override" in loaded.origins["algorithm.clip_low"]


def test_another_preset_over_a_base_replaces_the_old_one() -> None:
    base = settings("dapo", "algorithm.clip_low=0.1")
    chosen = load_settings([], ["algorithm.preset=gspo"], base=base).settings.algorithm
    assert (chosen.loss, chosen.dynamic_sampling.kind, chosen.overlong.factor) == ("gspo", "off", 0.0)
    assert chosen.clip_low == 0.1, "what the base set by itself stays"


def test_a_dump_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    chosen = settings("dapo", "algorithm.clip_high=0.5")
    path = tmp_path / "settings.yaml"
    path.write_text(dump_settings(chosen))
    again = load_settings([path]).settings
    assert again == chosen
    assert settings_hash(again) == settings_hash(chosen)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.preset='dappo'.*no such preset; known: grpo"):
        settings("dappo")
    with pytest.raises(SettingsError, match=r"Did you mean .*dapo.* Known: grpo"):
        explain("algorithm.preset=dappo")


def test_a_preset_whose_method_was_changed_warns() -> None:
    chosen = settings("dapo", "algorithm.loss=cispo", "algorithm.clip_high=4.0")
    problems = check_algorithm(chosen.algorithm, chosen.rollout.sampling, samples_per_prompt=8)
    assert [(p.keys, p.severity) for p in problems] == [(("algorithm.preset", "algorithm.loss"), "warning")]


def test_overlay_merges_sections_and_leaves_its_arguments_alone() -> None:
    under, over = {"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}}
    assert overlay(under, over) == {"a": {"x": 1, "y": 3}, "b": 1}
    assert under == {"a": {"x": 1, "y": 2}, "b": 1}


def test_constants_that_are_null_follow_from_the_limits() -> None:
    limits = ["rollout.max_turns=3", "rollout.sampling.max_tokens_per_turn=100", "rollout.max_total_tokens=2048"]
    assert resolve_settings(settings("dr_grpo", *limits), 9).algorithm.reduction_tokens == 300
    overlong = resolve_settings(settings("dapo", *limits), 9).algorithm.overlong
    assert (overlong.max_tokens, overlong.buffer_tokens) == (300, 60)
    assert resolve_settings(settings("grpo", *limits), 9).algorithm.reduction_tokens is None


# --- the page --------------------------------------------------------------------------------------


def test_the_committed_page_is_the_generated_one() -> None:
    how = "run python -m slipstream.algorithms.reference docs/algorithms.md"
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, how


def test_the_page_has_every_preset_and_component() -> None:
    from slipstream.algorithms.advantages import ADVANTAGES
    from slipstream.algorithms.losses import LOSSES
    from slipstream.algorithms.reduce import REDUCTIONS

    text = generated()
    for name in PRESETS:
        assert f"### {name}\n" in text
    for registry in (ADVANTAGES, LOSSES, REDUCTIONS):
        for name in registry:
            component = registry.get(name)
            assert all((component.formula, component.use, component.source)), f"{name} has no text for the page"
            assert f"| `{name}` |" in text


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ContractError, match="begin"):
        updated("# A page")
