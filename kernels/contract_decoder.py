"""Our own kernel contracts: the stages of the PyPTO programs, for every family and both forms of the down projection.

The argument tables say what a host hands over; scratch arguments are the programs' own business and left out. That the
programs take exactly these is held by a test, so a program whose interface changes needs a row here.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.contract import (
    BATCH_WINDOW_ROWS,
    CONTRACT_VERSION,
    MAX_ROPE_POSITIONS,
    PAGE_TOKENS,
    SHAPE_RULES,
    SLABS,
    VOCAB_PAD_MULTIPLE,
    DownDtype,
    SlabSpec,
)
from kernels.extern import CANN, PROGRAM
from kernels.shape_rules import ShapeRule
from kernels.stage_contract import Contract, Limits, Stage, StageArgument
from quantize.families import FAMILIES, Family

__all__ = ["ABI", "decoder_contract"]

ABI = "pypto-deploy"
QUANTIZATIONS: dict[DownDtype, str] = {"int8": "w8a8", "bf16": "w8a8-down-bf16"}
TOP_IDS = 32
PLACEHOLDER = ("1", "16")
"""What is handed over for a slab that a family does not have: a row of zeros that the kernel does not read."""

_RULES = (
    *SHAPE_RULES,
    ShapeRule("head-tile", "head_dim", "a multiple of", "16", "a head is whole fractals"),
    ShapeRule("head-limit", "head_dim", "at most", "256", "one head's tile must fit the matrix unit"),
    ShapeRule("hidden-fractal", "hidden_size", "a multiple of", "32", "INT8 fractals are 32 wide"),
    ShapeRule("top-ids", "vocab_size", "at least", str(TOP_IDS), "topk_select gives that many ids of every row"),
    ShapeRule("mlp-fractal", "intermediate_size", "a multiple of", "32", "INT8 fractals are 32 wide"),
)


def decoder_contract(family: Family, down: DownDtype) -> Contract:
    """The contract of `family` with the down projection in `down`."""
    wanted = {"always", "down_int8" if down == "int8" else "down_bf16"}
    wanted |= {"qk_norm"} if family.qk_norm else set()
    wanted |= {"qkv_bias"} if family.qkv_bias else set()
    slabs = tuple(spec for spec in SLABS if spec.when in wanted)
    by_name = {spec.name: spec for spec in slabs}
    return Contract(
        abi=ABI,
        family=family.name,
        quantization=QUANTIZATIONS[down],
        version=CONTRACT_VERSION,
        down=down,
        kv_layout="page,token,head,dim",
        limits=Limits(BATCH_WINDOW_ROWS, PAGE_TOKENS, VOCAB_PAD_MULTIPLE, MAX_ROPE_POSITIONS),
        capabilities=(
            "paged_kv",
            "chunked_prefill",
            "dynamic_batch",
            "device_embedding",
            "device_greedy_sampling",
            "topk_select",
            "turboquant4_kv",
        ),
        rules=_RULES,
        slabs=slabs,
        stages=(
            EMBEDDING_GATHER,
            _prefill_layer(by_name),
            _prefill_step(by_name),
            _decode_layer(by_name),
            _decode_step(by_name),
            LM_HEAD_GREEDY,
            GREEDY_SAMPLE,
            TOPK_SELECT,
            PAGED_ATTENTION,
            _decode_layer_turboquant(by_name),
            TURBOQUANT_ENCODE,
            TURBOQUANT_ATTENTION,
        ),
        execution=(
            ("prefill", ("embedding_gather", "prefill_step")),
            ("decode", ("decode_step",)),
        ),
    )


_LAYER_WEIGHTS = (
    ("input_rms", "input_rms_weight"),
    *((name, name) for name in ("wq", "wk", "wv", "wq_scale", "wk_scale", "wv_scale", "q_bias", "k_bias", "v_bias")),
    ("q_norm", "q_norm_weight"),
    ("k_norm", "k_norm_weight"),
    ("wo", "wo"),
    ("wo_scale", "wo_scale"),
    ("post_rms", "post_rms_weight"),
    *((name, name) for name in ("w_gate", "w_up", "w_gate_scale", "w_up_scale", "w_down", "w_down_scale")),
)
_FAMILY_WEIGHTS = ("q_norm", "k_norm", "q_bias", "k_bias", "v_bias")
_STACKED_WEIGHTS = (
    *(weight for weight in _LAYER_WEIGHTS if weight[0] not in _FAMILY_WEIGHTS),
    *(weight for name in _FAMILY_WEIGHTS for weight in _LAYER_WEIGHTS if weight[0] == name),
)
"""`decode_step` takes what not every family has last."""
_HEAD_AND_EMBEDDING = (
    StageArgument("final_norm", "FP32", ("1", "H"), slab="final_norm_weight"),
    StageArgument("lm_head_weight", "BF16", ("V", "H"), slab="lm_head_weight"),
    StageArgument("embed_weight", "BF16", ("V", "H"), slab="embed_weight"),
)
_ROWS = (
    StageArgument("cos", "FP32", ("B", "D")),
    StageArgument("sin", "FP32", ("B", "D")),
    StageArgument("slots", "INT32", ("B", "1")),
    StageArgument("context_tokens", "INT32", ("B",)),
    StageArgument("block_table", "INT32", ("B", "M")),
)
_PROMPTS = (
    StageArgument("cos", "FP32", ("T", "D")),
    StageArgument("sin", "FP32", ("T", "D")),
    StageArgument("row_starts", "INT32", ("B",)),
    StageArgument("context_tokens", "INT32", ("B",)),
    StageArgument("block_table", "INT32", ("B", "M")),
    StageArgument("causal_bias", "FP32", (str(PAGE_TOKENS), str(PAGE_TOKENS))),
)
_CACHES = (
    StageArgument("k_cache", "BF16", ("S", "KV"), "inout"),
    StageArgument("v_cache", "BF16", ("S", "KV"), "inout"),
)
PAGED_ATTENTION = Stage(
    "paged_attention",
    (
        StageArgument("q_rows", "BF16", ("B*N", "D")),
        StageArgument("k_cache", "BF16", ("S", "KV")),
        StageArgument("v_cache", "BF16", ("S", "KV")),
        StageArgument("context_tokens", "INT32", ("B",)),
        StageArgument("block_table", "INT32", ("B", "M")),
        StageArgument("context_rows", "BF16", ("B*N", "D"), "out"),
    ),
    implementations=(PROGRAM, CANN.name),
    note="every row attends to the context_tokens first tokens of its pages; N query heads a row",
)


_KEPT_MATRICES = (
    StageArgument("k_matrices", "BF16", ("D", "D")),
    StageArgument("v_matrices", "BF16", ("D", "D")),
)
_KEPT = (
    StageArgument("k_codes", "INT8", ("S", "C4")),
    StageArgument("k_norms", "FP32", ("S", "G")),
    StageArgument("v_codes", "INT8", ("S", "C4")),
    StageArgument("v_norms", "FP32", ("S", "G")),
)
_KEPT_CACHES = tuple(replace(argument, direction="inout") for argument in _KEPT)
_KEPT_NOTE = "a cache of TurboQuant codes of four bits, two a byte, and norms; matrices are the layer's rotations"
TURBOQUANT_ENCODE = Stage(
    "turboquant_encode",
    (
        StageArgument("k_rows", "BF16", ("B", "KV")),
        StageArgument("v_rows", "BF16", ("B", "KV")),
        StageArgument("slots", "INT32", ("B", "1")),
        *_KEPT_MATRICES,
        *_KEPT_CACHES,
    ),
    note=_KEPT_NOTE,
)
TURBOQUANT_ATTENTION = Stage(
    "turboquant_attention",
    (
        StageArgument("q_rows", "BF16", ("B*N", "D")),
        *_KEPT_MATRICES,
        *_KEPT,
        StageArgument("context_tokens", "INT32", ("B",)),
        StageArgument("block_table", "INT32", ("B", "M")),
        StageArgument("context_rows", "BF16", ("B*N", "D"), "out"),
    ),
    note=_KEPT_NOTE,
)
EMBEDDING_GATHER = Stage(
    "embedding_gather",
    (
        StageArgument("ids", "INT32", ("B",)),
        StageArgument("embed_weight", "BF16", ("V", "H"), slab="embed_weight"),
        StageArgument("hidden", "BF16", ("B", "H"), "out"),
    ),
)
LM_HEAD_GREEDY = Stage(
    "lm_head_greedy",
    (
        StageArgument("x", "BF16", ("B", "H")),
        StageArgument("final_norm", "FP32", ("1", "H"), slab="final_norm_weight"),
        StageArgument("weight", "BF16", ("V", "H"), slab="lm_head_weight"),
        StageArgument("logits", "FP32", ("B", "W"), "out"),
        StageArgument("ids", "INT32", ("B", "1"), "out"),
    ),
    note="W is the real vocabulary: padded ids have no logit and never win",
)
GREEDY_SAMPLE = Stage(
    "greedy_sample",
    (StageArgument("logits", "FP32", ("B", "V")), StageArgument("ids", "INT32", ("B", "1"), "out")),
    note="ties go to the lowest id; padded ids never win",
)
TOPK_SELECT = Stage(
    "topk_select",
    (
        StageArgument("logits", "FP32", ("B", "V")),
        StageArgument("values", "FP32", ("B", str(TOP_IDS)), "out"),
        StageArgument("ids", "INT32", ("B", str(TOP_IDS)), "out"),
    ),
    note="largest first, ties by id; padded ids are never among them",
)


def _layer_argument(name: str, spec: SlabSpec | None) -> StageArgument:
    """One layer's part of a slab: its matrix, or its row as a matrix of one row."""
    if spec is None:
        return StageArgument(name, "FP32", PLACEHOLDER)
    rows = spec.shape[0].removeprefix("L*")
    return StageArgument(name, spec.dtype, ("1" if rows == "L" else rows, spec.shape[1]), slab=spec.name)


def _stacked_argument(name: str, spec: SlabSpec | None) -> StageArgument:
    """A whole slab, all layers of it."""
    if spec is None:
        return StageArgument(name, "FP32", PLACEHOLDER)
    return StageArgument(name, spec.dtype, spec.shape, slab=spec.name)


def _decode_layer(slabs: dict[str, SlabSpec]) -> Stage:
    return Stage(
        "decode_layer",
        (
            StageArgument("x", "BF16", ("B", "H")),
            *(_layer_argument(name, slabs.get(slab)) for name, slab in _LAYER_WEIGHTS),
            *_ROWS,
            *_CACHES,
            StageArgument("out", "BF16", ("B", "H"), "out"),
        ),
        note="weights are one layer's; rows of a sequence stand in the order of their positions",
    )


def _decode_layer_turboquant(slabs: dict[str, SlabSpec]) -> Stage:
    plain = _decode_layer(slabs)
    arguments = [argument for argument in plain.arguments if argument not in _CACHES]
    return Stage(
        "decode_layer_turboquant",
        (*arguments[:-1], *_KEPT_MATRICES, *_KEPT_CACHES, arguments[-1]),
        note=_KEPT_NOTE,
    )


def _prefill_layer(slabs: dict[str, SlabSpec]) -> Stage:
    return Stage(
        "prefill_layer",
        (
            StageArgument("x", "BF16", ("T", "H")),
            *(_layer_argument(name, slabs.get(slab)) for name, slab in _LAYER_WEIGHTS),
            *_PROMPTS,
            *_CACHES,
            StageArgument("out", "BF16", ("T", "H"), "out"),
        ),
        note="sequences packed token-major; row_starts has one entry more than there are sequences",
    )


def _prefill_step(slabs: dict[str, SlabSpec]) -> Stage:
    return Stage(
        "prefill_step",
        (
            StageArgument("x", "BF16", ("T", "H"), "inout"),
            *(_stacked_argument(name, slabs.get(slab)) for name, slab in _STACKED_WEIGHTS),
            *_HEAD_AND_EMBEDDING,
            *_PROMPTS,
            *_CACHES,
            StageArgument("logits", "FP32", ("B", "W"), "out"),
            StageArgument("ids", "INT32", ("B", "1"), "out"),
            StageArgument("next_rows", "BF16", ("B", "H"), "out"),
        ),
        note="all layers, and the LM head on each sequence's last row; next_rows are the embedding rows of the ids",
    )


def _decode_step(slabs: dict[str, SlabSpec]) -> Stage:
    return Stage(
        "decode_step",
        (
            StageArgument("x", "BF16", ("B", "H"), "inout"),
            *(_stacked_argument(name, slabs.get(slab)) for name, slab in _STACKED_WEIGHTS),
            *_HEAD_AND_EMBEDDING,
            StageArgument("cos", "FP32", ("T", "D")),
            StageArgument("sin", "FP32", ("T", "D")),
            StageArgument("slots", "INT32", ("L*T", "1")),
            StageArgument("context_tokens", "INT32", ("T",)),
            StageArgument("block_table", "INT32", ("B", "M")),
            *_CACHES,
            StageArgument("logits", "FP32", ("T", "W"), "out"),
            StageArgument("ids", "INT32", ("T", "1"), "out"),
        ),
        note="all layers and the LM head; T is steps times B, the ids of one step being the tokens of the next",
    )


DECODER_CONTRACTS = tuple(decoder_contract(family, down) for family in FAMILIES.values() for down in QUANTIZATIONS)
