"""Block bootstrap intervals against theory: their width, their coverage, and their pairing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quantize.confidence import confidence
from quantize.errors import QuantizeError


def noise(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def neighbours_alike(count: int, seed: int, run: int = 32) -> Tensor:
    """Noise with a mean of zero and unit variance whose values stay the same for `run` positions."""
    return noise(count // run, seed).repeat_interleave(run)


def test_independent_positions_give_the_interval_of_the_textbook() -> None:
    values = noise(4096, seed=1)
    interval = confidence(lambda index: {"mean": float(values[index].mean())}, len(values))["mean"]
    half_width = 1.96 * float(values.std()) / math.sqrt(len(values))
    assert interval.value == pytest.approx(float(values.mean()))
    assert interval.high - interval.low == pytest.approx(2 * half_width, rel=0.15)


def test_positions_that_are_alike_give_a_wider_interval_than_single_ones_would() -> None:
    values = neighbours_alike(4096, seed=2)

    def mean(index: Tensor) -> dict[str, float]:
        return {"mean": float(values[index].mean())}

    single, blocks = (confidence(mean, len(values), block_positions=block)["mean"] for block in (1, 64))
    assert (blocks.high - blocks.low) / (single.high - single.low) > 4


def test_nineteen_in_twenty_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(100):
        values = neighbours_alike(4096, seed=seed + 10)
        interval = confidence(lambda index, v=values: {"mean": float(v[index].mean())}, len(values), resamples=200)
        held += interval["mean"].low <= 0 <= interval["mean"].high
    assert 87 <= held <= 99


def test_figures_of_one_call_are_paired() -> None:
    values = noise(2048, seed=3)
    intervals = confidence(
        lambda index: {"a": float(values[index].mean()), "difference": float((values + 1 - values)[index].mean())},
        len(values),
    )
    assert intervals["a"].high - intervals["a"].low > 0.05
    assert intervals["difference"].high - intervals["difference"].low < 1e-12


def test_the_seed_decides_and_short_texts_are_allowed() -> None:
    values = noise(40, seed=4)

    def mean(index: Tensor) -> dict[str, float]:
        return {"mean": float(values[index].mean())}

    assert confidence(mean, 40) == confidence(mean, 40)
    assert confidence(mean, 40, block_positions=8) != confidence(mean, 40, block_positions=8, seed=1)
    with pytest.raises(QuantizeError, match="found 0 positions"):
        confidence(mean, 0)
