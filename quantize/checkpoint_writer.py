"""Writing a checkpoint tensor by tensor: what is to come is known beforehand, so nothing is held in memory.

Headers are written first, data lands at its final offset, and the finished folder takes its name by one rename, after
an fsync of every file. Until then it is a hidden folder beside its target, removed on failure; one left by a killed
process is removed by the next writer of the same target.
"""

from __future__ import annotations

import fcntl
import glob
import json
import logging
import math
import os
import secrets
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, combine_digests, file_sha256, tensor_sha256
from quantize.errors import CheckpointError
from quantize.torch_dtypes import DTYPE_NAMES

MAX_SHARD_BYTES = 5 * 10**9
FREE_SPACE_MARGIN_BYTES = 64 * 2**20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return math.prod(self.shape) * self.dtype.itemsize


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(out: Path) -> None:
    """Refuse a place that holds anything; an empty folder is fine."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CheckpointError(f"{out}: exists already; remove it or choose another place")


class StagingFolder:
    """A hidden folder beside `out` that becomes `out` by one rename, or vanishes.

    A lock on the folder tells a living writer from a dead one: folders whose lock is free are left over and removed.
    """

    def __init__(self, out: Path) -> None:
        check_target(out)
        self.out = out
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self.path, self._lock = self._make()
        except OSError as error:
            raise CheckpointError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error

    def _make(self) -> tuple[Path, int]:
        """Make and lock the folder; once more when another writer took it for a leftover before it was locked."""
        while True:
            path = self.out.parent / f".{self.out.name}.partial-{secrets.token_hex(6)}"
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        for path in self.out.parent.glob(f".{glob.escape(self.out.name)}.partial-*"):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("removing %s, left by an interrupted run", path)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                logger.warning("%s belongs to a running writer of the same target", path)
            finally:
                os.close(descriptor)

    def commit(self) -> None:
        """Make everything durable and give the folder its name."""
        for path in self.path.iterdir():
            _fsync(path)
        _fsync(self.path)
        try:
            self.path.rename(self.out)
        except OSError as error:
            raise CheckpointError(f"{self.out}: cannot be put in place: {error.strerror}") from error
        _fsync(self.out.parent)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove the folder and all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class CheckpointWriter:
    """Streams tensors, `config.json` and sidecars into a new checkpoint directory; use as a context manager.

    Leaving the block without `commit` removes everything. Tensors may be written in any order, each once.
    """

    def __init__(
        self,
        out: Path,
        specs: Sequence[TensorSpec],
        config: Mapping[str, Any],
        sidecars: Sequence[Path] = (),
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise CheckpointError(f"{out}: a tensor name is planned twice")
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self._folder = StagingFolder(out)
        self._offsets: dict[str, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        self._done = False
        self.tensors: dict[str, dict[str, Any]] = {}
        try:
            free = shutil.disk_usage(self._folder.path).free
            if free < self.total_bytes + FREE_SPACE_MARGIN_BYTES:
                raise CheckpointError(f"{out}: needs {self.total_bytes} bytes of disk, {free} are free")
            self._create_shards(self._shards(specs, max_shard_bytes))
            (self._folder.path / CONFIG_NAME).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
            for sidecar in sidecars:
                shutil.copyfile(sidecar, self._folder.path / sidecar.name)
            self.files = {
                path.name: file_sha256(path) for path in self._folder.path.iterdir() if self._is_sidecar(path)
            }
        except OSError as error:
            self.close()
            raise CheckpointError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _is_sidecar(path: Path) -> bool:
        return path.suffix != ".safetensors" and path.name != INDEX_NAME

    @staticmethod
    def _shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
        """Cut the specs into shards in their order, then order each as safetensors does: wide dtypes first, by name."""
        shards: list[list[TensorSpec]] = [[]]
        filled_bytes = 0
        for spec in specs:
            if shards[-1] and filled_bytes + spec.nbytes > max_shard_bytes:
                shards.append([])
                filled_bytes = 0
            shards[-1].append(spec)
            filled_bytes += spec.nbytes
        return [sorted(shard, key=lambda spec: (-spec.dtype.itemsize, spec.name)) for shard in shards]

    def _create_shards(self, shards: list[list[TensorSpec]]) -> None:
        names = [SINGLE_NAME]
        if len(shards) > 1:
            names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
            weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder.path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        for name, shard in zip(names, shards, strict=True):
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            position = 0
            for spec in shard:
                end = position + spec.nbytes
                header[spec.name] = {
                    "dtype": DTYPE_NAMES[spec.dtype],
                    "shape": list(spec.shape),
                    "data_offsets": [position, end],
                }
                position = end
            raw = json.dumps(header, separators=(",", ":")).encode()
            raw += b" " * (-len(raw) % 8)
            descriptor = os.open(self._folder.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._descriptors.append(descriptor)
            os.write(descriptor, struct.pack("<Q", len(raw)) + raw)
            os.ftruncate(descriptor, 8 + len(raw) + position)
            for spec in shard:
                begin = header[spec.name]["data_offsets"][0]
                self._offsets[spec.name] = (len(self._descriptors) - 1, 8 + len(raw) + begin)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor (any strides; stored row-major); records its digest in `tensors`."""
        spec = self._specs.get(name)
        if spec is None or name in self.tensors:
            raise CheckpointError(f"{name!r} is {'not planned' if spec is None else 'written twice'}")
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)}, planned as {spec.dtype} {list(spec.shape)}"
            )
        contiguous = tensor.detach().contiguous()
        shard, offset = self._offsets[name]
        if spec.nbytes:
            view = contiguous.reshape(-1).view(torch.uint8).numpy().data
            try:
                while view:
                    written = os.pwrite(self._descriptors[shard], view, offset)
                    view, offset = view[written:], offset + written
            except OSError as error:
                raise CheckpointError(f"{self._folder.out}: {name!r} cannot be written: {error.strerror}") from error
        self.tensors[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "sha256": tensor_sha256(contiguous),
        }

    def commit(self) -> str:
        """Put the finished checkpoint in place; returns its payload digest. Refuses while a tensor is unwritten."""
        missing = [name for name in self._specs if name not in self.tensors]
        if missing:
            raise CheckpointError(f"{self._folder.out}: {len(missing)} planned tensors unwritten, first {missing[0]!r}")
        self._close_files()
        self._folder.commit()
        self._done = True
        return combine_digests(self.tensors, self.files)

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def close(self) -> None:
        """Remove what was written, unless it was committed."""
        if not self._done:
            self._close_files()
            self._folder.discard()
            self._done = True

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
