"""Loading: files, overrides, provenance, and errors that name the key, the source and the mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.config import RunSettings, load_settings
from slipstream.config.settings import NO_LIMIT
from slipstream.config.tree import leaves
from slipstream.errors import SettingsError


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(files, overrides)
    return str(caught.value)


def test_nothing_given_is_the_default() -> None:
    loaded = load_settings()
    assert loaded.settings == RunSettings()
    assert not loaded.notes
    assert not loaded.origins


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path, "schedule: {steps: 1, prompts_per_step: 2}\nseed: 1", "a.yaml")
    second = write(tmp_path, "schedule: {steps: 3}", "b.yaml")
    loaded = load_settings([first, second], ["seed=9"])
    assert (loaded.settings.schedule.steps, loaded.settings.schedule.prompts_per_step, loaded.settings.seed) == (
        3,
        2,
        9,
    )
    assert loaded.origins["schedule.steps"] == str(second)
    assert loaded.origins["schedule.prompts_per_step"] == str(first)
    assert loaded.origins["seed"] == "override 'seed=9'"


def test_override_values_are_typed_as_in_yaml() -> None:
    loaded = load_settings(
        [],
        [
            "training.optimizer.lr=1e-5",
            "data.train=[a.parquet,b.parquet]",
            "data.eval=builtin:text2sql/eval",
            "inference.max_model_len=null",
            "eval.before=false",
            "env.kwargs={mode: skyrl, depth: 2}",
            "env.kwargs.extra.deep=[1, two]",
            "rollout.sampling.stop=['</sql>']",
        ],
    ).settings
    assert loaded.training.optimizer.lr == 1e-5
    assert loaded.data.train == ("a.parquet", "b.parquet")
    assert loaded.data.eval == ("builtin:text2sql/eval",)
    assert loaded.inference.max_model_len is None
    assert loaded.eval.before is False
    assert loaded.env.kwargs == {"mode": "skyrl", "depth": 2, "extra": {"deep": [1, "two"]}}
    assert loaded.rollout.sampling.stop == ("</sql>",)


def test_base_lies_underneath_and_contradicts_nothing() -> None:
    base = RunSettings.model_validate({"schedule": {"prompts_per_step": 4, "steps": 7}, "env": {"kwargs": {"a": 1}}})
    loaded = load_settings([], ["trainer.train_batch_size=8", "env.kwargs.b=2"], base=base)
    assert (loaded.settings.schedule.prompts_per_step, loaded.settings.schedule.steps) == (8, 7)
    assert loaded.settings.env.kwargs == {"a": 1, "b": 2}
    assert load_settings(base=base).settings == base
    assert load_settings(base=base.model_dump()).settings == base


def test_a_part_of_a_section_leaves_its_other_defaults() -> None:
    loaded = load_settings([], ["eval.sampling.top_p=0.9", "sft.optimizer.warmup_steps=3"]).settings
    assert (loaded.eval.sampling.temperature, loaded.sft.optimizer.lr) == (0.0, 1e-5)
    for path, leaf in leaves().items():
        if not leaf.open and leaf.default is not None:
            # Setting any leaf to its default changes nothing, wherever the default comes from.
            *parents, name = path.split(".")
            tree: dict[str, object] = {name: leaf.default}
            for parent in reversed(parents):
                tree = {parent: tree}
            assert RunSettings.model_validate(tree) == RunSettings(), path


def test_what_a_base_left_open_stays_unset() -> None:
    base = RunSettings.model_validate({"algorithm": {"loss": "cross_entropy"}})
    loaded = load_settings([], ["algorithm.kl_coef=0.1"], base=base).settings
    assert loaded.algorithm.model_fields_set == {"loss", "kl_coef"}


def test_epochs_over_a_base_lift_its_steps() -> None:
    base = RunSettings.model_validate({"schedule": {"steps": 7}})
    by_epochs = load_settings([], ["schedule.epochs=2"], base=base).settings
    assert (by_epochs.schedule.epochs, by_epochs.schedule.steps) == (2, NO_LIMIT)
    again = load_settings([], ["schedule.steps=5"], base=by_epochs).settings
    assert (again.schedule.epochs, again.schedule.steps) == (None, 5)


def test_interpolations_resolve_over_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "somewhere")
    path = write(tmp_path, "run_dir: ${oc.env:RUNS}/x\neval: {samples_per_prompt: '${rollout.max_turns}'}")
    loaded = load_settings([path], ["rollout.max_turns=3"]).settings
    assert loaded.run_dir == Path("somewhere/x")
    assert loaded.eval.samples_per_prompt == 3
    assert "schedule.steps" in refusal("seed=${schedule.steps}")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("schedule.prompt_per_step=3", "schedule.prompts_per_step"),
        ("samples_per_prompt=3", "rollout.samples_per_prompt"),
        ("trainer.algorithm.eps_clip_lo=0.2", "trainer.algorithm.eps_clip_low"),
        ("rollout.sampling.temprature=1", "rollout.sampling.temperature"),
        ("generator.inference_engine.tensor_paralel_size=1", "generator.inference_engine.tensor_parallel_size"),
    ],
)
def test_unknown_key_names_source_and_nearest(override: str, nearest: str) -> None:
    message = refusal(override)
    assert f"override {override!r}" in message
    assert "unknown key" in message
    assert nearest in message


def test_every_unknown_key_is_named_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout: {max_turn: 2}\nmodel: {pth: x}")
    message = refusal("nonsense.key=1", files=(path,))
    assert message.count(str(path)) == 2
    assert "rollout.max_turns" in message
    assert "model.path" in message
    assert "nonsense.key" in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("+schedule.steps=3", ("leading '+'", "write 'schedule.steps=3'")),
        ("++schedule.steps=3", ("leading '+'", "write 'schedule.steps=3'")),
        ("~schedule.steps=3", ("leading '~'",)),
        ("schedule.steps", ("not of the form",)),
        ("schedule.steps=", ("has no value", "null")),
        ("schedule..steps=1", ("not of the form",)),
        ("data.train=[a,b", ("no valid YAML",)),
        ("rollout=3", ("is a section", "max_turns")),
        ("schedule.steps=abc", ("schedule.steps='abc'", "integer")),
        ("schedule.steps=2.5", ("schedule.steps=2.5", "integer")),
        ("schedule.steps=true", ("schedule.steps=true", "not true or false")),
        ("schedule.steps=null", ("schedule.steps=None", "integer")),
        ("schedule.steps=-1", ("greater than or equal to 0",)),
        ("logging.run_name=123", ("quotes",)),
        ("model.dtype=float16", ("'float32' or 'bfloat16'", "did you mean bfloat16?")),
        ("logging.sinks=[console,wandbb]", ("did you mean wandb?",)),
        ("rollout.sampling.top_k=0", ("-1 (off) or at least 1",)),
        ("rollout.sampling.stop=['']", ("empty string",)),
        ("training.optimizer.lr=.nan", ("finite",)),
        ("training.optimizer.betas=[0.9]", ("training.optimizer.betas",)),
        ("inference.engine=http", ("needs inference.urls",)),
        ("inference.urls=[http://x]", ("inference.engine=http",)),
        ("training.lora.target_modules=[1]", ("training.lora.target_modules=[1]",)),
    ],
)
def test_bad_override_is_readable(override: str, parts: tuple[str, ...]) -> None:
    message = refusal(override)
    for part in parts:
        assert part in message
    assert "pydantic" not in message
    assert "input_type" not in message


def test_several_type_errors_come_together() -> None:
    message = refusal("schedule.steps=x", "rollout.max_turns=y")
    assert "schedule.steps" in message
    assert "rollout.max_turns" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n- 2\n", "holds a list"),
        ("a: [1\n", "no valid YAML"),
        ("seed: 1\nseed: 2\n", "no valid YAML"),
        ("schedule.steps: 3\n", "nested sections"),
        ("schedule: {steps: '???'}\n", "schedule.steps"),
        ("1: 2\n", "nested sections"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    message = refusal(files=(path,))
    assert part in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert "gone.yaml" in refusal(files=(tmp_path / "gone.yaml",))


def test_empty_file_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    empty = write(tmp_path, "", "empty.yaml")
    sections = write(tmp_path, "rollout:\ntrainer:\n  algorithm:\n", "sections.yaml")
    assert load_settings([empty, sections]).settings == RunSettings()


def test_the_room_imports_without_torch() -> None:
    code = "import slipstream.config.reference, sys; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
