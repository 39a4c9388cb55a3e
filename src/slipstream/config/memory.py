"""The memory that a run will take, phase by phase.

Owns: the arithmetic from sizes to bytes.  Refuses: measuring; every figure is an estimate from above,
without the interpreter, the libraries and the allocator's slack (``OVERHEAD_BYTES`` stands for them).

The sampler and the trainer of this release share one process, so resident items add up in every phase.

>>> from slipstream.config.facts import BUNDLED
>>> memory = estimate_memory(RunSettings(), BUNDLED)
>>> memory.peak_phase
'update'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config.facts import ModelFacts, read_facts
from slipstream.config.settings import Dtype, RunSettings

PHASES = ("sampling", "scoring", "update", "publish")
OVERHEAD_BYTES = 700_000_000
"""The interpreter with torch and transformers imported."""

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing that takes memory, and the phases in which it does."""

    name: str
    bytes: int
    phases: Sequence[str]
    how: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All items; ``total`` adds up those of one phase."""

    items: Sequence[MemoryItem]

    def total(self, phase: str) -> int:
        """Bytes in a phase, overhead included."""
        return OVERHEAD_BYTES + sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes in that phase."""
        return self.total(self.peak_phase)


def width(dtype: Dtype) -> int:
    """Bytes per element."""
    return 2 if dtype == "bfloat16" else _FLOAT32


def trainable_parameters(settings: RunSettings, facts: ModelFacts) -> int:
    """All parameters, or those of the adapters (named modules that the model lacks count nothing)."""
    lora = settings.training.lora
    if lora.rank == 0:
        return facts.parameters
    wanted = lora.target_modules
    chosen = [
        (wide, high)
        for name, (wide, high) in facts.linears.items()
        if wanted == "all-linear" or name == wanted or (not isinstance(wanted, str) and name in wanted)
    ]
    return facts.layers * lora.rank * sum(wide + high for wide, high in chosen)


def estimate_memory(settings: RunSettings, facts: ModelFacts) -> MemoryPlan:
    """Bytes of each item; tokens per micro-batch and KV capacity are taken as full."""
    items = [
        *_trainer(settings, facts),
        *_critic_and_teacher(settings, facts),
        *_update(settings, facts),
        *_engine(settings, facts),
    ]
    return MemoryPlan([item for item in items if item.bytes > 0])


def _trainer(settings: RunSettings, facts: ModelFacts) -> list[MemoryItem]:
    compute, adapters = width(settings.model.dtype), settings.training.lora.rank > 0
    trained = trainable_parameters(settings, facts)
    separate = settings.algorithm.kl_coef > 0 and not adapters
    copy_needed = adapters or compute != _FLOAT32
    return [
        MemoryItem("master weights", trained * _FLOAT32, PHASES, "float32, trained parameters"),
        MemoryItem(
            "compute weights",
            facts.parameters * compute if copy_needed else 0,
            PHASES,
            f"{settings.model.dtype}, all parameters",
        ),
        MemoryItem("optimiser moments", trained * 2 * _FLOAT32, PHASES, "two float32 per trained parameter"),
        MemoryItem("gradients", trained * _FLOAT32, ("update",), "float32, trained parameters"),
        MemoryItem(
            "reference weights",
            facts.parameters * compute if separate else 0,
            PHASES,
            "a frozen copy, because algorithm.kl_coef > 0",
        ),
        MemoryItem("exported weights", facts.parameters * compute, ("publish",), "handed to the engine"),
    ]


def _critic_and_teacher(settings: RunSettings, facts: ModelFacts) -> list[MemoryItem]:
    """Models beside the policy; one whose directory cannot be read here counts as large as the policy."""
    algorithm, compute = settings.algorithm, width(settings.model.dtype)
    own = algorithm.advantage == "gae" and algorithm.critic.backbone == "own"
    critic = _parameters(algorithm.critic.path, facts) if own else 0
    teacher = _parameters(algorithm.teacher.path, facts) if algorithm.teacher.path is not None else 0
    weights = critic * (_FLOAT32 + (compute if compute != _FLOAT32 else 0))
    return [
        MemoryItem("critic weights", weights, PHASES, "float32 masters and the compute dtype"),
        MemoryItem("critic moments", critic * 2 * _FLOAT32, PHASES, "two float32 per parameter"),
        MemoryItem("critic gradients", critic * _FLOAT32, ("update",), "float32"),
        MemoryItem("teacher weights", teacher * width(algorithm.teacher.dtype), PHASES, algorithm.teacher.dtype),
    ]


def _parameters(path: str | None, facts: ModelFacts) -> int:
    known = None if path is None else read_facts(path)
    return facts.parameters if known is None else known.parameters


def _update(settings: RunSettings, facts: ModelFacts) -> list[MemoryItem]:
    compute = width(settings.model.dtype)
    longest = settings.schedule.prompts_per_step * settings.rollout.samples_per_prompt
    tokens = min(
        max(settings.training.max_tokens_per_microbatch, settings.rollout.max_total_tokens),
        longest * settings.rollout.max_total_tokens,
    )
    layer = tokens * facts.saved_elements_per_token * compute
    saved = layer * facts.layers
    if settings.model.gradient_checkpointing:
        saved = layer + tokens * facts.layers * facts.hidden_size * compute
    chunk = min(settings.training.logprob_chunk_tokens, tokens) * facts.vocab_size * _FLOAT32
    return [
        MemoryItem("activations", saved, ("update",), f"{tokens:,} tokens per micro-batch"),
        MemoryItem("activations of one layer", layer, ("scoring",), f"{tokens:,} tokens, nothing kept"),
        MemoryItem(
            "logits chunk",
            3 * chunk,
            ("scoring", "update"),
            f"{settings.training.logprob_chunk_tokens:,} tokens x {facts.vocab_size:,}, with log-probs and gradient",
        ),
    ]


def _engine(settings: RunSettings, facts: ModelFacts) -> list[MemoryItem]:
    if settings.inference.engine == "http":
        return []
    each = width(settings.inference.dtype)
    kv = settings.inference.kv_cache_tokens * facts.kv_elements_per_token * each
    logits = settings.inference.max_batch_size * facts.vocab_size * _FLOAT32
    return [
        MemoryItem("engine weights", facts.parameters * each, PHASES, f"{settings.inference.dtype}, a copy"),
        MemoryItem("KV cache", kv, PHASES, f"{settings.inference.kv_cache_tokens:,} tokens"),
        MemoryItem("sampling logits", 2 * logits, ("sampling",), f"{settings.inference.max_batch_size} sequences"),
    ]
