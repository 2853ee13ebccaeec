"""The CPU executor: W8A8 with exact INT32 sums, on mapped slabs and a paged BF16 cache.

It checks and lays out a batch, and hands it to one of two backends that compute the same step: `native` (C++, one call)
or `torch` (the golden's arithmetic). This module knows nothing of instruction sets or compilers.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.slabs import Slabs
from serving.errors import ExecutorError
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.kv_codec import open_codec
from serving.executor.native import NativeStep, default_threads
from serving.executor.native_build import NativeUnavailableError
from serving.executor.step import StepRows, plan_step
from serving.executor.torch_step import TorchStep

logger = logging.getLogger(__name__)

BackendName = Literal["native", "torch"]


class StepBackend(Protocol):
    """Computes one step: writes keys and values into the caches and the wanted rows into `logits`."""

    name: str

    def forward(self, rows: StepRows, logits: Tensor) -> None:
        """Run `rows`; `logits` is FP32 `[len(rows.logit_rows), real_vocab]`, filled in place."""
        ...

    def close(self) -> None:
        """Release what the backend holds."""
        ...


class CpuExecutor:
    """An `Executor` on the CPU; `backend` and `instruction_set` say what computes.

    `backend=None` takes the native step and falls back to torch with one warning when it cannot be built;
    `backend="native"` raises NativeUnavailableError instead. `threads=None` takes the cores free now, at most 8. `kv`
    names how keys and values are kept (`kernels.kv_format.KV_FORMATS`).
    """

    def __init__(
        self,
        slabs: Slabs,
        num_pages: int,
        threads: int | None = None,
        backend: BackendName | None = None,
        instruction_set: str | None = None,
        kv: str = "bf16",
    ) -> None:
        if num_pages < 1:
            raise ExecutorError(f"num_pages is {num_pages}; expected at least 1")
        if threads is not None and threads < 1:
            raise ExecutorError(f"threads is {threads}; expected at least 1, or none to use the free cores")
        if backend not in (None, "native", "torch"):
            raise ExecutorError(f"backend is {backend!r}; expected 'native', 'torch' or none for the best available")
        self.config = slabs.config
        self.num_pages = num_pages
        self.max_context_tokens = slabs.tensors["rope_cos"].shape[0]
        self.threads = threads if threads is not None else default_threads()
        self.kv = kv
        self._codec = open_codec(kv, slabs.config)
        self._lock = threading.Lock()
        slots = self.config.num_layers * num_pages * PAGE_TOKENS
        self._k_cache = _lazy_zeros_bf16(slots, self.config.kv_size)
        self._v_cache = _lazy_zeros_bf16(slots, self.config.kv_size)
        self._step: StepBackend | None = self._open_backend(slabs, backend, instruction_set)
        self.backend = self._step.name
        self.instruction_set = getattr(self._step, "instruction_set", "")
        logger.info("CPU executor: %s %s, %d threads", self.backend, self.instruction_set, self.threads)

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """Run `batch` and return logits FP32 `[rows, real_vocab]`; see `serving.executor.base.Executor.forward`."""
        rows = plan_step(batch, self.config, self.num_pages, self.max_context_tokens)
        logits = torch.empty(rows.logit_rows.shape[0], self.config.vocab_size, dtype=torch.float32)
        with self._lock:
            if self._step is None:
                raise ExecutorError("the executor is closed")
            if rows.count:
                self._step.forward(rows, logits)
        return logits

    def close(self) -> None:
        """Release weights, cache and threads; calling it again does nothing."""
        with self._lock:
            if self._step is not None:
                self._step.close()
                self._step = None
                self._k_cache = self._v_cache = torch.empty(0, dtype=torch.bfloat16)

    def _open_backend(self, slabs: Slabs, backend: BackendName | None, instruction_set: str | None) -> StepBackend:
        if backend != "torch":
            try:
                return NativeStep(slabs, self._k_cache, self._v_cache, self.threads, instruction_set, self._codec)
            except NativeUnavailableError as error:
                if backend == "native":
                    raise
                logger.warning(
                    "the native CPU step is not available, using torch, which is many times slower: %s", error
                )
        return TorchStep(slabs, self._k_cache, self._v_cache, self._codec)


def _lazy_zeros_bf16(rows: int, columns: int) -> Tensor:
    """Zeros BF16 `[rows, columns]` that take memory only where they are written, unlike torch.zeros."""
    memory = mmap.mmap(-1, rows * columns * torch.bfloat16.itemsize)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(rows, columns)
