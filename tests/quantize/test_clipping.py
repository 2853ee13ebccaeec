"""Clipping never costs: per row, against the exact error, and where it has something to gain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantize.clipping import quantize_weight_clipped, search_clipping
from quantize.numerics import quantize_weight


def rows(seed: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(64, 300, generator=torch.Generator().manual_seed(seed))
    values[::4] *= torch.logspace(-6, 2, 16).unsqueeze(1)
    values[::3, 7] *= 6
    return values.to(dtype)


def exact_error(weight: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (weight.double() - codes.double() * scale.double()).square().sum(dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_no_row_gets_worse_and_the_whole_gets_better(seed: int, dtype: torch.dtype) -> None:
    weight = rows(seed, dtype)
    plain_codes, plain_scale = quantize_weight(weight)
    codes, found = quantize_weight_clipped(weight)
    before, after = exact_error(weight, plain_codes, plain_scale), exact_error(weight, codes, found.scale)
    assert bool((after <= before * (1 + 1e-6)).all())
    assert bool((found.error <= found.unclipped_error).all())
    kept = before > 0
    assert float((after[kept] / before[kept]).mean()) < 0.985
    assert torch.allclose(found.error, after, rtol=1e-4, atol=1e-80)
    assert torch.allclose(found.unclipped_error, before, rtol=1e-4, atol=1e-80)


def test_it_finds_what_a_search_over_all_scales_finds() -> None:
    """The best of all BF16 scales within the grid's range is at most a hair better."""
    weight = rows(9, torch.bfloat16)[:16]
    found = search_clipping(weight)
    top = quantize_weight(weight)[1].view(torch.int16)
    best = exact_error(weight, *quantize_weight(weight))
    for step in range(80):
        scale = (top - step).view(torch.bfloat16)
        inside = scale.float() >= 0.7 * top.view(torch.bfloat16).float()
        codes = torch.round(weight.float() / scale.float()).clamp(-127, 127)
        error = torch.where(inside[:, 0], exact_error(weight, codes, scale), torch.inf)
        best = torch.minimum(best, error)
    assert bool((found.error <= best * 1.02).all())
    assert float(found.error.sum()) <= 1.005 * float(best.sum())


def test_rows_without_anything_to_gain_keep_their_scale() -> None:
    weight = torch.zeros(3, 64, dtype=torch.bfloat16)
    weight[1] = torch.tensor([127.0, -127.0] * 32)
    weight[2, 5] = 3.0
    _, scale = quantize_weight(weight)
    assert torch.equal(search_clipping(weight).scale, scale)
