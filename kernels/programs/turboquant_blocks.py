"""TurboQuant's building blocks, inlined by its kernels: encoding rows, and reading a page's codes.

Bytes are taken apart and put together in FP32: they are reached through FP16 as in quantization, and shifts and masks,
which work on integers, would be a detour. A cache is INT8 with 128 taken off, as PyPTO's interpreter reads UINT8 as
signed. All values are whole numbers below 256 and exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
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


def _product(rows_bf16: Any, matrix: Any, *, transposed: bool = False) -> Any:
    """BF16 `[n, d]` by BF16 `[d, d]`: FP32, in tiles of whole rows."""
    rows, dim = rows_bf16.shape
    tile = choose_cube_tile(dim, dim, 2, rows=rows, columns=dim)
    product = blocks.linear_bf16(rows_bf16, matrix, tile, transposed=transposed)
    pypto.set_vec_tile_shapes(min(rows, VECTOR_ROWS), dim)
    return product


def _count(values: Any, boundaries: list[float]) -> Any:
    """How many of `boundaries` each value reaches, FP32."""
    count = pypto.where(pypto.ge(values, boundaries[0]), 1.0, 0.0)
    for at, boundary in enumerate(boundaries[1:], 2):
        count = pypto.where(pypto.ge(values, boundary), float(at), count)
    return count


def lookup(codes: Any, centroids: list[float], first: float) -> Any:
    """The centroid of each code, FP32 whole numbers from `first` on: comparisons, as `gather` fails here."""
    found = pypto.where(pypto.ge(codes, first + 1), centroids[1], centroids[0])
    for at in range(2, len(centroids)):
        found = pypto.where(pypto.ge(codes, first + at), centroids[at], found)
    return found


@dataclass(frozen=True)
class KeptPages:
    """Reads pages of a TurboQuant cache for `decode_attention.attend_row`, in the rotated space.

    A key is as wide as its head, or twice that with a sketch, as `turboquant_cache.read_rows` gives it.
    """

    kv_heads: int
    head_dim: int
    bits: int
    sketch: bool
    k_codes: Any
    k_norms: Any
    v_codes: Any
    v_norms: Any

    def keys(self, first_slot: Any, valid: Any) -> Any:
        """Keys of all heads BF16 `[128, kv_heads * key_dim]`."""
        dim, sketch = self.head_dim, self.sketch
        width = dim * (2 if sketch else 1)
        keys = pypto.tensor([PAGE_TOKENS, self.kv_heads * width], pypto.DT_BF16, "keys")
        for head in range(self.kv_heads):
            parts = self._digits(self.k_codes, head, first_slot, valid)
            norm = _column(self.k_norms, head, first_slot, valid)
            for place, (digits, low) in enumerate(parts):
                column = head * width + place * digits.shape[1]
                if sketch:
                    step = _column(self.k_norms, self.kv_heads + head, first_slot, valid)
                    top = low + 2 ** (self.bits - 1)
                    signs = pypto.where(pypto.ge(digits, float(top)), 1.0, -1.0)
                    digits = pypto.where(pypto.ge(digits, float(top)), pypto.sub(digits, float(top - low)), digits)
                    pypto.assemble(blocks.to_bf16(pypto.mul(signs, step)), [0, column + dim], keys)
                pypto.assemble(self._scaled(digits, low, norm, sketch=sketch), [0, column], keys)
        return pypto.view(
            keys, [PAGE_TOKENS, self.kv_heads * width], [0, 0], valid_shape=[valid, self.kv_heads * width]
        )

    def values(self, first_slot: Any, valid: Any) -> list[Any]:
        """Values of each head BF16 `[128, head_dim]`."""
        dim = self.head_dim
        read = []
        for head in range(self.kv_heads):
            parts = self._digits(self.v_codes, head, first_slot, valid)
            norm = _column(self.v_norms, head, first_slot, valid)
            found = [self._scaled(digits, low, norm, sketch=False) for digits, low in parts]
            values = pypto.tensor([PAGE_TOKENS, dim], pypto.DT_BF16, f"values_{head}")
            for place, part in enumerate(found):
                pypto.assemble(part, [0, place * part.shape[1]], values)
            read.append(pypto.view(values, [PAGE_TOKENS, dim], [0, 0], valid_shape=[valid, dim]))
        return read

    def _scaled(self, digits: Any, low: int, norm: Any, *, sketch: bool) -> Any:
        """Centroids of FP32 codes that start at `low`, times the norms, BF16."""
        centroids, _ = codebook(self.head_dim, self.bits, sketch=sketch)
        return blocks.to_bf16(pypto.mul(lookup(digits, centroids, float(low)), norm))

    def _digits(self, cache: Any, head: int, first_slot: Any, valid: Any) -> list[tuple[Any, int]]:
        """A head's codes FP32, a value for each place in the byte, with the number at which they start."""
        per = codes_per_byte(self.bits)
        columns, base = self.head_dim // per, round(BYTE_VALUES ** (1 / per))
        pypto.set_vec_tile_shapes(PAGE_TOKENS, columns)
        packed = pypto.view(cache, [PAGE_TOKENS, columns], [first_slot, head * columns], valid_shape=[valid, columns])
        rest = blocks.to_fp32(pypto.cast(packed, pypto.DT_FP16))
        places = []
        # The top place is signed: what was taken off the byte is half of its values.
        low = -base // 2
        for place in reversed(range(1, per)):
            unit = float(base**place)
            digits = pypto.floor(pypto.mul(rest, 1.0 / unit))
            rest = pypto.sub(rest, pypto.mul(digits, unit))
            places.append((digits, low))
            low = 0
        return [(rest, low), *reversed(places)]


def kept_pages(spec: Any, k_codes: Any, k_norms: Any, v_codes: Any, v_norms: Any) -> KeptPages:
    """The reader of caches at the specification's shape and format."""
    return KeptPages(spec.num_kv_heads, spec.head_dim, spec.bits, spec.sketch, k_codes, k_norms, v_codes, v_norms)


def turn_queries(q_rows: Any, matrices: Any) -> Any:
    """Queries BF16 `[rows, d]` turned, and with a sketch their projection behind, BF16 `[rows, 2 d]`."""
    dim = q_rows.shape[1]
    turned = blocks.to_bf16(_product(q_rows, pypto.view(matrices, [dim, dim], [0, 0])))
    if matrices.shape[0] == dim:
        return turned
    projected = blocks.to_bf16(_product(turned, pypto.view(matrices, [dim, dim], [dim, 0])))
    return pypto.concat([turned, projected], -1)


def turn_back(context_rows: Any, matrices: Any) -> Any:
    """Context rows BF16 `[rows, d]` turned back, BF16."""
    return blocks.to_bf16(_product(context_rows, matrices, transposed=True))


def _column(norms: Any, column: int, first_slot: Any, valid: Any) -> Any:
    """A page's column of the norms' cache, FP32 `[128, 1]`."""
    return pypto.view(norms, [PAGE_TOKENS, 1], [first_slot, column], valid_shape=[valid, 1])
