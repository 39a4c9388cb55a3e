"""Rewrites the frozen lists of public names and of the command line: ``python tests/update_public_api.py``.

A change of these files in a commit says that the public surface changed on purpose.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

DATA = Path(__file__).parent / "data"
PUBLIC_API, CLI_SURFACE = DATA / "public_api.txt", DATA / "cli_surface.txt"

# Rooms say in ``__all__`` what is public; these modules are public by their own names.
MODULES = {
    "slipstream.errors": None,
    "slipstream.config": "all",
    "slipstream.trajectory": "all",
    "slipstream.envs": "all",
    "slipstream.envs.checker": ("Finding", "check_env"),
    "slipstream.inference.types": None,
    "slipstream.inference.client": ("HttpEngine",),
    "slipstream.inference.server": ("build_app", "serve"),
    "slipstream.inference.embedded.engine": ("EmbeddedEngine",),
    "slipstream.inference.embedded.pretrained": ("bundled_model", "load_causal_lm", "load_tokenizer"),
    "slipstream.inference.embedded.tiny": ("tiny_model", "tiny_model_dir", "tiny_tokenizer"),
    "slipstream.data": "all",
    "slipstream.schedule": "all",
    "slipstream.simulate": "all",
    "slipstream.ledger": "all",
    "slipstream.rollout": "all",
    "slipstream.algorithms": "all",
    "slipstream.weights": "all",
    "slipstream.training.protocol": "all",
    "slipstream.training.torch_backend": ("TorchBackend",),
    "slipstream.trainers.callbacks": ("Callback", "Control", "StepInfo"),
    "slipstream.trainers.run": ("Run", "RunResult", "train"),
    "slipstream.trainers.quickstart": ("quickstart",),
}


def public_api() -> str:
    """Every public name with its signature, room by room."""
    lines: list[str] = []
    for name, wanted in MODULES.items():
        module = importlib.import_module(name)
        lines.append(f"[{name}]")
        names = module.__all__ if wanted == "all" else wanted if wanted is not None else _own_names(module)
        for item in sorted(names):
            lines += _described(item, getattr(module, item))
        lines.append("")
    return "\n".join(lines)


def _own_names(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _described(name: str, value: Any) -> Iterator[str]:
    from pydantic import BaseModel

    if inspect.ismodule(value):
        yield f"{name}  (module)"
    elif inspect.isclass(value) and issubclass(value, BaseModel):
        yield f"class {name}  (settings: see the configuration reference)"
    elif inspect.isclass(value) and issubclass(value, Enum):
        yield f"class {name}: {', '.join(value.__members__)}"
    elif get_args(value):
        yield f"{name} = {value}"
    elif inspect.isclass(value):
        yield f"class {name}{_signature(value)}"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(cls: type) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_") or name in fields:
            continue
        if isinstance(value, property):
            yield f"{name}  (property)"
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            function = getattr(cls, name)
            prefix = "async def" if inspect.iscoroutinefunction(function) else "def"
            yield f"{prefix} {name}{_signature(function)}"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return "(...)"
    parameters = [
        p.replace(annotation=_shown(p.annotation), default=_shown(p.default, default=True))
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=_shown(signature.return_annotation)))


class _Text:
    """Stands in a signature for an annotation or a default; shows as its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(value: Any, default: bool = False) -> Any:
    """Annotations as written; plain defaults by value, others by type (their text differs between machines)."""
    if value is inspect.Parameter.empty:
        return value
    if not default:
        return _Text(value.strip("'") if isinstance(value, str) else inspect.formatannotation(value))
    plain = isinstance(value, (bool, int, float, str, bytes, type(None), tuple))
    return _Text(repr(value) if plain else f"<{type(value).__name__}>")


def cli_surface() -> str:
    """Every command with its arguments and options, read from the functions behind them."""
    from slipstream.cli.main import app

    lines: list[str] = []

    def walk(group: Any, path: str) -> None:
        if group.registered_callback is not None:
            lines.extend((path, *_options(group.registered_callback.callback)))
        for command in group.registered_commands:
            name = command.name or command.callback.__name__.replace("_", "-")
            lines.extend((f"{path} {name}", *_options(command.callback)))
        for inner in group.registered_groups:
            walk(inner.typer_instance, f"{path} {inner.name}")

    walk(app, "slipstream")
    return "\n".join(lines) + "\n"


def _options(function: Any) -> Iterator[str]:
    import typer.models

    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info, *_ = get_args(hints[name])
        if get_args(kind) and get_args(kind)[-1] is type(None):
            kind = get_args(kind)[0]  # optional
        typed = str(kind) if get_args(kind) else kind.__name__
        default = "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        shown = name if isinstance(info, typer.models.ArgumentInfo) else "--" + name.replace("_", "-")
        # typer takes the first name for a default when it stands inside Annotated.
        first = (info.default,) if isinstance(info.default, str) else ()
        names = (*first, *(info.param_decls or ())) or (shown,)
        yield f"    {' '.join(names)}  {typed.removeprefix('typing.')}  {default}"


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for path, text in ((PUBLIC_API, public_api()), (CLI_SURFACE, cli_surface())):
        changed = not path.exists() or path.read_text() != text
        path.write_text(text)
        print(f"{path}: {'rewritten' if changed else 'unchanged'}", file=sys.stderr)
