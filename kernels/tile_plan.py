"""The tiles of a whole program, checked before anything is compiled: which tile, at which site, breaks which rule.

A plan is the tiles that a kernel sets where they can fail: matmuls are checked where they are chosen, so a plan names
them by weight, and adds the vector tiles around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.errors import ProgramError
from kernels.programs.decode_tiles import LayerSizes, LayerTiles
from kernels.tile_rules import check_dequant_tile, check_reduction_tile, check_vector_tile
from kernels.tiles import FP32_IN_AND_OUT_BYTES, choose_cube_tile, dequant_rows, row_columns, row_tile

__all__ = ["check_head_tiles", "check_layer_tiles"]


def check_layer_tiles(sizes: LayerSizes, rows: int) -> None:
    """Refuse a decoder layer over windows of `rows` rows of which a tile breaks a rule; names the site and the rule."""
    hidden, inter, q_size = sizes.hidden_size, sizes.intermediate_size, sizes.q_size
    tiles = LayerTiles(sizes, rows)
    with _site("norm of hidden_size"):
        check_reduction_tile(hidden, hidden)
        check_vector_tile(row_tile(rows, hidden), hidden, FP32_IN_AND_OUT_BYTES)
    quantized = [("hidden_size", hidden), ("the attention's output", q_size)] if sizes.weights == "int8" else []
    quantized += [("intermediate_size", inter)] if sizes.down == "int8" else []
    for name, width in quantized:
        with _site(f"quantization of {name}"):
            check_vector_tile(row_tile(rows, width), row_columns(width), FP32_IN_AND_OUT_BYTES)
    with _site("wq, wk, wv"):
        tiles.query()
        tiles.key_value()
        check_vector_tile(row_tile(rows, q_size), q_size, FP32_IN_AND_OUT_BYTES)
    with _site("wo"):
        tiles.output()
    with _site("w_gate, w_up"):
        tile = tiles.up()
        check_dequant_tile(2 * tile.n, tile, inter)
        check_vector_tile(dequant_rows(rows, tile), 2 * tile.n, FP32_IN_AND_OUT_BYTES)
    with _site("w_down"):
        tile = tiles.down()
        check_vector_tile(dequant_rows(rows, tile), 2 * tile.n, FP32_IN_AND_OUT_BYTES)


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
