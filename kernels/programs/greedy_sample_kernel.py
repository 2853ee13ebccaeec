"""The PyPTO kernel of `greedy_sample`: the second half of `lm_head_greedy`, on logits that are there already.

Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.lm_head_kernel import best_ids, block_winners
from kernels.programs.sampling import GreedySample


def build(program: GreedySample, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)
    window, width = spec.window_rows, spec.chunk_tokens

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def greedy_sample(logits: of.logits, block_maxima: of.block_maxima, block_ids: of.block_ids, ids: of.ids):
        rows = logits.shape[0]
        for index in pypto.loop(0, (rows + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(rows - first, window)
            for chunk in pypto.loop(0, spec.chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
                start = pypto.min(chunk * width, spec.last_chunk_start)
                values = pypto.view(logits, [window, width], [first, start], valid_shape=[valid, width])
                block_winners(spec, chunk, values, valid, block_maxima, block_ids)
            for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
                pypto.assemble(best_ids(spec, block_maxima, block_ids, valid), [first, 0], ids)

    return greedy_sample
