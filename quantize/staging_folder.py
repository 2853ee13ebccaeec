"""Folders that become their target by one rename: until then hidden beside it, afterwards whole.

`StagingFolder` is for work that is repeated when interrupted; `ResumableFolder` survives a kill under a name that the
next run finds. A lock on the folder tells a living writer from a dead one; it goes with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import secrets
import shutil
from pathlib import Path

from quantize.errors import CheckpointError

JOURNAL_NAME, SCRATCH_NAME, KEY_NAME = "journal.jsonl", "scratch", "key"
logger = logging.getLogger(__name__)


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WORK_SUFFIXES = (".partial", ".search")
"""What unfinished work on `OUT` is called: `.OUT` and one of these."""


def work_folder(out: Path, suffix: str) -> Path:
    """The hidden folder beside `out` for unfinished work; `suffix` is one of `WORK_SUFFIXES`."""
    return out.parent / f".{out.name}{suffix}"


def sweep_finished(out: Path) -> None:
    """Remove what a writer that was killed right after putting `out` in place left beside it.

    Such a folder holds no checkpoint any more; one that does, or anything unknown, or has a living writer, stays.
    """
    for suffix in WORK_SUFFIXES:
        folder = work_folder(out, suffix)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if all(_is_spent(path) for path in folder.iterdir()):
                logger.info("removing %s, left by a run that had finished", folder)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _is_spent(path: Path) -> bool:
    """Whether this is bookkeeping of finished work."""
    if path.name == SCRATCH_NAME:
        return True
    return path.is_file() and (path.name in (JOURNAL_NAME, KEY_NAME) or path.suffix in (".json", ".new"))


def check_target(out: Path) -> None:
    """Refuse a place that holds anything; an empty folder is fine."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        sweep_finished(out)
        raise CheckpointError(f"{out}: exists already; remove it or choose another place")


def put_in_place(folder: Path, out: Path) -> None:
    """Flush `folder` and what it holds, and rename it to `out`."""
    for path in folder.iterdir():
        fsync_path(path)
    fsync_path(folder)
    try:
        folder.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be put in place: {error.strerror}") from error
    fsync_path(out.parent)


def _remove_leftovers(out: Path) -> None:
    """Remove the staging folders of `out` whose writers are dead."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.info("removing %s, left by an interrupted run", path)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            logger.warning("%s belongs to a running writer of the same target", path)
        finally:
            os.close(descriptor)


def claim_folder(folder: Path, out: Path) -> int:
    """Lock `folder`, made if absent, for work on `out`; returns the descriptor that holds the lock.

    Tries again when a finishing writer removed it meanwhile; raises CheckpointError when a living one has it.
    """
    while True:
        # Not `exist_ok`, which fails when the folder is removed right after it was found there.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"{out}: another process is writing it (into {folder}); wait for it, or choose another place"
            ) from None
        os.close(descriptor)


class StagingFolder:
    """A hidden folder beside `out` that becomes `out` by `commit`, or vanishes by `discard`."""

    def __init__(self, out: Path) -> None:
        check_target(out)
        self.out = out
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(out)
            self.path, self._lock = self._make()
        except OSError as error:
            raise CheckpointError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error

    def _make(self) -> tuple[Path, int]:
        """Make and lock the folder; once more when another writer took it for a leftover before it was locked."""
        while True:
            path = self.out.parent / f".{self.out.name}.partial-{secrets.token_hex(6)}"
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)

    def commit(self) -> None:
        """Make everything durable and give the folder its name."""
        put_in_place(self.path, self.out)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove the folder and all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class ResumableFolder:
    """A staging folder that the next writer of `out` finds again: `.OUT.partial/checkpoint` becomes `out`.

    Beside `checkpoint` lies the journal of what is finished. One writer at a time: a second one is refused while the
    first lives, and takes over from it when it is dead.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._root = work_folder(out, ".partial")
        self.path = self._root / "checkpoint"
        self.journal_path = self._root / JOURNAL_NAME
        self.scratch_path = self._root / SCRATCH_NAME
        check_target(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(out)
            self._lock = claim_folder(self._root, out)
            try:
                check_target(out)  # a writer that has just finished may have put it in place
                self.path.mkdir(exist_ok=True)
            except BaseException:
                self.discard()
                raise
        except OSError as error:
            raise CheckpointError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error

    def allocated_bytes(self) -> int:
        """Disk space that the files in the folder take already."""
        return sum(path.stat().st_blocks * 512 for path in self.path.iterdir())

    def clear(self) -> None:
        """Remove what an earlier writer left: files and journal."""
        self.journal_path.unlink(missing_ok=True)
        shutil.rmtree(self.path)
        self.path.mkdir()

    def commit(self) -> None:
        """Make everything durable, give the folder its name and remove the journal."""
        put_in_place(self.path, self.out)
        self.discard()

    def discard(self) -> None:
        """Remove everything that is not in place."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)

    def keep(self) -> None:
        """Leave everything for the next writer of the same target."""
        os.close(self._lock)
