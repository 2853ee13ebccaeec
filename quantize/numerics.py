"""The numeric contract of W8A8, in plain torch: what rounds where, and how.

Everything that computes with quantized values (the goldens, the CPU executor, the PyPTO programs) agrees with the
functions here within stated tolerances. The contract:

- a weight is INT8 per output channel, symmetric, with a scale in the source's dtype;
- an activation is INT8 per token, symmetric, quantized from its BF16 value with an FP32 scale;
- a product is INT8 x INT8 accumulated exactly in INT32, then `FP32(acc) * weight_scale * activation_scale`;
- norms, RoPE, softmax and the residual inside a layer are FP32; FP32 becomes BF16 by round-half-to-even.

This module knows nothing of checkpoints, files or models.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from quantize.rope import RopeScaling

INT8_MAX = 127
INT8_MIN = -128
COMPAT_DIVISOR = 127.5
ACTIVATION_AMAX_EPS = 1e-4
EXACT_FP32_K = 1024
"""Longest reduction for which an FP32 sum of INT8 products is exact: 128 * 128 * 1024 = 2**24."""


def smallest_scale(dtype: torch.dtype) -> float:
    """The least scale given to a row that is not zero.

    FP16's subnormals are ordinary FP32 numbers, so all of its range is used; below the normal BF16 and FP32 numbers
    a product would be flushed to zero anyway.
    """
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps if dtype == torch.float16 else info.smallest_normal


def quantize_weight(rows: Tensor, arithmetic: Literal["fp32", "compat"] = "fp32") -> tuple[Tensor, Tensor]:
    """Quantize weight rows `[out, in]` (BF16, FP16 or FP32, finite) to INT8, symmetric per row.

    Returns codes INT8 `[out, in]` and scales `[out, 1]` in the dtype of `rows`, always positive and finite.

    - `fp32`: the scale is `amax / 127` narrowed to the stored dtype, and `code = clamp(rint(w / scale), -127, 127)`
      in FP32 with the scale as stored. A scale that would vanish is raised to the dtype's least usable number.
      On SmolLM2-135M the squared error is 10 % below that of `compat`; `amax / 127.5` would gain another 0.3 %, not
      worth codes of -128.
    - `compat`: compressed-tensors' own arithmetic, `amax / 127.5` and `w / scale` each rounded to the stored dtype,
      codes clamped to [-128, 127].

    A row of zeros gets codes 0 and the dtype's epsilon as its scale (compressed-tensors' choice).
    """
    if arithmetic == "compat":
        dtype = rows.dtype
        scale = rows.abs().amax(dim=1, keepdim=True) / torch.tensor(COMPAT_DIVISOR, dtype=dtype)
        scale = torch.where(scale == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), scale)
        return torch.round((rows / scale).clamp_(INT8_MIN, INT8_MAX)).to(torch.int8), scale
    amax = rows.abs().amax(dim=1, keepdim=True)
    scale = weight_scales(amax)
    if rows.dtype == torch.float16:
        # Below 6e-5 FP16's steps are so coarse that a scale rounded down would clip the row: take the next one up.
        clips = amax.to(torch.float32) > scale.to(torch.float32) * (INT8_MAX + 0.5)
        scale = (scale.view(torch.int16) + clips.to(torch.int16)).view(torch.float16)
    return weight_codes(rows, scale), scale


def weight_scales(amax: Tensor, shrink: Tensor | None = None) -> Tensor:
    """Scales in the dtype of `amax` (largest magnitudes of rows, any shape): `amax / 127`, times `shrink` (FP32).

    Computed in FP32 and narrowed; never zero (see `quantize_weight`).
    """
    dtype = amax.dtype
    scale_fp32 = amax.to(torch.float32) / INT8_MAX
    scale = (scale_fp32 if shrink is None else scale_fp32 * shrink).to(dtype)
    eps = torch.tensor(torch.finfo(dtype).eps, dtype=dtype)
    return torch.where(amax == 0, eps, scale.clamp_min(smallest_scale(dtype)))


def weight_codes(rows: Tensor, scale: Tensor) -> Tensor:
    """Codes INT8 of `rows` for scales as stored, `[out, 1]`: `clamp(rint(w / scale), -127, 127)` in FP32."""
    quotient = rows.to(torch.float32) / scale.to(torch.float32)
    return torch.round(quotient).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def quantize_activation(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of `values` to INT8, symmetric and dynamic.

    `values` is BF16 `[tokens, k]`. Returns codes INT8 `[tokens, k]` and scales FP32 `[tokens, 1]` with
    `amax = max(1e-4, max|x|)`, `code = clamp(rint(x * (127 / amax)), -127, 127)` and `scale = amax / 127`.
    The multiplication by the reciprocal (rather than a division by the scale) is what the device kernels do.
    `127 / amax` is one correctly rounded division: torch turns `127 / tensor` into `reciprocal(tensor) * 127`, which
    rounds twice and differs in one value out of four.
    """
    x_fp32 = values.to(torch.float32)
    amax = x_fp32.abs().amax(dim=-1, keepdim=True).clamp_min(ACTIVATION_AMAX_EPS)
    codes = torch.round(x_fp32 * torch.full_like(amax, INT8_MAX).div_(amax)).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes, amax / INT8_MAX


def int8_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply INT8 `[m, k]` by INT8 `[k, n]` exactly; returns INT32 `[m, n]`.

    The product is computed by FP32 matmuls over slices of at most 1024 along k, where every partial sum is an
    integer of at most 2**24 and so exact in any order; the slices are added as INT32. No torch INT8 operator is
    both exact and fast on every CPU.
    """
    k = left.shape[1]
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.int32)
    for start in range(0, k, EXACT_FP32_K):
        stop = min(start + EXACT_FP32_K, k)
        part = left[:, start:stop].to(torch.float32) @ right[start:stop].to(torch.float32)
        total += part.to(torch.int32)
    return total


def linear_w8a8(codes: Tensor, scale_fp32: Tensor, weight: Tensor, weight_scale_fp32: Tensor) -> Tensor:
    """Apply a W8A8 linear to quantized activations; returns FP32 `[tokens, out]`.

    `codes` INT8 `[tokens, k]` and `scale_fp32` `[tokens, 1]` come from `quantize_activation`; `weight` is INT8
    `[k, out]` (the transposed, kernel-ready layout) and `weight_scale_fp32` is `[out]`. The dequantization order is
    `(FP32(acc) * weight_scale) * activation_scale`.
    """
    accumulator = int8_matmul(codes, weight)
    return accumulator.to(torch.float32) * weight_scale_fp32 * scale_fp32


def rms_norm(values_fp32: Tensor, gamma_fp32: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last axis in FP32: `x * (1 / sqrt(mean(x^2) + eps)) * gamma`; FP32 in, FP32 out.

    The inverse is a rounded square root and a rounded reciprocal (see `inverse_sqrt`).
    """
    return values_fp32 * inverse_sqrt(values_fp32.square().mean(dim=-1, keepdim=True) + eps) * gamma_fp32


def inverse_sqrt(values_fp32: Tensor) -> Tensor:
    """`1 / sqrt(x)` in FP32, root and reciprocal each correctly rounded.

    Torch's own FP32 `sqrt` and `rsqrt` are approximations on some CPUs (measured: one root in six is off by an ulp), so
    the root is taken in FP64: rounding a double root to FP32 gives the correctly rounded one.
    """
    return values_fp32.to(torch.float64).sqrt().to(torch.float32).reciprocal()


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Rotary frequencies FP32 `[head_dim / 2]`, in radians a position: `theta^(-2 i / head_dim)`, then scaled.

    `llama3` scaling goes by the wavelength `2 pi / f`: above `original / low_freq_factor` a frequency is divided by
    `factor`, below `original / high_freq_factor` it is kept, between them it is blended linearly in
    `original / wavelength`. Operations and their order are those of transformers, so that both agree to the bit.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_tokens
    wavelength = 2 * math.pi / frequency
    stretched = torch.where(wavelength > original / low, frequency / scaling.factor, frequency)
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / scaling.factor + share * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def rope_tables(
    head_dim: int, theta: float, positions: int, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables FP32 `[positions, head_dim]` for half-split (NeoX) rotary embedding.

    Columns `i` and `i + head_dim / 2` hold the same angle, `position` times `inverse_frequencies(...)[i]` (Su et al.,
    RoFormer, 2021; the scaling is Llama 3.1's).
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(head_dim, theta, scaling))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(heads_fp32: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate FP32 `[tokens, heads, head_dim]` by per-token tables FP32 `[tokens, head_dim]`, half split.

    `lo' = lo * cos_lo - hi * sin_lo` and `hi' = hi * cos_hi + lo * sin_hi`.
    """
    half = heads_fp32.shape[-1] // 2
    low, high = heads_fp32[..., :half], heads_fp32[..., half:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat(
        [low * cos[..., :half] - high * sin[..., :half], high * cos[..., half:] + low * sin[..., half:]], dim=-1
    )


def to_bf16(values: Tensor) -> Tensor:
    """Narrow FP32 to BF16 by round-half-to-even (torch's conversion on every backend used here)."""
    return values.to(torch.bfloat16)
