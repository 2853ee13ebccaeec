"""The PyPTO kernel of `embedding_gather`."""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.embedding import EmbeddingGather


def build(program: EmbeddingGather, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec
    window, hidden_size = spec.window_rows, spec.hidden_size

    def gather(tensors: Any) -> None:
        rows = tensors.ids.shape[0]
        for index in pypto.loop(0, (rows + window - 1) // window, 1, name="WINDOWS", idx_name="window"):
            first = index * window
            valid = pypto.min(rows - first, window)
            some = pypto.view(tensors.ids, [window], [first], valid_shape=[valid])
            # One tile for the window: a tile without a valid row fails in the interpreter's late passes.
            pypto.set_vec_tile_shapes(window, hidden_size)
            pypto.assemble(pypto.index_select(tensors.embed_weight, 0, some), [first, 0], tensors.hidden)

    return blocks.jit_kernel(program, options, gather)
