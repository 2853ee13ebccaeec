"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it holds is cleaned up first.

Their default action ends the process at once, and the folders of running checks, some hundred megabytes each, stay.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupted_by_signals"]

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGTERM and SIGHUP, and exit with 128 + signal when it has ended.

    A signal that is ignored (`nohup`) stays ignored. A second one during the clean-up is ignored; Ctrl-C is not.
    """
    owner, received = os.getpid(), list[int]()

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork inherits the handler, but not the clean-up
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    handled = [number for number in _NUMBERS if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    except BaseException:
        if not received:
            raise
    if received:
        sys.exit(128 + received[0])
