"""Tiny random models and a small tokenizer, made on the spot: a checkpoint directory in well under a second.

Weights are seeded per tensor name, so a directory made twice holds equal tensors. Norm weights and biases are random
too: with the library's ones and zeros, a swapped norm or a forgotten bias would go unseen.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TOKENIZER_IDS = 300
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, IM_START_ID, EOS_ID = 0, 1, 2
MERGES = (
    "Ġ t,h e,i n,e r,a n,o n,r e,a t,e n,o r,Ġ a,Ġt he,Ġ s,Ġ w,e s,o u,Ġ o,n d,i s,i t,"
    "Ġ c,Ġ b,e d,Ġ f,in g,Ġo f,Ġ p,Ġa nd,Ġ m,Ġt o,a l,a r,l l,o w,Ġ i,l e,Ġ h,v e,i c,Ġi n,l y"
)
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
"""Rotary scaling as in Llama 3.1; an original length of 256 puts frequencies of a head_dim of 32 in all three bands."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly 300 ids: 3 specials, 256 bytes and 41 merges; chat template and eos set."""
    merges = [(left, right) for left, right in (merge.rsplit(" ", 1) for merge in MERGES.split(","))]
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != TOKENIZER_IDS:
        raise ValueError(f"the tiny tokenizer has {len(vocab)} ids, expected {TOKENIZER_IDS}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter from a generator seeded by `seed` and the parameter's name; activations stay near 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # torch uses the low 32 bits of a seed only, so both must go into them.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("embed_tokens.weight"):
                values = 0.5 * noise
            elif parameter.dim() == 2:
                values = noise * parameter.shape[1] ** -0.5
            elif name.endswith(".bias"):
                values = 0.2 * noise
            else:
                values = 1.0 + 0.2 * noise
            parameter.copy_(values)


def _shape(overrides: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return {**shape, **overrides}


def _save(model: PreTrainedModel, directory: Path, seed: int, dtype: torch.dtype, max_shard_size: str) -> Path:
    randomize(model, seed)
    model.to(dtype).eval()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    return directory


def make_tiny_qwen3(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny Qwen3 (QK norms, head_dim 32 which is not hidden/heads) with tokenizer; returns `directory`."""
    config = Qwen3Config(**_shape({"head_dim": 32, **overrides}))
    return _save(Qwen3ForCausalLM(config), directory, seed, dtype, max_shard_size)


def make_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny Llama (head_dim 32, tied embeddings unless overridden) with tokenizer; returns `directory`."""
    config = LlamaConfig(**_shape({"head_dim": 32, "tie_word_embeddings": True, **overrides}))
    return _save(LlamaForCausalLM(config), directory, seed, dtype, max_shard_size)


def make_tiny_qwen2(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny Qwen2 (QKV biases, head_dim 16 = hidden/heads) with tokenizer; returns `directory`."""
    config = Qwen2Config(**_shape(overrides))
    return _save(Qwen2ForCausalLM(config), directory, seed, dtype, max_shard_size)


def make_tiny_mistral(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny Mistral (no sliding window, head_dim 32) with tokenizer; returns `directory`."""
    config = MistralConfig(**_shape({"head_dim": 32, "sliding_window": None, **overrides}))
    return _save(MistralForCausalLM(config), directory, seed, dtype, max_shard_size)
