"""What an interrupted writer had finished: one line of JSON a tensor, appended when its last byte is written.

The first line holds the key of the work: another key, and nothing of it is used. A line that a kill cut short ends the
journal, and is cut off before new lines come. The journal promises nothing about the disk: who reads it hashes the
tensors again before relying on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A finished tensor: sha256 of its payload (hex), and what the caller wants back with it (as JSON)."""

    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """Appends entries to the file at `path`; `entries` holds those found there under the same `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.entries: dict[str, Entry] = {}
        good_bytes = self._load(path, key)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._descriptor, good_bytes)
        if not good_bytes:
            self._append({"key": key})

    def _load(self, path: Path, key: str) -> int:
        """Read entries up to the first line that is none; returns the bytes of what was read, 0 for another key."""
        if not path.exists():
            return 0
        position = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                content = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                content = None
            if not isinstance(content, dict):
                break
            if position == 0:
                if content != {"key": key}:
                    return 0
            elif set(content) == {"tensor", "sha256", "facts"}:
                self.entries[content["tensor"]] = Entry(content["sha256"], content["facts"])
            else:
                break
            position += len(line)
        return position

    def _append(self, content: Mapping[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(content) + "\n").encode())

    def add(self, tensor: str, entry: Entry) -> None:
        """Record a finished tensor; one write, so that a kill leaves a line or the start of one."""
        self._append({"tensor": tensor, "sha256": entry.sha256, "facts": dict(entry.facts)})
        self.entries[tensor] = entry

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
