"""Paged causal attention of blocks of queries, inlined by the prefill kernels: online softmax over pages of 128 tokens.

A block is what a chunk has in one page of positions, so that every page before the block's own is seen whole and only
the last needs the mask. Lengths and page numbers are read from tensors, so nothing of them is compiled in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.prefill_layer import PrefillLayerSpec

__all__ = ["Block", "attend_block"]

SOFTMAX_ROWS = 64
"""Most rows in one vector tile: 64 x 128 FP32 values are 32 KB, several of which are alive at once."""


@dataclass(frozen=True)
class Block:
    """`valid_rows` tokens of `sequence` from `first_row` on, which stand in page number `page` from `offset` on."""

    sequence: Any
    first_row: Any
    valid_rows: Any
    page: Any
    offset: Any


def attend_block(
    spec: PrefillLayerSpec, block: Block, head: Any, page_slot: Callable[[Any], Any], tensors: Any
) -> None:
    """Attend one head's queries of `block` to the pages up to its own and write their columns of the context rows.

    `page_slot(page)` gives the cache row at which page number `page` of the sequence starts; `tensors` holds `q_rows`,
    `k_cache`, `v_cache`, `causal_bias` and `context_rows`.
    """
    rows, dim, kv_column = PAGE_TOKENS, spec.head_dim, head // spec.group * spec.head_dim
    accumulator = pypto.tensor([rows, dim], pypto.DT_FP32, "accumulator")
    total = pypto.tensor([rows, 1], pypto.DT_FP32, "total")
    maximum = pypto.tensor([rows, 1], pypto.DT_FP32, "maximum")
    state = (accumulator, total, maximum)
    valid, pages = block.valid_rows, block.page + 1
    for page in pypto.loop(0, pages, 1, name="PAGES", idx_name="page"):
        slot = page_slot(page)
        seen = pypto.min(block.offset + valid + (block.page - page) * PAGE_TOKENS, PAGE_TOKENS)
        query = pypto.view(tensors.q_rows, [rows, dim], [block.first_row, head * dim], valid_shape=[valid, dim])
        keys = pypto.view(tensors.k_cache, [PAGE_TOKENS, dim], [slot, kv_column], valid_shape=[seen, dim])
        values = pypto.view(tensors.v_cache, [PAGE_TOKENS, dim], [slot, kv_column], valid_shape=[seen, dim])
        pypto.set_cube_tile_shapes([128, 128], [dim, dim], [PAGE_TOKENS, PAGE_TOKENS])
        products = pypto.matmul(query, keys, pypto.DT_FP32, b_trans=True)
        pypto.set_vec_tile_shapes(SOFTMAX_ROWS, PAGE_TOKENS)
        products = pypto.view(products, [rows, PAGE_TOKENS], [0, 0], valid_shape=[valid, seen])
        scores = pypto.mul(products, dim**-0.5)
        if pypto.cond(pypto.is_loop_end(page)):
            bias = pypto.view(tensors.causal_bias, [rows, PAGE_TOKENS], [block.offset, 0], valid_shape=[valid, seen])
            scores = pypto.add(scores, bias)
            _step(spec, block, head, page, scores, values, state, tensors.context_rows, last=True)
        else:
            _step(spec, block, head, page, scores, values, state, tensors.context_rows, last=False)


def _step(
    spec: PrefillLayerSpec,
    block: Block,
    head: Any,
    page: Any,
    scores: Any,
    values: Any,
    state: Any,
    context_rows: Any,
    *,
    last: bool,
) -> None:
    """One page of the online softmax; the last one writes the block's context."""
    accumulator, total, maximum = state
    page_maximum = pypto.amax(scores, -1, keepdim=True)
    if pypto.cond(pypto.is_loop_begin(page)):
        weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, page_maximum)))
        page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
        part = _weighted(spec, weights, values, block)
        if last:
            _write(spec, part, page_total, block, head, context_rows)
        else:
            accumulator[:] = part
            total[:] = page_total
            maximum[:] = page_maximum
    else:
        old_accumulator, old_total, old_maximum = (blocks.whole(value, block.valid_rows) for value in state)
        new_maximum = pypto.maximum(old_maximum, page_maximum)
        weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, new_maximum)))
        rescale = pypto.exp(pypto.sub(old_maximum, new_maximum))
        page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
        new_total = pypto.add(pypto.mul(old_total, rescale), page_total)
        part = _weighted(spec, weights, values, block)
        new_accumulator = pypto.add(pypto.mul(old_accumulator, rescale), part)
        if last:
            _write(spec, new_accumulator, new_total, block, head, context_rows)
        else:
            accumulator[:] = new_accumulator
            total[:] = new_total
            maximum[:] = new_maximum


def _weighted(spec: PrefillLayerSpec, weights: Any, values: Any, block: Block) -> Any:
    """BF16 weights `[128, 128]` by a page's values: FP32 `[128, dim]`."""
    rows, dim = PAGE_TOKENS, spec.head_dim
    pypto.set_cube_tile_shapes([128, 128], [PAGE_TOKENS, PAGE_TOKENS], [dim, dim])
    part = pypto.matmul(weights, values, pypto.DT_FP32)
    pypto.set_vec_tile_shapes(SOFTMAX_ROWS, dim)
    return pypto.view(part, [rows, dim], [0, 0], valid_shape=[block.valid_rows, dim])


def _write(spec: PrefillLayerSpec, accumulator: Any, total: Any, block: Block, head: Any, context_rows: Any) -> None:
    """Divide, narrow, and put the head's context into its columns of the tokens' rows."""
    result = blocks.to_bf16(pypto.div(accumulator, total))
    pypto.assemble(result, [block.first_row, head * spec.head_dim], context_rows)
