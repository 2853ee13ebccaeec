"""Putting files and folders in place so that a reader sees all of them or none: link or copy, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the entries of `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` by a file holding `text`; a reader sees the old file or the new one, whatever happens."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` (links followed) by a hard link, or a durable copy where that fails."""
    source = source.resolve(strict=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def link_tree(source: Path, target: Path) -> None:
    """Make the new folder `target` hold the files below `source`, linked where possible; folders become durable."""
    target.mkdir()
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            link_tree(entry, target / entry.name)
        else:
            link_or_copy(entry, target / entry.name)
    sync_directory(target)


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, blocking: bool = True) -> Iterator[bool]:
    """Hold an advisory lock on the file `path` (made if absent); yields False when `blocking` is off and it is taken.

    The lock goes with the process, so a killed owner leaves none behind.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
