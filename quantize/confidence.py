"""Confidence intervals of figures measured over a text, by resampling blocks of neighbouring positions.

Positions of one text are not independent: a hard passage is hard for dozens of tokens, and so is a passage where
quantization hurts. Resampling single positions would give intervals that are too narrow. The circular block bootstrap
(Politis & Romano, "A circular block-resampling procedure for stationary data", 1992; blocks go back to Künsch, "The
jackknife and the bootstrap for general stationary observations", Annals of Statistics 17, 1989) draws whole runs of
neighbours instead, with the text closed to a ring so that every position is drawn equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.errors import QuantizeError

BLOCK_POSITIONS = 64
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure over all positions, and the limits of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def confidence(
    statistics: Callable[[Tensor], Mapping[str, float]],
    positions: int,
    *,
    block_positions: int = BLOCK_POSITIONS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Interval]:
    """95 % percentile intervals of every figure that `statistics` computes from positions INT64 `[positions]`.

    `statistics` is called with 0, 1, 2, ... for the values, then with `resamples` draws: blocks of `block_positions`
    neighbours from random starts on the ring of positions, the last block cut to length. All figures of one call see
    the same draw, and the draws depend on `positions`, `block_positions` and `seed` alone: ratios and differences of
    models measured on the same positions are paired, which is what makes their intervals narrow. Raises QuantizeError
    without positions. A text of few blocks gives intervals that are only a rough guide.
    """
    if positions < 1 or block_positions < 1 or resamples < 1:
        raise QuantizeError(
            f"found {positions} positions, blocks of {block_positions} and {resamples} resamples; expected one or more"
        )
    block_positions = min(block_positions, positions)
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-positions // block_positions)
    offsets = torch.arange(block_positions)
    values = statistics(torch.arange(positions))
    draws: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(resamples):
        starts = torch.randint(positions, (blocks, 1), generator=generator)
        index = ((starts + offsets) % positions).reshape(-1)[:positions]
        for name, value in statistics(index).items():
            draws[name].append(value)
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    intervals = {}
    for name, value in values.items():
        low, high = torch.quantile(torch.tensor(draws[name], dtype=torch.float64), tails).tolist()
        intervals[name] = Interval(value, low, high)
    return intervals
