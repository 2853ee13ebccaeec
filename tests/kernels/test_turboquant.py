"""TurboQuant against its theory: the codebook, the error it leaves, unbiased inner products, attention over it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.errors import ContractError
from kernels.kv_format import KV_FORMATS, KvFormat, parse_kv_format
from kernels.turboquant import TurboQuant, lloyd_max, pack_codes, theoretical_mse, unpack_codes
from quantize.numerics import to_bf16

MAX_TABLE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean squared errors in Table I of Max (1960)."""


def vectors(rows: int, width: int, seed: int) -> Tensor:
    """BF16 values of heavy tails and many magnitudes, as FP32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator) ** 3
    values *= torch.exp(torch.randn(rows, 1, generator=generator) * 2)
    values[:, 3] *= 30
    return to_bf16(values).to(torch.float32)


def relative_error(x: Tensor, found: Tensor) -> float:
    return float(((found.float() - x).square().sum(dim=1) / x.square().sum(dim=1)).mean())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_codebook_is_the_one_of_least_error(bits: int) -> None:
    centroids, boundaries = lloyd_max(bits)
    assert theoretical_mse(bits) == pytest.approx(MAX_TABLE[bits], rel=2e-3)
    assert torch.allclose(centroids, -centroids.flip(0), atol=1e-9)
    sample = torch.randn(400_000, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    codes = torch.bucketize(sample, boundaries, right=True)
    assert float((centroids[codes] - sample).square().mean()) == pytest.approx(MAX_TABLE[bits], rel=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_the_one_of_theory_whatever_the_vector(bits: int, head_dim: int) -> None:
    x = vectors(512, head_dim, 1)
    found = relative_error(x, TurboQuant(head_dim, bits, seed=2).round_trip(x))
    assert found == pytest.approx(theoretical_mse(bits), rel=0.08)


def test_without_the_rotation_outliers_would_cost_several_times_as_much() -> None:
    """Sensitivity: the codebook alone does not suit such vectors."""
    x = vectors(256, 128, 3)
    codec = TurboQuant(128, 4)
    codec.rotation = torch.eye(128)
    assert relative_error(x, codec.round_trip(x)) > 5 * theoretical_mse(4)


def test_the_sketch_makes_inner_products_unbiased() -> None:
    key, query = vectors(1, 64, 4), torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
    exact = float(key @ query.T)
    scale = float(key.norm() * query.norm())

    def estimates(sketch: bool) -> Tensor:
        codecs = (TurboQuant(64, 2, sketch=sketch, seed=seed) for seed in range(300))
        return torch.tensor([float(codec.round_trip(key).float() @ query.T) for codec in codecs]) / scale

    plain, sketched = estimates(False), estimates(True)
    deviation = float(sketched.std()) / math.sqrt(len(sketched))
    assert abs(float(sketched.mean()) - exact / scale) < 3 * deviation
    # The variance of QJL's estimator on the residual of the one-bit codebook: pi / (2 d) |r|^2 |q|^2 at most.
    assert float(sketched.std()) < 1.1 * math.sqrt(math.pi / 2 / 64 * theoretical_mse(1)) + 1e-3
    # Plain rounding shrinks: a decoded vector is short by the error's share.
    shrunk = exact / scale * (1 - theoretical_mse(2))
    assert abs(float(plain.mean()) - shrunk) < 3 * float(plain.std()) / math.sqrt(len(plain)) + 1e-3


@pytest.mark.parametrize(("name", "bound"), [("turboquant4", 0.02), ("turboquant3", 0.07), ("turboquant2", 0.25)])
def test_attention_over_the_kept_cache_is_near_the_exact_one(name: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(6)
    keys, values, query = (to_bf16(torch.randn(n, 128, generator=generator)).float() for n in (300, 300, 8))
    kv_format = parse_kv_format(name)
    assert kv_format is not None
    codec = TurboQuant(128, kv_format.bits)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(query @ k.T / math.sqrt(128), dim=-1) @ v

    exact = attend(keys, values)
    found = attend(codec.round_trip(keys).float(), codec.round_trip(values).float())
    error = float((found - exact).square().sum() / exact.square().sum())
    assert theoretical_mse(kv_format.bits) / 2 < error < bound


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codes_are_packed_and_found_again(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 64), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, {1: 8, 2: 16, 3: 32, 4: 32}[bits])
    assert torch.equal(unpack_codes(packed, bits), codes)
    if bits == 4:
        assert torch.equal(packed, codes[:, :32] + codes[:, 32:] * 16)
    with pytest.raises(ContractError, match="found 63 codes"):
        pack_codes(codes[:, :63], bits)


def test_rows_take_the_bytes_that_are_stated() -> None:
    assert TurboQuant(128, 4).row_bytes == 64 + 4
    assert TurboQuant(128, 4, sketch=True).row_bytes == 64 + 8
    assert TurboQuant(128, 2, sketch=True).row_bytes == 32 + 8


def test_formats_are_named() -> None:
    assert parse_kv_format("bf16") is None
    assert parse_kv_format("turboquant3-qjl") == KvFormat(3, sketch=True)
    assert len(KV_FORMATS) == 7
    with pytest.raises(ContractError, match="found KV format 'int8'; expected one of bf16, turboquant2"):
        parse_kv_format("int8")


def test_zero_vectors_stay_small_and_finite() -> None:
    decoded = TurboQuant(64, 4, sketch=True).round_trip(torch.zeros(2, 64)).float()
    assert bool(torch.isfinite(decoded).all())
    assert float(decoded.abs().max()) < 1e-2
