"""Where a search keeps its candidates: records of all, the checkpoint of the best one only.

A hidden folder beside the target, `.OUT.search`, with a file for each candidate that is made and judged. An interrupted
search finds it again and goes on behind them; one with another key (source, text, recipe, code) clears it first. A lock
keeps a second search for the same target out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from quantize.checkpoint import payload_digest
from quantize.errors import CheckpointError, WriteError
from quantize.staging_folder import KEY_NAME, check_target, claim_folder, put_in_place, work_folder

SEARCH_NAME = "search.json"


class CandidateFolder:
    """The candidates of one search for `out`, by name; use as a context manager."""

    def __init__(self, out: Path, key: str) -> None:
        self._out = out
        self._root = work_folder(out, ".search")
        check_target(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = claim_folder(self._root, out)
            try:
                check_target(out)  # a search that has just finished may have put it in place
                self._open(key)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise WriteError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error

    def _open(self, key: str) -> None:
        kept = self._root / KEY_NAME
        if not kept.is_file() or kept.read_text(errors="replace") != key:
            # The key comes last: a kill must not leave it beside candidates of another one.
            for path in self._root.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path != kept:
                    path.unlink()
            kept.write_text(key)

    def path(self, name: str) -> Path:
        """The place of a candidate's checkpoint, whether it is there or not."""
        return self._root / name

    def record(self, name: str) -> dict[str, Any] | None:
        """What was recorded of a candidate (JSON values), or None when it is not finished."""
        try:
            content = json.loads((self._root / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def save(self, name: str, record: Mapping[str, Any]) -> None:
        """Record a candidate that is made and judged; in one step, so that a kill leaves all of it or nothing."""
        fresh = self._root / f"{name}.new"
        try:
            fresh.write_text(json.dumps(record))
            fresh.replace(self._root / f"{name}.json")
        except OSError as error:
            raise WriteError(f"{self._out}: cannot be written: {error.strerror} ({fresh})") from error

    def drop(self, name: str) -> None:
        """Remove a candidate's checkpoint, and what a killed run left of it; its record stays."""
        shutil.rmtree(self.path(name), ignore_errors=True)

    def holds(self, name: str, digest: str) -> bool:
        """Whether the candidate's checkpoint is there and reads back as `digest`; all of it is hashed."""
        (self.path(name) / SEARCH_NAME).unlink(missing_ok=True)
        try:
            return payload_digest(self.path(name)) == digest
        except (CheckpointError, OSError):
            return False

    def commit(self, name: str, table: str) -> str:
        """Put a candidate in place with `table` as its `search.json`; removes the rest and returns the digest."""
        chosen = self.path(name)
        try:
            (chosen / SEARCH_NAME).write_text(table)
        except OSError as error:
            raise WriteError(f"{self._out}: cannot be written: {error.strerror} ({chosen})") from error
        digest = payload_digest(chosen)
        check_target(self._out)
        put_in_place(chosen, self._out)
        shutil.rmtree(self._root, ignore_errors=True)
        return digest

    def close(self) -> None:
        """Let go of the folder; without a single candidate begun it goes."""
        if self._root.is_dir() and all(path.name == KEY_NAME for path in self._root.iterdir()):
            shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> CandidateFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
