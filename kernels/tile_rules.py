"""What a tile must obey, as named rules, checked in plain integers before PyPTO sees the tile.

PyPTO 0.2.0 reports an overflow of L1 or of the unified buffer late, after several passes, without saying which tile it
was, and the process is unusable afterwards; a wrong nesting of depths it reports as FC4000. The capacities are the
Ascend 910B's. Each function raises ProgramError with the name of every rule broken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.errors import ProgramError

__all__ = ["RULES", "CubeTile", "check_cube_tile", "check_dequant_tile", "check_reduction_tile", "check_vector_tile"]

L0_BYTES = 64 * 1024
L0C_BYTES = 128 * 1024
L1_BYTES = 512 * 1024
UB_BYTES = 192 * 1024
M_ROWS_IN_L1 = 32
FRACTAL = 16
UNIT_BYTES = 32

RULES = {
    "cube-side": "every side of a matmul tile is at least one fractal of 16 elements",
    "cube-fractal": "depths and columns in L0 are whole fractals: multiples of 16 elements and of 32 bytes",
    "cube-depths": "the depth of an operand in L1 is whole multiples of the depth in L0",
    "cube-nesting": "the depths of the two operands in L1 divide one another",
    "cube-l0a": "the left operand's tile fits L0A, 64 KB",
    "cube-l0b": "the right operand's tile fits L0B, 64 KB",
    "cube-l0c": "the accumulator's tile fits L0C, 128 KB, at 4 bytes an element",
    "cube-l1": "both operands fit L1, 512 KB, rows rounded up to 32",
    "cube-accumulator": "INT8 operands accumulate in INT32, BF16 ones in FP32",
    "vector-unit": "the last side of a vector tile is whole units of 32 bytes",
    "vector-ub": "what a vector tile keeps alive fits the unified buffer, 192 KB",
    "vector-reduction": "a reduced axis is one tile: split, it costs five times the time and a pass of its own",
    "dequant-columns": "a tile on a matmul's result is whole multiples of its columns, so that it waits for one",
}
"""Every rule by name."""


@dataclass(frozen=True)
class CubeTile:
    """Tiles of a matmul `[m, k] x [k, n]`, in elements: `m` and `n` equal in L0 and L1; three depths along k.

    `k_l0` is the depth in L0, `k_left` and `k_right` the depths of the left and right operand kept in L1. Tasks are cut
    by the columns in L0, so that wider ones in L1 would gain nothing.
    """

    m: int
    k_l0: int
    k_left: int
    k_right: int
    n: int

    def shapes(self) -> tuple[list[int], list[int], list[int]]:
        """The three lists that `set_cube_tile_shapes` takes."""
        return [self.m, self.m], [self.k_l0, self.k_left, self.k_right], [self.n, self.n]

    def l1_bytes(self, element_bytes: int) -> int:
        """Bytes of L1 that both operands take."""
        return (max(self.m, M_ROWS_IN_L1) * self.k_left + self.k_right * self.n) * element_bytes


def check_cube_tile(tile: CubeTile, element_bytes: int, accumulator: str = "") -> None:
    """Refuse a matmul tile that cannot be laid out for operands of `element_bytes` (1 INT8, 2 BF16).

    `accumulator` is the result's dtype where the caller states it.
    """
    problems = []
    if min(tile.m, tile.k_l0, tile.k_left, tile.k_right, tile.n) < FRACTAL:
        problems.append(f"cube-side: every tile side is at least {FRACTAL} elements")
    else:
        for name, value in (("k_l0", tile.k_l0), ("n", tile.n)):
            if value % FRACTAL or value * element_bytes % UNIT_BYTES:
                problems.append(f"cube-fractal: {name}={value} is not whole fractals")
        for name, value in (("k_left", tile.k_left), ("k_right", tile.k_right)):
            if value % tile.k_l0:
                problems.append(f"cube-depths: {name}={value} is not a multiple of k_l0={tile.k_l0}")
        if max(tile.k_left, tile.k_right) % min(tile.k_left, tile.k_right):
            problems.append(f"cube-nesting: k_left={tile.k_left} and k_right={tile.k_right} do not divide one another")
    for name, used, limit in (
        ("L0A", tile.m * tile.k_l0 * element_bytes, L0_BYTES),
        ("L0B", tile.k_l0 * tile.n * element_bytes, L0_BYTES),
        ("L0C", max(tile.m, FRACTAL) * tile.n * 4, L0C_BYTES),
        ("L1", tile.l1_bytes(element_bytes), L1_BYTES),
    ):
        if used > limit:
            problems.append(f"cube-{name.lower()}: {name} needs {used} bytes and has {limit}")
    wanted = "INT32" if element_bytes == 1 else "FP32"
    if accumulator and accumulator != wanted:
        problems.append(f"cube-accumulator: the result is {accumulator}, expected {wanted}")
    _refuse(f"matmul tile {tile}", problems, "choose smaller k or n tiles")


def check_vector_tile(rows: int, columns: int, live_bytes_per_element: int, element_bytes: int = 4) -> None:
    """Refuse a vector tile of elements of `element_bytes` that keeps `live_bytes_per_element` bytes of each alive."""
    problems = []
    if columns * element_bytes % UNIT_BYTES:
        problems.append(f"vector-unit: a row has {columns * element_bytes} bytes, no multiple of {UNIT_BYTES}")
    used = rows * columns * live_bytes_per_element
    if used > UB_BYTES:
        problems.append(
            f"vector-ub: {live_bytes_per_element} bytes of every element are alive, {used} in all; "
            f"the unified buffer has {UB_BYTES}"
        )
    _refuse(f"vector tile [{rows}, {columns}]", problems, "use fewer rows or columns")


def check_reduction_tile(columns: int, width: int) -> None:
    """Refuse a tile of `columns` under a reduction over rows of `width`: norms and quantization take whole rows."""
    problems = [f"vector-reduction: a row of {width} is reduced in tiles of {columns}"] if columns < width else []
    _refuse(f"reduction tile of {columns} columns", problems, "make it as wide as the row")


def check_dequant_tile(columns: int, tile: CubeTile, width: int) -> None:
    """Refuse a tile of `columns` on the `width` columns of a matmul in `tile` whose edges are not the matmul's."""
    problems = []
    if columns < width and columns % tile.n:
        problems.append(f"dequant-columns: {columns} columns on matmul tiles of {tile.n}")
    _refuse(f"dequantization tile of {columns} columns", problems, f"use {tile.n} or {2 * tile.n}")


def _refuse(what: str, problems: Iterable[str], remedy: str) -> None:
    text = "; ".join(problems)
    if text:
        raise ProgramError(f"{what} does not fit: {text}; {remedy}")
