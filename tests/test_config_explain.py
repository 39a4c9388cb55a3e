"""``explain`` and the generated reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import explain, load_settings, render_explanation
from slipstream.config import readers as readers_module
from slipstream.config.readers import readers, unread
from slipstream.config.reference import main, reference
from slipstream.config.render import as_text
from slipstream.config.settings import RunSettings
from slipstream.config.skyrl import TABLE
from slipstream.config.tree import leaves, sections
from slipstream.errors import SettingsError

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_a_setting_shows_value_origin_and_skyrl_name() -> None:
    loaded = load_settings([], ["trainer.train_batch_size=4"])
    told = explain("schedule.prompts_per_step", loaded.settings, loaded.origins)
    assert (told.type_text, told.default, told.value, told.allowed) == ("int", "16", "4", ">= 1")
    assert "trainer.train_batch_size=4" in told.origin
    assert told.skyrl == ("trainer.train_batch_size",)
    assert "schedule" in told.rooms
    text = as_text(render_explanation(told))
    for part in ("schedule.prompts_per_step", "16", "4  (", "trainer.train_batch_size"):
        assert part in text


def test_without_settings_the_default_is_shown() -> None:
    told = explain("model.dtype")
    assert (told.value, told.origin, told.allowed) == ("bfloat16", "default", "float32, bfloat16")


def test_sections_and_skyrl_keys_are_explained() -> None:
    assert ("rollout.max_turns", "Model turns per trajectory.") in explain("rollout").inside
    assert "schedule.prompts_per_step" in explain("trainer.train_batch_size").description
    assert explain("trainer.fully_async.simulate_training").description.startswith("refused:")
    assert "schedule.max_staleness_steps" in explain("trainer.fully_async.max_staleness_steps").description
    assert any(key == "trainer.algorithm.kl_ctrl.type" for key, _ in explain("trainer.algorithm.kl_ctrl").inside)
    assert "env.kwargs" in explain("environment.skyrl_gym.mine.option").description


def test_every_key_can_be_explained() -> None:
    for path in (*leaves(), *sections(), *TABLE):
        told = explain(path)
        assert told.description, path
    for path in (*leaves(), *sections()):
        assert path in as_text(render_explanation(explain(path)))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"rollout\.max_turns"):
        explain("rollout.max_turn")


def test_every_setting_has_a_description() -> None:
    assert [path for path, leaf in leaves().items() if not leaf.description.endswith((".", ")"))] == []


def test_leaves_cover_the_whole_tree() -> None:
    def count(node: object) -> int:
        if not isinstance(node, dict):
            return 1
        return sum(count(child) for child in node.values()) if node else 1

    assert len(leaves()) == count(RunSettings().model_dump())


def test_readers_are_found_in_source_and_not_in_text(tmp_path: Path) -> None:
    room = tmp_path / "rollout"
    room.mkdir()
    (room / "a.py").write_text("def f(settings: 'X'):\n    return settings.rollout.max_turns\n")
    (room / "b.py").write_text("# rollout.env_workers\nTEXT = 'settings.rollout.env_workers'\n")
    (room / "c.py").write_text("def f(box):\n    return box.steps\n")
    assert readers(leaves()["rollout.max_turns"], tmp_path) == ("rollout",)
    assert readers(leaves()["rollout.env_workers"], tmp_path) == ()
    assert readers(leaves()["schedule.steps"], tmp_path) == ()
    (room / "d.py").write_text(
        "def f(rollout: RolloutSettings, n):\n    'concurrency'\n    return getattr(rollout, n or 'max_prompt_tokens')"
    )
    readers_module._modules.cache_clear()
    assert readers(leaves()["rollout.max_prompt_tokens"], tmp_path) == ("rollout",)
    assert readers(leaves()["rollout.concurrency"], tmp_path) == ()
    assert "training.backend" not in unread(tmp_path)  # there is only one
    assert "rollout.env_workers" in unread(tmp_path)
    assert "rollout.max_turns" not in unread(tmp_path)


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("return settings.training.determinism", True),
        ("return training.determinism", True),
        ("chosen = settings.training\n    return chosen.determinism", True),
        ("one, two = settings.model, self.settings.training\n    return two.determinism", True),
        ("one, two = settings.model, self.settings.training\n    return one.determinism", False),
        ("settings.training.threads\n    return parts.determinism", False),
        ("raise ValueError(f'trained with {settings.training.determinism}')", False),
        ("settings.training.determinism = 1", False),
    ],
)
def test_an_attribute_of_the_same_name_and_a_message_are_no_reading(tmp_path: Path, code: str, reads: bool) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "a.py").write_text(f"def f(self, settings, training, parts):\n    {code}\n")
    assert readers(leaves()["training.determinism"], tmp_path) == (("trainers",) if reads else ())


def test_the_committed_reference_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m slipstream.config.reference docs/configuration.md"
    )


def test_the_reference_lists_every_key_and_is_written_to_a_path(tmp_path: Path) -> None:
    assert main([str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert [path for path in (*leaves(), *TABLE) if f"| `{path}` |" not in page] == []


def test_a_preset_is_explained_with_what_is_given_beside_it() -> None:
    loaded = load_settings([], ["algorithm.preset=grpo", "algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01"])
    inside = dict(explain("algorithm.preset=grpo", loaded.settings, loaded.origins).inside)
    assert inside["algorithm.kl_coef"] == "0.1 (the preset: 0.04)"
    assert inside["algorithm.clip_high"] == "0.2"
    assert inside["algorithm.entropy_coef"] == "0.01"


def test_off_is_a_word_though_yaml_reads_it_as_false() -> None:
    loaded = load_settings([], ["algorithm.preset=dapo", "algorithm.dynamic_sampling.kind=off"])
    assert loaded.settings.algorithm.dynamic_sampling.kind == "off"
