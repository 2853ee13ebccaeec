"""The history of a store's aliases: an append-only file of moves, from which all present state follows.

Each alias is a stack: a promotion pushes a bundle, a rollback takes the top off and so returns to the one before; two
rollbacks in a row go one further back. Nothing is ever rewritten, so the file is also the record of who moved what and
why. A line that was torn by a crash was never acknowledged: readers ignore it and the next writer cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from serving.errors import StoreError


class AliasMove(BaseModel):
    """One move of an alias: the `sequence`-th of the store, to `digest` from `previous` (None when it was new)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequence: int
    time: str
    alias: str
    kind: Literal["promote", "rollback"]
    digest: str
    previous: str | None
    reason: str


def read_moves(path: Path) -> list[AliasMove]:
    """All moves, oldest first; StoreError for a damaged line other than a torn last one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    moves = []
    # What follows the last newline is a torn line, or nothing.
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            moves.append(AliasMove.model_validate_json(line))
        except ValidationError as error:
            raise StoreError(
                f"{path} line {number} is damaged; restore it, or remove the line to forget that move"
            ) from error
    return moves


def append_move(
    path: Path, alias: str, kind: Literal["promote", "rollback"], digest: str, previous: str | None, reason: str
) -> AliasMove:
    """Add a move durably; the caller holds the store's lock."""
    moves = read_moves(path)
    move = AliasMove(
        sequence=moves[-1].sequence + 1 if moves else 1,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        alias=alias,
        kind=kind,
        digest=digest,
        previous=previous,
        reason=reason,
    )
    with path.open("ab") as file:
        content = path.read_bytes()
        committed = content.rfind(b"\n") + 1
        if committed != len(content):
            file.truncate(committed)
        file.write(move.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return move


def alias_stacks(moves: Iterable[AliasMove]) -> dict[str, list[str]]:
    """Per alias the bundles it can be rolled back through, the present one last."""
    stacks: dict[str, list[str]] = {}
    for move in moves:
        stack = stacks.setdefault(move.alias, [])
        if move.kind == "promote":
            stack.append(move.digest)
            continue
        # A rollback may have skipped bundles that were gone; it names where it went.
        while stack and stack[-1] != move.digest:
            stack.pop()
    return stacks
