"""The PyPTO kernel of `greedy_sample`: the second half of `lm_head_greedy`, on logits that are there already."""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.lm_head_kernel import best_ids, block_winners
from kernels.programs.sampling import GreedySample


def build(program: GreedySample, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec
    window, width = spec.window_rows, spec.chunk_tokens

    def sample(tensors: Any) -> None:
        rows = tensors.logits.shape[0]
        for index in pypto.loop(0, (rows + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(rows - first, window)
            for chunk in pypto.loop(0, spec.chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
                start = pypto.min(chunk * width, spec.last_chunk_start)
                values = pypto.view(tensors.logits, [window, width], [first, start], valid_shape=[valid, width])
                block_winners(spec, chunk, values, valid, tensors.block_maxima, tensors.block_ids)
            for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
                pypto.assemble(best_ids(spec, tensors.block_maxima, tensors.block_ids, valid), [first, 0], tensors.ids)

    return blocks.jit_kernel(program, options, sample)
