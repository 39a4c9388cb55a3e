"""What every section of the settings is made of: the strict base class and shared types.

Owns: ``Settings``, text and URL lists, the optimiser's section (three sections hold one).
Refuses: sections of one room (``slipstream.config.settings`` and ``slipstream.config.algorithm`` have them).

>>> OptimizerSettings(lr=1e-5).lr
1e-05
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]


def one_or_many(value: Any) -> Any:
    """A single text as a list of one."""
    return (value,) if isinstance(value, str) else value


def section_defaults(**defaults: Any) -> BeforeValidator:
    """Defaults of a section where it stands: they hold also when only a part of the section is given."""
    return BeforeValidator(lambda value: {**defaults, **value} if isinstance(value, dict) else value)


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (off) or at least 1")
    return value


def _no_empty_text(values: tuple[str, ...]) -> tuple[str, ...]:
    if any(not value for value in values):
        raise ValueError("must not hold an empty string")
    return values


def _http_url(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no base URL; write for example http://127.0.0.1:8000")
    return tuple(url.rstrip("/") for url in urls)


def _expand_user(path: Path) -> Path:
    return path.expanduser()


Strings = Annotated[tuple[str, ...], BeforeValidator(one_or_many), AfterValidator(_no_empty_text)]
"""A list of strings; a single string is a list of one."""

Urls = Annotated[tuple[str, ...], BeforeValidator(one_or_many), AfterValidator(_http_url)]
TopK = Annotated[int, AfterValidator(_top_k)]
Beta = Annotated[float, Field(ge=0, lt=1)]
RunDir = Annotated[Path, AfterValidator(_expand_user)]


class Settings(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


class OptimizerSettings(Settings):
    """AdamW with a warm-up schedule."""

    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Decay rates of AdamW's two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator of AdamW's update.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the global gradient norm to this.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warm-up.")
    scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    total_steps: int | None = Field(
        None,
        ge=1,
        description="Optimiser steps of the linear/cosine schedule; null is filled in from the run's length.",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where linear/cosine end, as a share of the peak rate.")
