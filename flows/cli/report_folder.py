"""The folder that `--out` names, for reports: made before the work, and gone again when none was written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.cli.output import FailedError
from flows.cli.weights import refuse_existing
from flows.settings import UsageError

__all__ = ["report_folder", "writing_reports"]


@contextmanager
def report_folder(out: Path | None) -> Iterator[None]:
    """Hold the new or empty folder `out`, if one is named; what was made and is still empty at the end is removed.

    Raises UsageError before the block when `out` holds something, or cannot be made or written.
    """
    if out is None:
        yield
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        try:
            if made or not out.is_dir() or any(out.iterdir()):
                refuse_existing(out)
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out {out}: cannot be made ({error.strerror}); choose a folder that can be written"
            ) from None
        try:
            # Root may write where the mode says no, and nobody on a read-only file system: only a file tells.
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise UsageError(
                f"--out {out}: cannot be written ({error.strerror}); choose a folder that can be written"
            ) from None
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it holds reports, or something of another's
                folder.rmdir()


@contextmanager
def writing_reports(out: Path) -> Iterator[None]:
    """Say what was not written when the disk fills up in the block: the answer was printed before it."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"--out {out}: not all reports were written ({error}); the answer above is whole") from error
