"""The stages of a decoder layer over a batch of single tokens, inlined by `decode_layer` and `decode_step`.

Five loops: a prologue (norm, QKV, norms, RoPE, cache write), attention over the pages of each row, the output
projection with the MLP's norm, gate and up, and down. A loop starts after the one before it and has compiler options of
its own. Slabs are stacked over the layers, and the caches are `[layers * slots, width]`; a layer's offset may be
symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, stages
from kernels.programs.decode_attention import NO_SCOPE, attend_row, spread_queries
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.programs.decode_tiles import LayerTiles, tasks_per_core

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
    batch, hidden, inter = spec.batch_rows, spec.hidden_size, spec.intermediate_size
    slabs = stages.Slabs(tensors, at.layer)
    for _ in pypto.loop(0, 1, 1, name="PROLOGUE", idx_name="prologue", submit_before_loop=True):
        _prologue(spec, at, tensors, slabs, x)
    for row in pypto.loop(0, batch, 1, name="ROWS", idx_name="row", submit_before_loop=True):
        tokens = tensors.context_tokens[at.first_row + row]

        def page_slot(page: Any, row: Any = row) -> Any:
            return tensors.block_table[row, page] * PAGE_TOKENS + at.first_slot

        attend_row(spec, row, tokens, page_slot, tensors)
    residual = pypto.tensor([batch, hidden], pypto.DT_FP32, "residual")
    left = _operand_tensors(spec)
    activated = pypto.tensor([batch, inter], pypto.DT_BF16, "activated")
    for _ in pypto.loop(0, 1, 1, name="OUTPUT", idx_name="output", submit_before_loop=True):
        pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
        context = pypto.reshape(tensors.context_rows, [batch, spec.q_size])
        value, normed = stages.output(spec, slabs, x, context)
        _keep(normed, left)
        # A value that is assigned is used up, and this one was normalised too.
        residual[:] = pypto.add(value, 0.0)
    for _ in pypto.loop(0, 1, 1, name="UP", idx_name="up", submit_before_loop=True):
        # Tasks that read the same rows are merged, so that each core has one.
        columns = LayerTiles(spec, batch).up().n
        pypto.set_pass_options(cube_l1_reuse_setting={-1: tasks_per_core(columns, inter, inter)})
        activated[:] = stages.up(spec, slabs, left)
    for _ in pypto.loop(0, 1, 1, name="DOWN", idx_name="down", submit_before_loop=True):
        pypto.set_pass_options(sg_set_scope=QUANTIZE_SCOPE)
        quantized = blocks.operand(activated, spec.down)
        pypto.set_pass_options(sg_set_scope=NO_SCOPE)
        out[:] = stages.down(spec, slabs, quantized, residual)


def _operand_tensors(spec: DecodeLayerSpec) -> blocks.Operand:
    """Room for the MLP's operand, which crosses from one loop to the next."""
    shape = [spec.batch_rows, spec.hidden_size]
    if spec.weights == "bf16":
        return blocks.Operand(pypto.tensor(shape, pypto.DT_BF16, "normed"))
    return blocks.Operand(
        pypto.tensor(shape, pypto.DT_INT8, "codes"), pypto.tensor([spec.batch_rows, 1], pypto.DT_FP32, "scale")
    )


def _keep(value: blocks.Operand, room: blocks.Operand) -> None:
    """Put an operand into its room."""
    room.values[:] = value.values
    if value.scale is not None:
        room.scale[:] = value.scale


def _prologue(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, slabs: stages.Slabs, x: Any) -> None:
    """Project the rows, spread their queries, and write their keys and values to their slots."""
    batch, dim = spec.batch_rows, spec.head_dim
    cos = pypto.view(tensors.cos, [batch, dim], [at.first_row, 0])
    sin = pypto.view(tensors.sin, [batch, dim], [at.first_row, 0])
    if not isinstance(at.first_row, int):
        # A view at a symbolic row that is reshaped is copied in pieces, every half of every row in a task of its own.
        pypto.set_vec_tile_shapes(batch, dim)
        cos, sin = pypto.mul(cos, 1.0), pypto.mul(sin, 1.0)
    q, k, v = stages.project(spec, slabs, x, cos, sin)
    spread_queries(q, spec.num_kv_heads, tensors.q_rows)
    pypto.set_vec_tile_shapes(1, spec.kv_size)
    slots = pypto.view(tensors.slots, [batch, 1], [at.slots_row, 0])
    tensors.k_cache[:] = pypto.scatter_update(tensors.k_cache, -2, slots, k)
    tensors.v_cache[:] = pypto.scatter_update(tensors.v_cache, -2, slots, v)
