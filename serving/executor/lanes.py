"""The native step's floating-point order in torch: sixteen lanes, one summation tree, one exponential.

Element-wise torch operations round as IEEE says, one by one, so a sum spelled out as element-wise additions in a fixed
order gives the same bits on every CPU and at any batch size: those of csrc/vector_math.hpp. Torch's own reductions and
transcendental functions choose their order and their polynomials by CPU and by shape.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quantize.numerics import inverse_sqrt

LANES = 16
_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.428606820309417e-6
_ROUND = 12582912.0
"""1.5 * 2^23: adding and subtracting it rounds an FP32 value below 2^22 to an integer, half to even."""
_TAYLOR = tuple(float(np.float32(1) / np.float32(math.factorial(order))) for order in range(7, -1, -1))


def lane_sum(values: Tensor) -> Tensor:
    """Sum FP32 `[..., n]` over the last axis: sixteen lanes in order, then lane i + i+8, i + i+4, i + i+2, 0 + 1."""
    if values.shape[-1] % LANES:
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % LANES))
    steps = values.reshape(*values.shape[:-1], -1, LANES).unbind(-2)
    total: Tensor = steps[0]
    for step in steps[1:]:
        total = total + step
    for half in (8, 4, 2, 1):
        total = total[..., :half] + total[..., half : 2 * half]
    return total[..., 0]


def exponential(x: Tensor) -> Tensor:
    """e^x of FP32 by range reduction and a Taylor polynomial of degree 7; 0 below -104, infinity above 89."""
    x = x.clamp(-104.0, 89.0)
    power = (x * _LOG2_E + _ROUND) - _ROUND
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    result = torch.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        result = result * rest + coefficient
    whole = power.to(torch.int32)
    first = whole >> 1
    second = whole - first
    return result * _power_of_two(first) * _power_of_two(second)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """`x * (1 / sqrt(mean(x^2) + eps)) * gamma` over the last axis, FP32, with the mean in lane order."""
    mean_square = lane_sum(x * x) / x.shape[-1]
    return x * inverse_sqrt(mean_square + eps).unsqueeze(-1) * gamma


def matmul_in_order(left: Tensor, right: Tensor) -> Tensor:
    """FP32 `[m, k]` x `[k, n]` with every output summed over k in order, each product rounded before it is added."""
    total = torch.zeros(left.shape[0], right.shape[1])
    for column, row in zip(left.t().contiguous(), right, strict=True):
        total += column.unsqueeze(-1) * row
    return total


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
