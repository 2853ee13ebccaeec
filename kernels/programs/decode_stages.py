"""The stages of a decoder layer over a batch of single tokens, inlined by `decode_layer` and `decode_step`.

Five loops: a prologue (norm, QKV, norms, RoPE, cache write), attention over the pages of each row, the output
projection with the MLP's norm, gate and up, and down. A loop starts after the one before it and has compiler options of
its own. Slabs are stacked over the layers, and the caches are `[layers * slots, width]`; a layer's offset may be
symbolic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pypto

from kernels.contract import BATCH_WINDOW_ROWS as WINDOW_ROWS
from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, stages, turboquant_blocks
from kernels.programs.decode_attention import NO_SCOPE, PageReader, attend_row, spread_queries
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.programs.decode_tiles import LayerSizes, LayerTiles, tasks_per_core

QUANTIZE_SCOPE = 1
"""Marks the operations of one row's quantization, which the compiler would cut in two where a row is long."""


@dataclass(frozen=True)
class LayerAt:
    """Where a layer's stages work: numbers that may be symbolic.

    `layer` is the index in the stacked slabs, `first_slot` the first cache row of the layer, `slots_row` the first row
    of its `slots`, and `first_row` the first row of the batch in the per-token arguments (`cos`, `sin`,
    `context_tokens`).
    """

    layer: Any = 0
    first_slot: Any = 0
    slots_row: Any = 0
    first_row: Any = 0


@dataclass(frozen=True)
class Window:
    """The window of 16 rows of a batch that starts at row `first`, of which the first `valid` are in the batch."""

    first: Any
    valid: Any

    def view(self, tensor: Any, width: int, start: Any = 0) -> Any:
        """The window's rows of a 2-D tensor in which the batch starts at row `start`."""
        return pypto.view(tensor, [WINDOW_ROWS, width], [start + self.first, 0], valid_shape=[self.valid, width])


def windows(batch: Any) -> Iterator[Window]:
    """Loop over the windows of `batch` rows; the next waits for the one before, whose scratch it takes."""
    count = (batch + WINDOW_ROWS - 1) // WINDOW_ROWS
    for index in pypto.loop(0, count, 1, name="WINDOWS", idx_name="window", submit_before_loop=True):
        first = index * WINDOW_ROWS
        yield Window(first, pypto.min(batch - first, WINDOW_ROWS))


def layer_stages(spec: DecodeLayerSpec, at: LayerAt, tensors: Any, x: Any, out: Any) -> None:
    """Run the layer at `at` on hidden rows `x` and write its hidden rows to `out`, which may be `x` itself.

    `tensors` holds the program's arguments as attributes.
    """
    for window in windows(x.shape[0]):
        _window_stages(spec, at, window, tensors, x, out)


def _window_stages(spec: DecodeLayerSpec, at: LayerAt, window: Window, tensors: Any, x: Any, out: Any) -> None:
    hidden, valid = spec.hidden_size, window.valid
    slabs = stages.Slabs(tensors, at.layer)
    for _ in pypto.loop(0, 1, 1, name="PROLOGUE", idx_name="prologue", submit_before_loop=True):
        _prologue(spec, at, window, tensors, slabs, x)
    for row in pypto.loop(0, valid, 1, name="ROWS", idx_name="row", submit_before_loop=True):
        tokens = tensors.context_tokens[at.first_row + window.first + row]

        def page_slot(page: Any, row: Any = row) -> Any:
            return tensors.block_table[window.first + row, page] * PAGE_TOKENS + at.first_slot

        attend_row(spec, row, tokens, page_slot, tensors, _pages(spec, tensors))
    residual = pypto.tensor([WINDOW_ROWS, hidden], pypto.DT_FP32, "residual")
    left = operand_room(spec)
    for _ in pypto.loop(0, 1, 1, name="OUTPUT", idx_name="output", submit_before_loop=True):
        pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
        context = tensors.context_rows
        if spec.kv_format is not None:
            context = turboquant_blocks.turn_back(context, tensors.v_matrices)
            pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
        context = pypto.reshape(context, [WINDOW_ROWS, spec.q_size])
        value, normed = stages.output(spec, slabs, window.view(x, hidden), context, valid)
        keep(normed, left)
        # A value that is assigned is used up, and this one was normalised too.
        residual[:] = pypto.add(value, 0.0)
    finish_mlp(spec, slabs, left, residual, window, out)


def finish_mlp(
    spec: LayerSizes, slabs: stages.Slabs, left: blocks.Operand, residual: Any, window: Window, out: Any
) -> None:
    """The MLP behind its norm, in two loops: `left` is the norm's operand and `residual` FP32, both of 16 rows."""
    inter, valid = spec.intermediate_size, window.valid
    activated = pypto.tensor([WINDOW_ROWS, inter], pypto.DT_BF16, "activated")
    for _ in pypto.loop(0, 1, 1, name="UP", idx_name="up", submit_before_loop=True):
        # Tasks that read the same rows are merged, so that each core has one.
        columns = LayerTiles(spec, WINDOW_ROWS).up().n
        pypto.set_pass_options(cube_l1_reuse_setting={-1: tasks_per_core(columns, inter, inter)})
        activated[:] = stages.up(spec, slabs, _valid(left, valid), valid)
    for _ in pypto.loop(0, 1, 1, name="DOWN", idx_name="down", submit_before_loop=True):
        pypto.set_pass_options(sg_set_scope=QUANTIZE_SCOPE)
        quantized = blocks.operand(blocks.whole(activated, valid), spec.down, valid)
        pypto.set_pass_options(sg_set_scope=NO_SCOPE)
        finished = stages.down(spec, slabs, quantized, blocks.whole(residual, valid), valid)
        pypto.assemble(finished, [window.first, 0], out)


def operand_room(spec: LayerSizes) -> blocks.Operand:
    """Room for the MLP's operand, which crosses from one loop to the next."""
    shape = [WINDOW_ROWS, spec.hidden_size]
    if spec.weights == "bf16":
        return blocks.Operand(pypto.tensor(shape, pypto.DT_BF16, "normed"))
    return blocks.Operand(
        pypto.tensor(shape, pypto.DT_INT8, "codes"), pypto.tensor([WINDOW_ROWS, 1], pypto.DT_FP32, "scale")
    )


def keep(value: blocks.Operand, room: blocks.Operand) -> None:
    """Put an operand into its room."""
    room.values[:] = value.values
    if value.scale is not None:
        room.scale[:] = value.scale


def _valid(kept: blocks.Operand, valid: Any) -> blocks.Operand:
    """An operand's room with the rows stated that are valid."""
    scale = None if kept.scale is None else blocks.whole(kept.scale, valid)
    return blocks.Operand(blocks.whole(kept.values, valid), scale)


def _prologue(spec: DecodeLayerSpec, at: LayerAt, window: Window, tensors: Any, slabs: stages.Slabs, x: Any) -> None:
    """Project the rows, spread their queries, and write their keys and values to their slots."""
    dim = spec.head_dim
    # A view at a symbolic row that is reshaped is copied in pieces, every half of every row in a task of its own.
    pypto.set_vec_tile_shapes(WINDOW_ROWS, dim)
    cos, sin = (pypto.mul(window.view(table, dim, at.first_row), 1.0) for table in (tensors.cos, tensors.sin))
    q, k, v = stages.project(spec, slabs, window.view(x, spec.hidden_size), cos, sin, window.valid)
    slots = window.view(tensors.slots, 1, at.slots_row)
    if spec.kv_format is not None:
        q = turboquant_blocks.turn_queries(pypto.reshape(q, [WINDOW_ROWS * spec.num_heads, dim]), tensors.k_matrices)
        q = pypto.reshape(q, [WINDOW_ROWS, spec.num_heads, q.shape[1]])
        _keep_codes(spec, window, slots, k, tensors.k_matrices, tensors.k_codes, tensors.k_norms)
        _keep_codes(spec, window, slots, v, tensors.v_matrices, tensors.v_codes, tensors.v_norms)
    spread_queries(q, spec.num_kv_heads, tensors.q_rows)
    if spec.kv_format is None:
        pypto.set_vec_tile_shapes(1, spec.kv_size)
        tensors.k_cache[:] = pypto.scatter_update(tensors.k_cache, -2, slots, k)
        tensors.v_cache[:] = pypto.scatter_update(tensors.v_cache, -2, slots, v)


def _keep_codes(
    spec: DecodeLayerSpec, window: Window, slots: Any, rows: Any, matrices: Any, codes_cache: Any, norms_cache: Any
) -> None:
    """Encode the window's keys or values and put them into their slots."""
    bits = spec.kv_format.bits if spec.kv_format is not None else 0
    codes, norms = turboquant_blocks.encode(rows, matrices, bits, spec.num_kv_heads, window.valid)
    for cache, value in ((codes_cache, codes), (norms_cache, norms)):
        pypto.set_vec_tile_shapes(WINDOW_ROWS, value.shape[1])
        cache[:] = pypto.scatter_update(cache, -2, slots, value)


def _pages(spec: DecodeLayerSpec, tensors: Any) -> PageReader | None:
    """What reads the cache in attention; None is the reader of BF16."""
    if spec.kv_format is None:
        return None
    caches = (tensors.k_codes, tensors.k_norms, tensors.v_codes, tensors.v_norms)
    return turboquant_blocks.KeptPages(
        spec.num_kv_heads, spec.head_dim, spec.kv_format.bits, spec.kv_format.sketch, *caches
    )
