"""The native kernel against the torch contract to the bit, on every instruction set, and what it refuses and counts."""

from __future__ import annotations

import logging
import math
import struct
from typing import Literal

import pytest
import torch
from torch import Tensor

from quantize.clipping import quantize_weight_clipped
from quantize.errors import NativeBuildError
from quantize.native_build import available_instruction_sets
from quantize.numerics import quantize_weight
from quantize.row_kernel import (
    KERNEL_SETS,
    Buffer,
    NativeKernel,
    Rounding,
    RowKernel,
    Rows,
    RowSums,
    TorchKernel,
    element_value,
    open_kernel,
)
from quantize.torch_dtypes import DTYPE_NAMES

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SETS = [name for name in available_instruction_sets() if name in KERNEL_SETS]
PLAIN = Rounding()


def run(kernel: RowKernel, weight: Tensor, rounding: Rounding = PLAIN) -> tuple[Tensor, Tensor, RowSums, int | None]:
    """Codes, scales, sums and the first bad index of a kernel on a whole weight."""
    rows, columns = weight.shape
    buffer, codes, scales = Buffer(weight.nbytes), Buffer(weight.numel()), Buffer(rows * weight.itemsize)
    buffer.view[: weight.nbytes] = weight.contiguous().view(-1).view(torch.uint8).numpy().data
    sums = RowSums()
    block = Rows(buffer, DTYPE_NAMES[weight.dtype], 0, rows, columns)
    bad = kernel.quantize(block, rounding, codes, scales, sums)
    return (
        torch.frombuffer(codes.view, dtype=torch.int8).view(rows, columns),
        torch.frombuffer(scales.view, dtype=weight.dtype).view(rows, 1),
        sums,
        bad,
    )


def weights(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Matrices of odd widths and all magnitudes, with rows of zeros, heavy tails and the dtype's extremes."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for columns in (1, 9, 16, 33, 200):
        for magnitude in (1.0, 1e-3, 300.0, 1e-6, 6e-8, 1e-30, 1e-39):
            values = torch.randn(12, columns, generator=generator)
            values[6:] **= 3
            matrix = (values.clamp(-100, 100) * magnitude).to(dtype)
            matrix[3] = 0
            result.append(matrix)
    extremes = torch.full((4, 40), torch.finfo(dtype).max).to(dtype)
    extremes[1] = torch.finfo(dtype).smallest_normal
    extremes[2, 1:] = 0
    extremes[3, ::2] *= -1
    return [*result, extremes]


@pytest.mark.parametrize("arithmetic", ["fp32", "compat"])
@pytest.mark.parametrize("name", SETS)
def test_every_bfloat16_significand_meets_every_scale(name: str, arithmetic: Literal["fp32", "compat"]) -> None:
    # All pairs of significands whose quotient can touch a tie between codes, in rows of every largest weight.
    largest = torch.arange(0x3F80, 0x4080, dtype=torch.int16).view(torch.bfloat16)
    smaller = torch.arange(0x3A80, 0x4080, dtype=torch.int16).view(torch.bfloat16).expand(len(largest), -1)
    weight = torch.where(smaller <= largest[:, None], smaller, -largest[:, None])
    weight = torch.cat([largest[:, None], weight], dim=1)
    codes, scales, _, _ = run(NativeKernel(name), weight, Rounding(arithmetic))
    expected_codes, expected_scales = quantize_weight(weight, arithmetic)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arithmetic", ["fp32", "compat"])
@pytest.mark.parametrize("name", SETS)
def test_codes_and_scales_are_those_of_the_contract(
    name: str, arithmetic: Literal["fp32", "compat"], dtype: torch.dtype
) -> None:
    kernel = NativeKernel(name)
    for weight in weights(dtype, 1):
        codes, scales, sums, bad = run(kernel, weight, Rounding(arithmetic))
        expected_codes, expected_scales = quantize_weight(weight, arithmetic)
        assert torch.equal(codes, expected_codes)
        assert torch.equal(scales, expected_scales)
        assert bad is None
        noise = (weight.double() - codes.double() * scales.double()).square().sum()
        signal = float(weight.double().square().sum())
        assert sums.signal == pytest.approx(signal, rel=1e-5, abs=1e-90)
        # A row of one element has an error of FP32's own rounding, which the sums do not resolve.
        assert sums.noise == pytest.approx(float(noise), rel=1e-4, abs=1e-13 * signal)
        assert sums.vanished_rows == int(((codes == 0).all(dim=1) & (weight != 0).any(dim=1)).sum())


def test_every_bf16_number_gets_the_code_of_the_contract() -> None:
    """All magnitudes up to an amax, for every significand that an amax can have: ties and near ties among them."""
    numbers = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    kernel = NativeKernel()
    for significand in range(128, 256):
        row = numbers[numbers <= significand]
        weight = torch.cat([row, -row]).view(1, -1)
        codes, scales, _, _ = run(kernel, weight)
        expected_codes, expected_scales = quantize_weight(weight)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_clipping_is_that_of_torch(name: str, dtype: torch.dtype) -> None:
    kernel = NativeKernel(name)
    for weight in weights(dtype, 2):
        codes, scales, sums, _ = run(kernel, weight, Rounding(clip="mse"))
        expected_codes, found = quantize_weight_clipped(weight)
        assert torch.equal(scales, found.scale)
        assert torch.equal(codes, expected_codes)
        assert sums.noise == pytest.approx(float(found.error.sum()), rel=1e-12)
        assert sums.unclipped_noise == pytest.approx(float(found.unclipped_error.sum()), rel=1e-12)


@pytest.mark.parametrize("rounding", [PLAIN, Rounding("compat"), Rounding(clip="mse")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_kernel_gives_the_same_bits(dtype: torch.dtype, rounding: Rounding) -> None:
    native, torch_kernel = NativeKernel(), TorchKernel()
    for weight in weights(dtype, 3)[::3]:
        left, right = run(native, weight, rounding), run(torch_kernel, weight, rounding)
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])
        assert left[2].signal == pytest.approx(right[2].signal, rel=1e-5, abs=1e-90)
        for name in ("noise", "unclipped_noise"):
            expected = getattr(right[2], name)
            assert getattr(left[2], name) == pytest.approx(expected, rel=1e-4, abs=1e-13 * right[2].signal)
        assert left[2].vanished_rows == right[2].vanished_rows


@pytest.mark.parametrize("instruction_set", SETS)
def test_sums_have_the_same_bits_on_every_instruction_set(instruction_set: str) -> None:
    weight = torch.randn(40, 333, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    for rounding in (PLAIN, Rounding(clip="mse")):
        assert run(NativeKernel(instruction_set), weight, rounding)[2] == run(NativeKernel(), weight, rounding)[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", [NativeKernel, TorchKernel])
def test_the_first_bad_element_is_found(
    kernel: type[NativeKernel] | type[TorchKernel], value: float, dtype: torch.dtype
) -> None:
    weight = torch.ones(300, 37, dtype=dtype)
    weight[-1, -1] = weight[250, 36] = value
    assert run(kernel(), weight)[3] == 250 * 37 + 36
    buffer = Buffer(weight.nbytes)
    buffer.view[:] = weight.view(-1).view(torch.uint8).numpy().data
    assert kernel().first_non_finite(buffer, weight.numel(), DTYPE_NAMES[dtype]) == 250 * 37 + 36
    assert kernel().first_non_finite(buffer, 250 * 37, DTYPE_NAMES[dtype]) is None
    place = (250 * 37 + 36) * dtype.itemsize
    found = element_value(buffer.view[place : place + dtype.itemsize], DTYPE_NAMES[dtype])
    assert struct.pack("<d", abs(found)) == struct.pack("<d", abs(value))


def test_without_a_compiler_torch_takes_over_with_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from quantize import row_kernel

    row_kernel._load.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_kernel(), TorchKernel)
    assert "no C++ compiler (g++) was found" in caplog.text
    monkeypatch.undo()
    assert isinstance(open_kernel(), NativeKernel)


def test_an_instruction_set_that_cannot_run_is_refused() -> None:
    with pytest.raises(NativeBuildError, match="cannot run here"):
        NativeKernel("sse9")
