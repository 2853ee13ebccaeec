"""The numeric contract against exact arithmetic (fractions, FP64) and against compressed-tensors."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from quantize.numerics import (
    apply_rope,
    int8_matmul,
    inverse_frequencies,
    inverse_sqrt,
    linear_w8a8,
    quantize_activation,
    quantize_weight,
    rms_norm,
    rope_tables,
    to_bf16,
)
from quantize.rope import RopeScaling

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_error(rows: Tensor, codes: Tensor, scale: Tensor) -> float:
    return float((rows.double() - codes.double() * scale.double()).square().sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_for_the_scale_as_stored(dtype: torch.dtype) -> None:
    rows = random(32, 96).to(dtype)
    codes, scale = quantize_weight(rows)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (32, 1))
    exact = rows.double() / scale.double()
    assert torch.equal(codes.double(), exact.float().round().clamp(-127, 127).double())
    error = (exact - codes.double()).abs()
    assert float(error[exact.abs() <= 127].max()) <= 0.5 + 1e-5
    expected = (rows.double().abs().amax(dim=1, keepdim=True) / 127).float().to(dtype)
    assert torch.equal(scale, expected)


def test_codes_from_the_unrounded_scale_would_be_worse() -> None:
    """Sensitivity: rounding the scale to BF16 *after* the codes were taken costs measurably."""
    rows = random(256, 256).to(torch.bfloat16)
    codes, scale = quantize_weight(rows)
    ours = squared_error(rows, codes, scale)
    unrounded = rows.float().abs().amax(dim=1, keepdim=True) / 127
    assert ours < 0.97 * squared_error(rows, (rows.float() / unrounded).round(), scale)
    compat_codes, compat_scale = quantize_weight(rows, "compat")
    assert ours < 0.97 * squared_error(rows, compat_codes, compat_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [1.0, 1e-3, 100.0, 6e-5])
def test_compat_is_the_arithmetic_of_compressed_tensors(dtype: torch.dtype, amax: float) -> None:
    rows = random(64, 96, seed=3)
    rows = (rows / rows.abs().amax() * amax).to(dtype)
    rows[5] = 0
    codes, scale = quantize_weight(rows, "compat")
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    ct_scale, zero = calculate_qparams(rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True), args)
    assert torch.equal(scale, ct_scale)
    assert torch.equal(codes, ct_quantize(rows, ct_scale, zero, args, dtype=torch.int8))


def round_to_bf16(value: Fraction) -> Fraction:
    """The nearest BF16 number (8 significant bits, ties to even), in exact arithmetic; normal range."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value)))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (abs(value) < Fraction(2) ** exponent)
    unit = Fraction(2) ** (exponent - 7)
    return round(value / unit) * unit


def test_compat_fingerprint_by_exact_fractions() -> None:
    """The same formula written with fractions: each quotient rounded once to BF16, codes half to even."""
    rows = random(6, 40, seed=7).to(torch.bfloat16)
    codes, scale = quantize_weight(rows, "compat")
    for number, row in enumerate(rows.double().tolist()):
        expected_scale = round_to_bf16(Fraction(max(abs(value) for value in row)) / Fraction(255, 2))
        assert Fraction(float(scale[number])) == expected_scale
        quotients = [round_to_bf16(Fraction(value) / expected_scale) for value in row]
        assert codes[number].tolist() == [max(-128, min(127, round(quotient))) for quotient in quotients]


def test_compat_reaches_minus_128_and_fp32_never_does() -> None:
    rows = random(512, 64, seed=1).to(torch.bfloat16)
    assert quantize_weight(rows, "compat")[0].min() == -128
    assert quantize_weight(rows)[0].min() == -127


@pytest.mark.parametrize("arithmetic", ["fp32", "compat"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_have_codes_0_and_a_positive_scale(dtype: torch.dtype, arithmetic: str) -> None:
    codes, scale = quantize_weight(torch.zeros(2, 8, dtype=dtype), arithmetic)  # type: ignore[arg-type]
    assert codes.tolist() == [[0] * 8] * 2
    assert scale.flatten().tolist() == [torch.finfo(dtype).eps] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_rows_keep_a_positive_scale_and_their_codes(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    rows = torch.tensor([[1e-9, -1e-9], [smallest, 0], [smallest / 2, -smallest / 2], [3e-7, 1e-7], [1.1e-5, 1e-6]]).to(
        dtype
    )
    codes, scale = quantize_weight(rows)
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())
    back = codes.double() * scale.double()
    representable = rows.abs().amax(dim=1, keepdim=True).double() >= scale.double()
    error = (back - rows.double()).abs()
    assert bool((error <= 0.5 * scale.double() * 1.001).all())
    assert bool((codes != 0).any(dim=1)[representable[:, 0]].all())


def test_activations_follow_the_formula_and_round_once() -> None:
    values = to_bf16(random(16, 64) * 3)
    codes, scale = quantize_activation(values)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (16, 1))
    for row, row_codes, row_scale in zip(
        values.double().tolist(), codes.tolist(), scale.double().tolist(), strict=True
    ):
        amax = max(map(abs, row))
        assert row_scale[0] == float(torch.tensor(amax / 127, dtype=torch.float64).float())
        reciprocal = float(torch.tensor(127 / amax, dtype=torch.float64).float())
        products = torch.tensor([value * reciprocal for value in row], dtype=torch.float64).float()
        assert row_codes == products.round().int().tolist()


def test_an_idle_activation_has_the_least_scale() -> None:
    codes, scale = quantize_activation(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert codes.tolist() == [[0] * 8]
    assert scale.item() == pytest.approx(1e-4 / 127)


@pytest.mark.parametrize("k", [1, 1023, 1024, 1025, 3001])
def test_the_integer_product_is_exact_at_its_extremes(k: int) -> None:
    """Sensitivity: one FP32 matmul over the whole of k = 3001 is off: the sum is odd and above 2**24."""
    left = torch.full((2, k), -128, dtype=torch.int8)
    right = torch.full((k, 3), -128, dtype=torch.int8)
    right[:, 1] = -127
    left[0] = -127
    left[1] = torch.randint(-128, 128, (k,), generator=torch.Generator().manual_seed(k), dtype=torch.int8)
    assert torch.equal(int8_matmul(left, right).long(), left.long() @ right.long())


def test_a_linear_is_dequantized_in_the_stated_order() -> None:
    codes = torch.randint(-127, 128, (3, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    weight = torch.randint(-127, 128, (40, 5), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    activation_scale, weight_scale = random(3, 1, seed=2).abs(), random(5, seed=3).abs()
    expected = ((codes.long() @ weight.long()).float() * weight_scale) * activation_scale
    assert torch.equal(linear_w8a8(codes, activation_scale, weight, weight_scale), expected)


def test_the_inverse_root_is_correctly_rounded() -> None:
    values = random(4096, seed=5).abs() + 1e-6
    root = values.double().sqrt().float()
    assert torch.equal(inverse_sqrt(values), (1.0 / root.double()).float())


def test_rms_norm_is_close_to_fp64() -> None:
    values, gamma = random(4, 64), random(64, seed=1)
    exact = values.double() / (values.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()
    assert torch.allclose(rms_norm(values, gamma, 1e-6).double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rope_is_that_of_transformers(theta: float) -> None:
    config = Qwen3Config(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": theta})
    cos, sin = rope_tables(32, theta, 300)
    their_cos, their_sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    assert torch.equal(cos, their_cos[0])
    assert torch.equal(sin, their_sin[0])
    heads = random(300, 4, 32)
    rotated, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], their_cos, their_sin)
    assert torch.allclose(apply_rope(heads, cos, sin), rotated[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [
        pytest.param(128, 500_000.0, 8.0, 8192, id="Llama 3.1 8B"),
        pytest.param(64, 500_000.0, 32.0, 8192, id="Llama 3.2 1B"),
        pytest.param(128, 500_000.0, 32.0, 8192, id="Llama 3.2 3B"),
        pytest.param(32, 10_000.0, 8.0, 256, id="tiny"),
    ],
)
def test_scaled_rope_is_that_of_transformers_to_the_bit(
    head_dim: int, theta: float, factor: float, original: int
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    scaling = RopeScaling(factor, 1.0, 4.0, original)
    frequencies = inverse_frequencies(head_dim, theta, scaling)
    assert torch.equal(frequencies, theirs.inv_freq)
    cos, sin = rope_tables(head_dim, theta, 4096, scaling)
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(4096)[None])
    assert torch.equal(cos, their_cos[0])
    assert torch.equal(sin, their_sin[0])
    plain = inverse_frequencies(head_dim, theta)
    kept, divided = frequencies == plain, frequencies == plain / factor
    assert kept.any()
    assert divided.any()
    assert (~kept & ~divided).any()  # all three bands are there


def test_narrowing_rounds_half_to_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20])
    assert to_bf16(ties).tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]
