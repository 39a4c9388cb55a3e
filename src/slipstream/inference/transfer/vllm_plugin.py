"""vLLM's weight-transfer plug-in: the receiver inside vLLM's workers, and reading back what their kernels hold.

Owns: ``SlipstreamTransferEngine`` (backend ``slipstream``), its registration, the worker extension that verifies.
Refuses: loading anything before all of it has arrived; taking "loaded" for an answer.

vLLM finds ``register`` through the entry-point group ``vllm.general_plugins`` of this package; start it with
``FLAGS``.  Nothing here is imported by anything but vLLM; its environment needs Slipstream's core and nothing more.

An update touches the model in ``finish_weight_update`` alone, from tensors that are complete by then.  vLLM's layerwise
reload counts elements per layer and cannot tell a tensor sent twice from two tensors, so a half-loaded layer must never
be loaded into again; should a load fail, every layer gets back what it held.

Reading back: on CPUs vLLM repacks the weights of linear layers and frees the originals (its own checksums are then the
hash of nothing).  A one-hot row through the layer's kernel returns a column of the weight, exactly: one product
with a one, and zeros.  ``slipstream_checksums`` reads columns of every layer that way and compares them with what was
received; a layer that differs is read in full, and its true checksum reported.  Adapters are read from the buffers that
vLLM multiplies with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.inference.transfer.raw import Raw
from slipstream.inference.transfer.receiver import Receiver

if TYPE_CHECKING:
    import torch

BACKEND = "slipstream"
EXTENSION = "slipstream.inference.transfer.vllm_plugin.WorkerExtension"
READ_BACK = "slipstream_checksums"
"""Name of the worker method; ``/collective_rpc`` calls it."""
NO_ADAPTER = "no adapter is loaded"
"""What ``read_back_adapter`` tells of in place of an adapter's tensors."""
FLAGS = ("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', "--worker-extension-cls", EXTENSION)
"""Command-line flags of a vLLM that takes weights from this package."""

COLUMNS = 16
"""Columns read per packed layer and publish; which ones is drawn from the version."""
_READ_ROWS = 256  # one-hot rows per product when a layer is read in full


def register() -> None:
    """Make the backend known; called by vLLM in each of its processes, more than once in some."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, __name__, "SlipstreamTransferEngine")


# ---- reading back


def _columns(seed: str, width: int, count: int) -> list[int]:
    """``count`` different columns below ``width``, the same for the same seed."""
    picked: dict[int, None] = {}
    turn = 0
    while len(picked) < min(count, width):
        picked[int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:8]) % width] = None
        turn += 1
    return list(picked)


def _through_kernel(module: Any, columns: list[int], width: int, dtype: Any) -> torch.Tensor:
    """Columns of a packed weight, ``(out_features, len(columns))``, as its kernel multiplies with them."""
    import torch

    parts = []
    for start in range(0, len(columns), _READ_ROWS):
        chosen = columns[start : start + _READ_ROWS]
        rows = torch.zeros(len(chosen), width, dtype=dtype)
        rows[torch.arange(len(chosen)), torch.tensor(chosen)] = 1
        parts.append(module.cpu_linear(rows, module.weight, None).to(dtype))
    return torch.cat(parts).T.contiguous()


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint tensor lives in vLLM's model: rows ``[begin, end)`` of a parameter of a module."""

    module: Any
    leaf: str
    begin: int
    end: int


def _bare(module: Any) -> Any:
    """The layer below vLLM's LoRA wrapper, if it has one."""
    return getattr(module, "base_layer", module)


def locate(model: Any, received: Mapping[str, Raw]) -> dict[str, _Place]:
    """Places of the received names that can be told: same path, or a part of a fused layer.

    Names that vLLM maps otherwise (other architectures) and sharded parameters are left out: unknown, not wrong.
    """
    modules = {path: _bare(module) for path, module in model.named_modules()}
    fused = {
        part: (whole, parts)
        for whole, parts in (getattr(model, "packed_modules_mapping", None) or {}).items()
        for part in parts
    }
    found: dict[str, _Place] = {}
    for name, raw in received.items():
        path, _, leaf = name.rpartition(".")
        if path in modules:
            rows = raw.shape[0] if raw.shape else 1
            found[name] = _Place(modules[path], leaf, 0, rows)
            continue
        parent, _, part = path.rpartition(".")
        whole, parts = fused.get(part, ("", []))
        siblings = [f"{parent}.{other}.{leaf}" for other in parts]
        if f"{parent}.{whole}" not in modules or not all(sibling in received for sibling in siblings):
            continue
        begin = sum(received[sibling].shape[0] for sibling in siblings[: parts.index(part)])
        found[name] = _Place(modules[f"{parent}.{whole}"], leaf, begin, begin + raw.shape[0])
    return found


class _Kernels:
    """Sampled columns of packed layers, read once per layer, however many checkpoint tensors it fuses."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._read: dict[int, tuple[list[int], torch.Tensor]] = {}

    def sample(self, module: Any, width: int, dtype: Any) -> tuple[list[int], torch.Tensor]:
        """Column numbers and the columns, ``(out_features, COLUMNS)``."""
        known = self._read.get(id(module))
        if known is None:
            columns = _columns(f"{self._seed}/{len(self._read)}", width, COLUMNS)
            known = self._read[id(module)] = columns, _through_kernel(module, columns, width, dtype)
        return known


def _same(value: torch.Tensor, sent: torch.Tensor) -> bool:
    """Bit for bit, also where a kernel keeps a wider copy of a narrow tensor (biases, on some CPUs)."""
    import torch

    narrow = value.to(sent.dtype)
    return bool(torch.equal(narrow, sent) and torch.equal(narrow.to(value.dtype), value))


def _held(place: _Place, raw: Raw, kernels: _Kernels) -> str | None:
    """The checksum of what the model holds there; None where it cannot be read."""
    import torch

    parameter = getattr(place.module, place.leaf, None)
    sent = raw.torch()
    value: torch.Tensor | None = None
    if parameter is not None and parameter.numel() and tuple(parameter.shape[1:]) == raw.shape[1:]:
        if parameter.shape and parameter.shape[0] < place.end:
            return None
        value = parameter.detach()[place.begin : place.end].cpu() if parameter.shape else parameter.detach().cpu()
        if not _same(value, sent):
            return Raw.of(value).checksum()
    if place.leaf == "weight" and hasattr(place.module, "cpu_linear") and len(raw.shape) == 2:
        width = raw.shape[1]
        columns, got = kernels.sample(place.module, width, sent.dtype)
        if got.shape[0] < place.end:
            return None
        if not torch.equal(got[place.begin : place.end], sent[:, columns]):
            whole = _through_kernel(place.module, list(range(width)), width, sent.dtype)
            return Raw.of(whole[place.begin : place.end]).checksum()
        return raw.checksum()
    return raw.checksum() if value is not None else None


def _not_sent(model: Any, places: Mapping[str, _Place]) -> Iterator[tuple[str, Any]]:
    """What the model holds and no received tensor covers; shared parameters count with their owner."""
    covered = {id(getattr(place.module, place.leaf, None)) for place in places.values()}
    for name, parameter in model.named_parameters():
        if parameter.numel() and id(parameter) not in covered:
            yield name, parameter
    # Packed layers have no parameter left to be found by.
    modules = {id(place.module) for place in places.values()}
    for path, module in model.named_modules():
        layer = _bare(module)
        width = getattr(layer, "input_size", None)
        if hasattr(layer, "cpu_linear") and id(layer) not in modules and not layer.weight.numel() and width:
            yield f"{path}.weight", _through_kernel(layer, list(range(width)), width, layer.weight.dtype)


def _stale_ties(
    model: Any, places: Mapping[str, _Place], received: Mapping[str, Raw], kernels: _Kernels
) -> Iterator[tuple[str, Any]]:
    """Layers that share a received parameter (a tied head) but whose own packed kernel holds something else."""
    owners = {id(getattr(place.module, place.leaf, None)): name for name, place in places.items()}
    modules = {id(place.module) for place in places.values()}
    for path, module in model.named_modules():
        layer = _bare(module)
        name = owners.get(id(getattr(layer, "weight", None)))
        if name is None or id(layer) in modules or not hasattr(layer, "cpu_linear"):
            continue
        sent, rows = received[name].torch(), received[name].shape[0]
        columns, got = kernels.sample(layer, sent.shape[1], sent.dtype)
        if got.shape[0] >= rows and not bool((got[:rows] == sent[:, columns]).all()):
            whole = _through_kernel(layer, list(range(sent.shape[1])), sent.shape[1], sent.dtype)
            yield f"{path}.weight", whole[:rows]


def read_back(model: Any, received: Mapping[str, Raw], seed: str) -> dict[str, str]:
    """Checksums of what the model holds, by checkpoint name; empty before anything was received."""
    if not received:
        return {}
    places = locate(model, received)
    kernels = _Kernels(seed)
    held = {name: _held(place, received[name], kernels) for name, place in places.items()}
    told = {name: value for name, value in held.items() if value is not None}
    if len(told) == len(received):
        # Everything that was sent has been found, so whatever else the model holds is older.
        told |= {name: Raw.of(tensor).checksum() for name, tensor in _not_sent(model, places)}
    told |= {name: Raw.of(tensor).checksum() for name, tensor in _stale_ties(model, places, received, kernels)}
    return told


def read_back_adapter(manager: Any) -> dict[str, str]:
    """Checksums of the LoRA adapter that requests run with, by peft's names, from the buffers that are multiplied with.

    Left out is what cannot be told: layers of another form (experts), and all where workers hold parts of an adapter
    (tensor parallelism).  Where none is loaded there is one name that says so, and that nobody sends.
    """
    import torch

    loaded = [(number, slot) for slot, number in enumerate(manager.lora_index_to_id) if number is not None]
    if not loaded:
        return {NO_ADAPTER: Raw.of(torch.empty(0)).checksum()}
    if any(getattr(module, "tp_size", 1) > 1 for module in manager.modules.values()):
        return {}
    number, slot = max(loaded)
    adapter = manager.get_adapter(number)
    told: dict[str, str] = {}
    for path, module in manager.modules.items():
        weights, names = adapter.get_lora(path), manager.packed_modules.get(path, [path])
        for side in "AB":
            # A layer that vLLM packs (q, k and v) holds one adapter for each of its parts.
            stacked = getattr(module, f"lora_{side.lower()}_stacked", ())
            sent = [None] * len(stacked) if weights is None else getattr(weights, f"lora_{side.lower()}")
            parts = sent if isinstance(sent, list) else [sent]
            forms = {buffer.dim() for buffer in stacked} | {2 + like.dim() for like in parts if like is not None}
            if not len(names) == len(parts) == len(stacked) or forms != {4}:
                continue
            for name, like, buffer in zip(names, parts, stacked, strict=True):
                rows, width = (0, 0) if like is None else like.shape
                whole = buffer[slot, 0].cpu()
                held = whole[:rows, :width].contiguous()
                if whole.count_nonzero() > held.count_nonzero():
                    held = whole  # what lies beside it is multiplied with, too
                if held.numel():
                    told[f"base_model.model.{name}.lora_{side}.weight"] = Raw.of(held).checksum()
    return told


class WorkerExtension:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def slipstream_checksums(self) -> dict[str, str]:
        """What this worker's model holds, after an update and before the sender's memory is let go."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        if not isinstance(getattr(engine, "receiver", None), Receiver):
            return {}
        held: dict[str, str] = engine.held()
        # Adapters come by vLLM's own route, so nothing was received when one is published.
        lora = getattr(getattr(self, "model_runner", None), "lora_manager", None)
        return held if held or lora is None else read_back_adapter(lora._adapter_manager)


# ---- loading


def _give_back(model: Any) -> None:
    """Undo a reload that failed half-way: every open layer gets its kernels' tensors back."""
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(module, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def load(model: Any, model_config: Any, received: Mapping[str, Raw], device: Any) -> None:
    """Load checkpoint tensors through the model's own loader."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights((name, raw.torch().to(device)) for name, raw in received.items())
        except BaseException:
            _give_back(model)
            raise
        finalize_layerwise_reload(model, model_config)
        _repack_ties(model, received)


def _repack_ties(model: Any, received: Mapping[str, Raw]) -> None:
    """Pack layers again that share a weight with another one, such as a tied head.

    vLLM 0.32 reloads the owner of a shared weight only.  On a CPU the head multiplies with a packed copy of its own,
    which kept the old weights, silently; found by reading back.
    """
    for path, module in model.named_modules():
        layer = _bare(module)
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and f"{path}.weight" not in received and weight is not None and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def __getattr__(name: str) -> Any:
    """Build the engine class on first use: its base class is vLLM's, which only vLLM's processes have."""
    if name != "SlipstreamTransferEngine":
        raise AttributeError(name)
    built = _engine_class()
    globals()[name] = built
    return built


def _engine_class() -> Any:
    from vllm.distributed.weight_transfer import base

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
        """The message as it came; ``Receiver.init`` validates it."""

        message: dict[str, Any]

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        """The message as it came; ``Receiver.receive`` validates it."""

        message: dict[str, Any]

    class SlipstreamTransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
        """See the module."""

        init_info_cls: ClassVar[Any] = InitInfo
        update_info_cls: ClassVar[Any] = UpdateInfo

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            super().__init__(config, vllm_config, device, model)
            # vLLM's control plane can already load any file; the directory is not what protects it.
            self.receiver = Receiver(Path("/"), worker=_worker_index(vllm_config.parallel_config))
            self._loaded: dict[str, Raw] = {}

        def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
            return InitInfo(init_dict)

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            return UpdateInfo(update_dict)

        def init_transfer_engine(self, init_info: Any) -> None:
            self.receiver.init(init_info.message)

        def start_weight_update(self) -> None:
            self._loaded = {}
            self.receiver.begin()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class waits for an accelerator, which a CPU has not; nothing here is asynchronous.
            self.receiver.receive(update_info)

        def receive_weights(self, update_info: Any) -> None:
            self.receiver.receive(update_info.message)

        def finish_weight_update(self) -> None:
            received = self.receiver.tensors
            # First of all: after a failed load vLLM still counts the update as open, and takes it up again.
            self.receiver.release()
            if received:
                load(self.model, self.model_config, received, self.device)
            self._loaded = received

        def held(self) -> dict[str, str]:
            """Read back, then let go of what was received."""
            received, self._loaded = self._loaded, {}
            return read_back(self._default_model, received, self.receiver.version)

        def shutdown(self) -> None:
            self._loaded = {}
            self.receiver.close()

    return SlipstreamTransferEngine


def _worker_index(parallel: Any) -> int:
    """Index of this worker among those of its replica, data-parallel ones included."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
