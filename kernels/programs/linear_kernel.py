"""The PyPTO kernel of `linear_w8a8`. Annotations must be objects: no postponed evaluation here."""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.linear import LinearW8A8


def build(program: LinearW8A8, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def linear_w8a8(x: of.x, weight: of.weight, weight_scale: of.weight_scale, out: of.out):
        for _ in pypto.loop(1, name="LINEAR", idx_name="linear"):
            out[:] = blocks.linear(blocks.operand(x, "int8"), weight, weight_scale, spec.tile)

    return linear_w8a8
