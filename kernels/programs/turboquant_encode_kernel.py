"""The PyPTO kernel of `turboquant_encode`."""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks, turboquant_blocks
from kernels.programs.turboquant_encode import WINDOW_ROWS, TurboQuantEncode, TurboQuantEncodeSpec


def build(program: TurboQuantEncode, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec

    def encode(tensors: Any) -> None:
        rows = tensors.k_rows.shape[0]
        for index in pypto.loop(0, (rows + WINDOW_ROWS - 1) // WINDOW_ROWS, 1, name="WINDOWS", idx_name="window"):
            first = index * WINDOW_ROWS
            valid = pypto.min(rows - first, WINDOW_ROWS)
            places = pypto.view(tensors.slots, [WINDOW_ROWS, 1], [first, 0], valid_shape=[valid, 1])
            _keep(spec, first, valid, places, (tensors.k_rows, tensors.k_matrices, tensors.k_codes, tensors.k_norms))
            _keep(spec, first, valid, places, (tensors.v_rows, tensors.v_matrices, tensors.v_codes, tensors.v_norms))

    return blocks.jit_kernel(program, options, encode)


def _keep(spec: TurboQuantEncodeSpec, first: Any, valid: Any, places: Any, tensors: Any) -> None:
    """Encode a window of keys or of values and put it into its slots."""
    rows, matrices, codes_cache, norms_cache = tensors
    window = pypto.view(rows, [WINDOW_ROWS, spec.kv_size], [first, 0], valid_shape=[valid, spec.kv_size])
    codes, norms = turboquant_blocks.encode(window, matrices, spec.bits, spec.kv_heads, valid)
    pypto.set_vec_tile_shapes(WINDOW_ROWS, codes.shape[1])
    codes_cache[:] = pypto.scatter_update(codes_cache, -2, places, codes)
    pypto.set_vec_tile_shapes(WINDOW_ROWS, norms.shape[1])
    norms_cache[:] = pypto.scatter_update(norms_cache, -2, places, norms)
