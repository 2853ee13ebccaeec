"""The tiles of a whole program, checked before anything is compiled: which tile, at which site, breaks which rule.

A plan is the tiles that a kernel sets where they can fail: matmuls are checked where they are chosen, so a plan names
them by weight, and adds the vector tiles around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from kernels.errors import ProgramError
from kernels.programs.decode_tiles import choose_stream_tile, one_wave_columns
from kernels.tile_rules import check_dequant_tile, check_reduction_tile, check_vector_tile
from kernels.tiles import FP32_IN_AND_OUT_BYTES, choose_cube_tile, row_columns

__all__ = ["check_decode_tiles", "check_head_tiles"]


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


def check_decode_tiles(sizes: LayerSizes, down: Literal["int8", "bf16"], rows: int) -> None:
    """Refuse a decode layer over a window of `rows` rows of which a tile breaks a rule; names the site and the rule."""
    hidden, inter, q_size, kv_size = sizes.hidden_size, sizes.intermediate_size, sizes.q_size, sizes.kv_size
    with _site("norm of hidden_size"):
        check_reduction_tile(hidden, hidden)
        check_vector_tile(1, hidden, FP32_IN_AND_OUT_BYTES)
    for name, width in (("hidden_size", hidden), ("the attention's output", q_size), ("intermediate_size", inter)):
        with _site(f"quantization of {name}"):
            check_vector_tile(1, row_columns(width), FP32_IN_AND_OUT_BYTES)
    columns = one_wave_columns(q_size, kv_size, kv_size)
    with _site("wq, wk, wv"):
        choose_stream_tile(hidden, columns, columns)
        check_vector_tile(1, q_size, FP32_IN_AND_OUT_BYTES)
    with _site("wo"):
        choose_stream_tile(q_size, hidden)
    with _site("w_gate, w_up"):
        tile = choose_stream_tile(hidden, inter)
        check_dequant_tile(2 * tile.n, tile, inter)
        check_vector_tile(rows, 2 * tile.n, FP32_IN_AND_OUT_BYTES)
    with _site("w_down"):
        tile = choose_stream_tile(inter, hidden) if down == "int8" else choose_cube_tile(inter, hidden, 2)
        check_vector_tile(rows, 2 * tile.n, FP32_IN_AND_OUT_BYTES)


def check_head_tiles(hidden_size: int, chunk_tokens: int, block_tokens: int, rows: int) -> None:
    """Refuse an LM head over `rows` rows of which a tile breaks a rule; ProgramError names the site and the rule."""
    with _site("norm of hidden_size"):
        check_vector_tile(1, hidden_size, FP32_IN_AND_OUT_BYTES)
    with _site("lm_head_weight"):
        choose_cube_tile(hidden_size, chunk_tokens, 2, rows=rows, columns=block_tokens)
        check_vector_tile(rows, block_tokens, FP32_IN_AND_OUT_BYTES)


@contextmanager
def _site(name: str) -> Iterator[None]:
    """Name the site of a tile that is refused inside the block."""
    try:
        yield
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from error
