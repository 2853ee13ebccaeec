"""TurboQuant's building blocks, inlined by its kernels: encoding rows, and reading a page's codes.

Bytes are taken apart and put together in FP32: PyPTO's interpreter reads UINT8 as signed, so that a cache is INT8 with
128 taken off, and the shifts and masks of the device work on 16-bit integers, to which there is no conversion from
bytes. All values are whole numbers below 256 and exact.
"""

from __future__ import annotations

import math
from typing import Any

import pypto

from kernels.programs import blocks
from kernels.tiles import choose_cube_tile
from kernels.turboquant import NORM_EPS, TurboQuant, codes_per_byte
from kernels.turboquant_cache import BYTE_OFFSET

BYTE_VALUES = 256
VECTOR_ROWS = 16
"""Heads' vectors in one vector tile."""


def codebook(head_dim: int, bits: int, *, sketch: bool) -> tuple[list[float], list[float]]:
    """Centroids and boundaries as the codec has them, to be compiled in."""
    codec = TurboQuant(head_dim, bits, sketch=sketch)
    return codec.centroids.tolist(), codec.boundaries.tolist()


def encode(rows_bf16: Any, matrices: Any, bits: int, kv_heads: int, valid: Any) -> tuple[Any, Any]:
    """Codes INT8 and norms FP32 of BF16 rows `[rows, kv_heads * d]`, as `turboquant_cache.encode_rows`."""
    rows, width = rows_bf16.shape
    dim = width // kv_heads
    sketch = matrices.shape[0] > dim
    centroids, boundaries = codebook(dim, bits, sketch=sketch)
    pypto.set_vec_tile_shapes(1, width)
    x = blocks.to_fp32(blocks.whole(rows_bf16, valid))
    x = blocks.reshape_rows(x, [rows * kv_heads, dim])
    pypto.set_vec_tile_shapes(VECTOR_ROWS, dim)
    norms = pypto.sqrt(pypto.add(pypto.sum(pypto.mul(x, x), -1, keepdim=True), NORM_EPS))
    unit = blocks.to_bf16(pypto.div(x, norms))
    turned = _product(unit, pypto.view(matrices, [dim, dim], [0, 0]))
    codes = _count(turned, boundaries)
    if sketch:
        residual = pypto.sub(turned, lookup(codes, centroids, 0.0))
        projected = _product(blocks.to_bf16(residual), pypto.view(matrices, [dim, dim], [dim, 0]))
        codes = pypto.add(codes, pypto.where(pypto.ge(projected, 0.0), float(len(centroids)), 0.0))
        lengths = pypto.sqrt(pypto.sum(pypto.mul(residual, residual), -1, keepdim=True))
        steps = pypto.mul(pypto.mul(lengths, math.sqrt(math.pi / 2) / dim), norms)
    per = codes_per_byte(bits)
    part = dim // per
    total = pypto.view(codes, [rows * kv_heads, part], [0, 0])
    for place in range(1, per):
        value = pypto.view(codes, [rows * kv_heads, part], [0, place * part])
        total = pypto.add(total, pypto.mul(value, float(BYTE_VALUES ** (place / per))))
    total = pypto.cast(pypto.sub(total, float(BYTE_OFFSET)), pypto.DT_FP16, blocks.RINT)
    pypto.set_vec_tile_shapes(rows, kv_heads * part)
    packed = pypto.cast(blocks.reshape_rows(total, [rows, kv_heads * part], valid), pypto.DT_INT8)
    pypto.set_vec_tile_shapes(rows, -(-kv_heads // 8) * 8)
    # An operation after the reshape, without which its valid shape would be lost.
    kept = pypto.add(blocks.reshape_rows(norms, [rows, kv_heads], valid), 0.0)
    if sketch:
        kept = pypto.concat([kept, pypto.add(blocks.reshape_rows(steps, [rows, kv_heads], valid), 0.0)], -1)
    return packed, kept


def _product(rows_bf16: Any, matrix: Any) -> Any:
    """BF16 `[n, d]` by BF16 `[d, d]`: FP32, in tiles of whole rows."""
    rows, dim = rows_bf16.shape
    product = blocks.linear_bf16(rows_bf16, matrix, choose_cube_tile(dim, dim, 2, rows=rows, columns=dim))
    pypto.set_vec_tile_shapes(min(rows, VECTOR_ROWS), dim)
    return product


def _count(values: Any, boundaries: list[float]) -> Any:
    """How many of `boundaries` each value reaches, FP32."""
    count = pypto.where(pypto.ge(values, boundaries[0]), 1.0, 0.0)
    for at, boundary in enumerate(boundaries[1:], 2):
        count = pypto.where(pypto.ge(values, boundary), float(at), count)
    return count


def lookup(codes: Any, centroids: list[float], first: float) -> Any:
    """The centroid of each code, FP32 whole numbers from `first` on."""
    found = pypto.where(pypto.ge(codes, first + 1), centroids[1], centroids[0])
    for at in range(2, len(centroids)):
        found = pypto.where(pypto.ge(codes, first + at), centroids[at], found)
    return found
