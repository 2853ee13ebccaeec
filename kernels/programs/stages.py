"""The two dense stages of a decoder layer, over a window of rows of which the first `valid_rows` are real.

`project_rows` is everything before attention, `finish_rows` everything after it. Weights are values, so that a caller
may pass views of stacked slabs. Imported only where a program is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pypto

from kernels.programs import blocks
from kernels.tiles import choose_cube_tile

__all__ = ["FinishWeights", "ProjectWeights", "finish_rows", "project_rows"]


@dataclass(frozen=True)
class ProjectWeights:
    """Slabs of the first stage: norm `[1, hidden]`, projections `[hidden, n]`, scales, biases `[1, n]`, head norms."""

    input_rms: Any
    wq: Any
    wk: Any
    wv: Any
    wq_scale: Any
    wk_scale: Any
    wv_scale: Any
    q_bias: Any
    k_bias: Any
    v_bias: Any
    q_norm: Any
    k_norm: Any


@dataclass(frozen=True)
class FinishWeights:
    """Slabs of the last stage: output projection, norm, and the three of the MLP."""

    wo: Any
    wo_scale: Any
    post_rms: Any
    w_gate: Any
    w_up: Any
    w_gate_scale: Any
    w_up_scale: Any
    w_down: Any
    w_down_scale: Any


def project_rows(
    spec: Any, x: Any, weights: ProjectWeights, cos: Any, sin: Any, valid_rows: Any
) -> tuple[Any, Any, Any]:
    """Norm, quantize, project, normalise heads, rotate: BF16 `[rows, hidden]` to BF16 q, k, v.

    `spec` is a layer's specification (`DecodeLayerSpec` or one with the same shape fields); `cos`, `sin` FP32
    `[rows, dim]`.
    """
    rows, hidden, dim = x.shape[0], spec.hidden_size, spec.head_dim
    pypto.set_vec_tile_shapes(1, hidden)
    normed = blocks.rms_norm_rows(blocks.to_fp32(x), weights.input_rms, spec.rms_norm_eps, valid_rows)
    codes, scale = blocks.quantize_rows(blocks.to_bf16(normed), valid_rows)
    q_tile = choose_cube_tile(hidden, spec.q_size, 1, rows=rows)
    kv_tile = choose_cube_tile(hidden, spec.kv_size, 1, rows=rows)
    q = blocks.linear_w8a8(codes, scale, weights.wq, weights.wq_scale, q_tile, valid_rows)
    if spec.qkv_bias:
        q = pypto.add(q, weights.q_bias)
    k = blocks.linear_w8a8(codes, scale, weights.wk, weights.wk_scale, kv_tile, valid_rows)
    v = blocks.linear_w8a8(codes, scale, weights.wv, weights.wv_scale, kv_tile, valid_rows)
    if spec.qkv_bias:
        k = pypto.add(k, weights.k_bias)
        v = pypto.add(v, weights.v_bias)
    v_bf16 = blocks.to_bf16(v)
    q3 = blocks.reshape_rows(q, [rows, spec.num_heads, dim], valid_rows)
    k3 = blocks.reshape_rows(k, [rows, spec.num_kv_heads, dim], valid_rows)
    if spec.qk_norm:
        q3 = blocks.head_norm(q3, weights.q_norm, spec.rms_norm_eps)
        k3 = blocks.head_norm(k3, weights.k_norm, spec.rms_norm_eps)
    q_bf16 = blocks.reshape_rows(blocks.rotate(q3, cos, sin, valid_rows), [rows, spec.q_size], valid_rows)
    k_bf16 = blocks.reshape_rows(blocks.rotate(k3, cos, sin, valid_rows), [rows, spec.kv_size], valid_rows)
    return q_bf16, k_bf16, v_bf16


def finish_rows(spec: Any, x: Any, context: Any, weights: FinishWeights, valid_rows: Any) -> Any:
    """Output projection, residual and SwiGLU MLP; the residual stays FP32 and is narrowed once, to BF16.

    `x` BF16 `[rows, hidden]` is the layer's input, `context` BF16 `[rows, heads * dim]` the attention's output.
    """
    rows, hidden, inter = x.shape[0], spec.hidden_size, spec.intermediate_size
    codes, scale = blocks.quantize_rows(context, valid_rows)
    o_tile = choose_cube_tile(spec.q_size, hidden, 1, rows=rows)
    projected = blocks.linear_w8a8(codes, scale, weights.wo, weights.wo_scale, o_tile, valid_rows)
    residual = pypto.add(blocks.to_fp32(x), projected)
    normed = blocks.rms_norm_rows(residual, weights.post_rms, spec.rms_norm_eps, valid_rows)
    codes, scale = blocks.quantize_rows(blocks.to_bf16(normed), valid_rows)
    up_tile = choose_cube_tile(hidden, inter, 1, rows=rows)
    gate = blocks.linear_w8a8(codes, scale, weights.w_gate, weights.w_gate_scale, up_tile, valid_rows)
    up = blocks.linear_w8a8(codes, scale, weights.w_up, weights.w_up_scale, up_tile, valid_rows)
    activated = blocks.to_bf16(pypto.mul(blocks.silu(gate), up))
    if spec.down == "int8":
        codes, scale = blocks.quantize_rows(activated, valid_rows)
        down_tile = choose_cube_tile(inter, hidden, 1, rows=rows)
        down = blocks.linear_w8a8(codes, scale, weights.w_down, weights.w_down_scale, down_tile, valid_rows)
    else:
        down_tile = choose_cube_tile(inter, hidden, 2, rows=rows)
        down = blocks.whole(blocks.linear_bf16(activated, weights.w_down, down_tile), valid_rows)
    pypto.set_vec_tile_shapes(min(rows, blocks.VECTOR_ROWS), 2 * down_tile.n)
    return blocks.to_bf16(pypto.add(residual, down))
