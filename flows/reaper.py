"""No process outlives the command that started it, even when that command is killed with SIGKILL.

The command marks its environment, which every descendant inherits (Prefect's server, compilers, workers), and starts
a watcher in a session of its own that waits on a pipe. When the command ends, however it ends, the pipe closes and
the watcher ends what still carries the mark. Linux only, as PyPTO itself is: it reads `/proc`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "PYPTO_DEPLOY_RUN"
GRACE_S = 3.0
_POLL_S = 0.1


@contextmanager
def no_orphans() -> Iterator[None]:
    """End every process started inside the block when this process ends or the block is left; nests as one."""
    if MARK in os.environ:
        yield
        return
    mark = os.environ[MARK] = uuid.uuid4().hex
    read_end, write_end = os.pipe()
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "flows.reaper", mark], stdin=read_end, start_new_session=True, close_fds=True
        )
        os.close(read_end)
        yield
    finally:
        del os.environ[MARK]
        os.close(write_end)
        watcher.wait()


def marked(mark: str) -> list[int]:
    """Processes whose start environment carries the mark, this one excepted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if wanted in variables:
            found.append(int(entry.name))
    return found


def end_marked(mark: str) -> None:
    """Send SIGTERM to the marked processes, and SIGKILL to those that are still there after the grace time."""
    for signal_number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + grace_s
        for pid in marked(mark):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def main() -> None:
    """Watch: wait for the end of standard input, then end what carries the mark given as argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        continue
    end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
