"""The torch training backend at world size 1.

Owns: the verbs of ``TrainingBackend`` on one device, run in call order on one worker thread, so that an event
loop never waits for arithmetic.  Refuses: environments, HTTP, advantages, reduction, rescaling.

Lifecycle: construct (loads the model and checks that packing is exact) -> verbs -> ``close()``.  An exception
inside a verb reaches the caller through its future; later verbs still run.

>>> backend = TorchBackend(ModelSettings(path=folder), TrainingSettings(), handles=("policy", "reference"))
>>> backend.forward_backward("policy", batch, LossSpec("ppo_clip")).result().loss
>>> backend.optim_step("policy").result().applied
True

Handles: ``policy`` is trained; ``reference`` is a frozen copy of its first weights (with LoRA: the model with
its adapters off, at no cost).  Both are scored under each row's own ``SamplingSpec``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.objective import LossSpec, MetricAccumulator, loss_inputs, objective, run_prepass
from slipstream.algorithms.ops import torch_ops
from slipstream.config.settings import ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.errors import CheckpointError, ContractError, SettingsError
from slipstream.training import checkpoint
from slipstream.training.attention import active_layout
from slipstream.training.layout import Layout, plan_layouts
from slipstream.training.memory import give_back
from slipstream.training.model import PolicyModel
from slipstream.training.optimizer import MasterOptimizer
from slipstream.training.protocol import ExportedTensor, ForwardResult, OptimResult, StepOutput

POLICY, REFERENCE = "policy", "reference"
_log = logging.getLogger(__name__)
_R = TypeVar("_R")


class TorchBackend:
    """``TrainingBackend`` in torch; see the module's docstring."""

    def __init__(
        self,
        model_settings: ModelSettings,
        training: TrainingSettings,
        *,
        handles: Sequence[str] = (POLICY,),
        seed: int = 0,
        total_steps: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Load the model.

        Args:
            model_settings: which weights, compute dtype, attention, checkpointing.
            training: budget, chunk, optimiser, LoRA, threads, determinism.
            handles: ``policy``, optionally with ``reference``.
            seed: of new adapters and of their dropout.
            total_steps: length of a linear or cosine schedule where the settings do not say.
            device: a torch device.

        Raises:
            ModelError: the weights cannot be used, or packing is not exact for them.
            SettingsError: unknown handles, or a schedule without a length.
        """
        unknown = set(handles) - {POLICY, REFERENCE}
        if unknown or POLICY not in handles:
            raise SettingsError(f"handles must be 'policy' and optionally 'reference', got {tuple(handles)}")
        self.model_settings, self.training, self.handles = model_settings, training, tuple(handles)
        self._device = torch.device(device)
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="slipstream-train", initializer=self._start_worker)
        try:
            self._submit(lambda: self._build(seed, total_steps)).result()
        except BaseException:
            self.close()
            raise

    def _start_worker(self) -> None:
        # OpenMP keeps its thread count per calling thread, so it is set where the work runs.
        if self.training.threads is not None:
            torch.set_num_threads(self.training.threads)

    def _build(self, seed: int, total_steps: int | None) -> None:
        if self.training.determinism == "exact":
            torch.use_deterministic_algorithms(True)  # a process-wide switch; exact runs want it everywhere
        lora = self.training.lora
        self._policy = PolicyModel.load(self.model_settings, lora, device=self._device, seed=seed)
        self._optimizer = MasterOptimizer(self._policy.trainable(), self.training.optimizer, total_steps)
        self._policy.cast()
        self._policy.check_packing()
        self._reference: PolicyModel | None = None
        if REFERENCE in self.handles and lora.rank == 0:
            self._reference = PolicyModel.load(self.model_settings, lora, device=self._device)
            self._reference.cast()
            self._reference.freeze()
        generator = torch.Generator()
        generator.manual_seed(seed)
        self._rng = generator.get_state()

    # ---- verbs -------------------------------------------------------------------------------------------

    def forward(self, handle: str, batch: Batch, *, entropy: bool = False) -> Future[ForwardResult]:
        """Score every row's trained targets under its own sampling spec; no gradients."""
        return self._submit(lambda: self._forward(handle, batch, entropy))

    def forward_backward(self, handle: str, batch: Batch, loss: LossSpec) -> Future[StepOutput]:
        """Add the batch's gradient to what is pending; repeated calls add up until ``optim_step``."""
        return self._submit(lambda: self._forward_backward(handle, batch, loss))

    def optim_step(self, handle: str) -> Future[OptimResult]:
        """Clip and update, or refuse a step that is not finite; gradients are cleared either way."""
        return self._submit(lambda: self._optim_step(handle))

    def export_weights(self, handle: str) -> Iterator[ExportedTensor]:
        """Every parameter once, in checkpoint names and the compute dtype, after all verbs called so far.

        The tensors are the live weights where no adapter has to be merged: take or copy them before the next
        ``optim_step``.
        """
        named = self._submit(lambda: list(self._model(handle).weights())).result()
        for name, tensor in named:
            shape = tuple(tensor.shape)
            yield ExportedTensor(name, shape, tuple(slice(0, n) for n in shape), tensor.detach())

    def save(self, handle: str, directory: Path) -> Future[None]:
        """Write weights (float32 masters), moments, schedule and RNG; ``load`` continues to the bit."""
        return self._submit(lambda: self._save(handle, Path(directory)))

    def load(self, handle: str, directory: Path, *, weights_only: bool = False) -> Future[None]:
        """Read what ``save`` wrote; with ``weights_only`` the optimiser starts afresh.

        The future raises ``CheckpointError`` naming what is missing or corrupt; nothing has changed then.
        """
        return self._submit(lambda: self._load(handle, Path(directory), weights_only))

    def save_pretrained(self, handle: str, directory: Path) -> Future[None]:
        """Write a directory that transformers can load (adapters merged)."""
        return self._submit(lambda: self._model(handle).save_pretrained(Path(directory)))

    def save_adapter(self, directory: Path) -> Future[None]:
        """Write the policy's LoRA adapter alone, in peft's format."""
        return self._submit(lambda: self._policy.save_adapter(Path(directory)))

    def reset_optimizer(self, optimizer: OptimizerSettings, total_steps: int | None = None) -> Future[None]:
        """Begin a new phase: fresh moments, schedule and settings, same weights."""
        return self._submit(lambda: self._optimizer.reset(optimizer, total_steps))

    def set_reference(self) -> Future[None]:
        """Make the policy's present weights the reference (after a supervised warm start)."""
        return self._submit(self._set_reference)

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the pending float32 gradients by parameter name (for tests and probes)."""
        return self._submit(lambda: {k: v.clone() for k, v in self._optimizer.gradients().items()}).result()

    def close(self) -> None:
        """Finish the running verb, drop queued ones, free the worker.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._worker.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> TorchBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- on the worker thread ----------------------------------------------------------------------------

    def _submit(self, work: Callable[[], _R]) -> Future[_R]:
        if self._closed:
            raise ContractError("the training backend is closed")
        return self._worker.submit(work)

    def _model(self, handle: str) -> PolicyModel:
        if handle not in self.handles:
            raise ContractError(f"unknown handle {handle!r}; this backend has {', '.join(self.handles)}")
        if handle == REFERENCE:
            if self._reference is None:
                raise ContractError("with LoRA the reference is the base model; it is scored, not exported or saved")
            return self._reference
        return self._policy

    def _trained(self, handle: str) -> None:
        if handle != POLICY:
            raise ContractError(f"handle {handle!r} is frozen; only 'policy' is trained")

    @contextlib.contextmanager
    def _scoring(self, handle: str) -> Iterator[PolicyModel]:
        if handle == REFERENCE and self._reference is None and REFERENCE in self.handles:
            with self._policy.adapters_off():
                yield self._policy
        else:
            yield self._model(handle)

    def _layouts(self, batch: Batch) -> list[Layout]:
        for row in batch.rows:
            if row.sampling.truncated:
                raise ContractError(
                    f"row {row.row_id} was sampled with {row.sampling}: truncated or penalised sampling cannot be "
                    "scored without the sampler's kept sets; sample with top_p=1, top_k=-1, min_p=0, no penalties"
                )
            if row.sampling.greedy:
                raise ContractError(f"row {row.row_id} was sampled at temperature 0, which is for evaluation only")
        return plan_layouts(batch.rows, self.training.max_tokens_per_microbatch, share=self.training.share_prompts)

    def _temperature(self, batch: Batch, layout: Layout) -> Tensor:
        per_row = np.asarray([batch.rows[i].sampling.temperature for i in layout.row_ids_R], dtype=np.float32)
        return torch.as_tensor(per_row[layout.row_N], device=self._device)

    @torch.no_grad()
    def _forward(self, handle: str, batch: Batch, entropy: bool) -> ForwardResult:
        logprobs, entropies = _RowValues(batch), _RowValues(batch)
        with self._scoring(handle) as model:
            model.train_mode(False)
            for layout in self._layouts(batch):
                with active_layout(layout, self._device):
                    scores, spread = model.score(
                        layout,
                        self._temperature(batch, layout),
                        chunk=self.training.logprob_chunk_tokens,
                        entropy=entropy,
                    )
                logprobs.put(layout, scores)
                if spread is not None:
                    entropies.put(layout, spread)
        return ForwardResult(logprobs.rows, entropies.rows if entropy else None)

    def _forward_backward(self, handle: str, batch: Batch, loss: LossSpec) -> StepOutput:
        self._trained(handle)
        logprobs = _RowValues(batch)
        layouts = self._layouts(batch)
        loss = run_prepass(batch, loss, lambda: self._forward(handle, batch, False).logprobs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._rng)
            if LOSSES.get(loss.policy).unit == "group" and len(layouts) > 1:
                total, metrics = self._backward_whole(batch, loss, layouts, logprobs)
            else:
                total, metrics = self._backward_by_layout(batch, loss, layouts, logprobs)
            self._rng = torch.get_rng_state()
        if not np.isfinite(total):
            self._optimizer.poison(f"the loss is {total}")
        packed = sum(layout.n_tokens for layout in layouts)
        extra = {"microbatches": float(len(layouts)), "packed_tokens": float(packed)}
        give_back()
        return StepOutput(total, logprobs.rows, {**metrics.result(), **extra}, metrics.parts())

    def _score(self, batch: Batch, layout: Layout, loss: LossSpec) -> tuple[Tensor, Tensor | None]:
        chunk, temperature_N = self.training.logprob_chunk_tokens, self._temperature(batch, layout)
        return self._policy.score(layout, temperature_N, chunk=chunk, entropy=loss.needs_entropy)

    def _backward_by_layout(
        self, batch: Batch, loss: LossSpec, layouts: Sequence[Layout], logprobs: _RowValues
    ) -> tuple[float, MetricAccumulator]:
        """Token and row losses: every micro-batch of whole rows is a plain part of the sum."""
        xp, metrics, total = torch_ops(), MetricAccumulator(), 0.0
        self._policy.train_mode(True)
        for layout in layouts:
            with active_layout(layout, self._device):
                scores, spread = self._score(batch, layout, loss)
                inputs = loss_inputs(xp, batch, layout.row_ids_R, loss, scores, spread)
                value, parts = objective(xp, inputs, loss)
                value.backward()
            total += float(value.detach())
            logprobs.put(layout, scores.detach())
            metrics.add(parts)
        return total, metrics

    def _backward_whole(
        self, batch: Batch, loss: LossSpec, layouts: Sequence[Layout], logprobs: _RowValues
    ) -> tuple[float, MetricAccumulator]:
        """Group losses, whose groups may lie in several micro-batches: score first, then push gradients back.

        The objective sees all rows at once; its gradient with respect to each token's log-prob (and entropy) is
        what each micro-batch then propagates, at the price of one more forward pass.
        """
        xp, metrics, entropies = torch_ops(), MetricAccumulator(), _RowValues(batch)
        self._policy.train_mode(False)
        with torch.no_grad():
            for layout in layouts:
                with active_layout(layout, self._device):
                    scores, spread = self._score(batch, layout, loss)
                logprobs.put(layout, scores)
                if spread is not None:
                    entropies.put(layout, spread)
        order = [index for layout in layouts for index in layout.row_ids_R]

        def leaf(values: _RowValues) -> Tensor:
            flat = np.concatenate([values.rows[i] for i in order]).astype(np.float32)
            return torch.as_tensor(flat, device=self._device).requires_grad_()

        leaves = [leaf(logprobs)] + ([leaf(entropies)] if loss.needs_entropy else [])
        inputs = loss_inputs(xp, batch, order, loss, leaves[0], leaves[1] if loss.needs_entropy else None)
        value, parts = objective(xp, inputs, loss)
        metrics.add(parts)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        self._policy.train_mode(True)
        start = 0
        for layout in layouts:
            end = start + len(layout.at_N)
            with active_layout(layout, self._device):
                outputs = [x for x in self._score(batch, layout, loss) if x is not None]
                torch.autograd.backward(outputs, [g[start:end] for g in gradients])
            start = end
        return float(value.detach()), metrics

    def _optim_step(self, handle: str) -> OptimResult:
        self._trained(handle)
        result = self._optimizer.step()
        if not result.applied:
            _log.warning("optimiser step refused: %s", result.reason)
        return result

    def _set_reference(self) -> None:
        if self._reference is None:
            raise ContractError("there is no separate reference to set (handle absent, or LoRA)")
        source = dict(self._policy.hf.named_parameters())
        for name, parameter in self._reference.hf.named_parameters():
            parameter.data.copy_(source[name].data)

    def _save(self, handle: str, directory: Path) -> None:
        if handle == POLICY:
            values = {
                "handle": handle,
                "step": self._optimizer.step_count,
                "optimizer": self._optimizer.settings.model_dump(mode="json"),
                "total_steps": self._optimizer.total_steps,
                "model": self.model_settings.model_dump(mode="json"),
                "lora": self.training.lora.model_dump(mode="json"),
                "threads": torch.get_num_threads(),
            }
            parts = [*self._optimizer.state(), ("rng", {"torch": self._rng})]
            checkpoint.write(directory, parts, values)
        else:
            tensors = {name: p.data for name, p in self._model(handle).hf.named_parameters()}
            checkpoint.write(directory, [("weights", tensors)], {"handle": handle})

    def _load(self, handle: str, directory: Path, weights_only: bool) -> None:
        values = checkpoint.read_values(directory)
        if values.get("handle") != handle:
            raise CheckpointError(f"{directory} holds handle {values.get('handle')!r}, not {handle!r}")
        if handle != POLICY:
            self._load_reference(directory, values)
            return
        parts = {"master": checkpoint.read_part(directory, values, "master")}
        if weights_only:
            self._optimizer.restore(parts, None)
            return
        step = values.get("step")
        if not isinstance(step, int):
            raise CheckpointError(f"{directory / checkpoint.MANIFEST} names no step")
        if step > 0:
            parts |= {name: checkpoint.read_part(directory, values, name) for name in ("exp_avg", "exp_avg_sq")}
        rng = checkpoint.read_part(directory, values, "rng")
        if "torch" not in rng:
            raise CheckpointError(f"{directory}: part 'rng' lacks the torch state")
        self._optimizer.restore(parts, step)
        self._rng = rng["torch"]

    def _load_reference(self, directory: Path, values: dict[str, Any]) -> None:
        tensors = checkpoint.read_part(directory, values, "weights")
        own = dict(self._model(REFERENCE).hf.named_parameters())
        if set(tensors) != set(own) or any(tensors[name].shape != own[name].shape for name in own):
            raise CheckpointError(f"{directory}: the reference's weights belong to another model")
        for name, parameter in own.items():
            parameter.data.copy_(tensors[name])


class _RowValues:
    """Per-row float64 arrays in batch order, filled from layouts; rows that train nothing stay empty."""

    def __init__(self, batch: Batch) -> None:
        self.rows: list[FloatArray] = [np.zeros(0) for _ in batch.rows]

    def put(self, layout: Layout, values_N: Tensor) -> None:
        flat = values_N.double().cpu().numpy()
        edges = np.searchsorted(layout.row_N, np.arange(len(layout.row_ids_R) + 1))
        for place, index in enumerate(layout.row_ids_R):
            self.rows[index] = flat[edges[place] : edges[place + 1]]
