"""One decoder layer's slabs as program arguments: rules for a shape, dtypes and shapes, samples, the golden's view.

Shared by the programs that run a whole layer. A slab that a family or a form of the weights does not have is a
placeholder row of 16 zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Generator, Tensor

from kernels.goldens import LayerWeights
from kernels.programs.base import Argument

__all__ = [
    "PLACEHOLDER_COLUMNS",
    "STACKED_SLABS",
    "LayerDims",
    "WeightForm",
    "golden_weights",
    "sample_slabs",
    "shape_problems",
    "slab_arguments",
    "slabs_of_layer",
    "stacked_arguments",
    "stacked_rows",
    "stacked_slabs",
]

PLACEHOLDER_COLUMNS = 16
"""Width of the zero row handed over for a slab that a layer does not have; the kernel does not read it."""

WeightForm = Literal["int8", "bf16"]
"""INT8 weights with a scale per column, by rows quantized on the way; or BF16 weights by BF16 rows."""

_DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16}
STACKED_SLABS = tuple(LayerWeights.__dataclass_fields__)
"""The order of the slabs in programs over several layers."""
_NORMS = ("input_rms", "post_rms", "q_norm", "k_norm")


class LayerDims(Protocol):
    """The shape fields that every specification of a layer program has."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def num_heads(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def head_dim(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def qk_norm(self) -> bool: ...  # noqa: D102 - a field of the configuration
    @property
    def qkv_bias(self) -> bool: ...  # noqa: D102 - a field of the configuration
    @property
    def down(self) -> WeightForm: ...  # noqa: D102 - a field of the configuration
    @property
    def weights(self) -> WeightForm: ...  # noqa: D102 - a field of the configuration


def shape_problems(dims: LayerDims) -> list[str]:
    """Why no layer kernel covers `dims`, one text per field; empty when one does."""
    sizes = {name: getattr(dims, name) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")}
    problems = [f"{name} {size} is not at least 1" for name, size in sizes.items() if size < 1]
    if problems:
        return problems
    if dims.num_heads % dims.num_kv_heads:
        problems.append(f"{dims.num_heads} heads are not a multiple of {dims.num_kv_heads} key/value heads")
    if dims.head_dim % 16 or not 16 <= dims.head_dim <= 256:
        problems.append(f"head_dim {dims.head_dim} is not 16, 32, 48, ... 256")
    for name, size in (("hidden_size", dims.hidden_size), ("intermediate_size", dims.intermediate_size)):
        if size % 32:
            problems.append(f"{name} {size} is not a multiple of 32, the INT8 fractal width")
    if dims.weights == "bf16" and dims.down != "bf16":
        problems.append(f"down is {dims.down} beside BF16 weights; expected bf16")
    return problems


def slab_arguments(dims: LayerDims) -> tuple[Argument, ...]:
    """The slabs of one layer, in call order."""
    fp32 = torch.float32
    matrix, down_matrix = _DTYPES[dims.weights], _DTYPES[dims.down]
    q, kv = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    bias_q, bias_kv = (q, kv) if dims.qkv_bias else (PLACEHOLDER_COLUMNS, PLACEHOLDER_COLUMNS)
    norm = dims.head_dim if dims.qk_norm else PLACEHOLDER_COLUMNS
    hidden, inter = dims.hidden_size, dims.intermediate_size

    def scale(name: str, columns: int, form: WeightForm) -> Argument:
        return Argument(name, fp32, (1, columns if form == "int8" else PLACEHOLDER_COLUMNS))

    return (
        Argument("input_rms", fp32, (1, hidden)),
        Argument("wq", matrix, (hidden, q)),
        Argument("wk", matrix, (hidden, kv)),
        Argument("wv", matrix, (hidden, kv)),
        scale("wq_scale", q, dims.weights),
        scale("wk_scale", kv, dims.weights),
        scale("wv_scale", kv, dims.weights),
        Argument("q_bias", fp32, (1, bias_q)),
        Argument("k_bias", fp32, (1, bias_kv)),
        Argument("v_bias", fp32, (1, bias_kv)),
        Argument("q_norm", fp32, (1, norm)),
        Argument("k_norm", fp32, (1, norm)),
        Argument("wo", matrix, (q, hidden)),
        scale("wo_scale", hidden, dims.weights),
        Argument("post_rms", fp32, (1, hidden)),
        Argument("w_gate", matrix, (hidden, inter)),
        Argument("w_up", matrix, (hidden, inter)),
        scale("w_gate_scale", inter, dims.weights),
        scale("w_up_scale", inter, dims.weights),
        Argument("w_down", down_matrix, (inter, hidden)),
        scale("w_down_scale", hidden, dims.down),
    )


def stacked_arguments(dims: LayerDims) -> tuple[Argument, ...]:
    """The slabs of all layers, one behind the other, in call order."""
    by_name = {argument.name: argument for argument in slab_arguments(dims)}
    return tuple(replace(by_name[name], shape=(None, by_name[name].shape[1])) for name in STACKED_SLABS)


def stacked_slabs(slabs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's slabs, by their contract names, as the stacked arguments; absent ones become a placeholder row."""
    absent = torch.zeros(1, PLACEHOLDER_COLUMNS)
    return {name: slabs.get(name, slabs.get(f"{name}_weight", absent)) for name in STACKED_SLABS}


def slabs_of_layer(tensors: Mapping[str, Tensor], index: int, layers: int) -> dict[str, Tensor]:
    """The slabs of layer `index` of `layers` among the stacked arguments in `tensors`, as `slab_arguments` has them."""
    parts = {}
    for name in STACKED_SLABS:
        rows = tensors[name].shape[0] // layers
        # A placeholder may have one row for all layers.
        parts[name] = tensors[name][index * rows : (index + 1) * rows] if rows else tensors[name]
    return parts


def stacked_rows(dims: LayerDims, layers: int) -> dict[str, int]:
    """How many rows each stacked slab of `layers` layers has, but for placeholders, of which any number will do.

    What is a placeholder the options say: a slab of 16 columns may be one, or a head of 16.
    """
    placeholders = _absent_slabs(dims)
    if dims.weights == "bf16":
        placeholders |= {argument.name for argument in slab_arguments(dims) if argument.name.endswith("_scale")}
    return {
        argument.name: layers * (argument.shape[0] or 1)
        for argument in slab_arguments(dims)
        if argument.name not in placeholders
    }


def _absent_slabs(dims: LayerDims) -> set[str]:
    """Slabs that the family or the form of the down projection does not have."""
    absent = set() if dims.qk_norm else {"q_norm", "k_norm"}
    absent |= set() if dims.qkv_bias else {"q_bias", "k_bias", "v_bias"}
    absent |= set() if dims.down == "int8" else {"w_down_scale"}
    return absent


def sample_slabs(dims: LayerDims, generator: Generator) -> dict[str, Tensor]:
    """Random slabs whose products have about the size of their inputs."""
    tensors = {}
    for argument in slab_arguments(dims):
        shape = [size or 1 for size in argument.shape]
        if argument.dtype == torch.int8:
            tensors[argument.name] = torch.randint(-127, 128, shape, dtype=torch.int16, generator=generator).char()
        elif argument.dtype == torch.bfloat16:
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[0])
            tensors[argument.name] = values.to(torch.bfloat16)
        elif argument.name.endswith("_scale"):
            # Codes have an RMS of 73.
            depth = dims.intermediate_size if argument.name == "w_down_scale" else dims.hidden_size
            tensors[argument.name] = (0.5 + torch.rand(shape, generator=generator)) / (73.0 * math.sqrt(depth))
        elif argument.name in _NORMS:
            tensors[argument.name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            tensors[argument.name] = torch.randn(shape, generator=generator)
    return tensors


def golden_weights(dims: LayerDims, tensors: Mapping[str, Tensor]) -> LayerWeights:
    """The slabs among `tensors` as the golden takes them: rows of one as vectors, placeholders as None."""
    absent = _absent_slabs(dims)
    return LayerWeights(
        **{
            argument.name: tensors[argument.name][0] if argument.shape[0] == 1 else tensors[argument.name]
            for argument in slab_arguments(dims)
            if argument.name not in absent
        }
    )
