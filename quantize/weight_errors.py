"""The error of every quantized weight of a checkpoint, read from the files of source and candidate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantize.architecture import layer_of
from quantize.checkpoint import CheckpointReader

FOLDED = 0.03
"""Spread of the scales of a weight's rows or columns, candidate over source, above which a scale was folded in."""


@dataclass(frozen=True)
class WeightError:
    """Signal to quantization noise of one weight in dB against the source's.

    None when there is no error, or when `folded`: a calibrated algorithm has folded scales or a rotation into the
    weight, so that its difference from the source is no error.
    """

    name: str
    layer: int | None
    sqnr_db: float | None
    folded: bool


def weight_errors(source: Path, candidate: Path) -> list[WeightError]:
    """Errors of the INT8 weights of `candidate` that `source` has too, in the candidate's order.

    One weight of each is in memory at a time. Raises CheckpointError for a directory that holds no usable checkpoint.
    """
    errors = []
    with CheckpointReader(source) as left, CheckpointReader(candidate) as right:
        for name, info in right.infos.items():
            module = name.removesuffix(".weight")
            shared = name in left.infos and left.infos[name].shape == info.shape
            if info.dtype != "I8" or module == name or not shared:
                continue
            exact = left.tensor(name).to(torch.float32)
            found = right.tensor(name).to(torch.float32) * right.weight_scale(module)[:, None]
            folded = _is_folded(exact, found)
            errors.append(WeightError(module, layer_of(name), None if folded else _sqnr_db(exact, found), folded))
    return errors


def _sqnr_db(exact: Tensor, found: Tensor) -> float | None:
    signal = float(exact.square().sum(dtype=torch.float64))
    noise = float((found - exact).square().sum(dtype=torch.float64))
    return 10 * math.log10(signal / noise) if noise and signal else None


def _is_folded(exact: Tensor, found: Tensor) -> bool:
    """Whether rows or columns were scaled, or mixed: least-squares scales of either kind are spread, or far from 1."""
    for axis in (0, 1):
        energy = exact.square().sum(dim=axis)
        used = energy > 0
        scales = (exact * found).sum(dim=axis)[used] / energy[used]
        if len(scales) and float((scales - 1).square().mean().sqrt()) > FOLDED:
            return True
    return False
