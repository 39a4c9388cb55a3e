"""Tiny random models with a real tokenizer, for tests, demos and dry runs.

Owns: two-layer random models of several architectures and a byte-level BPE tokenizer of 300 entries with a
ChatML template.  Refuses: the network, pretrained weights, global random state (it is restored).

>>> model, tokenizer = tiny_model(seed=0)
>>> tokenizer.decode(tokenizer.encode("select 1"))
'select 1'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from slipstream.errors import ModelError

VOCAB_SIZE = 300
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Two-byte merges, so that text -> ids -> text is lossless but ids -> text -> ids is not ("t","h" becomes "th").
_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro"
)

_COMMON: dict[str, Any] = {"max_position_embeddings": 512, "initializer_range": 0.2}
_LLAMA_LIKE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_LLAMA_LIKE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_LLAMA_LIKE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "mistral": {**_LLAMA_LIKE, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "gemma2": {
        **_LLAMA_LIKE,
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,  # tied and scaled embeddings would make the random model repeat its input
    },
    "phi3": {**_LLAMA_LIKE, "model_type": "phi3", "pad_token_id": 258},
    "olmo2": {**_LLAMA_LIKE, "model_type": "olmo2"},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {
        **_LLAMA_LIKE,
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": 0.2,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
}


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer (256 bytes, 41 merges, 3 specials; 300 ids) with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(pair[0], pair[1]) for pair in _PAIRS.split()]
    space = "\u0120"  # the byte-level spelling of a blank
    merges += [(space, letter) for letter in "tasw"]
    tokens = alphabet + ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS, PAD])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(seed: int = 0, vocab: int = VOCAB_SIZE, arch: str = "llama", **overrides: Any) -> tuple[Any, Any]:
    """A random float32 model in eval mode and its tokenizer.

    Args:
        seed: of the weights; equal seeds give equal weights.
        vocab: rows of the embedding; at least 300 for text to be decodable.
        arch: llama, qwen2, qwen3, mistral, gemma2, phi3, olmo2, qwen3_moe, mixtral, gpt2 or mamba.
        **overrides: fields of the transformers config, e.g. ``num_hidden_layers=1``.
    """
    if arch not in _ARCHITECTURES:
        raise ModelError(f"no tiny model of architecture {arch!r}; choose one of {', '.join(_ARCHITECTURES)}")
    tokenizer = tiny_tokenizer()
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(**{**_ARCHITECTURES[arch], "vocab_size": vocab, **ids, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Constant norms and zero biases would hide a mix-up of parameters.
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
            elif "lm_head" in name:
                parameter.data.mul_(0.5)
    model.generation_config = GenerationConfig(**ids)
    return model.eval(), tokenizer


def tiny_model_dir(
    path: str | Path, seed: int = 0, vocab: int = VOCAB_SIZE, arch: str = "llama", **overrides: Any
) -> Path:
    """Save ``tiny_model`` and its tokenizer as a transformers model directory; returns the directory."""
    folder = Path(path)
    model, tokenizer = tiny_model(seed, vocab, arch, **overrides)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
