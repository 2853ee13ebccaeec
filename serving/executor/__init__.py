"""Executors: the arithmetic behind the engine. `open_executor` picks one by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kernels.kv_format import parse_kv_format
from kernels.slabs import load_slabs
from serving.errors import ExecutorError
from serving.executor.base import Chunk, Executor

DEFAULT_NUM_PAGES = 256

__all__ = ["Chunk", "Executor", "ExecutorKind", "open_executor"]

ExecutorKind = Literal["cpu", "torch", "pypto"]


def open_executor(
    slabs_dir: Path,
    kind: ExecutorKind = "cpu",
    num_pages: int | None = None,
    threads: int | None = None,
    kv: str = "bf16",
) -> Executor:
    """Open an executor on the slabs of `slabs_dir` with `num_pages` KV pages (256 by default).

    `cpu` is the native step (or torch, with a warning, where it cannot be built), `torch` the exact torch step, `pypto`
    the PyPTO programs. `threads=None` takes the cores that are free now, at most 8. `kv` names how the cache keeps keys
    and values (`kernels.kv_format.KV_FORMATS`). Raises ExecutorError for an unknown kind and
    kernels' errors for an unknown format and for slabs that cannot be loaded.
    """
    if kind not in ("cpu", "torch", "pypto"):
        raise ExecutorError(f"executor kind is {kind!r}; expected 'cpu', 'torch' or 'pypto'")
    parse_kv_format(kv)
    slabs = load_slabs(slabs_dir)
    pages = DEFAULT_NUM_PAGES if num_pages is None else num_pages
    if kind == "pypto":
        from serving.executor.pypto import PyptoExecutor

        return PyptoExecutor(slabs, pages, kv=kv)
    from serving.executor.cpu import CpuExecutor

    return CpuExecutor(slabs, pages, threads, backend="torch" if kind == "torch" else None, kv=kv)
