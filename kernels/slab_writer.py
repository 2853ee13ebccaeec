"""Writing slabs to disk: one file, allocated once, every tensor written at its place as its source is read.

Sources are read one tensor at a time, layers outermost, so the peak memory is about one tensor. Codes and scales are
re-oriented, never recomputed. This module knows slabs and a checkpoint, not which contract asked for them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract import ResolvedSlab
from kernels.errors import StagingError
from kernels.layout import slab_blocks
from kernels.slabs import slab_header, slab_offsets, tensor_bytes
from quantize.checkpoint import CheckpointReader
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables

__all__ = ["check_space", "source_names", "write_slabs"]

WRITE_BLOCK_BYTES = 1 << 24

Progress = Callable[[int, int], None]
OnSource = Callable[[str, Tensor], None]


def source_names(slab: ResolvedSlab, config: ModelConfig) -> list[str]:
    """The checkpoint tensors that make up `slab`, in slab order; a tied LM head is read from the embedding."""
    source = slab.spec.source
    if not source:
        return []
    if slab.name == "lm_head_weight" and config.tie_word_embeddings:
        return ["model.embed_tokens.weight"]
    if "{layer}" in source:
        return [source.format(layer=layer) for layer in range(config.num_layers)]
    return [source]


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise StagingError when the disk of `folder` has less room than `needed_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise StagingError(f"slabs need {needed_bytes} bytes but {folder} has {free_bytes} free; make room or move OUT")


def write_slabs(
    reader: CheckpointReader,
    slabs: Sequence[ResolvedSlab],
    path: Path,
    progress: Progress | None = None,
    on_source: OnSource | None = None,
) -> dict[str, dict[str, Any]]:
    """Write every slab of `reader`'s checkpoint to the new file `path`, layer by layer.

    Returns dtype, shape and sha256 of every slab by name. `progress(done_bytes, total_bytes)` is called as it goes,
    `on_source(name, tensor)` with every source tensor as it is read. Raises StagingError for values that no slab can
    hold, or when the disk is full.
    """
    header, offsets = slab_header(slabs), slab_offsets(slabs)
    total_bytes = sum(slab.nbytes for slab in slabs)
    hashers = {slab.name: hashlib.sha256() for slab in slabs}
    cursors = {name: len(header) + offset for name, offset in offsets.items()}
    done_bytes = 0
    with path.open("wb") as file:
        handle = file.fileno()
        _allocate(handle, len(header) + total_bytes, path)
        os.pwrite(handle, header, 0)
        for slab, block in _all_blocks(reader, slabs, on_source):
            view = tensor_bytes(block)
            hashers[slab.name].update(view)
            for start in range(0, len(view), WRITE_BLOCK_BYTES):
                part = view[start : start + WRITE_BLOCK_BYTES]
                _write_all(handle, part, cursors[slab.name])
                cursors[slab.name] += len(part)
            done_bytes += len(view)
            if progress is not None:
                progress(done_bytes, total_bytes)
    return {
        slab.name: {"dtype": slab.dtype, "shape": list(slab.shape), "sha256": hashers[slab.name].hexdigest()}
        for slab in slabs
    }


def _all_blocks(
    reader: CheckpointReader, slabs: Sequence[ResolvedSlab], on_source: OnSource | None
) -> Iterator[tuple[ResolvedSlab, Tensor]]:
    """Every block of every slab, layers outermost, so that one layer's sources are read together."""
    config = reader.config
    for layer in range(config.num_layers):
        for slab in slabs:
            if "{layer}" in slab.spec.source:
                yield from _source_blocks(reader, slab, source_names(slab, config)[layer], on_source)
    for slab in slabs:
        if not slab.spec.source:
            tables = rope_tables(config.head_dim, config.rope_theta, slab.shape[0], config.rope_scaling)
            yield slab, tables[0 if slab.spec.rule == "rope_cos" else 1].contiguous()
        elif "{layer}" not in slab.spec.source:
            yield from _source_blocks(reader, slab, source_names(slab, config)[0], on_source)


def _source_blocks(
    reader: CheckpointReader, slab: ResolvedSlab, name: str, on_source: OnSource | None
) -> Iterator[tuple[ResolvedSlab, Tensor]]:
    source = reader.tensor(name)
    if on_source is not None:
        on_source(name, source)
    for block in slab_blocks(slab, source):
        if block.is_floating_point() and not bool(torch.isfinite(block).all()):
            raise StagingError(f"{name} holds NaN or infinity; slab {slab.name} expects finite values")
        if slab.spec.rule == "scale_row" and not bool((block > 0).all()):
            raise StagingError(
                f"{name} holds a scale that is zero or negative; expected positive scales, quantize again"
            )
        yield slab, block


def _allocate(handle: int, size_bytes: int, path: Path) -> None:
    try:
        os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StagingError(f"{path.parent} has no room for {size_bytes} bytes of slabs; make room") from error
        os.truncate(handle, size_bytes)


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    while len(view):
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
