"""Steps whose output folder is addressed by the content that went in.

A step's key is a digest over its name, the digests of its inputs, its parameters and the source text of the packages
that do the work. Its output is built in a temporary folder, described by `record.json`, flushed and renamed, so a
folder that exists is whole; an existing one is re-hashed before it is trusted. Two processes that want the same key
take turns on a lock.

    work/<step>/<key>/record.json     what the step returned: digest, facts, seconds
    work/<step>/<key>/out/            the output itself
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from quantize.staging_folder import fsync_path
from tasks.errors import StepError

logger = logging.getLogger(__name__)

SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".txt")
_HASH_BLOCK_BYTES = 1 << 22


class StepRecord(BaseModel):
    """What a finished step left behind: the digest of its output folder and the facts it found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: str
    key: str
    path: str
    digest: str
    seconds: float
    facts: dict[str, Any]

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.path) / "out"


Build = Callable[[Path], Mapping[str, Any]]
"""Fills the (not yet existing) output folder it is given and returns facts that JSON can hold."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 over the relative names and bytes of all files below `folder`, in hex."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 over the source text of top-level packages of this project, so that a changed line is another key."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                digest.update(f"{path.relative_to(root).as_posix()}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


def step_key(step: str, packages: tuple[str, ...], **inputs: object) -> str:
    """The content key of a step: 32 hex digits over its name, its code and its inputs (digests and parameters)."""
    text = json.dumps({"step": step, "code": code_digest(*packages), "inputs": inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_record(work: Path, step: str, key: str) -> StepRecord | None:
    """The record of a finished step whose output is still what was recorded, or None (damage is logged)."""
    folder = work / step / key
    record_path = folder / "record.json"
    if not record_path.is_file():
        return None
    try:
        record = StepRecord.model_validate_json(record_path.read_text())
    except (ValidationError, UnicodeDecodeError) as error:
        logger.warning("%s: unreadable record (%s); the step runs again", record_path, error)
        return None
    record = record.model_copy(update={"path": str(folder)})
    found = folder_digest(record.out) if record.out.is_dir() else "nothing"
    if found != record.digest:
        logger.warning("%s: holds %s, recorded %s; the step runs again", record.out, found[:12], record.digest[:12])
        return None
    return record


def run_step(work: Path, step: str, key: str, build: Build) -> StepRecord:
    """Return the step's record, building its output with `build` unless a whole one exists under `key`.

    Raises what `build` raises; the temporary folder is removed then, and no folder appears under `key`.
    """
    parent = work / step
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / key
    with _locked(parent / f"{key}.lock"):
        if (record := find_record(work, step, key)) is not None:
            return record
        for leftover in parent.glob(f"{key}.tmp-*"):
            shutil.rmtree(leftover)
        temporary = parent / f"{key}.tmp-{os.getpid()}"
        temporary.mkdir()
        started = time.monotonic()
        try:
            facts = dict(build(temporary / "out"))
            if not (temporary / "out").is_dir():
                raise StepError(f"step {step!r} built no folder at {temporary / 'out'}")
            record = StepRecord(
                step=step,
                key=key,
                path=str(final),
                digest=folder_digest(temporary / "out"),
                seconds=round(time.monotonic() - started, 3),
                facts=facts,
            )
            (temporary / "record.json").write_text(record.model_dump_json(indent=2))
            _flush_folder(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            fsync_path(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return record


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with sorted keys, so that equal values are equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _flush_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            fsync_path(path)
    fsync_path(folder)
