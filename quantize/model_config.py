"""The shape of a model, read once from `config.json` and trusted from there on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder of a supported family (`qwen3`, `qwen2`, `llama`).

    Sizes are element counts; `eos_token_ids` is the union over config and generation config; `max_position_tokens`
    is the longest context the checkpoint states.
    """

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_tokens: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def q_size(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of one of the key and value projections: kv heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one key/value head (the GQA ratio)."""
        return self.num_heads // self.num_kv_heads
