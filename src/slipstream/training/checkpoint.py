"""A training checkpoint's files: safetensors parts and one JSON manifest, no pickle.

Owns: writing and reading a directory of named tensor parts with their sizes and SHA-256 sums.
Refuses: what the tensors mean, staging and pointers (the whole-run checkpoint does those).

Layout: ``training.json`` (written last) names every part's file, size and digest, and carries plain
values; ``PART.safetensors`` holds tensors by parameter name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError

MANIFEST = "training.json"
FORMAT = 1


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(directory: Path, parts: Iterable[tuple[str, Mapping[str, torch.Tensor]]], values: Mapping[str, Any]) -> None:
    """Write all parts, then the manifest.

    Raises:
        CheckpointError: the disk refused (full, read-only); the manifest is then absent.
    """
    entries: dict[str, Any] = {}
    path = directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        for name, tensors in parts:
            path = directory / f"{name}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
            _sync(path)
            entries[name] = {"file": path.name, "bytes": path.stat().st_size, "sha256": _digest(path)}
        path = directory / MANIFEST
        path.write_text(json.dumps({"format": FORMAT, "parts": entries, **values}, indent=1))
        _sync(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {path}: {error}; free space or choose another run_dir") from error


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def read_values(directory: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        CheckpointError: it is missing, not JSON, or of another format.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} holds no {MANIFEST}: not a training checkpoint, or a torn one") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("parts"), dict):
        raise CheckpointError(f"{path} has no supported format (want {FORMAT})")
    return values


def read_part(directory: Path, values: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
    """One part, checked against the manifest.

    Raises:
        CheckpointError: the part is missing, of the wrong size, or does not match its digest.
    """
    entry = values["parts"].get(name)
    if entry is None:
        raise CheckpointError(f"{directory}: the checkpoint has no part {name!r}")
    path = directory / entry["file"]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete")
    if path.stat().st_size != entry["bytes"]:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}; it is torn")
    if _digest(path) != entry["sha256"]:
        raise CheckpointError(f"{path} does not match its SHA-256 in {MANIFEST}; it is corrupt")
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
