"""The rules that turn a checkpoint tensor into its part of a slab: they re-orient, pad and widen, never recompute.

A rule yields contiguous row blocks in slab order, so that a large table is never held twice. What a rule expects of its
source is checked by `source_problem`, so a wrong tensor is named before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.contract import ResolvedSlab, Rule, SlabDtype

TORCH_DTYPES: dict[SlabDtype, torch.dtype] = {"INT8": torch.int8, "BF16": torch.bfloat16, "FP32": torch.float32}
PER_LAYER_RULES: frozenset[Rule] = frozenset({"transpose", "row", "scale_row"})
FLOAT_NAMES = ("BF16", "F16", "F32")
BLOCK_ROWS = 4096


def part_shape(slab: ResolvedSlab, num_layers: int) -> tuple[int, ...]:
    """Shape of what one layer contributes to `slab`; the whole shape for a slab that exists once."""
    if "{layer}" not in slab.spec.source:
        return slab.shape
    return (slab.shape[0] // num_layers, *slab.shape[1:])


def expected_source_shapes(slab: ResolvedSlab, num_layers: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes a source tensor of `slab` may have; a scale may be `[out, 1]` or `[out]`."""
    part = part_shape(slab, num_layers)
    match slab.spec.rule:
        case "transpose":
            return ((part[1], part[0]),)
        case "row":
            return ((part[1],),)
        case "scale_row":
            return ((part[1], 1), (part[1],))
        case "pad_zero_rows" | "pad_first_row":
            return ((vocab_size, part[1]),)
        case "rope_cos" | "rope_sin":
            return ()


def source_problem(
    slab: ResolvedSlab, name: str, dtype: str, shape: Sequence[int], num_layers: int, vocab_size: int
) -> str | None:
    """Say what is wrong with a source tensor of safetensors dtype `dtype` for `slab`; None when it fits."""
    expected = expected_source_shapes(slab, num_layers, vocab_size)
    if tuple(shape) not in expected:
        shapes = " or ".join(str(list(each)) for each in expected)
        return f"{name} has shape {list(shape)}; slab {slab.name} expects {shapes}"
    accepted = ("I8",) if slab.dtype == "INT8" else FLOAT_NAMES
    if dtype not in accepted:
        return f"{name} is {dtype}; slab {slab.name} expects {' or '.join(accepted)}"
    return None


def slab_blocks(slab: ResolvedSlab, source: Tensor) -> Iterator[Tensor]:
    """Yield the rows that `source` contributes to `slab`, in order, contiguous and in the slab's dtype.

    `transpose` turns `[out, in]` into `[in, out]`; `row` and `scale_row` give one row; the padding rules give the
    source's rows and then zeros (embedding) or copies of row 0 (LM head: logits of padded ids stay finite).
    FP32 and FP16 sources narrow to BF16 by round-half-to-even.
    """
    target = TORCH_DTYPES[slab.dtype]
    if slab.spec.rule == "transpose":
        yield source.to(target).t().contiguous()
        return
    if slab.spec.rule in PER_LAYER_RULES:
        yield source.to(target).reshape(1, -1).contiguous()
        return
    for start in range(0, source.shape[0], BLOCK_ROWS):
        yield source[start : start + BLOCK_ROWS].to(target).contiguous()
    padding_rows = slab.shape[0] - source.shape[0]
    if padding_rows and slab.spec.rule == "pad_zero_rows":
        yield torch.zeros(padding_rows, source.shape[1], dtype=target)
    elif padding_rows:
        yield source[:1].to(target).expand(padding_rows, -1).contiguous()
