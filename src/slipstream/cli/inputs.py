"""What a command is given: YAML files and ``key=value`` in any order, as settings that may run.

Owns: telling files from overrides, importing ``env.modules``, the plan before anything heavy loads.
Refuses: the meaning of a key (``slipstream.config``).

>>> split_items(["schedule.steps=3"])
([], ['schedule.steps=3'])
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.envs.registration import import_modules
from slipstream.errors import DataError, SettingsError

if TYPE_CHECKING:
    from slipstream.config import Loaded, Plan, Problem, RunSettings
    from slipstream.config.settings import AlgorithmSettings, InferenceSettings

COUNTED_BYTES = 64_000_000
"""A plan counts the rows of files up to this size; counting more is not cheap."""


def split_items(items: Sequence[str]) -> tuple[list[Path], list[str]]:
    """``(files, overrides)``: an item with ``=`` that is no file is an override."""
    files: list[Path] = []
    overrides: list[str] = []
    for item in items:
        if "=" in item and not Path(item).is_file():
            overrides.append(item)
        elif "=" not in item and not Path(item).exists():
            raise SettingsError(f"{item!r} is neither a file here nor of the form key=value")
        else:
            files.append(Path(item))
    return files, overrides


def load(items: Sequence[str], *extra: str) -> Loaded:
    """Settings from a command's items; ``extra`` overrides win.  ``env.modules`` are imported."""
    from slipstream.config import load_settings

    files, overrides = split_items(items)
    loaded = load_settings(files, [*overrides, *extra])
    import_modules(loaded.settings.env.modules)
    return loaded


def make_plan(loaded: Loaded, *, count: bool, environ: Mapping[str, str] = os.environ) -> Plan:
    """The plan of loaded settings, with the algorithm's problems; ``count`` reads row counts where that is cheap."""
    import psutil

    from slipstream.algorithms import algorithm_problems
    from slipstream.config import environment_notes, make_plan, read_facts

    settings = loaded.settings
    problems = [*algorithm_problems(settings), *_missing_models(settings), *_missing_files(settings)]
    if count and not any(problem.severity == "error" for problem in problems):
        problems += _own_components(settings)
    return make_plan(
        settings,
        read_facts(settings.model.path),
        count_rows(settings.data.train, settings) if count else None,
        count_rows(settings.data.eval, settings) if count else None,
        notes=[*loaded.notes, *environment_notes(environ)],
        problems=problems,
        memory_bytes=psutil.virtual_memory().total,
    )


def _own_components(settings: RunSettings) -> list[Problem]:
    """Broken rules of the user's own loss, estimator, reduction and filters; a run checks them when it starts."""
    from slipstream.algorithms.component_check import broken_components
    from slipstream.config import Problem

    return [
        Problem((label,), f"breaks its contract: {finding.rule}: {finding.message}", "see slipstream check --help")
        for label, finding in broken_components(settings.algorithm)
    ]


def _missing_models(settings: RunSettings) -> list[Problem]:
    """Model directories that are not here."""
    from slipstream.config import Problem

    algorithm = settings.algorithm
    paths = {
        "model.path": settings.model.path,
        "algorithm.critic.path": algorithm.critic.path,
        "algorithm.teacher.path": algorithm.teacher.path,
    }
    return [
        Problem((key,), f"{path}: no such directory", "give a model directory, a hub id or a bundled name")
        for key, path in paths.items()
        if path is not None and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists()
    ]


def _missing_files(settings: RunSettings) -> list[Problem]:
    """Data files that are not here; a run would stop at them, a plan only warns."""
    from slipstream.config import Problem

    return [
        Problem(
            (f"data.{part}",),
            f"{source} is not here, so its rows are not counted and a run would stop",
            "prepare it before the run",
            "warning",
        )
        for part in ("train", "eval", "sft")
        for source in getattr(settings.data, part)
        if _is_path(source) and not Path(source).expanduser().exists()
    ]


def _is_path(source: str) -> bool:
    """Whether a source names a file or directory, and not a built-in task or a hub data set."""
    return not source.startswith("builtin:") and (bool(Path(source).suffix) or Path(source).is_absolute())


def runnable(items: Sequence[str], *extra: str) -> RunSettings:
    """Settings that the plan does not refuse; its warnings go to stderr."""
    loaded = load(items, *extra)
    plan = make_plan(loaded, count=False)
    plan.raise_if_refused()
    for problem in plan.warnings:
        print(f"warning: {problem}", file=sys.stderr)
    quiet_loading(loaded.settings.model.path)
    return loaded.settings


def quiet_loading(path: str) -> None:
    """No progress bars while a model that is here is read; those of a download from the hub stay.

    Call it before transformers is imported: the variable is read then.
    """
    from slipstream.config.facts import BUNDLED_NAME

    if path == BUNDLED_NAME or Path(path).expanduser().is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def count_rows(sources: Sequence[str], settings: RunSettings) -> int | None:
    """How many prompts the sources hold, before the length filter; None when that is not cheap to know.

    Raises:
        DataError: a row cannot be used.
    """
    if not sources or not all(_cheap(source) for source in sources):
        return None
    from slipstream.data import PromptDataset

    return len(PromptDataset.load(sources, env_class=settings.env.id))


def _cheap(source: str) -> bool:
    """Whether reading a source fetches nothing and takes no more than seconds."""
    if source.startswith("builtin:text2sql"):
        from slipstream.paths import cache_dir

        return (cache_dir() / "databases").is_dir()  # else the database would be fetched and built
    if source.startswith("builtin:"):
        return True
    path = Path(source).expanduser()
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) <= COUNTED_BYTES
    return path.is_file() and path.stat().st_size <= COUNTED_BYTES


def sft_settings(items: Sequence[str]) -> RunSettings:
    """Settings of a purely supervised run: ``schedule.steps=0`` and ``sft.steps`` above 0."""
    loaded = load(items)
    for key in ("schedule.steps", "schedule.epochs"):
        if key in loaded.origins and loaded.settings.schedule.steps > 0:
            raise SettingsError(
                f"{key} is set ({loaded.origins[key]}), but sft trains without RL; remove it, or use 'slipstream train'"
            )
    if loaded.settings.sft.steps == 0:
        raise SettingsError("sft.steps is 0, so nothing would be trained; set sft.steps=N and data.sft=FILE")
    return runnable(items, "schedule.steps=0")


def check_arguments(
    env: str, data: str, modules: Sequence[str], settings: Sequence[str], limit: int
) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """``(env_config, rows)`` for the environment checker; rows None means the environment's own examples.

    Raises:
        SettingsError: a module or the class cannot be imported, or a setting is not of the form key=value.
        DataError: the data cannot be read.
    """
    from itertools import islice

    from slipstream.data import read_source
    from slipstream.data.prompts import read_messages

    import_modules(modules)
    if ":" in env:
        from slipstream.envs.registration import load_env_creator

        import_modules([env.partition(":")[0]])
        load_env_creator(env)
    else:
        from slipstream.envs import spec

        spec(env)  # an unknown id is an error of the command, not a finding about an environment
    kwargs = key_values(settings)
    if not data:
        return kwargs, None
    rows = []
    for where, row in islice(read_source(data), limit):
        if row.get("prompt") is None:
            raise DataError(f"{where}: no 'prompt' column or value; add chat messages or text")
        messages = read_messages(row["prompt"], where, "prompt")
        rows.append({**row, "prompt": [dict(message) for message in messages]})
    return kwargs, rows


def algorithm_settings(modules: Sequence[str], settings: Sequence[str]) -> AlgorithmSettings:
    """The section ``algorithm`` from ``key=value`` texts without its prefix, after importing ``modules``."""
    from slipstream.config import load_settings

    import_modules(modules)
    return load_settings([], [f"algorithm.{text}" for text in settings]).settings.algorithm


def inference_section(text: str) -> InferenceSettings:
    """The section ``inference`` from JSON; empty text means its defaults.

    Raises:
        SettingsError: no JSON, or a key or value that the section does not take.
    """
    from pydantic import ValidationError

    from slipstream.config.settings import InferenceSettings

    try:
        return InferenceSettings.model_validate_json(text or "{}")
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the text'}: {e['msg']}" for e in error.errors())
        raise SettingsError(
            f"--settings cannot be used ({wrong}); give a JSON object with keys of the section inference"
        ) from None


def key_values(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as one mapping, values read as YAML.

    Raises:
        SettingsError: a text is not of that form, or its value is no YAML.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for text in settings:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise SettingsError(f"--setting {text!r} is not of the form key=value")
        try:
            OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise SettingsError(
                f"--setting {text!r}: the value is no valid YAML ({' '.join(str(error).split())}); put text in quotes"
            ) from error
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
