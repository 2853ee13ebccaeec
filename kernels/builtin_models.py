"""Shapes of well-known models by name, and the few that stand for all families where small shapes are checked."""

from __future__ import annotations

from dataclasses import replace

from kernels.contract import DownDtype
from quantize.model_config import ModelConfig

__all__ = ["BUILTIN_NAMES", "SMALL_SUITE", "builtin_config"]

_QWEN3_14B = ModelConfig(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=40,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_tokens=40960,
    tie_word_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    dtype="bfloat16",
    eos_token_ids=(151643, 151645),
    bos_token_id=151643,
)
_BUILTIN = {
    "qwen3-0.6b": replace(
        _QWEN3_14B,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": replace(
        _QWEN3_14B,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=28,
        num_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": replace(
        _QWEN3_14B,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": replace(_QWEN3_14B, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
    "qwen3-14b": _QWEN3_14B,
    "qwen3-32b": replace(_QWEN3_14B, intermediate_size=25600, num_layers=64, num_heads=64),
    "qwen2.5-0.5b": replace(
        _QWEN3_14B,
        family="qwen2",
        architecture="Qwen2ForCausalLM",
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_position_tokens=32768,
        tie_word_embeddings=True,
        qk_norm=False,
        qkv_bias=True,
    ),
    "smollm2-135m": replace(
        _QWEN3_14B,
        family="llama",
        architecture="LlamaForCausalLM",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        rms_norm_eps=9.999999747378752e-06,
        rope_theta=1e5,
        max_position_tokens=8192,
        tie_word_embeddings=True,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
}
BUILTIN_NAMES = tuple(_BUILTIN)
SMALL_SUITE: tuple[tuple[str, DownDtype], ...] = (
    ("qwen3-14b", "int8"),
    ("qwen3-14b", "bf16"),
    ("qwen2.5-0.5b", "int8"),
    ("smollm2-135m", "int8"),
)
"""Models and forms of `down_proj` whose small shapes have every option of the programs.

QK norm; QKV biases; neither, as Llama and Mistral; 5, 7 and 3 query heads a key/value head; head_dim 128 and 64.
"""


def builtin_config(name: str) -> ModelConfig:
    """The shape of a well-known model by name; raises KeyError naming the known ones."""
    try:
        return _BUILTIN[name]
    except KeyError:
        raise KeyError(f"no built-in model is called {name!r}; known: {', '.join(BUILTIN_NAMES)}") from None
