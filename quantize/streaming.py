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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from quantize.budget import WorkPlan
from quantize.checkpoint_writer import CheckpointWriter, TensorStream
from quantize.errors import CheckpointError, NonFiniteWeightError
from quantize.hashing import new_hash, update_both
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


class _Work:
    """The jobs of a run, shared by its workers: which are left, which still matter, what came of them."""

    def __init__(self, jobs: Sequence[TensorJob]) -> None:
        self.jobs = jobs
        self.events: queue.SimpleQueue[int | Future[None]] = queue.SimpleQueue()
        self.sums: dict[int, RowSums] = {}
        self.refusals: dict[int, NonFiniteWeightError] = {}
        self._order = deque(sorted(range(len(jobs)), key=lambda number: -jobs[number].info.nbytes))
        self._limit = len(jobs)
        self._mutex = threading.Lock()

    def take(self) -> int | None:
        """The number of the next job, largest first; None when none is left that matters."""
        with self._mutex:
            while self._order:
                number = self._order.popleft()
                if self.wanted(number):
                    return number
            return None

    def wanted(self, number: int) -> bool:
        """Whether job `number` is to go on."""
        return number < self._limit

    def refuse(self, number: int, error: NonFiniteWeightError) -> None:
        """Job `number` holds a bad weight: only those before it could hold one that is named in its place."""
        with self._mutex:
            self.refusals[number] = error
            self._limit = min(self._limit, number)

    def stop(self) -> None:
        """Let every worker end at its next block."""
        with self._mutex:
            self._limit = 0


Piece = tuple[TensorStream, memoryview]


class _Worker:
    """Handles two tensors at a time, block by block in turn, so that their hashes run together (see `hashing`)."""

    def __init__(
        self, work: _Work, writer: CheckpointWriter, kernel: RowKernel, rounding: Rounding, block_bytes: int
    ) -> None:
        self._work = work
        self._writer = writer
        self._kernel = kernel
        self._rounding = rounding
        self._block_bytes = block_bytes
        self._rows = Buffer(block_bytes)
        self._unreported_bytes = 0
        self._reported_s = time.monotonic()

    def run(self) -> None:
        """Take jobs until none is left; a thread's whole life."""
        lanes = [self._lane(Buffer(self._block_bytes)) for _ in range(2)]
        while lanes:
            pieces = [(lane, piece) for lane in lanes if (piece := next(lane, None)) is not None]
            lanes = [lane for lane, _ in pieces]
            hashed = [(stream.hash, view) for _, (stream, view) in pieces]
            if len(hashed) == 2:
                update_both(*hashed[0], *hashed[1])
            elif hashed:
                hashed[0][0].update(hashed[0][1])
            for _, (stream, view) in pieces:
                stream.put(view)
        self._report(0, now=True)

    def _report(self, done_bytes: int, *, now: bool = False) -> None:
        """Count source bytes as done; passed on from time to time, since every event wakes another thread."""
        self._unreported_bytes += done_bytes
        time_s = time.monotonic()
        if self._unreported_bytes and (now or time_s - self._reported_s > PROGRESS_INTERVAL_S):
            self._work.events.put(self._unreported_bytes)
            self._unreported_bytes, self._reported_s = 0, time_s

    def _lane(self, buffer: Buffer) -> Iterator[Piece]:
        """Do one job after another; yields what is to be hashed and written before it goes on."""
        while (number := self._work.take()) is not None:
            try:
                yield from self._job(number, self._work.jobs[number], buffer)
            except NonFiniteWeightError as error:
                self._work.refuse(number, error)

    def _job(self, number: int, job: TensorJob, buffer: Buffer) -> Iterator[Piece]:
        """Do job `number` unless an earlier run has."""
        name = job.info.name
        if self._writer.finished(name) and (not job.quantized or self._writer.finished(name + "_scale")):
            if job.quantized:
                self._work.sums[number] = RowSums(**self._writer.facts(name))
            self._report(job.info.nbytes)
            return
        descriptor = os.open(job.info.file, os.O_RDONLY)
        try:
            yield from (self._quantize if job.quantized else self._copy)(number, job, descriptor, buffer)
        finally:
            os.close(descriptor)

    def _quantize(self, number: int, job: TensorJob, descriptor: int, codes: Buffer) -> Iterator[Piece]:
        name, dtype = job.info.name, job.info.dtype
        row_count, columns = job.rows
        row_bytes = columns * DTYPES[dtype]
        scales = Buffer(row_count * DTYPES[dtype])
        stream = self._writer.stream(name, new_hash())
        sums = RowSums()
        step = max(1, self._block_bytes // row_bytes)
        for first in range(0, row_count, step):
            if not self._work.wanted(number):
                return
            count = min(step, row_count - first)
            view = self._rows.view[: count * row_bytes]
            read_block(descriptor, view, job.info.offset + first * row_bytes, job.info.file)
            rows = Rows(self._rows, dtype, first, count, columns)
            bad = self._kernel.quantize(rows, self._rounding, codes, scales, sums)
            if bad is not None:
                raise _non_finite(job, first * columns + bad, self._rows, bad)
            yield stream, codes.view[: count * columns]
            self._report(view.nbytes)
        if not self._writer.finished(name + "_scale"):
            scale_stream = self._writer.stream(name + "_scale")
            scale_stream.append(scales.view[: row_count * DTYPES[dtype]])
            scale_stream.finish()
        stream.finish(asdict(sums))
        self._work.sums[number] = sums

    def _copy(self, number: int, job: TensorJob, descriptor: int, buffer: Buffer) -> Iterator[Piece]:
        item_bytes = DTYPES[job.info.dtype]
        # As much to hash as a quantized block of BF16 leaves, so that two lanes keep step.
        step = max(item_bytes, self._block_bytes // 2 // item_bytes * item_bytes)
        stream = self._writer.stream(job.info.name, new_hash())
        for start in range(0, job.info.nbytes, step):
            if not self._work.wanted(number):
                return
            view = buffer.view[: min(step, job.info.nbytes - start)]
            read_block(descriptor, view, job.info.offset + start, job.info.file)
            bad = self._kernel.first_non_finite(buffer, view.nbytes // item_bytes, job.info.dtype)
            if bad is not None:
                raise _non_finite(job, start // item_bytes + bad, buffer, bad)
            yield stream, view
            self._report(view.nbytes)
        stream.finish()


def check_finite(infos: Iterable[TensorInfo], kernel: RowKernel) -> None:
    """Read tensors block by block; raises NonFiniteWeightError for the first NaN or infinity in their order.

    For algorithms that reach a weight long after they began.
    """
    buffer = Buffer(kernel.block_bytes)
    for info in infos:
        job, item_bytes = TensorJob(info, quantized=False), DTYPES[info.dtype]
        step = kernel.block_bytes // item_bytes * item_bytes
        descriptor = os.open(info.file, os.O_RDONLY)
        try:
            for start in range(0, info.nbytes, step):
                view = buffer.view[: min(step, info.nbytes - start)]
                read_block(descriptor, view, info.offset + start, info.file)
                bad = kernel.first_non_finite(buffer, view.nbytes // item_bytes, info.dtype)
                if bad is not None:
                    raise _non_finite(job, start // item_bytes + bad, buffer, bad)
        finally:
            os.close(descriptor)


def _non_finite(job: TensorJob, element: int, buffer: Buffer, place: int) -> NonFiniteWeightError:
    """The refusal of element number `element` of the tensor, which lies at `place` in the buffer."""
    item_bytes = DTYPES[job.info.dtype]
    value = element_value(buffer.view[place * item_bytes : (place + 1) * item_bytes], job.info.dtype)
    row, column = divmod(element, job.rows[1])
    return NonFiniteWeightError(
        f"{job.info.name}: row {row}, column {column} holds {value}; every weight must be finite: get a sound copy of "
        "the checkpoint"
    )


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
    work = _Work(jobs)
    threads = max(1, min(plan.workers, len(jobs)))
    workers = [_Worker(work, writer, kernel, rounding, plan.block_bytes) for _ in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool:
        try:
            futures = [pool.submit(worker.run) for worker in workers]
            for future in futures:
                future.add_done_callback(work.events.put)
            _follow(work, threads, progress)
        except BaseException:
            work.stop()
            raise
    # A refusal comes before trouble of other kinds: it is the one that repeats.
    if work.refusals:
        raise work.refusals[min(work.refusals)]
    for future in futures:
        future.result()
    return {jobs[number].info.name: sums for number, sums in work.sums.items()}


def _follow(work: _Work, running: int, progress: Progress | None) -> None:
    """Report progress until every worker has ended; one that fails ends them all."""
    total_bytes = sum(job.info.nbytes for job in work.jobs)
    done_bytes, reported_s = 0, -math.inf
    while running:
        event = work.events.get()
        if isinstance(event, Future):
            running -= 1
            if event.exception() is not None:
                work.stop()
            continue
        done_bytes += event
        if progress is not None and (done_bytes == total_bytes or time.monotonic() - reported_s > PROGRESS_INTERVAL_S):
            reported_s = time.monotonic()
            progress(done_bytes, total_bytes)
