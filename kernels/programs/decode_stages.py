"""The stages of a decoder layer over a batch of single tokens, inlined by `decode_layer` and `decode_step`.

Three stages, joined by scratch arguments: a prologue (norm, quantize, QKV, norms, RoPE, cache write), attention over
the pages of each row, and an epilogue (output projection, residual, MLP). Each stage is a `pypto.loop`, so that the
next one starts after it. Slabs are stacked over the layers, `[layers * k, n]` or `[layers, n]`, and the caches are
`[layers * slots, width]`; a stage takes views at its layer's offset, which may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.decode_attention import attend_row
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.tiles import choose_cube_tile


@dataclass(frozen=True)
class LayerAt:
    """Where a layer's stages work: numbers that may be symbolic.

    `layer` is the index in the stacked slabs, `first_slot` the first cache row of the layer, `slots_row` the first row
    of its `slots`, and `first_row` the first of the window's rows in the per-token arguments (`cos`, `sin`,
    `context_tokens`).
    """

    layer: Any = 0
    first_slot: Any = 0
    slots_row: Any = 0
    first_row: Any = 0


def layer_stages(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any, out: Any) -> None:
    """Run the layer at `at` on hidden rows `x` and write its hidden rows to `out`, which may be `x` itself.

    `tensors` holds the program's arguments as attributes.
    """
    for _ in pypto.loop(0, 1, 1, name="PROLOGUE", idx_name="prologue", submit_before_loop=True):
        _prologue(spec, at, tensors, x)
    for row in pypto.loop(0, spec.batch_rows, 1, name="ROWS", idx_name="row", submit_before_loop=True):
        tokens = tensors.context_tokens[at.first_row + row]

        def page_slot(page: Any, row: Any = row) -> Any:
            return tensors.block_table[row, page] * PAGE_TOKENS + at.first_slot

        attend_row(spec, row, tokens, page_slot, tensors)
    for _ in pypto.loop(0, 1, 1, name="EPILOGUE", idx_name="epilogue", submit_before_loop=True):
        _epilogue(spec, at, tensors, x, out)


def _matrix(slab: Any, at: LayerAt, rows: int) -> Any:
    """The layer's `[rows, n]` of a stacked matrix."""
    return pypto.view(slab, [rows, slab.shape[1]], [at.layer * rows, 0])


def _vector(slab: Any, at: LayerAt) -> Any:
    """The layer's `[1, n]` of a stacked vector."""
    return pypto.view(slab, [1, slab.shape[1]], [at.layer, 0])


def _prologue(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any) -> None:
    """Norm, quantize, project, normalise heads, rotate; write the rows' keys and values to their slots."""
    batch, dim, hidden, kv_size = spec.batch_rows, spec.head_dim, spec.hidden_size, spec.kv_size
    pypto.set_vec_tile_shapes(1, hidden)
    input_rms = _vector(tensors.input_rms, at)
    normed = blocks.to_bf16(blocks.rms_norm_rows(blocks.to_fp32(x), input_rms, spec.rms_norm_eps))
    codes, scale = blocks.quantize_rows(normed)

    def project(weight: Any, weight_scale: Any, bias: Any, width: int) -> Any:
        tile = choose_cube_tile(hidden, width, 1)
        value = blocks.linear_w8a8(codes, scale, _matrix(weight, at, hidden), _vector(weight_scale, at), tile)
        return pypto.add(value, _vector(bias, at)) if spec.qkv_bias else value

    q = project(tensors.wq, tensors.wq_scale, tensors.q_bias, spec.q_size)
    k = project(tensors.wk, tensors.wk_scale, tensors.k_bias, kv_size)
    v = project(tensors.wv, tensors.wv_scale, tensors.v_bias, kv_size)
    v_bf16 = blocks.to_bf16(v)
    q3 = pypto.reshape(q, [batch, spec.num_heads, dim])
    k3 = pypto.reshape(k, [batch, spec.num_kv_heads, dim])
    if spec.qk_norm:
        q3 = blocks.head_norm(q3, _vector(tensors.q_norm, at), spec.rms_norm_eps)
        k3 = blocks.head_norm(k3, _vector(tensors.k_norm, at), spec.rms_norm_eps)
    cos = pypto.view(tensors.cos, [batch, dim], [at.first_row, 0])
    sin = pypto.view(tensors.sin, [batch, dim], [at.first_row, 0])
    q_rotated = pypto.reshape(blocks.rotate(q3, cos, sin), [batch * spec.num_heads, dim])
    k_rotated = pypto.reshape(blocks.rotate(k3, cos, sin), [batch, kv_size])
    pypto.set_vec_tile_shapes(spec.num_heads, dim)
    tensors.q_rows[:] = q_rotated
    pypto.set_vec_tile_shapes(batch, kv_size)
    slots = pypto.view(tensors.slots, [batch, 1], [at.slots_row, 0])
    tensors.k_cache[:] = pypto.scatter_update(tensors.k_cache, -2, slots, k_rotated)
    tensors.v_cache[:] = pypto.scatter_update(tensors.v_cache, -2, slots, v_bf16)


def _epilogue(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any, out: Any) -> None:
    """Output projection, residual and SwiGLU MLP; the residual stays FP32 and is narrowed once."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
    context = pypto.reshape(tensors.context_rows, [spec.batch_rows, spec.q_size])
    codes, scale = blocks.quantize_rows(context)
    o_tile = choose_cube_tile(spec.q_size, hidden, 1)
    wo, wo_scale = _matrix(tensors.wo, at, spec.q_size), _vector(tensors.wo_scale, at)
    residual = pypto.add(blocks.to_fp32(x), blocks.linear_w8a8(codes, scale, wo, wo_scale, o_tile))
    normed = blocks.to_bf16(blocks.rms_norm_rows(residual, _vector(tensors.post_rms, at), spec.rms_norm_eps))
    codes, scale = blocks.quantize_rows(normed)
    up_tile = choose_cube_tile(hidden, inter, 1)
    w_gate, w_up = _matrix(tensors.w_gate, at, hidden), _matrix(tensors.w_up, at, hidden)
    gate = blocks.linear_w8a8(codes, scale, w_gate, _vector(tensors.w_gate_scale, at), up_tile)
    up = blocks.linear_w8a8(codes, scale, w_up, _vector(tensors.w_up_scale, at), up_tile)
    activated = blocks.to_bf16(pypto.mul(blocks.silu(gate), up))
    w_down = _matrix(tensors.w_down, at, inter)
    if spec.down == "int8":
        codes, scale = blocks.quantize_rows(activated)
        down_tile = choose_cube_tile(inter, hidden, 1)
        down = blocks.linear_w8a8(codes, scale, w_down, _vector(tensors.w_down_scale, at), down_tile)
    else:
        down_tile = choose_cube_tile(inter, hidden, 2)
        down = blocks.linear_bf16(activated, w_down, down_tile)
    pypto.set_vec_tile_shapes(spec.batch_rows, 2 * down_tile.n)
    out[:] = blocks.to_bf16(pypto.add(residual, down))
