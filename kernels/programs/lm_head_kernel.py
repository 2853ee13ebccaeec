"""The PyPTO kernel of `lm_head_greedy`.

A prologue normalises the rows once; each vocabulary chunk writes its logits, its maximum and the lowest local id that
reaches it; an epilogue picks the first chunk with the largest maximum. Chunks are independent, so they can overlap.
Annotations must be objects: no postponed evaluation here.
"""

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.lm_head import LmHeadSpec
from kernels.tiles import choose_cube_tile

NO_ID = float(2**24)
"""Larger than any id; FP32 counts exactly up to it."""


def build(spec: LmHeadSpec, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel for `spec`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    batch, hidden, chunks = spec.batch_rows, spec.hidden_size, spec.chunks
    fp32, bf16, int32 = pypto.DT_FP32, pypto.DT_BF16, pypto.DT_INT32

    @pypto.frontend.jit(**options)
    def lm_head_greedy(
        x: pypto.Tensor([batch, hidden], bf16),
        final_norm: pypto.Tensor([1, hidden], fp32),
        weight: pypto.Tensor([spec.padded_vocab, hidden], bf16),
        normed_rows: pypto.Tensor([batch, hidden], bf16),
        chunk_maxima: pypto.Tensor([batch, chunks], fp32),
        chunk_ids: pypto.Tensor([batch, chunks], fp32),
        logits: pypto.Tensor([batch, spec.real_vocab], fp32),
        ids: pypto.Tensor([batch, 1], int32),
    ):
        for _ in pypto.loop(1, name="NORM", idx_name="norm"):
            _norm(spec, x, final_norm, normed_rows)
        for chunk in pypto.loop(0, chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
            _chunk(spec, chunk, normed_rows, weight, logits, chunk_maxima, chunk_ids)
        for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
            _sample(spec, chunk_maxima, chunk_ids, ids)

    return lm_head_greedy


def _norm(spec: LmHeadSpec, x: Any, final_norm: Any, normed_rows: Any) -> None:
    """Final RMS norm, narrowed to BF16."""
    pypto.set_vec_tile_shapes(1, spec.hidden_size)
    normed_rows[:] = blocks.to_bf16(blocks.rms_norm_rows(blocks.to_fp32(x), final_norm, spec.rms_norm_eps))


def _chunk(
    spec: LmHeadSpec, chunk: Any, normed_rows: Any, weight: Any, logits: Any, chunk_maxima: Any, chunk_ids: Any
) -> None:
    """Logits of one chunk's real ids, their maximum, and the lowest local id that reaches it."""
    batch, width = spec.batch_rows, spec.chunk_tokens
    first = chunk * width
    valid = pypto.min(spec.real_vocab - first, width)
    rows = pypto.view(weight, [width, spec.hidden_size], [first, 0], valid_shape=[valid, spec.hidden_size])
    tile = choose_cube_tile(spec.hidden_size, width, 2, rows=batch)
    normed = pypto.view(normed_rows, [batch, spec.hidden_size], [0, 0])
    values = blocks.linear_bf16(normed, rows, tile, transposed=True)
    pypto.set_vec_tile_shapes(1, width)
    maximum = pypto.amax(values, -1, keepdim=True)
    local = pypto.expand_clone(
        pypto.reshape(blocks.to_fp32(pypto.arange(width)), [1, width]), [batch, width], valid_shape=[batch, valid]
    )
    none = pypto.full([batch, width], NO_ID, pypto.DT_FP32, valid_shape=[batch, valid])
    winner = pypto.amin(pypto.where(pypto.ge(values, maximum), local, none), -1, keepdim=True)
    pypto.assemble(values, [0, first], logits)
    pypto.assemble(maximum, [0, chunk], chunk_maxima)
    pypto.assemble(winner, [0, chunk], chunk_ids)


def _sample(spec: LmHeadSpec, chunk_maxima: Any, chunk_ids: Any, ids: Any) -> None:
    """The lowest id among the chunks that reach the largest maximum."""
    batch, chunks = spec.batch_rows, spec.chunks
    pypto.set_vec_tile_shapes(1, chunks)
    offsets = pypto.mul(pypto.reshape(blocks.to_fp32(pypto.arange(chunks)), [1, chunks]), float(spec.chunk_tokens))
    candidates = pypto.add(chunk_ids, offsets)
    maximum = pypto.amax(chunk_maxima, -1, keepdim=True)
    reached = pypto.ge(chunk_maxima, maximum)
    none = pypto.full([batch, chunks], NO_ID, pypto.DT_FP32)
    winner = pypto.amin(pypto.where(reached, candidates, none), -1, keepdim=True)
    ids[:] = pypto.cast(winner, pypto.DT_INT32, blocks.RINT)
