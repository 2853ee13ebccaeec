"""The scale of least squared error for each channel of a weight: a little clipping for finer steps elsewhere.

A row quantized with `amax / 127` spends its range on its largest weight. With a smaller scale the largest ones are
clipped and all others lie closer to a code; which is better is a matter of the row, so it is searched per row: a grid
of shrunken scales from 1 down to 0.7, then finer steps around the best one (`1 / 400` at last, less than BF16 can tell
apart). The unclipped scale comes first and only a smaller error replaces it, so that no row gets worse.

`csrc/quantize_rows.cpp` does the same bit for bit: errors are compared, so they are added in one fixed order, a tree
that halves a row until one number is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.numerics import quantize_weight, weight_codes, weight_scales

CLIP_STEPS = 400
"""A clip of k shrinks a scale to `(400 - k) / 400`."""
LAST_CLIP = 120
CLIP_STRIDE = 8


@dataclass(frozen=True)
class ClipSearch:
    """What was found for each row: `scale` `[out, 1]` as stored; squared errors FP64 `[out]` with it and unclipped."""

    scale: Tensor
    error: Tensor
    unclipped_error: Tensor


def _unit(scale: Tensor) -> Tensor:
    """The power of two FP32 whose product with a positive scale lies in [1, 2), kept in FP32's normal range."""
    _, exponent = torch.frexp(scale.to(torch.float32))
    return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), (1 - exponent).clamp(-126, 127))


def _tree_error(rows_fp32: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    """Squared error FP32 `[out]` of quantizing rows with `scale`, in units of `1 / unit^2`.

    Squares are added by halving: the row is padded with zeros to a power of two, and its upper half is added to its
    lower one until one number is left.
    """
    codes = weight_codes(rows_fp32, scale).to(torch.float32)
    squares = (codes * (scale.to(torch.float32) * unit) - rows_fp32 * unit).square()
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = torch.nn.functional.pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares[:, 0]


def search_clipping(rows: Tensor) -> ClipSearch:
    """Find the scale of least squared rounding error of each row of `rows` `[out, in]` (BF16, FP16 or FP32, finite).

    Works on the whole of `rows` at once; cut large weights into blocks of rows. Exact: `error <= unclipped_error` for
    every row, and a row of zeros keeps the scale of `quantize_weight`.
    """
    _, scale = quantize_weight(rows)
    rows_fp32 = rows.to(torch.float32)
    amax = rows.abs().amax(dim=1, keepdim=True)
    unit = _unit(scale)
    unclipped = _tree_error(rows_fp32, scale, unit)
    best_error, best_clip = unclipped, torch.zeros(rows.shape[0], dtype=torch.int64)

    def consider(clip: Tensor) -> None:
        nonlocal scale, best_error, best_clip
        shrink = (CLIP_STEPS - clip).to(torch.float32) / torch.full_like(clip, CLIP_STEPS, dtype=torch.float32)
        candidate = weight_scales(amax, shrink.unsqueeze(1))
        error = _tree_error(rows_fp32, candidate, unit)
        better = (error < best_error) & (clip > 0) & (clip <= LAST_CLIP) & (amax[:, 0] != 0)
        scale = torch.where(better.unsqueeze(1), candidate, scale)
        best_error = torch.where(better, error, best_error)
        best_clip = torch.where(better, clip, best_clip)

    for clip in range(CLIP_STRIDE, LAST_CLIP + 1, CLIP_STRIDE):
        consider(torch.full_like(best_clip, clip))
    step = CLIP_STRIDE // 2
    while step:
        centre = best_clip
        consider(centre - step)
        consider(centre + step)
        step //= 2
    square_unit = unit[:, 0].to(torch.float64).square()
    return ClipSearch(scale, best_error.to(torch.float64) / square_unit, unclipped.to(torch.float64) / square_unit)


def quantize_weight_clipped(rows: Tensor) -> tuple[Tensor, ClipSearch]:
    """Quantize weight rows with the scales of `search_clipping`; returns codes INT8 `[out, in]` and the search."""
    found = search_clipping(rows)
    return weight_codes(rows, found.scale), found
