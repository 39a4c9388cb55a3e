"""The registry: ``register``, ``make``, ``spec`` and friends, shaped like skyrl-gym's.

Owns: ids and how their environments are built.  Refuses: importing an environment before it is made.

An id that is unknown here is looked up in skyrl-gym's own registry when that package is installed, so classes
that were registered there run unchanged::

    register("my-env", "my_package.envs:MyEnv", kwargs={"level": 2})
    env = make("my-env", env_config=EnvConfig(), extras={"max_turns": 3})
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.envs import error
from slipstream.envs.core import Env
from slipstream.errors import SettingsError

__all__ = [
    "EnvConfig",
    "EnvCreator",
    "EnvSpec",
    "deregister",
    "load_env_creator",
    "make",
    "pprint_registry",
    "register",
    "registry",
    "spec",
]


class EnvCreator(Protocol):
    """A class or function that builds an environment from keyword arguments."""

    def __call__(self, **kwargs: Any) -> Any: ...


class EnvConfig(dict[str, Any]):
    """Settings of an environment, readable as items and as attributes (skyrl-gym classes use either).

    >>> EnvConfig(db_path="data").db_path
    'data'
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"env_config has no {name!r}; it has {sorted(self)}. "
                f"Set it in env.kwargs.{name}, which are those of the environment that env.id names"
            ) from None


@dataclasses.dataclass
class EnvSpec:
    """How to build one environment: its id, its entry point (``"module:Class"`` or a callable), its arguments."""

    id: str
    entry_point: EnvCreator | str | None = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.name = self.id

    def make(self, **kwargs: Any) -> Any:
        """``make`` with this spec."""
        return make(self, **kwargs)

    def to_json(self) -> str:
        """The spec as JSON; a callable cannot be written (``ValueError``)."""
        fields = {"id": self.id, "entry_point": self.entry_point, "kwargs": self.kwargs}
        for key, value in fields.items():
            if callable(value):
                raise ValueError(
                    f"Callable found in {self.id} for {key}: {value!r}; only an entry point written as "
                    "'module:Class' can be serialised"
                )
        return json.dumps(fields)

    @staticmethod
    def from_json(json_env_spec: str) -> EnvSpec:
        """Read what ``to_json`` wrote; raises ``ValueError`` on anything else."""
        fields = json.loads(json_env_spec)
        try:
            return EnvSpec(**fields)
        except TypeError as wrong:
            raise ValueError(f"{fields!r} is not an EnvSpec ({wrong})") from wrong

    def pprint(self, disable_print: bool = False, include_entry_points: bool = False) -> str | None:
        """Print the spec, or return the text when ``disable_print``."""
        text = f"id={self.id}"
        if include_entry_points:
            text += f"\nentry_point={self.entry_point}"
        return _show(text, disable_print)


registry: dict[str, EnvSpec] = {}
"""All environments registered here, by id."""


def _show(text: str, disable_print: bool) -> str | None:
    if disable_print:
        return text
    print(text)
    return None


def _skyrl_registration() -> Any | None:
    """skyrl-gym's registration module, or None when the package is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return None
    # The id may be registered by the package itself, so its environments are imported too.
    importlib.import_module("skyrl_gym")
    return importlib.import_module("skyrl_gym.envs.registration")


def load_env_creator(name: str) -> EnvCreator:
    """Import ``"module:Class"`` and return the class or function."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise error.Error(f"entry point {name!r} must read 'module:Class'")
    try:
        creator: EnvCreator = getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise error.Error(f"entry point {name!r}: module {module_name!r} has no {attribute!r}") from None
    return creator


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register environments, rewards or losses; the working directory counts as a place.

    Raises:
        SettingsError: a module cannot be imported, with its own error.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:  # a console script does not see the working directory
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        # Fault boundary: a user's module may raise anything while it is imported.
        except Exception as error:
            raise SettingsError(
                f"env.modules: {name!r} cannot be imported ({type(error).__name__}: {error}); "
                "run from the directory that holds it, or install it"
            ) from error


def register(id: str, entry_point: EnvCreator | str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
    """Register an environment.

    Args:
        id: its name in ``env_class`` columns and settings.
        entry_point: ``"module:Class"`` (imported on first use) or a callable.
        kwargs: arguments passed at every ``make``; those of the call win.

    Raises:
        RegistrationError: the id is taken.
        Error: there is no entry point.
    """
    if entry_point is None:
        raise error.Error(f"register({id!r}): `entry_point` must be provided")
    if id in registry:
        raise error.RegistrationError(
            f"An environment with name `{id}` is already registered; deregister it first or choose another id"
        )
    registry[id] = EnvSpec(id=id, entry_point=entry_point, kwargs=dict(kwargs or {}))


def deregister(id: str) -> None:
    """Forget an environment; raises ``Error`` for an unknown id."""
    if id not in registry:
        raise error.Error(f"No registered env with id: {id}. Cannot deregister an environment that is not registered.")
    del registry[id]


def spec(env_id: str) -> Any:
    """The ``EnvSpec`` of an id (skyrl-gym's own spec object for an id registered there)."""
    found = registry.get(env_id)
    if found is not None:
        return found
    skyrl = _skyrl_registration()
    if skyrl is not None and env_id in skyrl.registry:
        return skyrl.registry[env_id]
    raise error.Error(
        f"No registered env with id: {env_id}. Known here: {', '.join(sorted(registry))}. "
        "Register it (slipstream.envs.register) or name the module that does in env.modules."
    )


def make(id: str | EnvSpec, **kwargs: Any) -> Any:
    """Build an environment.

    Registered arguments are copied, then overlaid by ``kwargs`` (usually ``env_config`` and ``extras``).

    Raises:
        Error: unknown id, or no entry point.
        TypeError: the constructor refuses the arguments, or does not build an environment.
    """
    env_spec = id if isinstance(id, EnvSpec) else spec(id)
    if not isinstance(env_spec, EnvSpec):
        return env_spec.make(**kwargs)
    if env_spec.entry_point is None:
        raise error.Error(f"{env_spec.id} registered but entry_point is not specified")
    arguments = copy.deepcopy(env_spec.kwargs)
    arguments.update(kwargs)
    creator: EnvCreator = (
        load_env_creator(env_spec.entry_point) if isinstance(env_spec.entry_point, str) else env_spec.entry_point
    )
    try:
        env = creator(**arguments)
    except TypeError as wrong:
        raise TypeError(
            f"{wrong} was raised from the environment creator for {env_spec.id} with kwargs ({sorted(arguments)})"
        ) from wrong
    if not _is_env(env):
        raise TypeError(
            f"{env_spec.id}: an environment must inherit from slipstream.envs.Env (or skyrl_gym.Env), "
            f"got {type(env).__module__}.{type(env).__qualname__}"
        )
    env.spec = EnvSpec(id=env_spec.id, entry_point=env_spec.entry_point, kwargs=arguments)
    return env


def _is_env(candidate: Any) -> bool:
    """True for our base class and, by name so that nothing is imported, for skyrl-gym's."""
    if isinstance(candidate, Env):
        return True
    return any(base.__module__ == "skyrl_gym.core" and base.__name__ == "Env" for base in type(candidate).__mro__)


def pprint_registry(
    print_registry: Mapping[str, Any] = registry, *, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print all ids in columns, or return the text when ``disable_print``."""
    ids = sorted(print_registry)
    if not ids:
        return _show("No environments registered.", disable_print)
    width = max(len(i) for i in ids) + 2
    rows = [ids[i : i + num_cols] for i in range(0, len(ids), num_cols)]
    text = "\n".join("".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
    return _show(text, disable_print)
