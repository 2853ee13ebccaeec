"""The PyPTO kernel of `lm_head_greedy`.

A prologue normalises the rows once; each vocabulary chunk writes its logits and, for every block of columns, the
maximum and the lowest id that reaches it; an epilogue picks the lowest id among the best blocks. The last chunk ends at
the last real id and overlaps the one before where the vocabulary is no multiple of a chunk: so every chunk is whole,
and padding is never read. Chunks are independent.
"""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.vocabulary import VocabularyChunks
from kernels.tiles import choose_cube_tile

NO_ID = float(2**24)
"""Larger than any id; FP32 counts exactly up to it."""


def build(program: LmHeadGreedy, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec

    def head(tensors: Any) -> None:
        tokens, window = tensors.x.shape[0], spec.window_rows
        for index in pypto.loop(0, (tokens + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(tokens - first, window)
            window_logits(spec, tensors.x, tensors.weight, tensors, first, valid, first)
            for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
                pypto.assemble(best_ids(spec, tensors.block_maxima, tensors.block_ids, valid), [first, 0], tensors.ids)

    return blocks.jit_kernel(program, options, head)


def window_logits(
    spec: LmHeadSpec, x: Any, weight: Any, tensors: Any, first: Any, valid_rows: Any, logits_row: Any
) -> None:
    """Norm and LM head of the window of `x` from row `first` on: logits from `logits_row` on, and blocks' winners.

    `tensors` holds `final_norm`, `logits` and the scratch as attributes. Two loops, each waiting for the one before.
    """
    for _ in pypto.loop(0, 1, 1, name="NORM", idx_name="norm", submit_before_loop=True):
        norm_rows(spec, x, tensors.final_norm, tensors.normed_rows, first, valid_rows)
    for chunk in pypto.loop(0, spec.chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
        head_chunk(
            spec,
            chunk,
            tensors.normed_rows,
            weight,
            tensors.logits,
            logits_row,
            tensors.block_maxima,
            tensors.block_ids,
            valid_rows,
        )


def norm_rows(
    spec: LmHeadSpec, x: Any, final_norm: Any, normed_rows: Any, first: Any = 0, valid_rows: Any = None
) -> None:
    """Final RMS norm of a window of rows from `first` on, narrowed to BF16; `valid_rows` of them, all when None."""
    rows, hidden = normed_rows.shape[0], spec.hidden_size
    pypto.set_vec_tile_shapes(1, hidden)
    x = pypto.view(x, [rows, hidden], [first, 0], valid_shape=[rows if valid_rows is None else valid_rows, hidden])
    normed = blocks.rms_norm_rows(blocks.to_fp32(x), final_norm, spec.rms_norm_eps, valid_rows)
    pypto.assemble(blocks.to_bf16(normed), [0, 0], normed_rows)


def head_chunk(
    spec: LmHeadSpec,
    chunk: Any,
    normed_rows: Any,
    weight: Any,
    logits: Any,
    logits_row: Any,
    block_maxima: Any,
    block_ids: Any,
    valid_rows: Any = None,
) -> None:
    """Logits of one chunk's ids, from row `logits_row` on; each block's maximum and the lowest id that reaches it."""
    batch, width, hidden = normed_rows.shape[0], spec.chunk_tokens, spec.hidden_size
    valid = batch if valid_rows is None else valid_rows
    first = pypto.min(chunk * width, spec.last_chunk_start)
    tile = choose_cube_tile(hidden, width, 2, rows=batch, columns=spec.block_tokens)
    rows = pypto.view(weight, [width, hidden], [first, 0])
    normed = pypto.view(normed_rows, [batch, hidden], [0, 0], valid_shape=[valid, hidden])
    values = blocks.linear_bf16(normed, rows, tile, transposed=True)
    block_winners(spec, chunk, values, valid, block_maxima, block_ids)
    pypto.assemble(values, [logits_row, first], logits)


def block_winners(
    spec: VocabularyChunks, chunk: Any, values: Any, valid: Any, block_maxima: Any, block_ids: Any
) -> None:
    """Each block's maximum in one chunk's logits FP32 `[rows, chunk]`, and the lowest id that reaches it."""
    rows, block = values.shape[0], spec.block_tokens
    numbers = count(block)
    pypto.set_vec_tile_shapes(rows, block)
    numbers = pypto.expand_clone(numbers, [rows, block], valid_shape=[valid, block])
    for index in range(spec.chunk_blocks):
        # A vector tile takes all rows of one matmul tile: with some rows of several, PyPTO loses the valid shape.
        part = pypto.view(values, [rows, block], [0, index * block], valid_shape=[valid, block])
        maximum = pypto.amax(part, -1, keepdim=True)
        winner = pypto.amin(pypto.where(pypto.ge(part, maximum), numbers, NO_ID), -1, keepdim=True)
        pypto.assemble(maximum, [0, chunk * spec.chunk_blocks + index], block_maxima)
        pypto.assemble(winner, [0, chunk * spec.chunk_blocks + index], block_ids)


def best_ids(spec: VocabularyChunks, block_maxima: Any, block_ids: Any, valid_rows: Any = None) -> Any:
    """The lowest id among the blocks that reach the largest maximum: INT32 `[rows, 1]`."""
    columns, blocks_in_use = spec.block_columns, spec.chunks * spec.chunk_blocks
    rows = block_maxima.shape[0]
    valid = [rows if valid_rows is None else valid_rows, blocks_in_use]
    number = count(columns)
    start = pypto.mul(number, float(spec.block_tokens))
    in_last_chunk = pypto.ge(number, float(blocks_in_use - spec.chunk_blocks))
    start = pypto.where(in_last_chunk, pypto.sub(start, float(spec.overlap_tokens)), start)
    maxima = pypto.view(block_maxima, [rows, columns], [0, 0], valid_shape=valid)
    local_ids = pypto.view(block_ids, [rows, columns], [0, 0], valid_shape=valid)
    candidates = pypto.add(local_ids, pypto.view(start, [1, columns], [0, 0], valid_shape=[1, blocks_in_use]))
    reached = pypto.ge(maxima, pypto.amax(maxima, -1, keepdim=True))
    winner = pypto.amin(pypto.where(reached, candidates, NO_ID), -1, keepdim=True)
    return pypto.cast(winner, pypto.DT_INT32, blocks.RINT)


def count(width: int) -> Any:
    """FP32 `[1, width]` holding 0, 1, 2, ...; leaves the vector tile at one whole row."""
    pypto.set_vec_tile_shapes(width)
    row = pypto.reshape(blocks.to_fp32(pypto.arange(width)), [1, width])
    pypto.set_vec_tile_shapes(1, width)
    return row
