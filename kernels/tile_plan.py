"""The tiles of a whole program, checked before anything is compiled: which tile, at which site, breaks which rule.

A plan is the tiles that a kernel is known to set where they can fail: matmuls are checked where they are chosen
(`kernels.tiles.choose_cube_tile`), so a plan names them by weight, and adds the vector tiles around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from kernels.errors import ProgramError
from kernels.tile_rules import CubeTile, check_dequant_tile, check_reduction_tile, check_vector_tile
from kernels.tiles import FP32_IN_AND_OUT_BYTES, choose_cube_tile, row_columns

__all__ = ["check_head_tiles", "check_layer_tiles", "layer_matmuls"]


class LayerSizes(Protocol):
    """What a decoder layer's tiles depend on."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden rows."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        ...

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        ...

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection."""
        ...


def layer_matmuls(sizes: LayerSizes, down: Literal["int8", "bf16"]) -> dict[str, tuple[int, int, int]]:
    """Depth, columns and operand bytes of every matmul with a weight in a layer, by the weight's name."""
    hidden, inter = sizes.hidden_size, sizes.intermediate_size
    return {
        "wq": (hidden, sizes.q_size, 1),
        "wk": (hidden, sizes.kv_size, 1),
        "wv": (hidden, sizes.kv_size, 1),
        "wo": (sizes.q_size, hidden, 1),
        "w_gate": (hidden, inter, 1),
        "w_up": (hidden, inter, 1),
        "w_down": (inter, hidden, 1 if down == "int8" else 2),
    }


def check_layer_tiles(sizes: LayerSizes, down: Literal["int8", "bf16"], rows: int) -> None:
    """Refuse a layer over a window of `rows` rows of which a tile breaks a rule.

    ProgramError names the site and the rule. All rows of the window are in one tile where a matmul's result is taken.
    """
    hidden = sizes.hidden_size
    with _site("norm of hidden_size"):
        check_reduction_tile(hidden, hidden)
        check_vector_tile(1, hidden, FP32_IN_AND_OUT_BYTES)
    for name, width in (
        ("hidden_size", hidden),
        ("the attention's output", sizes.q_size),
        ("intermediate_size", sizes.intermediate_size),
    ):
        with _site(f"quantization of {name}"):
            check_vector_tile(1, row_columns(width), FP32_IN_AND_OUT_BYTES)
    for weight, (k, n, element_bytes) in layer_matmuls(sizes, down).items():
        with _site(weight):
            _check_matmul(choose_cube_tile(k, n, element_bytes, rows), n, rows)


def check_head_tiles(hidden_size: int, chunk_tokens: int, block_tokens: int, rows: int) -> None:
    """Refuse an LM head over `rows` rows of which a tile breaks a rule; ProgramError names the site and the rule."""
    with _site("norm of hidden_size"):
        check_vector_tile(1, hidden_size, FP32_IN_AND_OUT_BYTES)
    with _site("lm_head_weight"):
        choose_cube_tile(hidden_size, chunk_tokens, 2, rows=rows, columns=block_tokens)
        check_vector_tile(rows, block_tokens, FP32_IN_AND_OUT_BYTES)


def _check_matmul(tile: CubeTile, n: int, rows: int) -> None:
    """The vector tile that takes a matmul's result is two of its tiles wide."""
    check_dequant_tile(2 * tile.n, tile, n)
    check_vector_tile(rows, 2 * tile.n, FP32_IN_AND_OUT_BYTES)


@contextmanager
def _site(name: str) -> Iterator[None]:
    """Name the site of a tile that is refused inside the block."""
    try:
        yield
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from error
