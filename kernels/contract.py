"""The kernel contract as data: which slabs a model becomes, in which order, dtype and shape.

A slab is one tensor over the whole model, in the layout the kernels read. The table below is the only place that
names slabs: staging writes what it says, loading checks files against it, and its fingerprint goes into every
manifest, so a file made for another table is refused rather than misread.

Symbols: L layers, H hidden, Q query width, KV key/value width, D head_dim, I intermediate, V the padded vocabulary,
P the RoPE positions. This module knows nothing of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kernels.errors import ContractError
from kernels.shape_rules import ShapeRule, shape_problems
from quantize.model_config import ModelConfig

CONTRACT_NAME = "decoder-w8a8"
CONTRACT_VERSION = 1

PAGE_TOKENS = 128
VOCAB_PAD_MULTIPLE = 512
BATCH_WINDOW_ROWS = 16
MAX_ROPE_POSITIONS = 4096
MAX_REDUCTION = 65536
"""Longest reduction whose INT32 sum cannot overflow with activations in -127..127: 127 * 128 * 2**16 < 2**31."""
MAX_VOCAB = 1 << 24
"""Most ids: programs that choose them carry them through FP32, which holds every whole number up to 2**24."""

DownDtype = Literal["int8", "bf16"]
SlabDtype = Literal["INT8", "BF16", "FP32"]
Rule = Literal["transpose", "row", "scale_row", "pad_zero_rows", "pad_first_row", "rope_cos", "rope_sin"]
Condition = Literal["always", "qk_norm", "qkv_bias", "down_int8", "down_bf16"]

ITEM_BYTES: dict[SlabDtype, int] = {"INT8": 1, "BF16": 2, "FP32": 4}


@dataclass(frozen=True)
class SlabSpec:
    """One row of the slab table.

    `shape` holds symbols, `*` multiplying them. `source` is the checkpoint's tensor (with `{layer}` when it exists once
    per layer), `rule` how it is re-oriented (see `kernels.layout`), `when` the families that have it.
    """

    name: str
    dtype: SlabDtype
    shape: tuple[str, ...]
    source: str
    rule: Rule
    when: Condition = "always"


@dataclass(frozen=True)
class ResolvedSlab:
    """A slab of one model: concrete sizes, and the table row it comes from."""

    name: str
    dtype: SlabDtype
    shape: tuple[int, ...]
    spec: SlabSpec

    @property
    def nbytes(self) -> int:
        """Payload size in bytes."""
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


_LAYER = "model.layers.{layer}."
_ATTN = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."

SLABS: tuple[SlabSpec, ...] = (
    SlabSpec("embed_weight", "BF16", ("V", "H"), "model.embed_tokens.weight", "pad_zero_rows"),
    SlabSpec("input_rms_weight", "FP32", ("L", "H"), _LAYER + "input_layernorm.weight", "row"),
    SlabSpec("wq", "INT8", ("L*H", "Q"), _ATTN + "q_proj.weight", "transpose"),
    SlabSpec("wk", "INT8", ("L*H", "KV"), _ATTN + "k_proj.weight", "transpose"),
    SlabSpec("wv", "INT8", ("L*H", "KV"), _ATTN + "v_proj.weight", "transpose"),
    SlabSpec("wq_scale", "FP32", ("L", "Q"), _ATTN + "q_proj.weight_scale", "scale_row"),
    SlabSpec("wk_scale", "FP32", ("L", "KV"), _ATTN + "k_proj.weight_scale", "scale_row"),
    SlabSpec("wv_scale", "FP32", ("L", "KV"), _ATTN + "v_proj.weight_scale", "scale_row"),
    SlabSpec("q_bias", "FP32", ("L", "Q"), _ATTN + "q_proj.bias", "row", "qkv_bias"),
    SlabSpec("k_bias", "FP32", ("L", "KV"), _ATTN + "k_proj.bias", "row", "qkv_bias"),
    SlabSpec("v_bias", "FP32", ("L", "KV"), _ATTN + "v_proj.bias", "row", "qkv_bias"),
    SlabSpec("q_norm_weight", "FP32", ("L", "D"), _ATTN + "q_norm.weight", "row", "qk_norm"),
    SlabSpec("k_norm_weight", "FP32", ("L", "D"), _ATTN + "k_norm.weight", "row", "qk_norm"),
    SlabSpec("wo", "INT8", ("L*Q", "H"), _ATTN + "o_proj.weight", "transpose"),
    SlabSpec("wo_scale", "FP32", ("L", "H"), _ATTN + "o_proj.weight_scale", "scale_row"),
    SlabSpec("post_rms_weight", "FP32", ("L", "H"), _LAYER + "post_attention_layernorm.weight", "row"),
    SlabSpec("w_gate", "INT8", ("L*H", "I"), _MLP + "gate_proj.weight", "transpose"),
    SlabSpec("w_up", "INT8", ("L*H", "I"), _MLP + "up_proj.weight", "transpose"),
    SlabSpec("w_gate_scale", "FP32", ("L", "I"), _MLP + "gate_proj.weight_scale", "scale_row"),
    SlabSpec("w_up_scale", "FP32", ("L", "I"), _MLP + "up_proj.weight_scale", "scale_row"),
    SlabSpec("w_down", "INT8", ("L*I", "H"), _MLP + "down_proj.weight", "transpose", "down_int8"),
    SlabSpec("w_down_scale", "FP32", ("L", "H"), _MLP + "down_proj.weight_scale", "scale_row", "down_int8"),
    SlabSpec("w_down", "BF16", ("L*I", "H"), _MLP + "down_proj.weight", "transpose", "down_bf16"),
    SlabSpec("final_norm_weight", "FP32", ("1", "H"), "model.norm.weight", "row"),
    SlabSpec("lm_head_weight", "BF16", ("V", "H"), "lm_head.weight", "pad_first_row"),
    SlabSpec("rope_cos", "FP32", ("P", "D"), "", "rope_cos"),
    SlabSpec("rope_sin", "FP32", ("P", "D"), "", "rope_sin"),
)
"""The slabs, in contract order. A tied model's `lm_head.weight` is read from the embedding."""


def padded_vocab(vocab_size: int) -> int:
    """Vocabulary rows after padding to a multiple of 512."""
    return -(-vocab_size // VOCAB_PAD_MULTIPLE) * VOCAB_PAD_MULTIPLE


def symbols(config: ModelConfig) -> dict[str, int]:
    """The value of every shape symbol of the table for `config`."""
    return {
        "L": config.num_layers,
        "H": config.hidden_size,
        "Q": config.q_size,
        "KV": config.kv_size,
        "D": config.head_dim,
        "I": config.intermediate_size,
        "V": padded_vocab(config.vocab_size),
        "P": min(config.max_position_tokens, MAX_ROPE_POSITIONS),
    }


def slab_specs(config: ModelConfig, down: DownDtype = "int8") -> list[ResolvedSlab]:
    """The slabs of a model in contract order, with concrete shapes.

    Raises ContractError, naming every limit exceeded, when the model does not fit the contract.
    """
    check_limits(config, down)
    conditions: set[Condition] = {"always", "down_int8" if down == "int8" else "down_bf16"}
    if config.qk_norm:
        conditions.add("qk_norm")
    if config.qkv_bias:
        conditions.add("qkv_bias")
    return resolve_slabs((spec for spec in SLABS if spec.when in conditions), symbols(config))


def resolve_slabs(specs: Iterable[SlabSpec], sizes: Mapping[str, int]) -> list[ResolvedSlab]:
    """Give table rows the sizes of a model."""
    return [
        ResolvedSlab(spec.name, spec.dtype, tuple(term_size(term, sizes) for term in spec.shape), spec)
        for spec in specs
    ]


def term_size(term: str, sizes: Mapping[str, int]) -> int:
    """The value of a shape term: symbols and numbers joined by `*`; raises KeyError for an unknown symbol."""
    value = 1
    for factor in term.split("*"):
        value *= int(factor) if factor.isdigit() else sizes[factor]
    return value


SHAPE_RULES = (
    ShapeRule("gqa", "num_heads", "a multiple of", "num_kv_heads", "query heads share key/value heads evenly"),
    ShapeRule("even-head", "head_dim", "a multiple of", "2", "rotary embedding splits a head in halves"),
    *(
        ShapeRule("int32-sum", size, "at most", str(MAX_REDUCTION), "longer INT32 sums could overflow")
        for size in ("hidden_size", "intermediate_size", "q_size")
    ),
    ShapeRule("fp32-ids", "vocab_size", "at most", str(MAX_VOCAB), "ids are carried through FP32"),
)
"""What a model's shape must obey so that its slabs mean what the table says."""


def check_limits(config: ModelConfig, down: DownDtype) -> None:
    """Raise ContractError unless the model's shape is one that the contract can carry."""
    problems = shape_problems(SHAPE_RULES, config)
    if down not in ("int8", "bf16"):
        problems.insert(0, f"down is {down!r}; expected 'int8' or 'bf16'")
    if problems:
        raise ContractError(
            f"the model does not fit contract {CONTRACT_NAME} v{CONTRACT_VERSION}: " + "; ".join(problems)
        )


def fingerprint(down: DownDtype = "int8") -> str:
    """SHA-256 of the contract as canonical JSON: name, version, limits and the slab table of the `down` variant."""
    skipped = "down_bf16" if down == "int8" else "down_int8"
    table = [
        [spec.name, spec.dtype, list(spec.shape), spec.source, spec.rule, spec.when]
        for spec in SLABS
        if spec.when != skipped
    ]
    limits = {
        "page_tokens": PAGE_TOKENS,
        "vocab_pad_multiple": VOCAB_PAD_MULTIPLE,
        "batch_window_rows": BATCH_WINDOW_ROWS,
        "max_rope_positions": MAX_ROPE_POSITIONS,
    }
    payload = {"name": CONTRACT_NAME, "version": CONTRACT_VERSION, "down": down, "limits": limits, "slabs": table}
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
