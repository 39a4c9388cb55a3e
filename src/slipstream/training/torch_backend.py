"""The torch training backend at world size 1.

Owns: the verbs of ``TrainingBackend`` on one device, run in call order on one worker thread, so that an event
loop never waits for arithmetic.  Refuses: environments, HTTP, advantages, reduction, rescaling.

Lifecycle: construct (loads the model and checks that packing is exact) -> verbs -> ``close()``.  An exception
inside a verb reaches the caller through its future; later verbs still run.

>>> backend = TorchBackend(ModelSettings(path=folder), TrainingSettings(), handles=("policy", "reference"))
>>> backend.forward_backward("policy", batch, LossSpec("ppo_clip")).result().loss
>>> backend.optim_step("policy").result().applied
True

Handles: ``policy`` is trained; ``reference`` is a frozen copy of its first weights (with LoRA: the model with its
adapters off, or as they were at ``set_reference``); ``teacher`` is another frozen model over the same vocabulary.  All
three are scored under each row's own ``SamplingSpec``, over the ids that the sampler kept.  ``critic`` gives values: a
model of its own with its own optimiser, or a head on the policy, which ``optim_step("policy")`` moves too.
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

from slipstream.algorithms.batch import Batch
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.objective import LossSpec, MetricAccumulator, loss_inputs, objective, run_prepass
from slipstream.algorithms.ops import torch_ops
from slipstream.config.algorithm import CriticSettings, TeacherSettings
from slipstream.config.settings import LoraSettings, ModelSettings, OptimizerSettings, TrainingSettings
from slipstream.errors import CheckpointError, ContractError, ModelError, SettingsError
from slipstream.memory import give_back, one_heap
from slipstream.openmp import end_idle_workers
from slipstream.training import checkpoint
from slipstream.training.critic import Critic
from slipstream.training.model import PolicyModel
from slipstream.training.optimizer import MasterOptimizer
from slipstream.training.passes import Pass, RowValues
from slipstream.training.protocol import ExportedTensor, ForwardResult, OptimResult, StepOutput
from slipstream.training.routing import RoutingReplay

POLICY, REFERENCE, CRITIC, TEACHER = "policy", "reference", "critic", "teacher"
ADAPTER = "adapter"
"""Handle of the policy's adapter alone, for ``export_weights``."""
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
        critic: CriticSettings | None = None,
        teacher: TeacherSettings | None = None,
    ) -> None:
        """Load the models.

        Args:
            model_settings: which weights, compute dtype, attention, checkpointing.
            training: budget, chunk, optimiser, LoRA, threads, determinism.
            handles: ``policy``, optionally with ``reference``, ``critic`` and ``teacher``.
            seed: of new adapters and of their dropout.
            total_steps: length of a linear or cosine schedule where the settings do not say.
            device: a torch device.
            critic: backbone, weights and optimiser of the handle ``critic``.
            teacher: weights and dtype of the handle ``teacher``.

        Raises:
            ModelError: the weights cannot be used, or packing is not exact for them.
            SettingsError: unknown handles, or a schedule without a length.
        """
        unknown = set(handles) - {POLICY, REFERENCE, CRITIC, TEACHER}
        if unknown or POLICY not in handles:
            raise SettingsError(
                f"handles must be 'policy' and optionally 'reference', 'critic', 'teacher', got {tuple(handles)}"
            )
        self._critic_settings = critic or CriticSettings()
        self._teacher_path, self._teacher_dtype = (teacher.path, teacher.dtype) if teacher else (None, None)
        if TEACHER in handles and self._teacher_path is None:
            raise SettingsError("handle 'teacher' needs algorithm.teacher.path (a local model)")
        self.model_settings, self.training, self.handles = model_settings, training, tuple(handles)
        self._device = torch.device(device)
        self._closed = False
        one_heap()
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
        path = self.model_settings.path
        self._routing = RoutingReplay(self._policy.hf, path) if self.training.routing_replay else None
        self._critic = self._build_critic(seed) if CRITIC in self.handles else None
        shared = self._critic is not None and self._critic.shared
        own = dict(self._critic.head_parameters()) if self._critic is not None and shared else {}
        self._optimizer = MasterOptimizer(self._policy.trainable() | own, self.training.optimizer, total_steps)
        self._policy.cast()
        self._policy.lean(self._optimizer)
        self._policy.check_packing()
        self._critic_optimizer: MasterOptimizer | None = None
        if self._critic is not None and not shared:
            self._critic_optimizer = MasterOptimizer(
                self._critic.trainable(), self._critic_settings.optimizer, total_steps
            )
            self._critic.backbone.cast()
            self._critic.backbone.lean(self._critic_optimizer)
            self._critic.backbone.check_packing()
        self._reference = self._frozen(self.model_settings) if REFERENCE in self.handles and lora.rank == 0 else None
        self._reference_adapter: dict[str, Tensor] | None = None
        self._teacher: PolicyModel | None = None
        if TEACHER in self.handles and self._teacher_path is not None:
            changes = {"path": self._teacher_path, "dtype": self._teacher_dtype}
            self._teacher = self._frozen(self.model_settings.model_copy(update=changes))
            self._teacher.check_packing()
        generator = torch.Generator()
        generator.manual_seed(seed)
        self._rng = generator.get_state()

    def _build_critic(self, seed: int) -> Critic:
        """Before the optimiser takes its masters: a shared head is among the policy's parameters."""
        settings = self._critic_settings
        if settings.backbone == "shared":
            return Critic(self._policy, shared=True)
        changes = {"path": settings.path or self.model_settings.path}
        own = self.model_settings.model_copy(update=changes)
        backbone = PolicyModel.load(own, LoraSettings(), device=self._device, seed=seed)
        if backbone.vocab_size < self._policy.vocab_size:
            raise ModelError(
                f"{own.path} has {backbone.vocab_size} token ids and the policy {self._policy.vocab_size}: a critic "
                "reads the policy's tokens, so it has to know them all (algorithm.critic.path)"
            )
        return Critic(backbone, shared=False)

    def _frozen(self, settings: ModelSettings) -> PolicyModel:
        """A model that is only scored: without adapters, in the compute dtype."""
        model = PolicyModel.load(settings, LoraSettings(), device=self._device)
        model.cast()
        model.freeze()
        model.lean(None)
        return model

    @property
    def saved_handles(self) -> tuple[str, ...]:
        """Handles with weights of their own that a checkpoint has to hold.

        A shared critic lies in the policy's checkpoint; a teacher is a file already, and so is a LoRA run's reference
        until ``set_reference``.
        """
        has = {
            POLICY: True,
            REFERENCE: self._reference is not None or self._reference_adapter is not None,
            CRITIC: self._critic_optimizer is not None,
            TEACHER: False,
        }
        return tuple(handle for handle in self.handles if has[handle])

    # ---- verbs -------------------------------------------------------------------------------------------

    def forward(self, handle: str, batch: Batch, *, entropy: bool = False) -> Future[ForwardResult]:
        """Score every row's trained targets under its own sampling spec (critic: their values); no gradients."""
        return self._submit(lambda: self._forward(handle, batch, entropy))

    def forward_backward(self, handle: str, batch: Batch, loss: LossSpec) -> Future[StepOutput]:
        """Add the batch's gradient to what is pending; repeated calls add up until ``optim_step``."""
        return self._submit(lambda: self._forward_backward(handle, batch, loss))

    def optim_step(self, handle: str) -> Future[OptimResult]:
        """Clip and update, or refuse a step that is not finite; gradients are cleared either way.

        A critic on the policy's backbone has no step of its own: ``optim_step("policy")`` moves it.
        """
        return self._submit(lambda: self._optim_step(handle))

    def export_weights(self, handle: str) -> Iterator[ExportedTensor]:
        """Every parameter once, in checkpoint names and the compute dtype, after all verbs called so far.

        The tensors are the live weights where no adapter has to be merged: take or copy them before the next
        ``optim_step``.  Handle ``adapter`` is the policy's LoRA adapter alone, under peft's names, in float32 and with
        the scale in B.
        """

        def named_weights() -> list[tuple[str, Tensor]]:
            of_adapter = handle == ADAPTER
            return list(self._policy.adapter_weights() if of_adapter else self._model(handle).weights())

        named = self._submit(named_weights).result()
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

    def gradients(self, handle: str = POLICY) -> dict[str, Tensor]:
        """Copies of the pending float32 gradients by parameter name (for tests and probes)."""
        return self._submit(lambda: {k: v.clone() for k, v in self._moved_by(handle).gradients().items()}).result()

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
        return self._worker.submit(self._alone, work)

    @staticmethod
    def _alone(work: Callable[[], _R]) -> _R:
        try:
            return work()
        finally:
            end_idle_workers()

    def _known(self, handle: str) -> None:
        if handle not in self.handles:
            raise ContractError(f"unknown handle {handle!r}; this backend has {', '.join(self.handles)}")

    def _model(self, handle: str) -> PolicyModel:
        self._known(handle)
        if handle == REFERENCE:
            if self._reference is None:
                raise ContractError("with LoRA the reference is the base model; it is scored, not exported or saved")
            return self._reference
        if handle == TEACHER and self._teacher is not None:
            return self._teacher
        if handle == CRITIC and self._critic is not None:
            return self._critic.backbone
        return self._policy

    def _moved_by(self, handle: str) -> MasterOptimizer:
        """The optimiser that a handle's gradients go to."""
        self._known(handle)
        if handle == CRITIC:
            return self._critic_optimizer or self._optimizer
        if handle != POLICY:
            raise ContractError(f"handle {handle!r} is frozen; only 'policy' and 'critic' are trained")
        return self._optimizer

    @contextlib.contextmanager
    def _scoring(self, handle: str) -> Iterator[PolicyModel]:
        if handle == REFERENCE and self._reference is None and REFERENCE in self.handles:
            adapter = self._reference_adapter
            with self._policy.adapters_off() if adapter is None else self._policy.adapters_as(adapter):
                yield self._policy
        else:
            yield self._model(handle)

    def _pass(self, handle: str, model: PolicyModel, batch: Batch) -> Pass:
        critic = self._critic if handle == CRITIC else None
        # A reference that is the policy without its adapters routes by itself, as one with weights of its own does.
        routing = self._routing if model is self._policy and handle != REFERENCE else None
        return Pass(batch, model, self.training, self._device, critic=critic, routing=routing)

    @torch.no_grad()
    def _forward(self, handle: str, batch: Batch, entropy: bool) -> ForwardResult:
        found = RowValues(batch)
        with self._scoring(handle) as model:
            model.train_mode(False)
            way = self._pass(handle, model, batch)
            for layout in way.layouts:
                with way.open(layout):
                    found.put(layout, way.outputs(layout, entropy=entropy))
        if handle == CRITIC:
            return ForwardResult([], values=found.rows("values"))
        return ForwardResult(found.rows("logprobs"), found.rows("entropy") if entropy else None)

    def _forward_backward(self, handle: str, batch: Batch, loss: LossSpec) -> StepOutput:
        optimizer, model = self._moved_by(handle), self._model(handle)
        kind = LOSSES.get(loss.policy).kind
        if (kind == "value") != (handle == CRITIC):
            raise ContractError(f"loss {loss.policy!r} is of kind {kind!r}, which handle {handle!r} does not learn")
        give_back(self.training.heap_growth)  # the holes that sampling left: micro-batches would not fill them
        loss = run_prepass(batch, loss, lambda: self._forward(handle, batch, False).logprobs)
        way, found = self._pass(handle, model, batch), RowValues(batch)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._rng)
            if LOSSES.get(loss.policy).unit == "group" and len(way.layouts) > 1:
                total, metrics = self._backward_whole(way, loss, found)
            else:
                total, metrics = self._backward_by_layout(way, loss, found)
            self._rng = torch.get_rng_state()
        if not np.isfinite(total):
            optimizer.poison(f"the loss is {total}")
        packed = sum(layout.n_tokens for layout in way.layouts)
        extra = {"microbatches": float(len(way.layouts)), "packed_tokens": float(packed)}
        give_back(self.training.heap_growth)
        return StepOutput(total, found.rows("logprobs"), {**metrics.result(), **extra}, metrics.parts())

    def _backward_by_layout(self, way: Pass, loss: LossSpec, found: RowValues) -> tuple[float, MetricAccumulator]:
        """Token and row losses: every micro-batch of whole rows is a plain part of the sum."""
        xp, metrics, total = torch_ops(), MetricAccumulator(), 0.0
        way.model.train_mode(True)
        for layout in way.layouts:
            with way.open(layout):
                outputs = way.outputs(layout, entropy=loss.needs_entropy, top=loss.needs_top)
                inputs = loss_inputs(xp, way.batch, layout.row_ids_R, loss, **{"logprobs": None, **outputs})
                value, parts = objective(xp, inputs, loss)
                value.backward()
            total += float(value.detach())
            found.put(layout, outputs)
            metrics.add(parts)
        return total, metrics

    def _backward_whole(self, way: Pass, loss: LossSpec, found: RowValues) -> tuple[float, MetricAccumulator]:
        """Group losses, whose groups may lie in several micro-batches: score first, then push gradients back.

        The objective sees all rows at once; its gradient with respect to each token's log-prob (and entropy) is
        what each micro-batch then propagates, at the price of one more forward pass.
        """
        xp, metrics, names = torch_ops(), MetricAccumulator(), []
        way.model.train_mode(False)
        with torch.no_grad():
            for layout in way.layouts:
                with way.open(layout):
                    outputs = way.outputs(layout, entropy=loss.needs_entropy, top=loss.needs_top)
                found.put(layout, outputs)
                names = list(outputs)
        order = [index for layout in way.layouts for index in layout.row_ids_R]
        leaves: dict[str, Tensor] = {}
        for name in names:
            flat = np.concatenate([found.rows(name)[i] for i in order]).astype(np.float32)
            leaves[name] = torch.as_tensor(flat, device=self._device).requires_grad_()
        inputs = loss_inputs(xp, way.batch, order, loss, **{"logprobs": None, **leaves})
        value, parts = objective(xp, inputs, loss)
        metrics.add(parts)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        way.model.train_mode(True)
        start = 0
        for layout in way.layouts:
            end = start + len(layout.at_N)
            with way.open(layout):
                again = way.outputs(layout, entropy=loss.needs_entropy, top=loss.needs_top)
                torch.autograd.backward([again[name] for name in names], [g[start:end] for g in gradients])
            start = end
        return float(value.detach()), metrics

    def _optim_step(self, handle: str) -> OptimResult:
        optimizer = self._moved_by(handle)
        if handle == CRITIC and self._critic_optimizer is None:
            raise ContractError("a critic on the policy's backbone moves with it; call optim_step('policy')")
        result = optimizer.step()
        if not result.applied:
            _log.warning("optimiser step refused: %s", result.reason)
        return result

    def _set_reference(self) -> None:
        if REFERENCE not in self.handles:
            raise ContractError("this backend has no reference to set")
        if self._reference is None:
            self._reference_adapter = {name: p.data.clone() for name, p in self._policy.trainable().items()}
            return
        source = dict(self._policy.hf.named_parameters())
        for name, parameter in self._reference.hf.named_parameters():
            parameter.data.copy_(source[name].data)

    def _save(self, handle: str, directory: Path) -> None:
        if handle not in self.saved_handles:
            self._model(handle)  # has a better reason to refuse, for some
            raise ContractError(f"handle {handle!r} has no weights of its own to save (see saved_handles)")
        if handle == REFERENCE:
            tensors = self._reference_adapter or {name: p.data for name, p in self._model(handle).hf.named_parameters()}
            checkpoint.write(directory, [("weights", tensors)], {"handle": handle})
            return
        optimizer = self._moved_by(handle)
        values = {
            "handle": handle,
            "step": optimizer.step_count,
            "optimizer": optimizer.settings.model_dump(mode="json"),
            "total_steps": optimizer.total_steps,
            "model": self._model(handle).settings.model_dump(mode="json"),
            "lora": self.training.lora.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
        }
        rng = [("rng", {"torch": self._rng})] if handle == POLICY else []
        checkpoint.write(directory, [*optimizer.state(), *rng], values)

    def _load(self, handle: str, directory: Path, weights_only: bool) -> None:
        values = checkpoint.read_values(directory)
        if values.get("handle") != handle:
            raise CheckpointError(f"{directory} holds handle {values.get('handle')!r}, not {handle!r}")
        if handle == REFERENCE:
            self._load_reference(directory, values)
            return
        optimizer = self._moved_by(handle)
        parts = {"master": checkpoint.read_part(directory, values, "master")}
        if weights_only:
            optimizer.restore(parts, None)
            return
        step = values.get("step")
        if not isinstance(step, int):
            raise CheckpointError(f"{directory / checkpoint.MANIFEST} names no step")
        if step > 0:
            parts |= {name: checkpoint.read_part(directory, values, name) for name in ("exp_avg", "exp_avg_sq")}
        rng = checkpoint.read_part(directory, values, "rng") if handle == POLICY else {"torch": self._rng}
        if "torch" not in rng:
            raise CheckpointError(f"{directory}: part 'rng' lacks the torch state")
        optimizer.restore(parts, step)
        self._rng = rng["torch"]

    def _load_reference(self, directory: Path, values: dict[str, Any]) -> None:
        tensors = checkpoint.read_part(directory, values, "weights")
        of_adapter = self._reference is None and REFERENCE in self.handles
        own = self._policy.trainable() if of_adapter else dict(self._model(REFERENCE).hf.named_parameters())
        if set(tensors) != set(own) or any(tensors[name].shape != own[name].shape for name in own):
            raise CheckpointError(f"{directory}: the reference's weights belong to another model")
        if of_adapter:
            self._reference_adapter = {name: tensors[name].to(own[name]) for name in own}
            return
        for name, parameter in own.items():
            parameter.data.copy_(tensors[name])
