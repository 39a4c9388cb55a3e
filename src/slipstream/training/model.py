"""The model behind a training handle: weights, adapters, packed forward, export.

Owns: loading a causal LM for packed training, LoRA through peft, the hidden states and log-probs of a
layout, checkpoint names, and the start-up check that packing is exact for this architecture.
Refuses: optimisation, losses, micro-batching.

Lifecycle: ``PolicyModel.load(...)`` -> ``check_packing()`` -> ``score(layout, ...)`` any number of times.
Parameters are loaded in float32, so that an optimiser can take exact masters before ``cast()`` turns
them into the compute dtype.

Shape legend: ``T`` packed tokens, ``N`` trained tokens, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.batch import BatchRow
from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.errors import ModelError
from slipstream.inference.embedded.pretrained import load_causal_lm, load_tokenizer
from slipstream.training import attention
from slipstream.training.fused import lean_layers
from slipstream.training.layout import Layout, plan_layouts
from slipstream.training.lean import GradientSink, LeanStack
from slipstream.training.scorer import Head, Kept, score_tokens
from slipstream.trajectory import SamplingSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class PolicyModel:
    """A causal LM that scores packed layouts."""

    def __init__(self, model: Any, settings: ModelSettings, lora: LoraSettings, device: torch.device) -> None:
        self.settings = settings
        self.dtype = DTYPES[settings.dtype]
        self.device = device
        self.hf = model.to(device)
        _refuse_unsupported(model, settings.path)
        _disable_dropout(model)
        # Before adapters exist: the probe compares plain layers (an adapter starts as zero, but dropout is random).
        lean_layers(model)
        self.peft: Any = _add_adapters(model, lora, settings.path) if lora.rank > 0 else None
        self._lean: LeanStack | None = None
        self._sink: GradientSink | None = None
        if settings.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})

    @classmethod
    def load(
        cls, settings: ModelSettings, lora: LoraSettings, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> PolicyModel:
        """Load ``settings.path`` in float32.

        Raises:
            ModelError: the directory holds no usable weights, or the architecture cannot be packed.
        """
        attention.register()
        place = torch.device(device)
        name = _attention_name(settings, place)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # adapters start from this seed whatever ran before
            return cls(load_causal_lm(settings.path, "float32", name), settings, lora, place)

    @property
    def tied(self) -> bool:
        """True when the vocabulary projection is the embedding."""
        return self.hf.get_output_embeddings().weight is self.hf.get_input_embeddings().weight

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.hf.get_output_embeddings().weight.shape[0])

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are trained, by name; tied ones once."""
        return {name: p for name, p in self.hf.named_parameters() if p.requires_grad}

    def cast(self) -> None:
        """Turn parameters into the compute dtype (buffers, such as rotary frequencies, stay as they are)."""
        for parameter in self.hf.parameters():
            if parameter.dtype != self.dtype:
                parameter.data = parameter.data.to(self.dtype)
        self.hf.config.dtype = self.dtype

    def lean(self, sink: GradientSink | None) -> None:
        """From now on run the body as ``LeanStack`` where that computes the same.

        Call after ``cast()``.  Weight gradients of the body and of the vocabulary projection go to ``sink``; None for
        a frozen model.
        """
        self._sink = sink
        self._lean = LeanStack.of(self.hf, sink, checkpointing=self.settings.gradient_checkpointing)

    def freeze(self) -> None:
        """Make every parameter constant (a reference)."""
        self.hf.requires_grad_(False)

    def score(
        self,
        layout: Layout,
        temperature_N: Tensor,
        *,
        chunk: int,
        entropy: bool = False,
        kept: Kept | None = None,
        beside_NK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of the layout's trained tokens, ``(N,)`` float32.

        With further ids to score in the same places (``beside_NK``) the log-probs are ``(N, 1 + K)``, theirs behind.

        Call inside ``attention.active_layout(layout, device)``; keep it open through ``backward``.
        """
        at_N = torch.as_tensor(layout.at_N, device=self.device)
        targets_N = torch.as_tensor(layout.targets_N, device=self.device)
        if beside_NK is not None:
            targets_N = torch.cat((targets_N[:, None], beside_NK), 1)
        hidden_ND = self.hidden(layout).index_select(0, at_N)
        head = self.head()
        return score_tokens(hidden_ND, head, targets_N, temperature_N, chunk=chunk, entropy=entropy, kept=kept)

    def hidden(self, layout: Layout) -> Tensor:
        """The last hidden state, ``(T, D)``."""
        ids = torch.as_tensor(layout.ids_T, device=self.device)[None]
        if int(layout.ids_T.max()) >= self.hf.get_input_embeddings().weight.shape[0]:
            raise ModelError(f"token id {int(layout.ids_T.max())} lies outside the model's vocabulary")
        if self._lean is not None:
            return self._lean(layout)
        positions = torch.as_tensor(layout.positions_T, device=self.device)[None]
        # Never a mask and never a cache: either would let packed rows see each other.
        out = self.hf.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def head(self) -> Head:
        """The vocabulary projection as it is now."""
        layer = self.hf.get_output_embeddings()
        return Head(layer.weight, layer.bias, getattr(self.hf.config, "final_logit_softcapping", None), self._sink)

    def train_mode(self, training: bool) -> None:
        """Switch adapters' dropout and activation checkpointing on or off; other dropout is off for good."""
        self.hf.train(training)

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """The base model behind the adapters."""
        with self.peft.disable_adapter():
            yield

    @contextlib.contextmanager
    def adapters_as(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The policy with other adapters, by parameter name."""
        own = self.trainable()
        kept = {name: own[name].data for name in tensors}
        try:
            for name, tensor in tensors.items():
                own[name].data = tensor
            yield
        finally:
            for name, tensor in kept.items():
                own[name].data = tensor

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """``(checkpoint name, tensor)`` as ``save_pretrained`` names them; adapters merged, tied weights once.

        Without adapters the tensors are the live parameters (no copies).
        """
        from transformers.core_model_loading import revert_weight_conversion

        # Transformers' own removal of tied weights would copy every master, since they lie in one buffer.
        state, tied = dict(self.hf.state_dict()), set(self.hf.all_tied_weights_keys)
        sources = {tensor.data_ptr() for name, tensor in state.items() if name not in tied}
        state = {name: t for name, t in state.items() if name not in tied or t.data_ptr() not in sources}
        if self.peft is not None:
            state = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
            state = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
            for name, module in self.hf.named_modules():
                if hasattr(module, "get_delta_weight"):
                    base = module.base_layer.weight
                    delta = sum(_delta(module, adapter) for adapter in module.active_adapters)
                    state[f"{name}.weight"] = (base.float() + delta).to(base.dtype)
        yield from revert_weight_conversion(self.hf, state).items()

    @torch.no_grad()
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """``(peft's name, tensor)`` of the adapter, float32; its scale ``alpha / rank`` is multiplied into B."""
        if self.peft is None:
            raise ModelError("there is no adapter to export: training.lora.rank is 0")
        for name, module in self.peft.named_modules():
            if hasattr(module, "get_delta_weight"):
                for adapter in module.active_adapters:
                    a, b = module.lora_A[adapter].weight.float(), module.lora_B[adapter].weight.float()
                    yield f"{name}.lora_A.weight", a
                    yield f"{name}.lora_B.weight", b * module.scaling[adapter]

    def save_pretrained(self, directory: Path) -> None:
        """Write weights (adapters merged), config, and the tokenizer where the source has one."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.peft is None:
            self.hf.save_pretrained(directory)
        else:
            merged = {name: tensor.contiguous() for name, tensor in self.weights()}
            self.hf.save_pretrained(directory, state_dict=merged)
        with contextlib.suppress(ModelError):
            load_tokenizer(self.settings.path, self.settings.chat_template).save_pretrained(directory)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter alone, in peft's format."""
        if self.peft is None:
            raise ModelError("there is no adapter to save: training.lora.rank is 0")
        self.peft.save_pretrained(directory)

    @torch.no_grad()
    def check_packing(self) -> None:
        """Refuse an architecture whose packed scores are not those of single rows.

        Packs three rows that share a prefix, two of which share more, and a lone one; then (i) compares with
        transformers' own unpacked eager forward, and (ii) replaces all but the lone row, whose log-probs must stay.

        Raises:
            ModelError: rows see each other, or the scores differ from the model's own.
        """
        vocab = min(self.vocab_size, 4096)
        rng = np.random.default_rng(0)
        common, more, lone, other = (rng.integers(3, vocab, n) for n in (18, 18, 9, 10))
        begins = [common, np.concatenate([common, more]), np.concatenate([common, more])]
        rows = [probe_row(np.concatenate([begin, rng.integers(3, vocab, 4)])) for begin in begins]
        rows.append(probe_row(lone))
        swapped = [probe_row(other), rows[-1]]
        packed = self._probe(rows)
        alone = np.concatenate([self._unpacked_logprobs(row) for row in rows])
        gap = float(np.abs(packed - alone).mean())
        bound = 2e-3 if self.dtype == torch.float32 else 0.1
        if not gap <= bound:
            raise ModelError(
                f"{self.settings.path} ({self.hf.config.model_type}): packed log-probs are off by {gap:.3g} on average "
                f"from the model's own (bound {bound}); this architecture cannot be trained packed"
            )
        moved = np.abs(self._probe(swapped)[-len(lone) + 1 :] - packed[-len(lone) + 1 :]).mean()
        if not moved <= bound:
            raise ModelError(
                f"{self.settings.path} ({self.hf.config.model_type}): packed rows see each other (a row's log-probs "
                f"moved by {moved:.3g} when another row changed)"
            )

    def _probe(self, rows: list[BatchRow]) -> np.ndarray[Any, Any]:
        (layout,) = plan_layouts(rows, 1024)
        with attention.active_layout(layout, self.device):
            logprobs, _ = self.score(layout, torch.ones(len(layout.at_N), device=self.device), chunk=64)
        return logprobs.double().cpu().numpy()

    def _unpacked_logprobs(self, row: BatchRow) -> np.ndarray[Any, Any]:
        name = self.hf.config._attn_implementation
        self.hf.set_attn_implementation("eager")
        try:
            ids = torch.as_tensor(row.inputs_T, device=self.device)[None]
            logits = self.hf(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self.hf.set_attn_implementation(name)
        targets = torch.as_tensor(row.targets_T, device=self.device)
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].double().cpu().numpy()


def probe_row(ids: np.ndarray[Any, Any], name: str = "probe") -> BatchRow:
    """A row of token ids ``(T + 1,)`` that is scored in every place and never trained on."""
    length = len(ids) - 1
    zeros = np.zeros(length)
    return BatchRow(
        row_id=name,
        trajectory_id=name,
        group_id=name,
        inputs_T=ids[:-1],
        targets_T=ids[1:],
        trained_T=np.ones(length, dtype=bool),
        weights_T=zeros,
        advantages_T=zeros,
        behaviour_logprobs_T=np.full(length, np.nan),  # nobody sampled it, so it routes by itself
        sampling=SamplingSpec(),
    )


def _attention_name(settings: ModelSettings, device: torch.device) -> str:
    """``auto`` is the blockwise kernel on the CPU and the dense mask elsewhere; ``sdpa``/``eager`` force the mask."""
    if settings.attn_implementation == "flash_attention_2":
        raise ModelError(
            "attn_implementation=flash_attention_2 is not available in packed training with shared prompts; use auto"
        )
    if settings.attn_implementation == "auto" and device.type == "cpu":
        return attention.BLOCKWISE
    return attention.MASKED


def _refuse_unsupported(model: Any, path: str) -> None:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    recurrent = any(
        "mamba" in type(module).__name__.lower() or "deltanet" in type(module).__name__.lower()
        for module in model.modules()
    )
    if kinds or recurrent:
        what = ", ".join(sorted(kinds)) or "recurrent layers"
        raise ModelError(f"{path} ({config.model_type}) has {what}; packed training needs attention in every layer")
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{path} ({config.model_type}) does not let its attention function be chosen; it cannot be packed"
        )
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ModelError(f"{path} ({config.model_type}): the output layer is {type(head).__name__}, expected Linear")


def _disable_dropout(model: Any) -> None:
    """Scores must not be random; a sampler has no dropout either."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _add_adapters(model: Any, lora: LoraSettings, path: str) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ModelError(f"{path}: LoRA cannot be applied ({error}); check training.lora.target_modules") from error
    if type(model.get_output_embeddings()) is not torch.nn.Linear:
        raise ModelError("an adapter on the output layer is not supported; leave lm_head out of lora.target_modules")
    return peft


def _delta(module: Any, adapter: str) -> Tensor:
    """An adapter's contribution in float32, in the layout of its base weight."""
    a, b = module.lora_A[adapter].weight.float(), module.lora_B[adapter].weight.float()
    product = (b @ a) * module.scaling[adapter]
    return product.t() if module.fan_in_fan_out else product
