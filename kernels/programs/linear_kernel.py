"""The PyPTO kernel of `linear_w8a8`."""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.linear import LinearW8A8


def build(program: LinearW8A8, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec

    def linear(tensors: Any) -> None:
        for _ in pypto.loop(1, name="LINEAR", idx_name="linear"):
            tensors.out[:] = blocks.linear(
                blocks.operand(tensors.x, "int8"), tensors.weight, tensors.weight_scale, spec.tile
            )

    return blocks.jit_kernel(program, options, linear)
