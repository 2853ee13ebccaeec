"""Tile shapes for the matrix and vector units, chosen and checked before PyPTO sees them.

PyPTO reports an overflow of L1 or of the unified buffer late, after several passes, and the process is unusable
afterwards. The limits of the Ascend 910B family are few, so they are checked here, in plain integers, and tiles are
chosen to obey them. This module knows nothing of models or programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.errors import ProgramError

__all__ = ["CubeTile", "check_cube_tile", "check_vector_tile", "choose_cube_tile", "vector_columns"]

CUBE_CORES = 24
L0_BYTES = 64 * 1024
L0C_BYTES = 128 * 1024
L1_BYTES = 512 * 1024
UB_BYTES = 192 * 1024
COPY_BYTES = 320 * 1024
"""Size that one copy of a weight tile into L1 aims at: larger copies amortise the fixed 0.8 us per copy."""
M_ROWS_IN_L1 = 32
FRACTAL = 16


@dataclass(frozen=True)
class CubeTile:
    """Tiles of a matmul `[m, k] x [k, n]`, in elements: `m` and `n` equal in L0 and L1; three depths along k.

    `k_l0` is the depth in L0, `k_left` and `k_right` the depths of the left and right operand kept in L1.
    """

    m: int
    k_l0: int
    k_left: int
    k_right: int
    n: int

    def shapes(self) -> tuple[list[int], list[int], list[int]]:
        """The three lists that `set_cube_tile_shapes` takes."""
        return [self.m, self.m], [self.k_l0, self.k_left, self.k_right], [self.n, self.n]


def check_cube_tile(tile: CubeTile, element_bytes: int) -> None:
    """Raise ProgramError, naming each limit passed, if `tile` cannot be laid out for operands of `element_bytes`."""
    problems = []
    if min(tile.m, tile.k_l0, tile.k_left, tile.k_right, tile.n) < FRACTAL:
        problems.append(f"every tile side is at least {FRACTAL} elements")
    else:
        for name, value in (("k_left", tile.k_left), ("k_right", tile.k_right)):
            if value % tile.k_l0:
                problems.append(f"{name}={value} is not a multiple of k_l0={tile.k_l0}")
        if max(tile.k_left, tile.k_right) % min(tile.k_left, tile.k_right):
            problems.append(f"k_left={tile.k_left} and k_right={tile.k_right} do not divide one another")
    for name, used, limit in (
        ("L0A", tile.m * tile.k_l0 * element_bytes, L0_BYTES),
        ("L0B", tile.k_l0 * tile.n * element_bytes, L0_BYTES),
        ("L0C", max(tile.m, FRACTAL) * tile.n * 4, L0C_BYTES),
        ("L1", _l1_bytes(tile, element_bytes), L1_BYTES),
    ):
        if used > limit:
            problems.append(f"{name} needs {used} bytes and has {limit}")
    if problems:
        raise ProgramError(f"matmul tile {tile} does not fit: {'; '.join(problems)}; choose smaller k or n tiles")


def check_vector_tile(rows: int, columns: int, live_bytes_per_element: int) -> None:
    """Raise ProgramError if a vector tile with this many live bytes per element overflows the unified buffer."""
    used = rows * columns * live_bytes_per_element
    if used > UB_BYTES:
        raise ProgramError(
            f"vector tile [{rows}, {columns}] keeps {live_bytes_per_element} bytes per element alive, {used} bytes in "
            f"all; the unified buffer has {UB_BYTES}; use fewer rows or columns"
        )


def choose_cube_tile(k: int, n: int, element_bytes: int, rows: int = FRACTAL, columns: int | None = None) -> CubeTile:
    """Choose tiles for `[rows, k] x [k, n]`: about one task per core along n, few and large copies along k.

    The left operand stays whole in L1 where it fits; the weight is copied in pieces of up to 320 KB. `rows` up to 128;
    `columns` sets the width of a tile, where the caller needs a certain one.
    """
    m = _round_up(min(rows, 128), FRACTAL)
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


def vector_columns(width: int, preferred: int) -> int:
    """Columns of a vector tile over a row of `width`: `preferred`, or the whole row if that is shorter."""
    return min(width, preferred)


def _l1_bytes(tile: CubeTile, element_bytes: int) -> int:
    return (max(tile.m, M_ROWS_IN_L1) * tile.k_left + tile.k_right * tile.n) * element_bytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple
