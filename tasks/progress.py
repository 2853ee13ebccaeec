"""How a step tells of its progress, without knowing who listens.

A step calls `advance(done, total)` or `note(text)`; the command line installs a listener, a deployment run does not.
The listener is process-wide, since Prefect may run a task in another thread than the flow's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class ProgressListener(Protocol):
    """What the command line implements to draw progress."""

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` units (bytes, windows, requests) of the running step are finished."""

    def note(self, text: str) -> None:
        """A short remark on what the running step does now."""


class LogListener:
    """The default listener: remarks go to the log, counts are dropped."""

    def advance(self, done: int, total: int) -> None:
        """Counts are too many for a log."""

    def note(self, text: str) -> None:
        """Log the remark."""
        logger.info("%s", text)


_listener: ProgressListener = LogListener()


@contextmanager
def listening(listener: ProgressListener) -> Iterator[None]:
    """Send progress to `listener` inside the block."""
    global _listener
    previous, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = previous


def advance(done: int, total: int) -> None:
    """Report that `done` of `total` units of the running step are finished."""
    _listener.advance(done, total)


def note(text: str) -> None:
    """Report a short remark on what the running step does now."""
    _listener.note(text)
