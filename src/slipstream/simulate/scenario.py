"""What is simulated: work, engines, trainer and schedule, with their units.

Owns: the typed inputs and reading them from YAML and ``key=value``.  Refuses: running anything.

>>> scenario = Scenario.model_validate({"work": {"turn_tokens": "lognormal(400, 1.0)"}, "engines": {"replicas": 2}})
>>> scenario.schedule.kind, scenario.engines.seconds_per_token(10)
('sync', 0.025)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from slipstream.config.schedule_checks import BATCHES
from slipstream.config.settings import ScheduleSettings, Settings
from slipstream.errors import SettingsError
from slipstream.simulate.distributions import Constant, Distribution, Exponential, LogNormal, parse_distribution


def _parsed(value: Any) -> Distribution:
    try:
        return parse_distribution(value)
    except SettingsError as error:
        raise ValueError(str(error)) from None


Amount = Annotated[Distribution, BeforeValidator(_parsed), PlainSerializer(str)]
"""A distribution, also as a number or text."""


class _Section(Settings):
    model_config = ConfigDict(arbitrary_types_allowed=True)


class WorkSettings(_Section):
    """What one trajectory asks for."""

    samples_per_prompt: int = Field(8, ge=1, description="Trajectories of a group.")
    prompt_tokens: Amount = Field(Constant(200), description="Tokens of a prompt; a group shares it.")
    turns: Amount = Field(Constant(1), description="Model turns of a trajectory.")
    turn_tokens: Amount = Field(LogNormal(400, 1.0), description="Tokens that the model writes in one turn.")
    observation_tokens: Amount = Field(Constant(0), description="Tokens that the environment adds after a turn.")
    env_seconds: Amount = Field(Constant(0), description="Environment time after each turn, in seconds.")
    common: float = Field(
        0.5, ge=0, le=1, description="Share of a length's rank that the prompt decides: 1 gives a group one length."
    )
    refused_share: float = Field(0.0, ge=0, lt=1, description="Groups that filters refuse, such as zero variance.")
    failed_share: float = Field(0.0, ge=0, lt=1, description="Groups that come back without a score.")


class EngineModel(_Section):
    """Replicas that decode in steps; one step gives each running sequence a token."""

    replicas: int = Field(1, ge=1, description="Engine replicas.")
    max_batch: int = Field(64, ge=1, description="Sequences that one replica decodes together; others queue.")
    step_seconds: float = Field(0.02, gt=0, description="Seconds of a decode step, whatever the batch.")
    step_seconds_per_sequence: float = Field(0.0005, ge=0, description="And for each sequence in it.")
    prefill_seconds_per_token: float = Field(0.0, ge=0, description="Seconds per token that is not in the cache.")
    cache_tokens: float = Field(1e6, ge=0, description="Prefix cache of one replica, in tokens.")
    keep_cache: bool = Field(False, description="Whether cached prefixes outlive a publish (no cache salt).")
    router: Literal["sticky_least_loaded", "consistent_hash", "cache_aware", "round_robin"] = Field(
        "sticky_least_loaded", description="Routing policy."
    )

    def seconds_per_token(self, batch: int) -> float:
        """Seconds between two tokens of one sequence, when ``batch`` run."""
        return self.step_seconds + self.step_seconds_per_sequence * batch


class TrainerModel(_Section):
    """The updates."""

    update_seconds: Amount = Field(Constant(10), description="Seconds of a step's update (scoring included).")
    update_seconds_per_token: float = Field(0.0, ge=0, description="And for each sampled token of its groups.")
    publish_seconds: Amount = Field(Constant(0.5), description="Seconds that engines stand still for a publish.")
    publish_every: int = Field(
        1, ge=1, description="Steps between publishes: 1 is this library; more is for comparison with others."
    )
    pause: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Requests at a publish: frozen, awaited, or aborted and computed anew."
    )


class Scenario(_Section):
    """One simulated run."""

    seed: int = Field(0, ge=0, description="Of all draws.")
    work: WorkSettings = WorkSettings()
    engines: EngineModel = EngineModel()
    trainer: TrainerModel = TrainerModel()
    schedule: ScheduleSettings = ScheduleSettings(steps=30)

    def under(self, **schedule: Any) -> Scenario:
        """The same work under another schedule; ``schedule`` gives its settings.

        Over-sampling of whole batches becomes full batches in a queue, and stays what it is in another batch schedule.
        """
        kept = self.schedule.model_dump(include={"prompts_per_step", "steps", "step_deadline_seconds"})
        drawn = self.schedule.generate_prompts_per_step
        if schedule.get("kind", "sync") in BATCHES:
            kept["generate_prompts_per_step"] = drawn
        else:
            kept["full_batch"] = self.schedule.full_batch or drawn is not None
        return self.model_copy(update={"schedule": ScheduleSettings.model_validate({**kept, **schedule})})

    def with_(self, section: str, **values: Any) -> Scenario:
        """A copy with some fields of a section replaced (and validated)."""
        old = getattr(self, section)
        new = type(old).model_validate({**{n: getattr(old, n) for n in type(old).model_fields}, **values})
        return self.model_copy(update={section: new})


def load_scenario(files: Sequence[Path] = (), overrides: Sequence[str] = (), base: Scenario | None = None) -> Scenario:
    """A scenario from YAML files and ``key=value`` overrides, later ones on top.

    Raises:
        SettingsError: a file is no YAML mapping, a key is unknown, or a value does not fit.
    """
    tree: dict[str, Any] = {} if base is None else base.model_dump(mode="json")
    for path in files:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"{path}: cannot be read as YAML ({str(error).splitlines()[0]})") from None
        if not isinstance(loaded, dict):
            raise SettingsError(f"{path}: want sections such as 'work:' and 'engines:' at the top")
        tree = _merged(tree, loaded)
    for item in overrides:
        key, _, value = item.partition("=")
        try:
            node: Any = yaml.safe_load(value)
        except yaml.YAMLError:
            node = value
        for name in reversed(key.strip().split(".")):
            node = {name: node}
        tree = _merged(tree, node)
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise SettingsError("the scenario cannot be used: " + "; ".join(lines)) from None


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(one)
    for key, value in other.items():
        inside = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if inside else value
    return out


__all__ = [
    "Amount",
    "Constant",
    "EngineModel",
    "Exponential",
    "LogNormal",
    "Scenario",
    "TrainerModel",
    "WorkSettings",
    "load_scenario",
]
