"""Tiles and task counts of a layer's matmuls; of those over few rows, chosen by what copying costs on the device.

At 16 rows a matmul is a stream of weight tiles into L1. A copy costs a latency and its bytes, one after the other on a
core; the last tile is multiplied after it came. So few, large copies, the left operand whole where it fits, and as many
tasks as there are cores (or a whole number of waves). Constants are PyPTO 0.2.0's cost model of the Ascend 910B2. Over
more rows the left operand counts too, and `kernels.tiles` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS
from kernels.tile_rules import L0_BYTES
from kernels.tiles import CUBE_CORES, CubeTile, check_cube_tile, choose_cube_tile
from kernels.tuned_tiles import tuned_tile

__all__ = [
    "PAGES_AT_ONCE",
    "LayerSizes",
    "LayerTiles",
    "choose_stream_tile",
    "one_wave_columns",
    "page_groups",
    "tasks_per_core",
]

COPY_LATENCY_US = 0.78
COPY_BYTES_PER_US = 172_000.0
ROWS = 16
MAX_COLUMNS = 256
MAX_WAVE_COLUMNS = 320
"""Widest tile whose operands fit L1 beside a left operand of 5,120 values, for matmuls that share a wave."""
PAGES_AT_ONCE = 4
"""Pages of a row that one loop body attends to: starting a body and its tasks costs more than a page takes."""


class LayerSizes(Protocol):
    """What a decoder layer's tiles depend on."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def q_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def kv_size(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def down(self) -> Literal["int8", "bf16"]: ...  # noqa: D102 - a field of the configuration
    @property
    def weights(self) -> Literal["int8", "bf16"]: ...  # noqa: D102 - a field of the configuration


@dataclass(frozen=True)
class LayerTiles:
    """The matmul tiles of a layer of `sizes` over a window of `rows` rows; each raises ProgramError when none fits."""

    sizes: LayerSizes
    rows: int

    def query(self) -> CubeTile:
        """Of `wq`; over few rows Q, K and V share one wave of tasks."""
        return self._projection(self.sizes.q_size)

    def key_value(self) -> CubeTile:
        """Of `wk` and `wv`."""
        return self._projection(self.sizes.kv_size)

    def output(self) -> CubeTile:
        """Of `wo`."""
        return self._tile(self.sizes.q_size, self.sizes.hidden_size)

    def up(self) -> CubeTile:
        """Of `w_gate` and `w_up`."""
        return self._tile(self.sizes.hidden_size, self.sizes.intermediate_size)

    def down(self) -> CubeTile:
        """Of `w_down`."""
        sizes = self.sizes
        return self._tile(sizes.intermediate_size, sizes.hidden_size, element_bytes=_bytes(sizes.down))

    def _projection(self, n: int) -> CubeTile:
        kv, columns = self.sizes.kv_size, None
        if self.rows <= ROWS:
            columns = one_wave_columns(self.sizes.q_size, kv, kv)
        return self._tile(self.sizes.hidden_size, n, columns)

    def _tile(self, k: int, n: int, columns: int | None = None, element_bytes: int = 0) -> CubeTile:
        element_bytes = element_bytes or _bytes(self.sizes.weights)
        if self.rows <= ROWS:
            return choose_stream_tile(k, n, columns, element_bytes)
        return choose_cube_tile(k, n, element_bytes, rows=self.rows)


def choose_stream_tile(k: int, n: int, columns: int | None = None, element_bytes: int = 1) -> CubeTile:
    """Tile of a matmul of up to 16 rows, `[16, k] x [k, n]`: the one whose copies take the least time.

    `columns` is the width of a task, by default an equal share per core of at most 256; `element_bytes` 1 for INT8, 2
    for BF16. A matmul in the table of tuned tiles gets its tile from there. Raises ProgramError when no tile fits.
    """
    tuned = tuned_tile(k, n, ROWS, element_bytes)
    if tuned is not None and columns in (None, tuned.n):
        return tuned
    if columns is None:
        columns = min(_round_up(-(-n // CUBE_CORES), 32), MAX_COLUMNS)
    depth = next((size for size in (256, 128, 64, 32) if size * columns * element_bytes <= L0_BYTES), 0)
    fitting = list(_candidates(k, min(depth, _round_up(k, 32)), columns, element_bytes)) if depth else []
    if not fitting:
        raise ProgramError(
            f"no tile of {columns} columns of {element_bytes} bytes each fits; use at most {MAX_COLUMNS}"
        )
    return min(fitting, key=lambda tile: _copies_us(k, tile, element_bytes))


def one_wave_columns(*widths: int) -> int:
    """Columns of a task such that matmuls of these `widths` run side by side in one wave; 256 if none are so few."""
    for columns in range(32, MAX_WAVE_COLUMNS + 1, 32):
        if sum(-(-width // columns) for width in widths) <= CUBE_CORES:
            return columns
    return MAX_COLUMNS


def page_groups(tokens: int) -> int:
    """Loop bodies in which a row attends to `tokens` tokens."""
    return -(-tokens // (PAGES_AT_ONCE * PAGE_TOKENS))


def tasks_per_core(columns: int, *widths: int) -> int:
    """Tasks of `columns` columns that each core runs for matmuls of these `widths`: merged, they are one wave."""
    return -(-sum(-(-width // columns) for width in widths) // CUBE_CORES)


def _candidates(k: int, depth: int, columns: int, element_bytes: int) -> Iterator[CubeTile]:
    """Tiles of `depth` in L0 that obey the hardware; the left operand is whole, or a few times as deep as the right."""
    whole = _round_up(k, depth)
    for right in range(depth, whole + 1, depth):
        lefts = {right * times for times in (1, 2, 3, 4) if right * times <= whole}
        for left in lefts | ({whole} if whole % right == 0 else set()):
            tile = CubeTile(ROWS, depth, left, right, columns)
            if _fits(tile, element_bytes):
                yield tile


def _fits(tile: CubeTile, element_bytes: int) -> bool:
    try:
        check_cube_tile(tile, element_bytes)
    except ProgramError:
        return False
    return True


def _copies_us(k: int, tile: CubeTile, element_bytes: int) -> float:
    """Time to bring both operands of one task into L1, and the last weight tile from there to L0."""
    element_us = element_bytes / COPY_BYTES_PER_US
    right = -(-k // tile.k_right) * COPY_LATENCY_US + k * tile.n * element_us
    left = -(-k // tile.k_left) * COPY_LATENCY_US + k * ROWS * element_us
    return right + left + tile.k_right * tile.n * element_us


def _bytes(form: Literal["int8", "bf16"]) -> int:
    return 1 if form == "int8" else 2


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
