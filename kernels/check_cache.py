"""Check results kept by content: one folder per key, published by rename, checked when read.

An entry is `result.json` and the artifacts it names, with a digest over both. A damaged entry is dropped with a note
and made again, as is whatever else stands in its place; a folder that cannot be written only means that results are
not kept. Processes that want the same key wait for one another, so that a check is computed once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kernels.report import CheckResult
from quantize.json_files import parse_json

RESULT_FILE = "result.json"
STAGED_PREFIX = ".new-"
SWEEP_AGE_S = 600.0
"""Age at which the folder of an entry that was being written belongs to nobody: writing takes seconds."""

logger = logging.getLogger(__name__)


class CheckCache:
    """Results under `root`, created on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> CheckResult | None:
        """The result kept under `key`, marked as cached, or None; a damaged entry is reported and removed."""
        folder = self.root / key
        if not folder.exists() and not folder.is_symlink():
            return None
        try:
            if folder.is_symlink() or not folder.is_dir():
                raise ValueError("it is no folder")
            entry = parse_json((folder / RESULT_FILE).read_bytes())
            result = CheckResult.from_json(entry["result"])
            if result.key != key:
                raise ValueError(f"it holds key {result.key}")
            for name in result.artifacts:
                if entry["sha256"][name] != hashlib.sha256((folder / name).read_bytes()).hexdigest():
                    raise ValueError(f"{name} does not match its digest")
            if entry["sha256"][RESULT_FILE] != _digest_of(result):
                raise ValueError("the result does not match its digest")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("cached check %s is damaged (%s); it is made again", folder, error)
            _remove(folder)
            return None
        paths = tuple(str(folder / name) for name in result.artifacts)
        return replace(result, cached=True, artifacts=paths)

    def put(self, result: CheckResult) -> CheckResult:
        """Keep `result`, copying the files it names; returns it with their new paths, or
        without artifacts if it cannot be kept (the caller's files are temporary)."""
        staged: Path | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            staged = Path(tempfile.mkdtemp(dir=self.root, prefix=STAGED_PREFIX))
            digests = {}
            for path in map(Path, result.artifacts):
                shutil.copyfile(path, staged / path.name)
                digests[path.name] = hashlib.sha256((staged / path.name).read_bytes()).hexdigest()
            kept = replace(result, artifacts=tuple(Path(path).name for path in result.artifacts))
            digests[RESULT_FILE] = _digest_of(kept)
            entry = {"result": kept.to_json(), "sha256": digests}
            (staged / RESULT_FILE).write_text(json.dumps(entry, indent=1))
            folder = self.root / result.key
            _remove(folder)
            staged.rename(folder)
        except OSError as error:
            logger.warning("cannot keep check %s under %s (%s)", result.key[:12], self.root, error)
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
            return replace(result, artifacts=())
        return replace(result, artifacts=tuple(str(folder / name) for name in kept.artifacts))

    def _sweep(self) -> None:
        """Remove what processes that were killed while they wrote an entry have left."""
        for folder in self.root.glob(f"{STAGED_PREFIX}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > SWEEP_AGE_S:
                    _remove(folder)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the key's lock, so that concurrent processes make an entry once; no lock where none can be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            stream = (self.root / f".{key}.lock").open("w")
        except OSError:
            yield
            return
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _remove(path: Path) -> None:
    """Remove the folder, file or link `path`, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _digest_of(result: CheckResult) -> str:
    return hashlib.sha256(json.dumps(result.to_json(), sort_keys=True).encode()).hexdigest()
