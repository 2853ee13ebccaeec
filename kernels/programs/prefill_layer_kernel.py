"""The PyPTO kernel of `prefill_layer`."""

from __future__ import annotations

from typing import Any

from kernels.programs import blocks, prefill_stages
from kernels.programs.prefill_layer import PrefillLayer


def build(program: PrefillLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""

    def layer(tensors: Any) -> None:
        prefill_stages.layer_stages(program.spec, prefill_stages.LayerAt(), tensors, tensors.x, tensors.out)

    return blocks.jit_kernel(program, options, layer)
