"""One subprocess of `kernels.program_runner`: its folder, environment, deadline and end.

PyPTO writes its output, logs and caches wherever environment variables say, so all of them point into a temporary
folder that is removed afterwards. A subprocess that overruns is killed with its whole process group.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels.errors
from kernels.errors import ProgramError, ToolchainError
from kernels.verdict import read_error_log

SYSTEM_PATH = "/usr/bin:/bin"
"""First on PATH: PyPTO's reporting scripts run `python3` from there, and one with matplotlib draws for 20 seconds.

The compiler it calls for every program, `g++`, may stand elsewhere, so the caller's PATH follows.
"""
FOLDER_PREFIX = "pypto-run-"
LOCK_FILE = "owner.lock"
SWEEP_AGE_S = 60.0
MIN_FREE_BYTES = 256 << 20
"""Least room on the disk for a request to start: PyPTO writes some hundred megabytes for a small shape."""
FULL_BYTES = 16 << 20
"""Less than this left after a failure: the disk is full, whatever the failure says."""
_POLL_S = 0.1
_DROPPED = ("ASCEND_HOME_PATH", "PYTHONHOME", "LD_PRELOAD")


@dataclass(frozen=True)
class Finished:
    """A subprocess that carried its request out: the result it wrote, its stdout, and PyPTO's output folder."""

    result: dict[str, Any]
    stdout: str
    output: Path


@contextmanager
def runner_folder() -> Iterator[Path]:
    """A temporary folder for one request, removed at the end with everything PyPTO wrote.

    Folders whose owner was killed are removed on the way: each holds a lock as long as its owner lives. Raises
    ToolchainError when the disk has no room for a request.
    """
    _sweep_abandoned(Path(tempfile.gettempdir()))
    if lack := lack_of_space(Path(tempfile.gettempdir()), MIN_FREE_BYTES):
        raise ToolchainError(lack)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder,
        (Path(folder) / LOCK_FILE).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def lack_of_space(folder: Path, least_bytes: int) -> str:
    """What is wrong and what to do, when less than `least_bytes` are free on the disk of `folder`; otherwise empty."""
    free = shutil.disk_usage(folder).free
    if free >= least_bytes:
        return ""
    return (
        f"the disk of {folder} has {free / 1e6:.0f} MB free, of {least_bytes / 1e6:.0f} MB that are needed at least; "
        "make room, or set TMPDIR to a folder on another disk"
    )


def _sweep_abandoned(parent: Path) -> None:
    """Remove request folders older than a minute whose lock nobody holds."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < SWEEP_AGE_S or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK_FILE).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def check_timeout(timeout_s: float) -> None:
    """Raise ToolchainError for what is no number of seconds to wait."""
    if not 0 < timeout_s < math.inf:
        raise ToolchainError(f"a timeout of {timeout_s} s: expected a number of seconds above 0")


def run_request(
    folder: Path, request: Mapping[str, Any], timeout_s: float, stopped: threading.Event | None = None
) -> Finished:
    """Carry `request` out in a subprocess working in `folder`.

    Raises ToolchainError for a timeout that is no time, or when it overruns `timeout_s` or `stopped` is set meanwhile
    (its process group is killed first), and ProgramError when it fails, with the reason from its output and from
    PyPTO's log.
    """
    check_timeout(timeout_s)
    output, logs = folder / "output", folder / "log"
    for path in (output, logs, folder / "home"):
        path.mkdir(exist_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "kernels.program_runner", str(folder)]
    with (folder / "stdout").open("w+") as stdout, (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(folder, output, logs),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            _wait(process, timeout_s, stopped)
        finally:
            _kill_group(process)
        printed, complained = (
            (folder / "stdout").read_text(errors="replace"),
            (folder / "stderr").read_text(errors="replace"),
        )
    result = folder / "result.json"
    if process.returncode != 0 or not result.is_file():
        reason = _reason(complained) or f"exit status {process.returncode}"
        lack = lack_of_space(folder, FULL_BYTES)
        raise ProgramError("; ".join(part for part in (lack, reason, read_error_log(logs)) if part))
    return Finished(json.loads(result.read_text()), printed, output)


def _wait(process: subprocess.Popen[bytes], timeout_s: float, stopped: threading.Event | None) -> None:
    """Wait for the end of `process`; raises ToolchainError at the deadline, or when `stopped` is set."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            process.wait(left_s if stopped is None else min(_POLL_S, left_s))
            return
        except subprocess.TimeoutExpired:
            if stopped is not None and stopped.is_set():
                raise ToolchainError("stopped, and killed") from None
            if time.monotonic() >= deadline:
                raise ToolchainError(
                    f"did not end within {timeout_s:.0f} s and was killed; raise the timeout or check a smaller shape"
                ) from None


def _environment(folder: Path, output: Path, logs: Path) -> dict[str, str]:
    root = Path(kernels.errors.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    inherited = environment.get("PYTHONPATH", "")
    return {
        **environment,
        "PATH": os.pathsep.join(part for part in (SYSTEM_PATH, environment.get("PATH", "")) if part),
        "PYTHONPATH": os.pathsep.join(part for part in (str(root), inherited) if part),
        "TILE_FWK_OUTPUT_DIR": str(output),
        "ASCEND_WORK_PATH": str(logs),
        "ASCEND_PROCESS_LOG_PATH": str(logs),
        "PYPTO_HOME": str(folder / "home"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Subprocesses run side by side, and sums in one thread are the same whoever runs beside them.
        "OMP_NUM_THREADS": "1",
    }


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the subprocess's group (its scripts too) and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(stderr: str) -> str:
    """What went wrong, from a traceback: PyPTO's first complaint if there is one, for later errors follow from it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and "(+0x" not in line]
    first = [at for at, line in enumerate(lines) if line.startswith("ERROR:root:Record function")]
    raised = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
    if not first and not raised:
        return " ".join(lines[-2:])[:600]
    start = first[0] if first else raised[-1]
    return " ".join(lines[start : start + 2])[:600]
