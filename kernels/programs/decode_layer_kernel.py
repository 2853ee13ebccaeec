"""The PyPTO kernel of `decode_layer`, over caches of either kind."""

from __future__ import annotations

from typing import Any

from kernels.programs import blocks, decode_stages
from kernels.programs.decode_layer import DecodeLayer


def build(program: DecodeLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""

    def layer(tensors: Any) -> None:
        decode_stages.layer_stages(program.spec, decode_stages.LayerAt(), tensors, tensors.x, tensors.out)

    return blocks.jit_kernel(program, options, layer)
