"""TurboQuant: keys and values as a norm and a few bits a coordinate, rotated so that one codebook suits every vector.

After Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate" (2025) and "QJL: 1-Bit
Quantized JL Transform for KV Cache Quantization with Zero Overhead" (2024). A random rotation makes the coordinates of
any unit vector nearly N(0, 1/d) and nearly independent, so each is rounded by the Lloyd-Max codebook of that Gaussian:
no calibration, no scale beside the norm. With a sketch, one of the bits goes to the signs of a Gaussian projection of
what rounding left, which makes inner products with the decoded vector unbiased.

This module is the arithmetic, in torch. A caller that needs sums in an order of its own passes its `Sums`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ContractError
from quantize.numerics import to_bf16

NORM_EPS = 1e-6
_LLOYD_STEPS = 2000


@functools.cache
def lloyd_max(bits: int) -> tuple[Tensor, Tensor]:
    """Centroids FP64 `[2^bits]` and boundaries FP64 `[2^bits - 1]` of the scalar quantizer of N(0, 1) of least MSE.

    Lloyd's iteration from the normal quantiles: boundaries are midpoints, a centroid is the mean of its cell,
    `(phi(a) - phi(b)) / (Phi(b) - Phi(a))` (Max, "Quantizing for Minimum Distortion", 1960).
    """
    if not 1 <= bits <= 8:
        raise ContractError(f"found {bits} bits a coordinate; expected 1 to 8")
    levels = 2**bits
    centroids = torch.special.ndtri((torch.arange(levels, dtype=torch.float64) + 0.5) / levels)
    for _ in range(_LLOYD_STEPS):
        boundaries = (centroids[1:] + centroids[:-1]) / 2
        mass, moment = _cells(boundaries)
        centroids = moment / mass
    # Symmetric to the last bit, as the distribution is.
    centroids = (centroids - centroids.flip(0)) / 2
    return centroids, (centroids[1:] + centroids[:-1]) / 2


def theoretical_mse(bits: int) -> float:
    """The MSE of `lloyd_max(bits)` on N(0, 1), which is TurboQuant's relative squared error for large d."""
    centroids, boundaries = lloyd_max(bits)
    mass, _ = _cells(boundaries)
    return 1.0 - float((mass * centroids.square()).sum())


def _cells(boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Probability and first moment of N(0, 1) in each cell."""
    infinity = torch.tensor([math.inf], dtype=torch.float64)
    edges = torch.cat([-infinity, boundaries, infinity])
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(edges).diff(), -density.diff()


@dataclass(frozen=True)
class Sums:
    """How sums are taken: `matmul` FP32 `[n, k]` x `[k, m]`, `row_sum` FP32 `[n, k]` to `[n]`."""

    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    row_sum: Callable[[Tensor], Tensor] = lambda values: values.sum(dim=-1)


@dataclass(frozen=True)
class Encoded:
    """Vectors as they are kept: `codes` UINT8 `[n, d]`, `norms` FP32 `[n]`, and the sketch of a key.

    `signs` FP32 `[n, d]` of -1 and 1 and `residual_norms` FP32 `[n]`, relative to `norms`; None without a sketch.
    """

    codes: Tensor
    norms: Tensor
    signs: Tensor | None = None
    residual_norms: Tensor | None = None


class TurboQuant:
    """Encodes and decodes vectors of `head_dim` coordinates; `seed` makes rotation and sketch.

    `rotation` (orthogonal up to BF16) and `projection` (Gaussian; None without a sketch) are FP32 `[d, d]` of BF16
    values, `centroids` FP32 `[levels]` and `boundaries` FP32 `[levels - 1]` those of N(0, 1/d).
    """

    def __init__(
        self, head_dim: int, bits: int, *, sketch: bool = False, seed: int = 0, sums: Sums | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.head_dim, self.bits, self.sketch = head_dim, bits, sketch
        self.rotation = to_bf16(_orthogonal(head_dim, generator)).to(torch.float32)
        self.projection: Tensor | None = None
        if sketch:
            gaussian = torch.randn(head_dim, head_dim, generator=generator)
            self.projection = to_bf16(gaussian).to(torch.float32)
        centroids, boundaries = lloyd_max(bits - 1 if sketch else bits)
        self.centroids = (centroids / math.sqrt(head_dim)).to(torch.float32)
        self.boundaries = (boundaries / math.sqrt(head_dim)).to(torch.float32)
        self._sums = sums or Sums()

    @classmethod
    def from_matrices(cls, matrices: Tensor, bits: int) -> TurboQuant:
        """The codec of given `matrices` BF16 `[d, d]`, or `[2 d, d]` with a sketch, as `matrices` gives them."""
        rows, head_dim = matrices.shape
        if rows not in (head_dim, 2 * head_dim):
            raise ContractError(
                f"found matrices of shape {[rows, head_dim]}; expected {head_dim} or {2 * head_dim} rows"
            )
        codec = cls(head_dim, bits, sketch=rows > head_dim)
        codec.rotation = matrices[:head_dim].to(torch.float32)
        if codec.sketch:
            codec.projection = matrices[head_dim:].t().to(torch.float32).contiguous()
        return codec

    @property
    def matrices(self) -> Tensor:
        """The rotation and below it, with a sketch, the projection transposed: what vectors are multiplied by."""
        parts = [self.rotation] if self.projection is None else [self.rotation, self.projection.t()]
        return torch.cat(parts).to(torch.bfloat16)

    @property
    def sign_scale(self) -> float:
        """What a sign of the sketch stands for, in units of the residual's norm: `sqrt(pi / 2) / d`."""
        return math.sqrt(math.pi / 2) / self.head_dim

    def encode(self, x: Tensor) -> Encoded:
        """Encode FP32 `[n, d]` (values of BF16). A coordinate on a boundary belongs to the cell above it."""
        norms = _root(self._sums.row_sum(x * x) + NORM_EPS)
        turned = self._sums.matmul(to_bf16(x / norms.unsqueeze(1)).to(torch.float32), self.rotation)
        codes = (turned.unsqueeze(-1) >= self.boundaries).sum(dim=-1, dtype=torch.uint8)
        if self.projection is None:
            return Encoded(codes, norms)
        residual = turned - self.centroids[codes.long()]
        # Narrowed for the matrix unit, which takes BF16; the norm is that of the residual itself.
        narrow = to_bf16(residual).to(torch.float32)
        projected = self._sums.matmul(narrow, self.projection.t().contiguous())
        signs = torch.where(projected >= 0, 1.0, -1.0)
        return Encoded(codes, norms, signs, _root(self._sums.row_sum(residual * residual)))

    def decode(self, encoded: Encoded) -> Tensor:
        """The vectors BF16 `[n, d]`: codebook and sketch summed in the rotated space, scaled, narrowed, turned back.

        The sketch adds `sqrt(pi / 2) / d * |r| * S^T sign(S r)` for the residual r (QJL's estimator), whose inner
        product with any vector has the expectation of r's own.
        """
        turned = self.centroids[encoded.codes.long()]
        if self.projection is not None and encoded.signs is not None and encoded.residual_norms is not None:
            back = self._sums.matmul(encoded.signs, self.projection)
            factor = encoded.residual_norms * self.sign_scale
            turned = turned + back * factor.unsqueeze(1)
        scaled = to_bf16(turned * encoded.norms.unsqueeze(1)).to(torch.float32)
        return to_bf16(self._sums.matmul(scaled, self.rotation.t().contiguous()))

    def round_trip(self, x: Tensor) -> Tensor:
        """What attention reads of `x` FP32 `[n, d]` once it has been kept: BF16 `[n, d]`."""
        return self.decode(self.encode(x))

    @property
    def row_bytes(self) -> int:
        """Bytes that one vector takes when packed: its codes with the sketch's signs, its norm, and the sketch's."""
        return self.head_dim // codes_per_byte(self.bits) + (8 if self.sketch else 4)


def codes_per_byte(bits: int) -> int:
    """How many codes share a byte: eight of one bit, four of two, two of three or four."""
    return {1: 8, 2: 4, 3: 2, 4: 2}[bits]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack UINT8 `[n, d]` into `[n, d / per]`: with two a byte, byte c holds code c low and code c + d/2 high.

    More codes a byte stand the same way, by thirds and quarters of the row.
    """
    per = codes_per_byte(bits)
    if codes.shape[-1] % per:
        raise ContractError(f"found {codes.shape[-1]} codes a row; expected a multiple of {per}, which share a byte")
    parts = codes.chunk(per, dim=-1)
    packed = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        packed |= part << (place * (8 // per))
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    per = codes_per_byte(bits)
    width = 8 // per
    return torch.cat([packed >> (place * width) & (2**width - 1) for place in range(per)], dim=-1)


def _root(x: Tensor) -> Tensor:
    """The square root of FP32 rounded correctly, which torch's own in FP32 is not on every CPU."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def _orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """A rotation drawn evenly: Q of a Gaussian's QR with the signs of R's diagonal (Mezzadri, 2007), FP64 `[n, n]`."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    turned: Tensor = q * r.diagonal().sign()
    return turned
