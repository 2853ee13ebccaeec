"""The search for matmul tiles on the cost model, within a budget of seconds.

For every INT8 matmul of a layer that has a wave of its own: candidates that obey the tile rules, in the order of a
rough reckoning of the cost model (waves of tasks times copies), are simulated as `linear_w8a8` until the budget is
spent. A fused program may prefer other tiles than its parts do, so the whole layer is simulated with the best few found
for each, until it gains; a tile with which it does not is not kept. Times are the cost model's, which knows no
bandwidth limit: below a matmul's bytes at 1.6 TB/s there is nothing to gain, and the search for it ends there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.contract import BATCH_WINDOW_ROWS, DownDtype, check_limits
from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.decode_tiles import choose_stream_tile
from kernels.programs.linear import LinearW8A8, LinearW8A8Spec
from kernels.report import HBM_BYTES_PER_US
from kernels.tile_rules import L0_BYTES, CubeTile
from kernels.tiles import CUBE_CORES
from kernels.tuned_tiles import EMPTY_TABLE, TABLE_VARIABLE, TunedTile, check_target, merge_table
from quantize.model_config import ModelConfig

__all__ = [
    "TableNotWrittenError",
    "TuneResult",
    "candidate_tiles",
    "table_in_effect",
    "tune_decode_layer",
    "write_result",
]

CONTEXT_TOKENS = 256
COPY_CYCLES = 1400
CYCLES_PER_BYTE = 1 / 95.7
"""A copy into L1 as the cost model has it: a fixed start, then 95.7 bytes a cycle."""
DEPTHS_L0 = (64, 128, 256, 512)
MAX_COLUMNS = 512
MAX_PIECES = 20
FINALISTS = 3
"""Tiles of one matmul, faster alone than the one in use, that are tried in the whole layer."""

Simulate = Callable[[Program], float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TuneResult:
    """What a search found: the program's simulated us before and after, and how many tiles were tried for its parts.

    `kept` are the tiles with which the whole program gained, `dropped` those that were faster alone only, and
    `confirmed` the tiles in use that stay: none was faster, or none with which the program gained.
    """

    before_us: float
    after_us: float
    kept: tuple[TunedTile, ...]
    dropped: tuple[TunedTile, ...]
    confirmed: tuple[TunedTile, ...]
    tried: int


class TableNotWrittenError(ProgramError):
    """A search ended and its table could not be written; `result` is what it found."""

    def __init__(self, table: Path, result: TuneResult, reason: Exception) -> None:
        self.result = result
        super().__init__(f"{table}: not written ({reason}); what the search found is lost unless it is noted now")


def write_result(table: Path, result: TuneResult) -> TuneResult:
    """Put the tiles kept and confirmed into `table`; raises TableNotWrittenError, which holds the result."""
    try:
        merge_table(table, [*result.kept, *result.confirmed])
    except (OSError, ProgramError) as error:
        raise TableNotWrittenError(table, result, error) from error
    return result


def candidate_tiles(k: int, n: int, rows: int) -> list[CubeTile]:
    """Tiles for INT8 `[rows, k] x [k, n]` that obey the rules, in the order of their reckoned time."""
    found: dict[CubeTile, float] = {}
    for columns in range(32, min(MAX_COLUMNS, n) + 1, 32):
        for depth in DEPTHS_L0:
            if depth * columns > L0_BYTES or depth > k:
                continue
            for pieces in range(1, MAX_PIECES + 1):
                right = _round_up(-(-k // pieces), depth)
                for left in {right, right * pieces}:
                    tile = CubeTile(16, depth, left, right, columns)
                    if tile not in found and _allowed(k, n, rows, tile):
                        found[tile] = _reckoned_us(k, n, tile)
    return sorted(found, key=lambda tile: (found[tile], -tile.n, -tile.k_right))


def tune_decode_layer(
    config: ModelConfig,
    simulate: Simulate,
    table: Path,
    *,
    down: DownDtype = "int8",
    rows: int = BATCH_WINDOW_ROWS,
    budget_s: float = 600.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Search tiles for the INT8 matmuls of a decode layer of `config` over `rows` rows; `table` gets one for each.

    `simulate` gives a program's time in us. The budget bounds the search; simulations of the whole layer, one before
    and up to three for each matmul, come on top. Raises ProgramError when `rows` is out of range, `table` cannot be
    written or the layer does not compile; TableNotWrittenError when writing fails at the end.
    """
    check_limits(config, down)
    if not 1 <= rows <= BATCH_WINDOW_ROWS:
        raise ProgramError(f"tiles are tuned for windows of 1 to {BATCH_WINDOW_ROWS} rows, not {rows}")
    check_target(table)
    layer = DecodeLayer(DecodeLayerSpec.of(config, down, (CONTEXT_TOKENS,) * rows))
    with table_in_effect(table):
        before_us = simulate(layer)
        shapes = _matmuls(config, down)
        searched, deadline = [], clock() + budget_s
        for number, (k, n) in enumerate(shapes):
            share_s = (deadline - clock()) / (len(shapes) - number)
            searched.append(_tune_matmul(k, n, rows, simulate, clock() + share_s, clock, progress))
    found = [entry for faster, _ in searched for entry in faster]
    found.sort(key=lambda entry: entry.simulated_us - entry.before_us)
    kept, after_us = _gaining(found, layer, before_us, simulate, table)
    settled = {entry.key for entry in kept}
    confirmed = [used for _, used in searched if used.key not in settled]
    dropped = tuple(entry for entry in found if entry.key not in settled)
    tried = sum(used.tried for _, used in searched)
    return write_result(table, TuneResult(before_us, after_us, tuple(kept), dropped, tuple(confirmed), tried))


def _matmuls(config: ModelConfig, down: DownDtype) -> list[tuple[int, int]]:
    """Depth and columns of a layer's INT8 matmuls, but for Q, K and V, whose tasks share one wave."""
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes = {(config.q_size, hidden), (hidden, inter)} | ({(inter, hidden)} if down == "int8" else set())
    return sorted(shapes)


def _gaining(
    found: list[TunedTile], layer: DecodeLayer, before_us: float, simulate: Simulate, table: Path
) -> tuple[list[TunedTile], float]:
    """The first of `found` for each matmul with which the layer gains, and its time with all of them."""
    kept: list[TunedTile] = []
    best_us = before_us
    with tempfile.TemporaryDirectory() as folder:
        for number, entry in enumerate(found):
            if any(entry.key == settled.key for settled in kept):
                continue
            trial = Path(folder) / f"tiles-{number}.json"
            if table.is_file():
                trial.write_bytes(table.read_bytes())
            merge_table(trial, [*kept, entry])
            with table_in_effect(trial):
                time_us = simulate(layer)
            if time_us < best_us:
                kept, best_us = [*kept, entry], time_us
    return kept, best_us


def _tune_matmul(
    k: int,
    n: int,
    rows: int,
    simulate: Simulate,
    deadline: float,
    clock: Callable[[], float],
    progress: Progress | None,
) -> tuple[list[TunedTile], TunedTile]:
    """The best few tiles found before `deadline` that are faster than the one in use, and that one."""
    used = choose_stream_tile(k, n)
    before_us = simulate(LinearW8A8(LinearW8A8Spec.of(k, n, rows, used)))
    times = {used: before_us}
    for tile in candidate_tiles(k, n, rows):
        if clock() >= deadline or min(times.values()) <= k * n / HBM_BYTES_PER_US:
            break
        if tile == used:
            continue
        if progress is not None:
            progress(f"{k} x {n}: {min(times.values()):.1f} us, {len(times)} tiles tried")
        try:
            times[tile] = simulate(LinearW8A8(LinearW8A8Spec.of(k, n, rows, tile)))
        except ProgramError:
            continue  # the rules let it pass and the compiler did not: no candidate
    entries = [
        TunedTile(k, n, BATCH_WINDOW_ROWS, 1, tile, before_us, time_us, len(times)) for tile, time_us in times.items()
    ]
    faster = sorted((entry for entry in entries if entry.simulated_us < before_us), key=lambda e: e.simulated_us)
    return faster[:FINALISTS], entries[0]


def _allowed(k: int, n: int, rows: int, tile: CubeTile) -> bool:
    try:
        LinearW8A8(LinearW8A8Spec.of(_round_up(k, 32), _round_up(n, 32), rows, tile)).check_tiles()
    except ProgramError:
        return False
    return True


def _reckoned_us(k: int, n: int, tile: CubeTile) -> float:
    """Waves of tasks, each copying its weight and rows into L1 piece by piece."""
    tasks = -(-n // tile.n)
    waves = -(-tasks // CUBE_CORES)
    right_copies, left_copies = -(-k // tile.k_right), -(-k // tile.k_left)
    cycles = (right_copies + left_copies) * COPY_CYCLES + k * (tile.n + tile.m) * CYCLES_PER_BYTE
    return waves * cycles / 1800.0


@contextmanager
def table_in_effect(table: Path) -> Iterator[None]:
    """Make `table` the one that tiles are chosen from, here and in subprocesses; an empty one while it is absent."""
    before = os.environ.get(TABLE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        if not table.exists():
            table = Path(folder) / "tiles.json"
            table.write_text(EMPTY_TABLE)
        os.environ[TABLE_VARIABLE] = str(table.absolute())
        try:
            yield
        finally:
            if before is None:
                del os.environ[TABLE_VARIABLE]
            else:
                os.environ[TABLE_VARIABLE] = before


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
