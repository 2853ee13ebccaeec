"""The PyPTO kernel of `turboquant_encode`. Annotations must be objects: no postponed evaluation here."""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.programs import blocks, turboquant_blocks
from kernels.programs.turboquant_encode import WINDOW_ROWS, TurboQuantEncode, TurboQuantEncodeSpec


def build(program: TurboQuantEncode, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def turboquant_encode(
        k_rows: of.k_rows,
        v_rows: of.v_rows,
        slots: of.slots,
        k_matrices: of.k_matrices,
        v_matrices: of.v_matrices,
        k_codes: of.k_codes,
        k_norms: of.k_norms,
        v_codes: of.v_codes,
        v_norms: of.v_norms,
    ):
        rows = k_rows.shape[0]
        for index in pypto.loop(0, (rows + WINDOW_ROWS - 1) // WINDOW_ROWS, 1, name="WINDOWS", idx_name="window"):
            first = index * WINDOW_ROWS
            valid = pypto.min(rows - first, WINDOW_ROWS)
            places = pypto.view(slots, [WINDOW_ROWS, 1], [first, 0], valid_shape=[valid, 1])
            _keep(spec, first, valid, places, (k_rows, k_matrices, k_codes, k_norms))
            _keep(spec, first, valid, places, (v_rows, v_matrices, v_codes, v_norms))

    return turboquant_encode


def _keep(spec: TurboQuantEncodeSpec, first: Any, valid: Any, places: Any, tensors: Any) -> None:
    """Encode a window of keys or of values and put it into its slots."""
    rows, matrices, codes_cache, norms_cache = tensors
    window = pypto.view(rows, [WINDOW_ROWS, spec.kv_size], [first, 0], valid_shape=[valid, spec.kv_size])
    codes, norms = turboquant_blocks.encode(window, matrices, spec.bits, spec.kv_heads, valid)
    pypto.set_vec_tile_shapes(WINDOW_ROWS, codes.shape[1])
    codes_cache[:] = pypto.scatter_update(codes_cache, -2, places, codes)
    pypto.set_vec_tile_shapes(WINDOW_ROWS, norms.shape[1])
    norms_cache[:] = pypto.scatter_update(norms_cache, -2, places, norms)
