"""The receiving end of every transport, the same in ``slipstream serve`` and in vLLM's workers.

Owns: turning a shipment into whole, named tensors in host memory; the mirror for deltas; the broadcast link.
Refuses: loading them into a model (its caller does, from ``tensors``, once they are complete), versions' meaning.

Lifecycle: any number of ``init``; then per update ``begin`` -> ``receive`` (once or more) -> the caller loads
``tensors`` -> ``release``.  ``tensors`` may alias the sender's memory or the mirror: read only, and only until
``release``.  A failed ``receive`` leaves nothing behind that a later one could mistake for its own.

>>> import tempfile, numpy as np
>>> from pathlib import Path
>>> from safetensors.numpy import save_file
>>> path = Path(tempfile.mkdtemp()) / "w.safetensors"
>>> save_file({"w": np.ones(2, np.float32)}, path)
>>> receiver = Receiver(path.parent)
>>> receiver.begin()
>>> sorted(receiver.receive({"path": str(path)}))
['w']
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.transfer import messages
from slipstream.inference.transfer.gloo import GlooLink
from slipstream.inference.transfer.memory import attach
from slipstream.inference.transfer.packet import Mirror, catch_up
from slipstream.inference.transfer.raw import Raw, cut


def read_safetensors(path: Path) -> Mapping[str, Any]:
    """All tensors of a file: torch tensors where torch is installed (it knows bfloat16), else numpy arrays."""
    from safetensors import SafetensorError, safe_open

    framework = "pt" if importlib.util.find_spec("torch") else "np"
    try:
        with safe_open(str(path), framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path}: not a readable safetensors file ({error})") from error


def allowed(root: Path | None, given: str) -> Path:
    """``given`` as a real path below ``root``; anything else is refused."""
    if root is None:
        raise RequestError("this server takes no weights from disk; start it with a transfer directory")
    path, base = Path(os.path.realpath(given)), Path(os.path.realpath(root))
    if path != base and base not in path.parents:
        raise RequestError(f"{given}: outside the transfer directory {base}")
    return path


class Receiver:
    """Collects the tensors of one update at a time.

    Args:
        root: directory below which files and packets may lie; None refuses them.
        worker: index of this process among those of its replica (tensor-parallel rank).
    """

    def __init__(self, root: Path | None = None, worker: int = 0) -> None:
        self.root = root
        self._worker = worker
        self._mirror = Mirror()
        self._link: GlooLink | None = None
        self.tensors: dict[str, Raw] = {}
        """What the open update has brought so far, by checkpoint name."""
        self.version = ""
        """The version that the last shipment named."""

    def init(self, info: Mapping[str, Any]) -> None:
        """Prepare a way of travelling; blocks until a broadcast group is complete."""
        message = messages.parse_init(info)
        if isinstance(message, messages.DirectoryInit):
            directory = allowed(self.root, message.directory)
            if not directory.is_dir():
                raise RequestError(f"{directory}: not a directory that this server can see")
            return
        self._link = None
        rank = message.first_rank + self._worker
        self._link = GlooLink.join(message.host, message.port, rank, message.world_size, message.timeout_seconds)

    def begin(self) -> None:
        """Forget an update that was left open."""
        self.release()
        self.version = ""

    def check(self, info: Mapping[str, Any]) -> None:
        """Raise what ``receive`` would of a message that is wrong in itself, without moving a byte."""
        message = messages.parse_shipment(info)
        paths = message.packets if isinstance(message, messages.DeltaShipment) else []
        for path in [message.path] if isinstance(message, messages.FileShipment) else paths:
            allowed(self.root, path)

    def receive(self, info: Mapping[str, Any]) -> dict[str, Raw]:
        """One shipment's tensors, added to ``tensors``.

        Raises:
            RequestError: the message is wrong, or names what this receiver may not read.
            InferenceError: the bytes did not arrive whole.
        """
        message = messages.parse_shipment(info)
        found = self._fetch(message)
        twice = sorted(self.tensors.keys() & found.keys())
        if twice:
            raise RequestError(f"{twice[0]} was sent twice in one update")
        self.tensors.update(found)
        self.version = getattr(message, "version", "")
        return found

    def release(self) -> None:
        """Let go of the sender's memory.  The mirror stays, for the next delta."""
        self.tensors = {}

    def close(self) -> None:
        """Release everything."""
        self.release()
        self._mirror.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _fetch(self, message: Any) -> dict[str, Raw]:
        if isinstance(message, messages.AbandonShipment):
            self.release()
            raise RequestError("the update was abandoned, as asked")
        if isinstance(message, messages.FileShipment):
            return {name: Raw.of(t) for name, t in read_safetensors(allowed(self.root, message.path)).items()}
        if isinstance(message, messages.MemoryShipment):
            return cut(attach(message.path, message.size), messages.entries(message.table))
        if isinstance(message, messages.DeltaShipment):
            return self._delta(message)
        return self._broadcast(message)

    def _delta(self, message: messages.DeltaShipment) -> dict[str, Raw]:
        catch_up(self._mirror, [allowed(self.root, path) for path in message.packets])
        if self._mirror.version != message.version:
            raise InferenceError(f"the packets lead to {self._mirror.version}, not to {message.version}")
        return dict(self._mirror.tensors)

    def _broadcast(self, message: messages.GlooShipment) -> dict[str, Raw]:
        if self._link is None:
            raise InferenceError("no broadcast group has been joined; send init_info first")
        buffer = np.empty(message.size, np.uint8)
        try:
            self._link.broadcast(buffer, message.chunk_bytes)
        except InferenceError:
            self._link = None
            raise
        return cut(buffer, messages.entries(message.table))
