"""Who serves from a store: one small record for each live worker, for switches, pruning and status.

A worker holds a lock on `workers/<pid>.lock` as long as it lives and keeps `workers/<pid>.json` up to date. The lock
goes with the process however it ends, so a record whose lock is free belongs to nobody and is cleared away.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from serving.files import locked, write_text_atomic

WorkerState = Literal["starting", "ready", "switching", "failed", "stopping"]


class WorkerRecord(BaseModel):
    """What a worker says of itself.

    `ref` is what it was told to serve and `alias` the same when that is an alias it follows; `digest` is what it serves
    now. `failed_digest`, `failed_move` (the sequence number of the alias move) and `error` tell of the last bundle that
    it could not take up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    url: str
    ref: str
    alias: str | None
    served_model_name: str
    executor: str
    state: WorkerState
    digest: str | None = None
    failed_digest: str | None = None
    failed_move: int | None = None
    error: str | None = None


class WorkerRegistration:
    """A worker's own record; use `register`."""

    def __init__(self, folder: Path, record: WorkerRecord) -> None:
        self._file = folder / f"{record.pid}.json"
        self.record = record
        self.update()

    def update(self, **changes: Any) -> None:
        """Change fields of the record and write it."""
        self.record = WorkerRecord.model_validate({**self.record.model_dump(), **changes})
        write_text_atomic(self._file, self.record.model_dump_json(indent=1))


@contextlib.contextmanager
def register(root: Path, record: WorkerRecord) -> Iterator[WorkerRegistration]:
    """Be listed in the store at `root` while the context lasts."""
    folder = root / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f"{record.pid}.lock"
    with locked(lock):
        try:
            yield WorkerRegistration(folder, record)
        finally:
            (folder / f"{record.pid}.json").unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


def live_workers(root: Path) -> list[WorkerRecord]:
    """Records of the workers that are alive, by process id; records of dead ones are removed."""
    records = []
    for file in sorted((root / "workers").glob("*.json")):
        lock = file.with_suffix(".lock")
        if not _is_held(lock):
            file.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            continue
        try:
            records.append(WorkerRecord.model_validate_json(file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValidationError):
            # It has just ended, or is of another version: neither can be asked to switch.
            continue
    return sorted(records, key=lambda record: record.pid)


def _is_held(lock: Path) -> bool:
    if not os.path.lexists(lock):
        return False
    with locked(lock, shared=True, blocking=False) as free:
        return not free
