"""Tensors from the source's shards to the new checkpoint, block by block, several tensors at a time.

Each worker reads a block of whole rows into its own buffer, quantizes it (or checks that it is finite), hashes the
result while it lies in the core's cache, and writes it at its final place: memory is a few blocks a worker, whatever
the size of a tensor or shard. Reads are `pread`s, not mappings, since mapped pages would count as resident.

A tensor is the unit of parallel work and of resuming; its blocks go in order, since its digest is one hash over them.
Large tensors start first, so that no worker is left alone with one at the end. What comes out does not depend on
the number of workers, the size of blocks or the order of work; neither does a refusal, which names the first bad
tensor in the source's order.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from quantize.budget import WorkPlan
from quantize.checkpoint_writer import CheckpointWriter
from quantize.errors import CheckpointError, NonFiniteWeightError
from quantize.row_kernel import Buffer, Rounding, RowKernel, Rows, RowSums, element_value
from quantize.safetensors_header import DTYPES, TensorInfo

Progress = Callable[[int, int], None]
PROGRESS_INTERVAL_S = 0.05


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the source: quantized into `name` and `name_scale`, or copied as it is."""

    info: TensorInfo
    quantized: bool

    @property
    def rows(self) -> tuple[int, int]:
        """The tensor as a matrix: rows and columns; a vector is one row."""
        shape = self.info.shape
        return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))

    @property
    def least_block_bytes(self) -> int:
        """The smallest block it can be handled in: a row when it is quantized, an element when it is copied."""
        return DTYPES[self.info.dtype] * (self.rows[1] if self.quantized else 1)


def read_block(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from a file at `offset`; raises CheckpointError when the file ends before."""
    while view:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(f"{path}: changed while being read: it ends at byte {offset}")
        view, offset = view[count:], offset + count


class _Worker:
    """Handles one tensor after another in buffers of its own."""

    def __init__(
        self,
        writer: CheckpointWriter,
        kernel: RowKernel,
        rounding: Rounding,
        block_bytes: int,
        advance: Callable[[int], None],
        wanted: Callable[[int], bool],
    ) -> None:
        self._writer = writer
        self._kernel = kernel
        self._rounding = rounding
        self._block_bytes = block_bytes
        self._advance = advance
        self._wanted = wanted
        self._rows = Buffer(block_bytes)
        self._codes = Buffer(block_bytes // 2)

    def run(self, number: int, job: TensorJob) -> RowSums | None:
        """Do job `number` unless an earlier run has; returns the sums of a quantized tensor.

        Stops between blocks when the job is no longer wanted.
        """
        name, scale_name = job.info.name, job.info.name + "_scale"
        if self._writer.finished(name) and (not job.quantized or self._writer.finished(scale_name)):
            self._advance(job.info.nbytes)
            return RowSums(**self._writer.facts(name)) if job.quantized else None
        if not job.info.nbytes:
            self._writer.stream(name).finish()
            return None
        descriptor = os.open(job.info.file, os.O_RDONLY)
        try:
            if job.quantized:
                return self._quantize(number, job, descriptor)
            self._copy(number, job, descriptor)
            return None
        finally:
            os.close(descriptor)

    def _quantize(self, number: int, job: TensorJob, descriptor: int) -> RowSums | None:
        name, dtype = job.info.name, job.info.dtype
        row_count, columns = job.rows
        row_bytes = columns * DTYPES[dtype]
        scales = Buffer(row_count * DTYPES[dtype])
        stream = self._writer.stream(name)
        sums = RowSums()
        step = max(1, self._block_bytes // row_bytes)
        for first in range(0, row_count, step):
            if not self._wanted(number):
                return None
            count = min(step, row_count - first)
            view = self._rows.view[: count * row_bytes]
            read_block(descriptor, view, job.info.offset + first * row_bytes, job.info.file)
            rows = Rows(self._rows, dtype, first, count, columns)
            bad = self._kernel.quantize(rows, self._rounding, self._codes, scales, sums)
            if bad is not None:
                raise self._non_finite(job, first * columns + bad, bad)
            stream.append(self._codes.view[: count * columns])
            self._advance(view.nbytes)
        if not self._writer.finished(name + "_scale"):
            scale_stream = self._writer.stream(name + "_scale")
            scale_stream.append(scales.view[: row_count * DTYPES[dtype]])
            scale_stream.finish()
        stream.finish(asdict(sums))
        return sums

    def _copy(self, number: int, job: TensorJob, descriptor: int) -> None:
        item_bytes = DTYPES[job.info.dtype]
        step = self._block_bytes - self._block_bytes % item_bytes
        stream = self._writer.stream(job.info.name)
        for start in range(0, job.info.nbytes, step):
            if not self._wanted(number):
                return
            view = self._rows.view[: min(step, job.info.nbytes - start)]
            read_block(descriptor, view, job.info.offset + start, job.info.file)
            bad = self._kernel.first_non_finite(self._rows, view.nbytes // item_bytes, job.info.dtype)
            if bad is not None:
                raise self._non_finite(job, start // item_bytes + bad, bad)
            stream.append(view)
            self._advance(view.nbytes)
        stream.finish()

    def _non_finite(self, job: TensorJob, element: int, place: int) -> NonFiniteWeightError:
        """The refusal of element number `element` of the tensor, which lies at `place` in the block."""
        item_bytes = DTYPES[job.info.dtype]
        value = element_value(self._rows.view[place * item_bytes : (place + 1) * item_bytes], job.info.dtype)
        row, column = divmod(element, job.rows[1])
        return NonFiniteWeightError(
            f"{job.info.name}: row {row}, column {column} holds {value}; every weight must be finite: get a sound copy "
            "of the checkpoint"
        )


class _Gate:
    """Which jobs still matter: all, those before the first refused one, or none."""

    def __init__(self, count: int) -> None:
        self._limit = count
        self._mutex = threading.Lock()

    def wanted(self, number: int) -> bool:
        """Whether job `number` is to go on."""
        return number < self._limit

    def refuse(self, number: int) -> None:
        """Job `number` holds a bad weight: only those before it could hold one that is named in its place."""
        with self._mutex:
            self._limit = min(self._limit, number)

    def stop(self) -> None:
        """Let every worker end at its next block."""
        with self._mutex:
            self._limit = 0


def stream_tensors(
    jobs: Sequence[TensorJob],
    writer: CheckpointWriter,
    kernel: RowKernel,
    rounding: Rounding,
    plan: WorkPlan,
    progress: Progress | None = None,
) -> Mapping[str, RowSums]:
    """Write every job's tensors to `writer`; returns the sums of the quantized ones by name.

    `progress(done_bytes, total_bytes)` counts source bytes and is called from the caller's thread. Raises
    NonFiniteWeightError for the first bad tensor in the order of `jobs`, CheckpointError when the source changes or the
    disk refuses. An interrupt ends the workers before it goes on.
    """
    gate = _Gate(len(jobs))
    events: queue.SimpleQueue[int | Future[RowSums | None]] = queue.SimpleQueue()
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    threads = max(1, min(plan.workers, len(jobs)))
    for _ in range(threads):
        idle.put(_Worker(writer, kernel, rounding, plan.block_bytes, events.put, gate.wanted))

    def run(number: int) -> RowSums | None:
        if not gate.wanted(number):
            return None
        worker = idle.get()
        try:
            return worker.run(number, jobs[number])
        except NonFiniteWeightError:
            gate.refuse(number)
            raise
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool:
        try:
            order = sorted(range(len(jobs)), key=lambda number: -jobs[number].info.nbytes)
            futures = {number: pool.submit(run, number) for number in order}
            for future in futures.values():
                future.add_done_callback(events.put)
            _follow(events, gate, len(jobs), sum(job.info.nbytes for job in jobs), progress)
        except BaseException:
            gate.stop()
            raise
    failures = {number: error for number in range(len(jobs)) if (error := futures[number].exception()) is not None}
    if failures:
        # A refusal comes before trouble of other kinds: it is the one that repeats.
        refusals = [number for number, error in failures.items() if isinstance(error, NonFiniteWeightError)]
        raise failures[min(refusals or failures)]
    sums = {jobs[number].info.name: futures[number].result() for number in range(len(jobs))}
    return {name: found for name, found in sums.items() if found is not None}


def _follow(
    events: queue.SimpleQueue[int | Future[RowSums | None]],
    gate: _Gate,
    running: int,
    total_bytes: int,
    progress: Progress | None,
) -> None:
    """Report progress until every job has ended; trouble that is no refusal of a weight ends them all."""
    done_bytes, reported_s = 0, -math.inf
    while running:
        event = events.get()
        if isinstance(event, Future):
            running -= 1
            if event.exception() is not None and not isinstance(event.exception(), NonFiniteWeightError):
                gate.stop()
            continue
        done_bytes += event
        if progress is not None and (done_bytes == total_bytes or time.monotonic() - reported_s > PROGRESS_INTERVAL_S):
            reported_s = time.monotonic()
            progress(done_bytes, total_bytes)
