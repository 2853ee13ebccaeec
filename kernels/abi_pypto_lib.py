"""The A8W8 interface of pypto-lib's Qwen3 kernels, reproduced as a contract of ours.

pypto-lib (`models/qwen3_14b`, August 2026) has A8W8 entry points for decode (29 arguments) and prefill (31), and no
entry in its own registry for them. The tables below are those entry points: names, order, dtypes and shapes. It differs
from ours in three ways: the down projection stays BF16, caches are ordered page, head, token, dim, and RoPE tables
always have 4096 rows.

The shape rules are those its kernels state or need: one constant set per model, checked when they are imported. Tile
counts that a build chooses freely (the five K splits of the output projection, say) are constants of that build and no
rules of the interface; `kernel_constants` lists what a build for a model must have.
"""

from __future__ import annotations

from kernels.contract import PAGE_TOKENS, VOCAB_PAD_MULTIPLE, SlabSpec, padded_vocab
from kernels.shape_rules import ShapeRule
from kernels.stage_contract import Contract, Limits, Stage, StageArgument
from quantize.model_config import ModelConfig

__all__ = ["ABI", "PYPTO_LIB_QWEN3_A8W8", "kernel_constants"]

ABI = "pypto-lib"
BATCH_PAD = 16
MAX_SEQ = 4096
SAMPLED_IDS_PAD = 8
TOP_K = 32
OUT_PROJECTION_SPLITS = (20, 5, 512)
"""How its build for 14B cuts the output projection: columns in 20, depth in 5 parts of whole 512s."""

_LAYER = "model.layers.{layer}."
_ATTN = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."

_SLABS = (
    SlabSpec("decode_input_rms_weight", "FP32", ("L", "H"), _LAYER + "input_layernorm.weight", "row"),
    SlabSpec("decode_wq", "INT8", ("L*H", "H"), _ATTN + "q_proj.weight", "transpose"),
    SlabSpec("decode_wk", "INT8", ("L*H", "KV"), _ATTN + "k_proj.weight", "transpose"),
    SlabSpec("decode_wv", "INT8", ("L*H", "KV"), _ATTN + "v_proj.weight", "transpose"),
    SlabSpec("decode_wq_scale", "FP32", ("L", "H"), _ATTN + "q_proj.weight_scale", "scale_row"),
    SlabSpec("decode_wk_scale", "FP32", ("L", "KV"), _ATTN + "k_proj.weight_scale", "scale_row"),
    SlabSpec("decode_wv_scale", "FP32", ("L", "KV"), _ATTN + "v_proj.weight_scale", "scale_row"),
    SlabSpec("decode_q_norm_weight", "FP32", ("L", "D"), _ATTN + "q_norm.weight", "row"),
    SlabSpec("decode_k_norm_weight", "FP32", ("L", "D"), _ATTN + "k_norm.weight", "row"),
    SlabSpec("rope_cos", "FP32", ("P", "D"), "", "rope_cos"),
    SlabSpec("rope_sin", "FP32", ("P", "D"), "", "rope_sin"),
    SlabSpec("decode_wo", "INT8", ("L*H", "H"), _ATTN + "o_proj.weight", "transpose"),
    SlabSpec("decode_wo_scale", "FP32", ("L", "H"), _ATTN + "o_proj.weight_scale", "scale_row"),
    SlabSpec("decode_w_gate", "INT8", ("L*H", "I"), _MLP + "gate_proj.weight", "transpose"),
    SlabSpec("decode_w_up", "INT8", ("L*H", "I"), _MLP + "up_proj.weight", "transpose"),
    SlabSpec("decode_w_gate_scale", "FP32", ("L", "I"), _MLP + "gate_proj.weight_scale", "scale_row"),
    SlabSpec("decode_w_up_scale", "FP32", ("L", "I"), _MLP + "up_proj.weight_scale", "scale_row"),
    SlabSpec("decode_w_down", "BF16", ("L*I", "H"), _MLP + "down_proj.weight", "transpose"),
    SlabSpec("decode_post_rms_weight", "FP32", ("L", "H"), _LAYER + "post_attention_layernorm.weight", "row"),
    SlabSpec("final_norm_weight", "FP32", ("1", "H"), "model.norm.weight", "row"),
    SlabSpec("lm_head_weight", "BF16", ("V", "H"), "lm_head.weight", "pad_first_row"),
    SlabSpec("embed_weight", "BF16", ("V", "H"), "model.embed_tokens.weight", "pad_zero_rows"),
)
_BY_NAME = {spec.name: spec for spec in _SLABS}


def _weight(name: str, slab: str = "") -> StageArgument:
    """An argument that is a whole slab: `decode_<name>` unless said otherwise."""
    spec = _BY_NAME[slab or f"decode_{name}"]
    return StageArgument(name, spec.dtype, spec.shape, slab=spec.name)


_ROPE = (_weight("rope_cos", "rope_cos"), _weight("rope_sin", "rope_sin"))
_QKV = tuple(_weight(name) for name in ("wq", "wk", "wv", "wq_scale", "wk_scale", "wv_scale"))
_QK_NORM = (_weight("q_norm_weight"), _weight("k_norm_weight"))
_CACHES = (
    StageArgument("k_cache", "BF16", ("S", "D"), "inout"),
    StageArgument("v_cache", "BF16", ("S", "D"), "inout"),
)
_GATE_UP = tuple(_weight(name) for name in ("w_gate", "w_up", "w_gate_scale", "w_up_scale"))
_HEAD = (_weight("final_norm_weight", "final_norm_weight"), _weight("lm_head_weight", "lm_head_weight"))

_DECODE = Stage(
    "decode",
    (
        StageArgument("hidden_states", "BF16", (str(BATCH_PAD), "H")),
        _weight("input_rms_weight"),
        *_QKV,
        *_QK_NORM,
        StageArgument("seq_lens", "INT32", ("B",)),
        StageArgument("active_batch", "INT32", ("1",)),
        StageArgument("block_table", "INT32", ("B*M",)),
        StageArgument("slot_mapping", "INT32", ("B",)),
        *_ROPE,
        *_CACHES,
        _weight("wo"),
        _weight("wo_scale"),
        *_GATE_UP,
        _weight("w_down"),
        _weight("post_rms_weight"),
        *_HEAD,
        StageArgument("out", "FP32", ("B", "V"), "out"),
    ),
    note="seq_lens counts the token being decoded; rows past active_batch write keys too: give them a scratch slot",
)
_PREFILL = Stage(
    "prefill",
    (
        StageArgument("hidden_states", "BF16", ("T", "H")),
        StageArgument("seq_lens", "INT32", ("B",)),
        StageArgument("chunk_lens", "INT32", ("B",)),
        StageArgument("chunk_offsets", "INT32", ("B",)),
        _weight("input_rms_weight"),
        *_QKV,
        *_QK_NORM,
        *_ROPE,
        StageArgument("block_table", "INT32", ("B*M",)),
        StageArgument("slot_mapping", "INT32", ("T",)),
        *_CACHES,
        _weight("wo"),
        _weight("wo_scale"),
        _weight("post_rms_weight"),
        *_GATE_UP,
        _weight("w_down"),
        *_HEAD,
        StageArgument("out", "FP32", ("B", "V"), "out"),
        StageArgument("hidden_out", "BF16", ("T", "H"), "out"),
    ),
    note="writes hidden_out and the caches only: final_norm_weight, lm_head_weight and out are taken and not used",
)
_GREEDY_SAMPLE = Stage(
    "greedy_sample",
    (
        StageArgument("logits", "FP32", (str(BATCH_PAD), "V")),
        StageArgument("sampled_ids", "INT32", (str(BATCH_PAD), str(SAMPLED_IDS_PAD)), "out"),
    ),
    note="column 0 holds the id; ties go to the lowest one",
)
_TOPK_SELECT = Stage(
    "topk_select",
    (
        StageArgument("logits", "FP32", (str(BATCH_PAD), "V")),
        StageArgument("sampling_control", "INT32", ("2",)),
        StageArgument("topk_values", "FP32", (str(BATCH_PAD), str(TOP_K)), "out"),
        StageArgument("topk_indices", "INT32", (str(BATCH_PAD), str(TOP_K)), "out"),
    ),
    note="sampling_control is the active batch and k",
)

_RULES = (
    ShapeRule("head-dim", "head_dim", "is", "128", "heads of 128 are built into rotary embedding and attention"),
    ShapeRule("query-width", "q_size", "is", "hidden_size", "wq and wo are square: heads x head_dim is hidden"),
    ShapeRule("gqa", "num_heads", "a multiple of", "num_kv_heads", "query heads share key/value heads evenly"),
    ShapeRule("query-group", "q_per_kv", "at most", "8", "a group of query heads fills at most half of a 16-row tile"),
    ShapeRule("kv-pairs", "num_kv_heads", "a multiple of", "2", "attention takes key/value heads two at a time"),
    ShapeRule("kv-tile", "kv_size", "a multiple of", "512", "key and value projections are cut in tiles of 512"),
    ShapeRule("hidden-tile", "hidden_size", "a multiple of", "512", "projections are cut in tiles of 512"),
    ShapeRule("mlp-tile", "intermediate_size", "a multiple of", "256", "gate and up are cut in tiles of 256"),
    ShapeRule("rms-eps", "rms_norm_eps", "is", "1e-06", "the kernels' norms have this epsilon built in"),
)

PYPTO_LIB_QWEN3_A8W8 = Contract(
    abi=ABI,
    family="qwen3",
    quantization="w8a8-down-bf16",
    version=1,
    down="bf16",
    kv_layout="page,head,token,dim",
    limits=Limits(BATCH_PAD, PAGE_TOKENS, VOCAB_PAD_MULTIPLE, MAX_SEQ),
    capabilities=("paged_kv", "chunked_prefill", "greedy_sample", "topk_select"),
    rules=_RULES,
    slabs=_SLABS,
    stages=(_DECODE, _PREFILL, _GREEDY_SAMPLE, _TOPK_SELECT),
    execution=(("prefill", ("prefill",)), ("decode", ("decode", "greedy_sample"))),
    fixed_sizes=(("P", MAX_SEQ),),
)


def kernel_constants(config: ModelConfig) -> dict[str, int | str]:
    """The constants a build of pypto-lib's kernels must have for slabs of `config`, by their names there.

    `retune` is present where the cut of the output projection that its build for 14B uses does not divide this model.
    """
    constants: dict[str, int | str] = {
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "q_head_batch": config.q_per_kv,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "vocab": padded_vocab(config.vocab_size),
        "real_vocab": config.vocab_size,
        "max_seq": MAX_SEQ,
    }
    columns, splits, inner = OUT_PROJECTION_SPLITS
    if config.hidden_size % columns or config.hidden_size % (splits * inner):
        constants["retune"] = (
            f"N_SPLITS_OUT = {columns} and K_SPLITS_OUT = {splits} of decode_layer_a8w8 do not cut hidden size "
            f"{config.hidden_size} in whole tiles of {inner}: choose others"
        )
    return constants
