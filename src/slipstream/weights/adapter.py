"""LoRA adapters for vLLM: a few megabytes in place of all the weights.

Owns: writing an adapter in peft's format, and having vLLM load it under one name in the place of the one before.
Refuses: engines without LoRA (they are sent merged weights by any other transport); requests that a pause keeps: in
vLLM each goes on with the adapter that it began with, under the new version's name.

The one before is unloaded first.  vLLM's own way of loading in place marks the adapter to be read from disk again for
every batch that uses it.  It is loaded when the update has been finished, which only gives the version its name: there
vLLM (0.32) drops every adapter from its workers, and what is read back has to be what requests will meet.

Verified like whole weights where vLLM runs with this package's plug-in: the adapter is read back from the buffers that
vLLM multiplies with.  So B is sent with its scale in it (vLLM would multiply it in by itself, and other bytes come
back).  Without the plug-in, and where several workers hold parts, a publish needs a probe.

Launch vLLM with ``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and some ``--weight-transfer-config``
(without one it takes no update at all), as ``inference.transport=adapter`` does; requests name the adapter as their
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
from slipstream.inference.launch.engines import ADAPTER
from slipstream.inference.types import Engine
from slipstream.weights.transport import Export, Staged, collect, stage_tensors
from slipstream.weights.wire import abandon, slug

_A, _B = ".lora_A.weight", ".lora_B.weight"


@runtime_checkable
class _Callable(Protocol):
    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any: ...


class AdapterTransport:
    """Adapters as directories that both sides see.

    An export holds peft's tensors, ``....lora_A.weight`` ``(r, in)`` and ``....lora_B.weight`` ``(out, r)``, the scale
    ``alpha / r`` multiplied into B.

    Args:
        directory: where they are written.
        lora_name: what requests call it.
        dtype: as for ``InProcessTransport``.
    """

    name = "adapter"
    continues = False
    after_finish = True

    def __init__(self, directory: Path, *, lora_name: str = ADAPTER, dtype: str | None = None) -> None:
        self._directory = directory
        self._lora_name = lora_name
        self._dtype = dtype
        self._folders: set[Path] = set()

    def stage(self, version: str, export: Export) -> Staged:
        """Write the adapter.

        Raises:
            PublishError: the export is no adapter, or it cannot be written; nothing is left of it.
        """
        staged = stage_tensors(version, collect(export, self._dtype))
        wrong = [name for name in staged.tensors if not name.endswith((_A, _B))]
        if wrong:
            raise PublishError(f"{wrong[0]} is no part of an adapter; publish merged weights by another transport")
        folder = self._directory / f"adapter-{slug(version)}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        try:
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text(json.dumps(_config(staged.tensors)))
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


def _config(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Peft's description, read off the tensors; alpha is the rank, since the scale is in B."""
    ranks = {name: int(tensor.shape[0]) for name, tensor in tensors.items() if name.endswith(_A)}
    modules = sorted({name.removesuffix(_A).rpartition(".")[2] for name in ranks})
    rank = max(ranks.values(), default=0)
    own = {name.removesuffix(_A).removeprefix("base_model.model."): r for name, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": modules,
        **({"rank_pattern": own, "alpha_pattern": own} if own else {}),
    }
