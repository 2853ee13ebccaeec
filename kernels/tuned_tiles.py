"""Matmul tiles that a search settled on, in a JSON table that the choice of tiles looks into before its rule of thumb.

An entry says how many tiles were simulated and the time before and after; where both are equal, the tile in use was
the best of them. The table ships with the package; `$PYPTO_DEPLOY_TILES` names another one. Its digest is part of every
check's key, so that a changed table is a new program. Entries are written by `pypto-deploy programs tune`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernels.errors import ProgramError
from kernels.tile_rules import CubeTile, check_cube_tile

__all__ = ["TunedTile", "merge_table", "read_table", "table_digest", "table_path", "tuned_tile"]

TABLE_VARIABLE = "PYPTO_DEPLOY_TILES"
SHIPPED_TABLE = Path(__file__).with_name("tuned_tiles.json")


@dataclass(frozen=True)
class TunedTile:
    """The tile for `[rows, k] x [k, n]` with operands of `element_bytes`, and why: simulated us before and after.

    `tried` counts the tiles that were simulated, the one in use among them.
    """

    k: int
    n: int
    rows: int
    element_bytes: int
    tile: CubeTile
    before_us: float
    simulated_us: float
    tried: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What the tile is for."""
        return self.k, self.n, self.rows, self.element_bytes


def table_path() -> Path:
    """The table in effect."""
    named = os.environ.get(TABLE_VARIABLE)
    return Path(named) if named else SHIPPED_TABLE


def tuned_tile(k: int, n: int, rows: int, element_bytes: int) -> CubeTile | None:
    """The tuned tile for exactly this matmul, or None."""
    path = table_path()
    entry = _indexed(path, table_digest()).get((k, n, rows, element_bytes))
    return None if entry is None else entry.tile


def read_table(path: Path) -> list[TunedTile]:
    """The entries of `path`; none when there is no such file. Raises ProgramError for one that cannot be used."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    try:
        return [_entry(values) for values in json.loads(text)["tiles"]]
    except (ValueError, KeyError, TypeError, ProgramError) as error:
        raise ProgramError(
            f"{path} is no table of tiles ({error}); expected one that `programs tune` wrote: remove it and tune again"
        ) from error


def merge_table(path: Path, entries: Iterable[TunedTile]) -> None:
    """Put `entries` into the table at `path`, in place of those for the same matmuls, and publish it by rename.

    Two searches may end at once: the folder is locked from reading to renaming.
    """
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _merge(path, entries)
    finally:
        os.close(folder)


def _merge(path: Path, entries: Iterable[TunedTile]) -> None:
    merged = {entry.key: entry for entry in read_table(path)} | {entry.key: entry for entry in entries}
    tiles = [
        {
            "k": entry.k,
            "n": entry.n,
            "rows": entry.rows,
            "element_bytes": entry.element_bytes,
            "tile": [entry.tile.m, entry.tile.k_l0, entry.tile.k_left, entry.tile.k_right, entry.tile.n],
            "before_us": entry.before_us,
            "simulated_us": entry.simulated_us,
            "tried": entry.tried,
        }
        for _, entry in sorted(merged.items())
    ]
    lines = ",\n".join(f"  {json.dumps(tile)}" for tile in tiles)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text('{"tiles": [\n' + lines + "\n]}\n")
    scratch.replace(path)


def table_digest() -> str:
    """SHA-256 of the table in effect; of nothing when there is none."""
    path = table_path()
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


@lru_cache(maxsize=8)
def _indexed(path: Path, digest: str) -> dict[tuple[int, int, int, int], TunedTile]:
    """The table by matmul; `digest` makes a changed file a new entry."""
    return {entry.key: entry for entry in read_table(path)}


def _entry(values: dict[str, object]) -> TunedTile:
    fields = dict(values)
    sides = fields.pop("tile")
    if not isinstance(sides, list) or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"tile {sides!r}; expected five sizes")
    entry = TunedTile(tile=CubeTile(*sides), **fields)  # type: ignore[arg-type]
    check_cube_tile(entry.tile, entry.element_bytes)
    return entry
