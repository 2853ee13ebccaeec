"""The PyPTO kernel of `embedding_gather`. Annotations must be objects: no postponed evaluation here."""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.embedding import EmbeddingGather


def build(program: EmbeddingGather, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)
    window, hidden_size = spec.window_rows, spec.hidden_size

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def embedding_gather(ids: of.ids, embed_weight: of.embed_weight, hidden: of.hidden):
        rows = ids.shape[0]
        for index in pypto.loop(0, (rows + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(rows - first, window)
            some = pypto.view(ids, [window], [first], valid_shape=[valid])
            # One tile for the window: a tile without a valid row fails in the interpreter's late passes.
            pypto.set_vec_tile_shapes(window, hidden_size)
            pypto.assemble(pypto.index_select(embed_weight, 0, some), [first, 0], hidden)

    return embedding_gather
