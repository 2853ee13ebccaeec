"""The stages of a decoder layer over packed chunks of prompts, inlined by `prefill_layer` and `prefill_step`.

Four loops, joined by scratch arguments: windows of rows are projected; blocks of keys and values go to their pages;
blocks of queries attend, head by head; windows of rows are finished. A block is what a chunk has in one page of
positions: its keys stand behind one another in the cache, and only its last page needs a causal mask. Slabs are stacked
over the layers, and the caches are `[layers * slots, width]`; a layer's offset may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, stages
from kernels.programs.prefill_attention import Block, attend_block
from kernels.programs.prefill_layer import PrefillLayerSpec
from kernels.tiles import row_tile

__all__ = ["LayerAt", "layer_stages"]


@dataclass(frozen=True)
class LayerAt:
    """Where a layer's stages work, in numbers that may be symbolic: its index, and the first cache row it has."""

    layer: Any = 0
    first_slot: Any = 0


def layer_stages(spec: PrefillLayerSpec, at: LayerAt, tensors: Any, x: Any, out: Any, kept: Any = None) -> None:
    """Run the layer at `at` on the hidden rows `x` and write its hidden rows to `out`.

    `out` may be `x` itself where `kept` is scratch like it, which takes the rows that the residual needs: one loop may
    not read and write one tensor. `tensors` holds the program's arguments as attributes.
    """
    tokens, window = x.shape[0], spec.window_rows
    windows = (tokens + window - 1) // window
    slabs = stages.Slabs(tensors, at.layer)
    for index in pypto.loop(0, windows, 1, name="PROJECT", idx_name="projected", submit_before_loop=True):
        first = index * window
        valid = pypto.min(tokens - first, window)
        _project(spec, slabs, tensors, x, first, valid)
        if kept is not None:
            pypto.set_vec_tile_shapes(row_tile(window, spec.hidden_size), spec.hidden_size)
            pypto.assemble(_rows(x, window, spec.hidden_size, first, valid), [first, 0], kept)
    for block in _blocks(tensors, "CACHE"):
        _write_cache(spec, at, tensors, block)
    for block in _blocks(tensors, "ATTEND"):

        def page_slot(page: Any, block: Block = block) -> Any:
            return tensors.block_table[block.sequence, page] * PAGE_TOKENS + at.first_slot

        for head in pypto.loop(0, spec.num_heads, 1, name="HEADS", idx_name="head"):
            attend_block(spec, block, head, page_slot, tensors)
    for index in pypto.loop(0, windows, 1, name="FINISH", idx_name="finished", submit_before_loop=True):
        first = index * window
        valid = pypto.min(tokens - first, window)
        hidden = _rows(x if kept is None else kept, window, spec.hidden_size, first, valid)
        context = _rows(tensors.context_rows, window, spec.q_size, first, valid)
        residual, normed = stages.output(spec, slabs, hidden, context, valid)
        activated = stages.up(spec, slabs, normed, valid)
        finished = stages.down(spec, slabs, blocks.operand(activated, spec.down, valid), residual, valid)
        pypto.assemble(finished, [first, 0], out)


def _blocks(tensors: Any, name: str) -> Iterator[Block]:
    """Loop over the blocks of every sequence; no loop of the next call starts before all of them are done."""
    sequences = tensors.context_tokens.shape[0]
    for sequence in pypto.loop(0, sequences, 1, name=name, idx_name="sequence", submit_before_loop=True):
        start, context = tensors.row_starts[sequence], tensors.context_tokens[sequence]
        cached = context - (tensors.row_starts[sequence + 1] - start)
        first_page = cached // PAGE_TOKENS
        count = (context + PAGE_TOKENS - 1) // PAGE_TOKENS - first_page
        for index in pypto.loop(0, count, 1, name=f"{name}_BLOCKS", idx_name="block"):
            page = first_page + index
            token = pypto.max(cached, page * PAGE_TOKENS)
            yield Block(
                sequence=sequence,
                first_row=start + token - cached,
                valid_rows=pypto.min(context, (page + 1) * PAGE_TOKENS) - token,
                page=page,
                offset=token - page * PAGE_TOKENS,
            )


def _rows(tensor: Any, rows: int, width: int, first: Any, valid: Any) -> Any:
    """`valid` rows of a 2-D tensor from `first` on, as a window of `rows`."""
    return pypto.view(tensor, [rows, width], [first, 0], valid_shape=[valid, width])


def _project(spec: PrefillLayerSpec, slabs: stages.Slabs, tensors: Any, x: Any, first: Any, valid: Any) -> None:
    """Project one window of rows; queries, keys and values go to scratch."""
    rows, dim = spec.window_rows, spec.head_dim
    hidden = _rows(x, rows, spec.hidden_size, first, valid)
    cos, sin = _rows(tensors.cos, rows, dim, first, valid), _rows(tensors.sin, rows, dim, first, valid)
    q, k, v = stages.project(spec, slabs, hidden, cos, sin, valid)
    q = blocks.reshape_rows(q, [rows, spec.q_size], valid)
    for value, target in ((q, tensors.q_rows), (k, tensors.k_rows), (v, tensors.v_rows)):
        _store(value, first, target)


def _store(value: Any, first: Any, target: Any) -> None:
    """Write a window of BF16 rows to scratch from row `first` on, in the parts in which they were made.

    Parts of more rows would join the tasks that make them. Rows that are not valid are written too: a reshaped value
    has lost its valid shape. Scratch has room for them.
    """
    rows, width = value.shape
    part = row_tile(rows, width)
    for at in range(0, rows, part):
        pypto.assemble(pypto.view(value, [part, width], [at, 0], valid_shape=[part, width]), [first + at, 0], target)


def _write_cache(spec: PrefillLayerSpec, at: LayerAt, tensors: Any, block: Block) -> None:
    """Put a block's keys and values into its page, where they stand behind one another."""
    slot = tensors.block_table[block.sequence, block.page] * PAGE_TOKENS + at.first_slot + block.offset
    pypto.set_vec_tile_shapes(16, spec.kv_size)
    for rows, cache in ((tensors.k_rows, tensors.k_cache), (tensors.v_rows, tensors.v_cache)):
        value = _rows(rows, PAGE_TOKENS, spec.kv_size, block.first_row, block.valid_rows)
        pypto.assemble(value, [slot, 0], cache)
