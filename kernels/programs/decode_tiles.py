"""Tiles and task counts of the decode stages' INT8 matmuls, chosen by what copying costs on the device.

At 16 rows a matmul is a stream of weight tiles into L1. A copy costs a latency and its bytes, one after the other on a
core; the last tile is multiplied after it came. So few, large copies, the left operand whole where it fits, and as many
tasks as there are cores (or a whole number of waves). Constants are PyPTO 0.2.0's cost model of the Ascend 910B2. This
module knows nothing of models or programs.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.errors import ProgramError
from kernels.tile_rules import L0_BYTES
from kernels.tiles import CUBE_CORES, CubeTile, check_cube_tile
from kernels.tuned_tiles import tuned_tile

__all__ = ["choose_stream_tile", "one_wave_columns", "tasks_per_core"]

COPY_LATENCY_US = 0.78
COPY_BYTES_PER_US = 172_000.0
ROWS = 16
MAX_COLUMNS = 256
MAX_WAVE_COLUMNS = 320
"""Widest tile whose operands fit L1 beside a left operand of 5,120 values, for matmuls that share a wave."""


def choose_stream_tile(k: int, n: int, columns: int | None = None) -> CubeTile:
    """Tile of an INT8 matmul of up to 16 rows, `[16, k] x [k, n]`: the one whose copies take the least time.

    `columns` is the width of a task, by default an equal share per core of at most 256. A matmul in the table of tuned
    tiles gets its tile from there. Raises ProgramError when no tile fits.
    """
    tuned = tuned_tile(k, n, ROWS, 1)
    if tuned is not None and columns in (None, tuned.n):
        return tuned
    if columns is None:
        columns = min(_round_up(-(-n // CUBE_CORES), 32), MAX_COLUMNS)
    depth = next((size for size in (256, 128, 64, 32) if size * columns <= L0_BYTES), 0)
    fitting = list(_candidates(k, min(depth, _round_up(k, 32)), columns)) if depth else []
    if not fitting:
        raise ProgramError(f"no INT8 tile of {columns} columns fits; use at most {MAX_COLUMNS}")
    return min(fitting, key=lambda tile: _copies_us(k, tile))


def one_wave_columns(*widths: int) -> int:
    """Columns of a task such that matmuls of these `widths` run side by side in one wave; 256 if none are so few."""
    for columns in range(32, MAX_WAVE_COLUMNS + 1, 32):
        if sum(-(-width // columns) for width in widths) <= CUBE_CORES:
            return columns
    return MAX_COLUMNS


def tasks_per_core(columns: int, *widths: int) -> int:
    """Tasks of `columns` columns that each core runs for matmuls of these `widths`: merged, they are one wave."""
    return -(-sum(-(-width // columns) for width in widths) // CUBE_CORES)


def _candidates(k: int, depth: int, columns: int) -> Iterator[CubeTile]:
    """Tiles of `depth` in L0 that obey the hardware; the left operand is whole, or a few times as deep as the right."""
    whole = _round_up(k, depth)
    for right in range(depth, whole + 1, depth):
        lefts = {right * times for times in (1, 2, 3, 4) if right * times <= whole}
        for left in lefts | ({whole} if whole % right == 0 else set()):
            tile = CubeTile(ROWS, depth, left, right, columns)
            if _fits(tile):
                yield tile


def _fits(tile: CubeTile) -> bool:
    try:
        check_cube_tile(tile, 1)
    except ProgramError:
        return False
    return True


def _copies_us(k: int, tile: CubeTile) -> float:
    """Time to bring both operands of one task into L1, and the last weight tile from there to L0."""
    weight_us = tile.k_right * tile.n / COPY_BYTES_PER_US
    right = -(-k // tile.k_right) * COPY_LATENCY_US + k * tile.n / COPY_BYTES_PER_US
    left = -(-k // tile.k_left) * COPY_LATENCY_US + k * ROWS / COPY_BYTES_PER_US
    return right + left + weight_us


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
