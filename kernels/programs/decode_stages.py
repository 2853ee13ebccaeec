"""The stages of a decoder layer over a batch of single tokens, inlined by `decode_layer` and `decode_step`.

Five stages: a prologue (norm, quantize, QKV, norms, RoPE, cache write), attention over the pages of each row, the
output projection with the MLP's norm, gate and up, and down. Each is a `pypto.loop`: the next one starts after it,
and it has compiler options of its own. Slabs are stacked over the layers, `[layers * k, n]` or `[layers, n]`, and the
caches are `[layers * slots, width]`; a stage takes views at its layer's offset, which may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.decode_attention import NO_SCOPE, attend_row, spread_queries
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.programs.decode_tiles import choose_stream_tile, one_wave_columns, tasks_per_core
from kernels.tiles import CubeTile, choose_cube_tile

QUANTIZE_SCOPE = 1
"""Marks the operations of one row's quantization, which the compiler would cut in two where a row is long."""


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
    batch, hidden = spec.batch_rows, spec.hidden_size
    residual = pypto.tensor([batch, hidden], pypto.DT_FP32, "residual")
    codes = pypto.tensor([batch, hidden], pypto.DT_INT8, "codes")
    scale = pypto.tensor([batch, 1], pypto.DT_FP32, "scale")
    activated = pypto.tensor([batch, spec.intermediate_size], pypto.DT_BF16, "activated")
    for _ in pypto.loop(0, 1, 1, name="OUTPUT", idx_name="output", submit_before_loop=True):
        residual[:], codes[:], scale[:] = _output(spec, at, tensors, x)
    for _ in pypto.loop(0, 1, 1, name="UP", idx_name="up", submit_before_loop=True):
        activated[:] = _up(spec, at, tensors, codes, scale)
    for _ in pypto.loop(0, 1, 1, name="DOWN", idx_name="down", submit_before_loop=True):
        out[:] = _down(spec, at, tensors, activated, residual)


def _matrix(slab: Any, at: LayerAt, rows: int) -> Any:
    """The layer's `[rows, n]` of a stacked matrix."""
    return pypto.view(slab, [rows, slab.shape[1]], [at.layer * rows, 0])


def _vector(slab: Any, at: LayerAt) -> Any:
    """The layer's `[1, n]` of a stacked vector."""
    return pypto.view(slab, [1, slab.shape[1]], [at.layer, 0])


def _quantized_norm(spec: DecodeLayerSpec, x_fp32: Any, gamma: Any) -> tuple[Any, Any]:
    """RMS-normalise FP32 rows, narrow them to BF16 and quantize: INT8 codes and FP32 scales `[rows, 1]`."""
    return blocks.quantize_rows(blocks.to_bf16(blocks.rms_norm_rows(x_fp32, gamma, spec.rms_norm_eps)))


def _row_by_row(codes: Any, scale: Any, weight: Any, weight_scale: Any, tile: CubeTile) -> Any:
    """A W8A8 linear whose result is made row by row, so that whole rows go on into a norm or a rotation."""
    pypto.set_cube_tile_shapes(*tile.shapes())
    accumulator = blocks.whole(pypto.matmul(codes, weight, pypto.DT_INT32))
    pypto.set_vec_tile_shapes(1, weight.shape[1])
    return pypto.mul(pypto.mul(blocks.to_fp32(accumulator), weight_scale), scale)


def _prologue(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any) -> None:
    """Norm, quantize, project, normalise heads, rotate; write the rows' keys and values to their slots."""
    batch, dim, hidden = spec.batch_rows, spec.head_dim, spec.hidden_size
    pypto.set_vec_tile_shapes(1, hidden)
    codes, scale = _quantized_norm(spec, blocks.to_fp32(x), _vector(tensors.input_rms, at))
    columns = one_wave_columns(spec.q_size, spec.kv_size, spec.kv_size)
    tile = choose_stream_tile(hidden, columns, columns)
    cos = pypto.view(tensors.cos, [batch, dim], [at.first_row, 0])
    sin = pypto.view(tensors.sin, [batch, dim], [at.first_row, 0])

    def project(weight: Any, weight_scale: Any, bias: Any) -> Any:
        value = _row_by_row(codes, scale, _matrix(weight, at, hidden), _vector(weight_scale, at), tile)
        return pypto.add(value, _vector(bias, at)) if spec.qkv_bias else value

    def rotated(value: Any, heads: int, gamma: Any) -> Any:
        by_head = pypto.reshape(value, [batch, heads, dim])
        if spec.qk_norm:
            by_head = blocks.head_norm(by_head, _vector(gamma, at), spec.rms_norm_eps)
        return blocks.rotate(by_head, cos, sin)

    k = rotated(project(tensors.wk, tensors.wk_scale, tensors.k_bias), spec.num_kv_heads, tensors.k_norm)
    k = pypto.reshape(k, [batch, spec.kv_size])
    v = blocks.to_bf16(project(tensors.wv, tensors.wv_scale, tensors.v_bias))
    q = rotated(project(tensors.wq, tensors.wq_scale, tensors.q_bias), spec.num_heads, tensors.q_norm)
    spread_queries(q, spec.num_kv_heads, tensors.q_rows)
    pypto.set_vec_tile_shapes(1, spec.kv_size)
    slots = pypto.view(tensors.slots, [batch, 1], [at.slots_row, 0])
    tensors.k_cache[:] = pypto.scatter_update(tensors.k_cache, -2, slots, k)
    tensors.v_cache[:] = pypto.scatter_update(tensors.v_cache, -2, slots, v)


def _output(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any) -> tuple[Any, Any, Any]:
    """Output projection and residual, then the MLP's norm: FP32 residual, and its codes and scales."""
    pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
    context = pypto.reshape(tensors.context_rows, [spec.batch_rows, spec.q_size])
    codes, scale = blocks.quantize_rows(context)
    tile = choose_stream_tile(spec.q_size, spec.hidden_size)
    wo = _matrix(tensors.wo, at, spec.q_size)
    projected = _row_by_row(codes, scale, wo, _vector(tensors.wo_scale, at), tile)
    residual = pypto.add(blocks.to_fp32(x), projected)
    # A value that is assigned is used up: the residual is needed for the norm and after it.
    return pypto.add(residual, 0.0), *_quantized_norm(spec, residual, _vector(tensors.post_rms, at))


def _up(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, codes: Any, scale: Any) -> Any:
    """The MLP up to its activation: BF16 `[rows, intermediate]` = SiLU(gate) * up."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    tile = choose_stream_tile(hidden, inter)
    # Tasks that read the same rows are merged, so that each core has one.
    pypto.set_pass_options(cube_l1_reuse_setting={-1: tasks_per_core(tile.n, inter, inter)})
    w_gate, w_up = _matrix(tensors.w_gate, at, hidden), _matrix(tensors.w_up, at, hidden)
    gate = blocks.linear_w8a8(codes, scale, w_gate, _vector(tensors.w_gate_scale, at), tile)
    up = blocks.linear_w8a8(codes, scale, w_up, _vector(tensors.w_up_scale, at), tile)
    return blocks.to_bf16(pypto.mul(blocks.silu(gate), up))


def _down(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, activated: Any, residual: Any) -> Any:
    """Down projection and residual, narrowed to BF16 `[rows, hidden]`."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    w_down = _matrix(tensors.w_down, at, inter)
    if spec.down == "int8":
        pypto.set_pass_options(sg_set_scope=QUANTIZE_SCOPE)
        codes, scale = blocks.quantize_rows(activated)
        pypto.set_pass_options(sg_set_scope=NO_SCOPE)
        tile = choose_stream_tile(inter, hidden)
        down = blocks.linear_w8a8(codes, scale, w_down, _vector(tensors.w_down_scale, at), tile)
    else:
        tile = choose_cube_tile(inter, hidden, 2)
        down = blocks.linear_bf16(activated, w_down, tile)
    pypto.set_vec_tile_shapes(spec.batch_rows, 2 * tile.n)
    return blocks.to_bf16(pypto.add(residual, down))
