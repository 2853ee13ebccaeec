"""What a resumed run must find unchanged: the source's files and the code that writes.

Reading gigabytes to see whether they are the same would cost as much as the work itself, so the source is known by what
the file system says of its shards: which file, how long, when written, when changed. Any write moves the last; a copy
elsewhere is another source, and work on it starts anew.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError

FileState = tuple[str, int, int, int, int]


def source_state(reader: CheckpointReader) -> list[FileState]:
    """Name, inode, size, and times of last write and last change (ns) of every shard, links followed."""
    state = []
    for path in sorted({info.file for info in reader.infos.values()}):
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        state.append((path.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return state


def check_unchanged(reader: CheckpointReader, before: list[FileState]) -> None:
    """Raise CheckpointError when a shard is not what it was at `before`: the output would mix two sources."""
    changed = [old[0] for old, new in zip(before, source_state(reader), strict=True) if old != new]
    if changed:
        raise CheckpointError(
            f"{reader.directory}: {', '.join(changed)} changed while being read; quantize again once nothing writes "
            "there"
        )


@cache
def code_digest() -> str:
    """sha256 (hex) over the sources of this package: work that other code began is not carried on."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.rglob("*.py"), *folder.glob("csrc/*")]):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def work_identity(state: list[FileState], recipe_digest: str) -> str:
    """The `resume_key` of writing what `recipe_digest` makes of the source in `state`."""
    content = json.dumps([state, recipe_digest, code_digest()])
    return hashlib.sha256(content.encode()).hexdigest()
