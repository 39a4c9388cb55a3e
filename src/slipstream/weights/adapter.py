"""LoRA adapters for vLLM: a few megabytes in place of all the weights.

Owns: writing an adapter in peft's format, and having vLLM load it under one name in the place of the one before.
Refuses: engines without LoRA (they are sent merged weights by any other transport); checksums: vLLM does not say what
an adapter holds, so a publish of adapters is verified by a probe; requests that a pause keeps: in vLLM each goes on
with the adapter that it began with, under the new version's name.

The one before is unloaded first.  vLLM's own way of loading in place marks the adapter to be read from disk again for
every batch that uses it.

Launch vLLM with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``; requests name the adapter as their
``model``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from slipstream.errors import PublishError, RequestError
from slipstream.inference.client import write_safetensors
from slipstream.inference.types import Engine
from slipstream.weights.transport import Export, Staged, collect, stage_tensors
from slipstream.weights.wire import abandon, slug


@runtime_checkable
class _Callable(Protocol):
    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any: ...


class AdapterTransport:
    """Adapters as directories that both sides see.

    Args:
        directory: where they are written.
        config: peft's ``adapter_config.json`` as a mapping (``r``, ``lora_alpha``, ``target_modules``, ...).
        lora_name: what requests call it.
        dtype: as for ``InProcessTransport``.
    """

    name = "adapter"
    continues = False

    def __init__(
        self, directory: Path, config: Mapping[str, Any], *, lora_name: str = "policy", dtype: str | None = None
    ) -> None:
        self._directory = directory
        self._config = {"peft_type": "LORA", **config}
        self._lora_name = lora_name
        self._dtype = dtype
        self._folders: set[Path] = set()

    def stage(self, version: str, export: Export) -> Staged:
        """Write the adapter.

        Raises:
            PublishError: the export is no adapter, or it cannot be written; nothing is left of it.
        """
        staged = stage_tensors(version, collect(export, self._dtype))
        wrong = [name for name in staged.tensors if ".lora_" not in name]
        if wrong:
            raise PublishError(f"{wrong[0]} is no part of an adapter; publish merged weights by another transport")
        folder = self._directory / f"adapter-{slug(version)}"
        try:
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text(json.dumps(self._config))
            write_safetensors(folder / "adapter_model.safetensors", staged.tensors)
        # safetensors raises a class of its own for a failed write.
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise PublishError(f"cannot write {folder}: {error}") from error
        self._folders.add(folder)
        return Staged(version, {}, staged.checksums, staged.bytes, staged.bytes, folder)

    async def send(self, staged: Staged, engine: Engine) -> None:
        """Have it loaded in the place of the one before."""
        if not isinstance(engine, _Callable):
            raise PublishError(f"adapters go to a vLLM behind a URL, not to a {type(engine).__name__}")
        with contextlib.suppress(RequestError):  # none was loaded
            await engine.call("POST", "/v1/unload_lora_adapter", {"lora_name": self._lora_name})
        body = {"lora_name": self._lora_name, "lora_path": str(staged.payload)}
        await engine.call("POST", "/v1/load_lora_adapter", body)

    async def abandon(self, engine: Engine) -> None:
        """See ``Transport``."""
        await abandon(engine, self.name)

    def release(self, staged: Staged) -> None:
        """Delete the directory."""
        shutil.rmtree(staged.payload, ignore_errors=True)
        self._folders.discard(staged.payload)

    def close(self) -> None:
        """Delete every directory that is left."""
        while self._folders:
            shutil.rmtree(self._folders.pop(), ignore_errors=True)
