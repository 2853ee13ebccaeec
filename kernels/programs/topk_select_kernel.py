"""The PyPTO kernel of `topk_select`.

Every chunk of the vocabulary yields its 32 best, and with several chunks the 32 best of these win. PyPTO's own top-k
leaves open which of equal values it takes, so the best are taken one by one: the largest value, then the lowest id that
has it. The last chunk overlaps the one before: the ids that it shares are masked there. Annotations must be objects: no
postponed evaluation here.
"""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.lm_head_kernel import NO_ID, count
from kernels.programs.sampling import TOP_IDS, TopkSelect, TopkSelectSpec

TAKEN = -3.402823e38
"""The value of an id that is taken or masked: below every finite logit that matters."""
TILE_ELEMENTS = 6144
"""Most logits in a vector tile: 24 KB, of which values, ids, a mask and two choices are alive at once."""


def build(program: TopkSelect, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec
    window, width, inner = spec.window_rows, spec.chunk_tokens, spec.chunks - 1

    def select(tensors: Any) -> None:
        rows = tensors.logits.shape[0]
        for index in pypto.loop(0, (rows + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(rows - first, window)
            for chunk in pypto.loop(0, inner, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
                part = pypto.view(tensors.logits, [window, width], [first, chunk * width], valid_shape=[valid, width])
                _best(
                    part, _numbers(spec, valid), (0, chunk * TOP_IDS), tensors.candidate_values, tensors.candidate_ids
                )
            for _ in pypto.loop(0, 1, 1, name="LAST", idx_name="last", submit_before_loop=True):
                start = spec.last_chunk_start
                part = pypto.view(tensors.logits, [window, width], [first, start], valid_shape=[valid, width])
                numbers = _numbers(spec, valid)
                if spec.overlap_tokens > 0:
                    part = pypto.where(pypto.ge(numbers, float(spec.overlap_tokens)), part, TAKEN)
                if spec.chunks == 1:
                    _best(part, numbers, (first, 0), tensors.values, tensors.ids)
                else:
                    _best(part, numbers, (0, inner * TOP_IDS), tensors.candidate_values, tensors.candidate_ids)
            if spec.chunks > 1:
                for _ in pypto.loop(0, 1, 1, name="SELECT", idx_name="select", submit_before_loop=True):
                    offered, offered_ids = _offered(spec, valid, tensors.candidate_values, tensors.candidate_ids)
                    _best(offered, offered_ids, (first, 0), tensors.values, tensors.ids)

    return blocks.jit_kernel(program, options, select)


def _numbers(spec: TopkSelectSpec, valid: Any) -> Any:
    """The local ids of a chunk, FP32 `[rows, chunk]`."""
    rows, width = spec.window_rows, spec.chunk_tokens
    return pypto.expand_clone(count(width), [rows, width], valid_shape=[valid, width])


def _best(values: Any, ids: Any, at: Any, best_values: Any, best_ids: Any) -> None:
    """Write the 32 largest of FP32 `values` and their `ids` from place `at` on; ids differ within a row.

    Ids are FP32 too, and become INT32 where the target is.
    """
    rows, width = values.shape
    pypto.set_vec_tile_shapes(max(1, min(rows, TILE_ELEMENTS // width)), width)
    for place in range(TOP_IDS):
        largest = pypto.amax(values, -1, keepdim=True)
        winner = pypto.amin(pypto.where(pypto.ge(values, largest), ids, NO_ID), -1, keepdim=True)
        pypto.assemble(largest, [at[0], at[1] + place], best_values)
        if best_ids.dtype == pypto.DT_INT32:
            pypto.assemble(pypto.cast(winner, pypto.DT_INT32, blocks.RINT), [at[0], at[1] + place], best_ids)
        else:
            pypto.assemble(winner, [at[0], at[1] + place], best_ids)
        values = pypto.where(pypto.eq(ids, winner), TAKEN, values)


def _offered(spec: TopkSelectSpec, valid: Any, candidate_values: Any, candidate_ids: Any) -> tuple[Any, Any]:
    """All chunks' candidates: their values, and their ids in the vocabulary."""
    rows, columns = candidate_values.shape
    number = count(columns)
    chunk = pypto.floor(pypto.mul(number, 1.0 / TOP_IDS))
    start = pypto.mul(chunk, float(spec.chunk_tokens))
    in_last_chunk = pypto.ge(chunk, float(spec.chunks - 1))
    start = pypto.where(in_last_chunk, pypto.sub(start, float(spec.overlap_tokens)), start)
    values = pypto.view(candidate_values, [rows, columns], [0, 0], valid_shape=[valid, columns])
    local_ids = pypto.view(candidate_ids, [rows, columns], [0, 0], valid_shape=[valid, columns])
    return values, pypto.add(local_ids, start)
