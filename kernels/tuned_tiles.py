"""Matmul tiles that a search settled on, in a JSON table that the choice of tiles looks into before its rule of thumb.

An entry says how many tiles were simulated and the time before and after; where both are equal, the tile in use was
the best of them. The table ships with the package; `$PYPTO_DEPLOY_TILES` names another one. Its digest is part of every
check's key, so that a changed table is a new program. Entries are written by `pypto-deploy programs tune`. A table is
taken whole or refused: one entry that cannot be meant makes the others doubtful.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from kernels.errors import ProgramError
from kernels.tile_rules import FRACTAL, CubeTile, check_cube_tile
from quantize.json_files import parse_json

__all__ = [
    "EMPTY_TABLE",
    "TunedTile",
    "check_target",
    "merge_table",
    "read_table",
    "table_digest",
    "table_path",
    "tuned_tile",
]

TABLE_VARIABLE = "PYPTO_DEPLOY_TILES"
TABLE_MODE = 0o644
SHIPPED_TABLE = Path(__file__).with_name("tuned_tiles.json")
EMPTY_TABLE = '{"tiles": [\n]}\n'
MAX_ROWS = 128
"""Most rows of a window that tiles are chosen for."""


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
    """The entries of the table `path`; raises ProgramError, naming it, when it is absent or cannot be used."""
    try:
        if path.exists() and not path.is_file():
            raise ProgramError(f"{path} is no file; expected a table that `programs tune` wrote")
        raw = path.read_bytes()
    except OSError as error:
        raise ProgramError(
            f"{path} cannot be read as a table of tiles ({error.strerror}); expected one that `programs tune` wrote: "
            f"name another in {TABLE_VARIABLE}, or unset it"
        ) from error
    try:
        values = parse_json(raw)
        if not isinstance(values, dict) or set(values) != {"tiles"} or not isinstance(values["tiles"], list):
            raise ValueError("expected an object with a list `tiles`")
        entries = [_entry(entry) for entry in values["tiles"]]
        seen: set[tuple[int, int, int, int]] = set()
        for entry in entries:
            if entry.key in seen:
                raise ValueError(f"two entries for k, n, rows, element_bytes {entry.key}")
            seen.add(entry.key)
    except (ValueError, ProgramError) as error:
        raise ProgramError(
            f"{path} is no table of tiles ({error}); expected one that `programs tune` wrote: remove it and tune again"
        ) from error
    return entries


def check_target(path: Path) -> None:
    """Raise ProgramError unless `merge_table` can read the table at `path`, or make one there; nothing is changed."""
    path = path.resolve()
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ProgramError(f"{path}: its folder does not exist; make it, or name a table elsewhere with `--table`")
    if path.exists():
        read_table(path)
    try:
        # A mode says little to root, and nothing of a read-only file system: only a file tells.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ProgramError(
            f"{path}: cannot be written ({error.strerror}); name a table in a folder that can with `--table`"
        ) from error


def merge_table(path: Path, entries: Iterable[TunedTile]) -> None:
    """Put `entries` into the table at `path`, in place of those for the same matmuls, and publish it by rename.

    Two searches may end at once: the folder is locked from reading to renaming. A link stays one, to the new table.
    """
    path = path.resolve()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _merge(path, entries)
    finally:
        os.close(folder)


def _merge(path: Path, entries: Iterable[TunedTile]) -> None:
    known = read_table(path) if path.exists() else []
    merged = {entry.key: entry for entry in known} | {entry.key: entry for entry in entries}
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
    scratch_file, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(scratch_file, "w") as stream:
            stream.write('{"tiles": [\n' + lines + "\n]}\n")
        Path(scratch).chmod(TABLE_MODE)
        Path(scratch).replace(path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise


def table_digest() -> str:
    """SHA-256 of the table in effect; of nothing where it cannot be read, which the choice of a tile refuses."""
    path = table_path()
    try:
        raw = path.read_bytes() if path.is_file() else b""
    except OSError:
        raw = b""
    return hashlib.sha256(raw).hexdigest()


@lru_cache(maxsize=8)
def _indexed(path: Path, digest: str) -> dict[tuple[int, int, int, int], TunedTile]:
    """The table by matmul; `digest` makes a changed file a new entry."""
    return {entry.key: entry for entry in read_table(path)}


def _entry(values: object) -> TunedTile:
    """One entry; raises ValueError for fields or values that no search writes, ProgramError for a tile out of rule."""
    names = [field.name for field in fields(TunedTile)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise ValueError(f"an entry is {str(values)[:120]}; expected an object of {', '.join(names)}")
    sides = values["tile"]
    if not isinstance(sides, list) or len(sides) != 5 or not all(_is_count(side) for side in sides):
        raise ValueError(f"tile {str(sides)[:80]}; expected five sizes")
    for name in ("k", "n", "rows", "element_bytes", "tried"):
        if not _is_count(values[name]):
            raise ValueError(f"{name} {str(values[name])[:80]!r}; expected a whole number of at least 1")
    for name in ("before_us", "simulated_us"):
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} {str(value)[:80]!r}; expected microseconds")
    entry = TunedTile(**{**values, "tile": CubeTile(*sides)})
    if entry.element_bytes not in (1, 2):
        raise ValueError(f"element_bytes {entry.element_bytes}; expected 1 (INT8) or 2 (BF16)")
    if entry.rows % FRACTAL or entry.rows > MAX_ROWS or entry.tile.m != entry.rows:
        raise ValueError(
            f"a tile of {entry.tile.m} rows for a window of {entry.rows}; expected equal multiples of {FRACTAL} "
            f"up to {MAX_ROWS}"
        )
    check_cube_tile(entry.tile, entry.element_bytes)
    return entry


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
