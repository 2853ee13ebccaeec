"""The supported decoder families as data: one row each; a new family of the same structure is a row and a test.

All are pre-norm decoders of RMSNorm, rotary grouped-query attention and a SwiGLU MLP, with the tensor names of
transformers' Llama. A row says in what a family differs from that, and what transformers assumes for absent keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """What distinguishes a family, and the defaults of transformers' configuration class.

    `default_head_dim` None means hidden_size / heads; `default_kv_heads` None means as many as query heads.
    `window`: when `sliding_window` takes effect. `set`: whenever it is not null (`default_window` when absent);
    `switched`: only with `use_sliding_window`, in the layers from `max_window_layers` on.
    """

    name: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    window: Literal["set", "switched"] = "set"
    default_window: int | None = None
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    default_bos: int | None = None
    default_eos: int | None = None


_ROWS = (
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, window="switched", default_head_dim=128, default_kv_heads=32),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="switched", default_kv_heads=32),
    Family("llama", "LlamaForCausalLM", default_bos=1, default_eos=2),
    Family("mistral", "MistralForCausalLM", default_window=4096, default_kv_heads=8, default_bos=1, default_eos=2),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ROWS}
