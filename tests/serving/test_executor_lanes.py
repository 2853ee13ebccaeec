"""The torch spelling of the native step's floating-point order."""

from __future__ import annotations

import pytest
import torch

from serving.executor.lanes import exponential, lane_sum, matmul_in_order, rms_norm


def test_exponential_is_accurate_and_saturates() -> None:
    x = torch.linspace(-87, 88, 100_001)
    exact = torch.exp(x.double())
    assert ((exponential(x).double() - exact) / exact).abs().max() < 2 * 2.0**-24
    edges = torch.tensor([float("-inf"), -200.0, 0.0, 100.0, float("inf")])
    assert exponential(edges).tolist() == [0.0, 0.0, 1.0, float("inf"), float("inf")]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 576])
def test_lane_sum_is_a_sum_in_its_own_order(size: int) -> None:
    values = torch.randn(5, 3, size, generator=torch.Generator().manual_seed(size))
    assert torch.allclose(lane_sum(values), values.double().sum(-1).float(), atol=1e-4)
    assert torch.equal(lane_sum(values)[2], lane_sum(values[2].clone()))


def test_lane_sum_order_is_pinned() -> None:
    """2^24 swallows a single 1 but not the pair (1 + 1): the tree adds lanes 1 and 9 before lane 0 meets them."""
    values = torch.zeros(16)
    values[0], values[1], values[9] = 2.0**24, 1.0, 1.0
    assert lane_sum(values).item() == 2.0**24 + 2
    values = torch.zeros(16)
    values[0], values[8], values[1] = 2.0**24, 1.0, 1.0
    assert lane_sum(values).item() == 2.0**24


def test_matmul_in_order_and_rms_norm_agree_with_double() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(4, 96, generator=generator).bfloat16().float()
    right = torch.randn(96, 33, generator=generator).bfloat16().float()
    assert torch.allclose(matmul_in_order(left, right), (left.double() @ right.double()).float(), atol=1e-4)
    assert torch.equal(matmul_in_order(left, right)[:1], matmul_in_order(left[:1], right))
    gamma = torch.randn(96, generator=generator)
    expected = left.double() / (left.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()
    assert torch.allclose(rms_norm(left, gamma, 1e-6), expected.float(), rtol=1e-5, atol=1e-6)
