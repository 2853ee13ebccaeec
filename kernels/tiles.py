"""Tile shapes for the matrix and vector units, chosen to obey `kernels.tile_rules` and to keep the cores busy.

This module knows nothing of models or programs.
"""

from __future__ import annotations

from kernels.tile_rules import (
    FRACTAL,
    L0_BYTES,
    L1_BYTES,
    M_ROWS_IN_L1,
    UB_BYTES,
    UNIT_BYTES,
    CubeTile,
    check_cube_tile,
    check_vector_tile,
)
from kernels.tuned_tiles import tuned_tile

__all__ = [
    "CubeTile",
    "check_cube_tile",
    "check_vector_tile",
    "choose_cube_tile",
    "dequant_rows",
    "row_columns",
    "row_tile",
    "vector_columns",
]

CUBE_CORES = 24
VECTOR_CORES = 48
FP32_IN_AND_OUT_BYTES = 8
COPY_BYTES = 320 * 1024
"""Size that one copy of a weight tile into L1 aims at: larger copies amortise the fixed 0.8 us per copy."""

ROW_TILE_BYTES = 40 * 1024
"""Most FP32 bytes in a vector tile of whole rows: three, and their narrowed forms, are alive where a residual is added.

Tiles of 80 KB were spilled there, which the cost model refuses, and took longer where they were not.
"""
DEQUANT_TILE_ELEMENTS = 16 * 512
"""Most elements in a vector tile as wide as two matmul tiles: 32 KB of FP32, of which several are alive at once."""


def choose_cube_tile(k: int, n: int, element_bytes: int, rows: int = FRACTAL, columns: int | None = None) -> CubeTile:
    """Choose tiles for `[rows, k] x [k, n]`: about one task per core along n, few and large copies along k.

    The left operand stays whole in L1 where it fits; the weight is copied in pieces of up to 320 KB. `rows` up to 128;
    `columns` sets the width of a tile, where the caller needs a certain one. A matmul in the table of tuned tiles gets
    its tile from there, if that is as wide.
    """
    m = _round_up(min(rows, 128), FRACTAL)
    tuned = tuned_tile(k, n, m, element_bytes)
    if tuned is not None and columns in (None, tuned.n):
        return tuned
    align = 32 // element_bytes * (2 if element_bytes == 2 else 1)
    if columns is None:
        columns = min(_round_up(-(-n // CUBE_CORES), align), 256, _round_up(n, align))
    depth = min(_round_up(k, align), _round_down(L0_BYTES // element_bytes // max(columns, m), align), 256)
    left_limit = L1_BYTES // 4 // (max(m, M_ROWS_IN_L1) * element_bytes)
    left_whole = _round_up(k, depth) * max(m, M_ROWS_IN_L1) * element_bytes
    copy = COPY_BYTES
    if left_whole <= L1_BYTES - COPY_BYTES:
        copy = min(COPY_BYTES, L1_BYTES - left_whole)
        left_limit = _round_up(k, depth)
    right = min(max(_round_down(copy // (columns * element_bytes), depth), depth), _round_up(k, depth))
    pieces = max(1, -(-k // right))
    right = _round_up(-(-k // pieces), depth)
    left = right * max(1, min(pieces, left_limit // right))
    while left * max(m, M_ROWS_IN_L1) * element_bytes + right * columns * element_bytes > L1_BYTES and left > depth:
        if left > right:
            left -= right
        else:
            right = left = max(depth, _round_down(right // 2, depth))
    tile = CubeTile(m, depth, left, right, columns)
    check_cube_tile(tile, element_bytes)
    return tile


def row_tile(rows: int, width: int) -> int:
    """Rows in a vector tile of whole rows: one, or as many as keep the tiles to one wave of cores and fit."""
    tile = 1
    while rows > tile * VECTOR_CORES and 2 * tile * width * 4 <= ROW_TILE_BYTES:
        tile *= 2
    return tile


def dequant_rows(rows: int, tile: CubeTile) -> int:
    """Rows in a vector tile as wide as two matmul tiles: a power of two, or all `rows` where they are few."""
    fitting = max(1, DEQUANT_TILE_ELEMENTS // (2 * tile.n))
    return min(rows, 1 << fitting.bit_length() - 1)


def row_columns(width: int) -> int:
    """Columns of a vector tile over FP32 rows of `width`: the whole row, or its fewest equal parts that fit.

    An operation has its input and its output in the unified buffer, 8 bytes an element: rows of more than 24,576
    elements (the MLP of Qwen3-32B has 25,600) are cut, and their reductions then take a pass of their own.
    """
    parts = -(-width * FP32_IN_AND_OUT_BYTES // UB_BYTES)
    return min(width, _round_up(-(-width // parts), UNIT_BYTES))


def vector_columns(width: int, preferred: int) -> int:
    """Columns of a vector tile over a row of `width`: `preferred`, or the whole row if that is shorter."""
    return min(width, preferred)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple
