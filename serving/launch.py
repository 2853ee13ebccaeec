"""Start a worker process, wait until it serves, and stop it again."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ServingError
from serving.executor import ExecutorKind

POLL_S = 0.05
STOP_TIMEOUT_S = 60.0
_LOG_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class LaunchedWorker:
    """A worker that answers requests."""

    url: str
    pid: int
    digest: str


@contextmanager
def launched_worker(
    store_root: Path, ref: str, *, executor: ExecutorKind = "cpu", timeout_s: float = 600.0
) -> Iterator[LaunchedWorker]:
    """A worker process that serves `ref` (alias, digest or bundle folder) on a free loopback port inside the block.

    Raises ServingError with the end of the worker's log when it ends early or is not ready after `timeout_s`. The
    worker is stopped gracefully at the end of the block, and killed if that takes more than a minute.
    """
    with tempfile.TemporaryDirectory(prefix="pypto-deploy-worker-") as folder:
        ready_file, log_file = Path(folder) / "ready.json", Path(folder) / "log"
        command = [sys.executable, "-m", "serving.worker", "--store", str(store_root), "--ref", ref, "--port", "0"]
        command += ["--executor", executor, "--ready-file", str(ready_file)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _await_ready(process, ready_file, log_file, timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log_file: Path, timeout_s: float
) -> LaunchedWorker:
    deadline = time.monotonic() + timeout_s
    while not ready_file.exists():
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            tail = log_file.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]
            state = f"ended with exit code {code}" if code is not None else f"was not ready after {timeout_s:g} s"
            raise ServingError(f"the worker {state}; the end of its log:\n{tail}")
        time.sleep(POLL_S)
    ready = json.loads(ready_file.read_text())
    return LaunchedWorker(url=ready["url"], pid=ready["pid"], digest=ready["digest"])
