"""How much memory and how many cores a run may use, and what follows for its workers and blocks."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from quantize.errors import BudgetError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)
SPARE_BYTES = 24 * 10**6
"""Kept out of the budget's buffers: thread stacks, file tables, what the interpreter allocates meanwhile."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def parse_bytes(text: str) -> int:
    """Bytes of `600M`, `2G`, `1.5GiB` or a plain number; suffixes are decimal, those with `i` binary.

    Raises BudgetError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * UNITS[(match[2] or "").upper()])
    if size < 1:
        raise BudgetError(f"{text[:40]!r} is no size; expected a number of bytes, or one such as 600M, 2G or 1GiB")
    return size


def _quota_cores(root: Path, group: str) -> float:
    """The least CPU quota, in cores, of a control group (version 2) and those above it; infinite without one."""
    least = math.inf
    folder = root / group.lstrip("/")
    while True:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                least = min(least, int(quota) / int(period))
        except (OSError, ValueError):
            pass
        if folder == root or root not in folder.parents:
            return least
        folder = folder.parent


def usable_cores(root: Path = CGROUP_ROOT) -> int:
    """Cores that this process may use: those of its CPU affinity, at most its control group's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    quota = _quota_cores(root, group)
    return cores if math.isinf(quota) else max(1, min(cores, math.ceil(quota)))


def resident_bytes() -> int:
    """Resident memory of this process now; 0 where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass(frozen=True)
class WorkPlan:
    """How many workers run, and the bytes of source that each holds at a time."""

    workers: int
    block_bytes: int


def plan_work(
    memory_bytes: int | None,
    workers: int,
    block_bytes: int,
    bytes_per_block_byte: float,
    row_bytes: int,
    resident: int,
) -> WorkPlan:
    """Fit workers and blocks into `memory_bytes` of resident memory for the whole process (None: no bound is set).

    `block_bytes` is the size that runs best, `bytes_per_block_byte` what a worker allocates for each byte of a block,
    `row_bytes` the widest row: a block holds one at least. `resident` is what the process takes before. Smaller blocks
    come first, fewer workers after. Raises BudgetError naming the least budget that works.
    """
    if workers < 1:
        raise BudgetError(f"{workers} workers: expected at least 1")
    block_bytes = max(block_bytes, row_bytes)
    if memory_bytes is None:
        return WorkPlan(workers, block_bytes)
    left = memory_bytes - resident - SPARE_BYTES
    for count in range(workers, 0, -1):
        fitting = int(left / (count * bytes_per_block_byte))
        if fitting >= row_bytes:
            return WorkPlan(count, min(block_bytes, fitting))
    least = math.ceil(resident + SPARE_BYTES + row_bytes * bytes_per_block_byte)
    raise BudgetError(
        f"{memory_bytes} bytes of memory are too few: the process takes {resident}, and one row of {row_bytes} bytes "
        f"with what computing it needs makes {least}; expected at least {math.ceil(least / 10**6)}M"
    )
