"""The search for the tile of the LM head's matmul, on the cost model and within a budget of seconds.

A chunk of the vocabulary is one wave of tasks, whose columns the choice of ids fixes; how deep the operands are cut is
free. Candidates are simulated in the program itself over a few chunks, and the best is kept if it gains over the whole
vocabulary. Below the bytes at 1.6 TB/s there is nothing to gain, though a time there is not reachable.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kernels.contract import BATCH_WINDOW_ROWS, check_limits
from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.tile_rules import L0_BYTES, CubeTile, check_cube_tile
from kernels.tiles import choose_cube_tile
from kernels.tuned_tiles import TunedTile, check_target, merge_table
from kernels.tuner import (
    COPY_CYCLES,
    CYCLES_PER_BYTE,
    MAX_PIECES,
    Progress,
    Simulate,
    TuneResult,
    table_in_effect,
    write_result,
)
from quantize.model_config import ModelConfig

__all__ = ["head_tiles", "tune_lm_head"]

ELEMENT_BYTES = 2
SEARCHED_CHUNKS = 3
DEPTHS_L0 = (32, 64, 128)


def tune_lm_head(
    config: ModelConfig,
    simulate: Simulate,
    table: Path,
    *,
    budget_s: float = 600.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Search the tile of the LM head of `config` over windows of 16 rows; the one to use goes into `table`.

    `simulate` gives a program's time in us. The budget bounds the search over a few chunks; two simulations of the
    whole head come on top. Raises ProgramError when `table` cannot be written or the head does not compile,
    TableNotWrittenError when writing fails at the end.
    """
    check_limits(config, "int8")
    check_target(table)
    whole = LmHeadGreedy(LmHeadSpec.of(config, BATCH_WINDOW_ROWS))
    spec = whole.spec
    few = replace(config, vocab_size=min(config.vocab_size, SEARCHED_CHUNKS * spec.chunk_tokens))
    searched = LmHeadGreedy(LmHeadSpec.of(few, BATCH_WINDOW_ROWS))
    with table_in_effect(table):
        used = choose_cube_tile(
            spec.hidden_size, spec.chunk_tokens, ELEMENT_BYTES, rows=BATCH_WINDOW_ROWS, columns=spec.block_tokens
        )
        before_us = simulate(searched)
    best, best_us, tried, deadline = used, before_us, 1, clock() + budget_s

    def entry(tile: CubeTile, from_us: float, to_us: float) -> TunedTile:
        shape = (spec.hidden_size, spec.chunk_tokens, BATCH_WINDOW_ROWS, ELEMENT_BYTES)
        return TunedTile(*shape, tile, from_us, to_us, tried)

    for tile in head_tiles(spec.hidden_size, spec.block_tokens):
        if clock() >= deadline:
            break
        if tile == used:
            continue
        if progress is not None:
            progress(f"{best_us:.1f} us over {searched.spec.chunks} chunks, {tried} tiles tried")
        try:
            time_us = _with_tile(searched, entry(tile, before_us, before_us), simulate, table)
        except ProgramError:
            continue  # the rules let it pass and the compiler did not: no candidate
        tried += 1
        if time_us < best_us:
            best, best_us = tile, time_us
    with table_in_effect(table):
        whole_us = simulate(whole)
    confirmed = entry(used, whole_us, whole_us)
    dropped: tuple[TunedTile, ...] = ()
    if best != used:
        tuned_us = _with_tile(whole, entry(best, before_us, best_us), simulate, table)
        found = entry(best, whole_us, tuned_us)
        if tuned_us < whole_us:
            return write_result(table, TuneResult(whole_us, tuned_us, (found,), (), (), tried))
        dropped = (found,)
    return write_result(table, TuneResult(whole_us, whole_us, (), dropped, (confirmed,), tried))


def head_tiles(hidden: int, columns: int) -> list[CubeTile]:
    """Tiles `columns` wide that obey the rules, in the order of a rough reckoning of a task's copies."""
    found = dict.fromkeys(_tiles(hidden, columns))
    return sorted(found, key=lambda tile: (_copy_cycles(hidden, tile), -tile.k_right))


def _tiles(hidden: int, columns: int) -> Iterator[CubeTile]:
    for depth in DEPTHS_L0:
        if depth * columns * ELEMENT_BYTES > L0_BYTES or depth > hidden:
            continue
        for pieces in range(1, MAX_PIECES + 1):
            right = _round_up(-(-hidden // pieces), depth)
            for left in {right, right * pieces}:
                tile = CubeTile(BATCH_WINDOW_ROWS, depth, left, right, columns)
                try:
                    check_cube_tile(tile, ELEMENT_BYTES)
                except ProgramError:
                    continue
                yield tile


def _copy_cycles(hidden: int, tile: CubeTile) -> float:
    """Cycles to bring both operands of one task into L1, and the last weight tile on."""
    copies = -(-hidden // tile.k_right) + -(-hidden // tile.k_left)
    moved = hidden * (tile.n + tile.m) + tile.k_right * tile.n
    return copies * COPY_CYCLES + moved * ELEMENT_BYTES * CYCLES_PER_BYTE


def _with_tile(program: Program, entry: TunedTile, simulate: Simulate, table: Path) -> float:
    """Time of `program` with `entry` in the table."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "tiles.json"
        if table.is_file():
            trial.write_bytes(table.read_bytes())
        merge_table(trial, [entry])
        with table_in_effect(trial):
            return simulate(program)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
