"""Checks side by side: a few workers, bounded by memory, stopped together.

A worker is a thread that waits for a subprocess. What a check will hold is reckoned from its arguments before it
starts, and it starts when that fits beside the others; the largest, which would not fit at all, run alone. Work that
is stopped (an interrupt, an error of another check) ends its subprocesses before the pool returns. This module knows
nothing of programs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kernels.errors import ToolchainError
from quantize.budget import CGROUP_ROOT

__all__ = ["CheckPool", "available_bytes", "checked_workers", "total_bytes"]

Result = TypeVar("Result")

MEMORY_SHARE = 0.8
"""Part of the memory that is free at the start which checks may hold together; the rest is for those who come later."""


class CheckPool:
    """Up to `workers` pieces of work at once, which together hold at most `memory_bytes` unless one runs alone.

    `stopped` is set when the pool gives up: work that waits for something long must look at it.
    """

    def __init__(self, workers: int, memory_bytes: int | None = None) -> None:
        self.workers = workers
        self.memory_bytes = int(available_bytes() * MEMORY_SHARE) if memory_bytes is None else memory_bytes
        self.stopped = threading.Event()
        self._changed = threading.Condition()
        self._held: list[int] = []

    def run(self, work: Sequence[Callable[[], Result]]) -> list[Result]:
        """Do all of `work`; results in its order. The first exception stops the rest and is raised."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="check") as threads:
            futures = [threads.submit(piece) for piece in work]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    if (error := future.exception()) is not None:
                        raise error
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                self._stop()
                raise

    @contextmanager
    def holding(self, peak_bytes: int) -> Iterator[None]:
        """Wait until `peak_bytes` fit beside what runs, or nothing runs; raises ToolchainError when the pool stops."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped.is_set() or self._fits(peak_bytes))
            if self.stopped.is_set():
                raise ToolchainError("stopped before it started")
            self._held.append(peak_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(peak_bytes)
                self._changed.notify_all()

    def _fits(self, peak_bytes: int) -> bool:
        return not self._held or sum(self._held) + peak_bytes <= self.memory_bytes

    def _stop(self) -> None:
        self.stopped.set()
        with self._changed:
            self._changed.notify_all()


def checked_workers(workers: int | None, cores: int) -> int:
    """`workers`, or one a core when None; raises ToolchainError for less than one."""
    if workers is not None and workers < 1:
        raise ToolchainError(f"{workers} workers: expected at least 1")
    return workers or cores


def total_bytes(root: Path = CGROUP_ROOT) -> int:
    """Memory of the machine, at most what the control group allows."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int((root / "memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or none with a limit ("max")
        return total


def available_bytes(root: Path = CGROUP_ROOT) -> int:
    """Memory that can be taken without swapping: what the system has free, at most what the control group allows."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or none with a limit ("max")
        return free
    return max(0, min(free, limit))
