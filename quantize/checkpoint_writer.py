"""Writing a checkpoint tensor by tensor: what is to come is known beforehand, so nothing is held in memory.

Headers are written first, data lands at its final offset, and the finished folder takes its name by one rename, after
an fsync of every file. Until then it is a hidden folder beside its target. Without a `resume_key` it is removed on
failure, and one left by a killed process is removed by the next writer of the same target. With one, finished tensors
are journalled, and the next writer with the same key, plan and files carries on after them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quantize.checkpoint import CONFIG_NAME, INDEX_NAME, MADE_NAMES, combine_digests, file_sha256
from quantize.errors import CheckpointError, QuantizeError, WriteError
from quantize.hashing import Hash
from quantize.journal import Entry, Journal
from quantize.shard_layout import Shard, TensorSpec, cut_shards, is_laid_out, lay_out
from quantize.staging_folder import ResumableFolder, StagingFolder

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 5 * 10**9
FREE_SPACE_MARGIN_BYTES = 64 * 2**20
VERIFY_BLOCK_BYTES = 2**20
logger = logging.getLogger(__name__)


class TensorStream:
    """Takes one tensor's payload piece by piece, in order; made by `CheckpointWriter.stream`."""

    def __init__(self, writer: CheckpointWriter, spec: TensorSpec, hash_: Hash, descriptor: int, offset: int) -> None:
        self._writer = writer
        self._spec = spec
        self._descriptor = descriptor
        self._offset = offset
        self._end = offset + spec.nbytes
        self.hash = hash_

    def append(self, piece: memoryview) -> None:
        """Hash and write the next bytes (row-major, little-endian); raises WriteError when the disk refuses them."""
        self.hash.update(piece)
        self.put(piece)

    def put(self, piece: memoryview) -> None:
        """Write the next bytes, which the caller has given to `hash`."""
        if self._offset + piece.nbytes > self._end:
            raise CheckpointError(f"{self._spec.name!r} got more bytes than its {self._spec.nbytes}")
        try:
            while piece:
                written = os.pwrite(self._descriptor, piece, self._offset)
                piece = piece[written:]
                self._offset += written
        except OSError as error:
            raise WriteError(f"{self._writer.out}: {self._spec.name!r} cannot be written: {error.strerror}") from error

    def finish(self, facts: Mapping[str, Any] | None = None) -> None:
        """Record the tensor as finished, with `facts` (JSON values) for a run that resumes after it."""
        if self._offset != self._end:
            raise CheckpointError(f"{self._spec.name!r} lacks {self._end - self._offset} of {self._spec.nbytes} bytes")
        self._writer._record(self._spec, Entry(self.hash.hexdigest(), facts or {}))


class CheckpointWriter:
    """Streams tensors, `config.json` and sidecars into a new checkpoint directory; use as a context manager.

    Leaving the block without `commit` removes everything; with a `resume_key`, a failure that is no refusal of the
    input (an interrupt, a full disk) keeps it for the next run. Tensors may be written in any order, each once, and
    different ones from several threads at a time.

    `max_shard_bytes`: cut shards by payload size; None makes one shard of each `group` of the specs. `resume_key`: a
    digest of everything else that the tensors' bytes depend on (source, recipe, code). `texts`: further files by name,
    in place of sidecars of that name. A caller that resumes asks
    `finished(name)` before each tensor and skips it when it is.
    """

    def __init__(
        self,
        out: Path,
        specs: Sequence[TensorSpec],
        config: Mapping[str, Any],
        sidecars: Sequence[Path] = (),
        max_shard_bytes: int | None = MAX_SHARD_BYTES,
        *,
        resume_key: str | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.out = out
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise CheckpointError(f"{out}: a tensor name is planned twice")
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self.tensors: dict[str, dict[str, Any]] = {}
        self._mutex = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        self._journal: Journal | None = None
        self._resumed: dict[str, Entry] = {}
        self._done = False
        shards = lay_out(cut_shards(specs, max_shard_bytes))
        texts = texts or {}
        sidecars = [sidecar for sidecar in sidecars if sidecar.name not in MADE_NAMES]
        self._folder = StagingFolder(out) if resume_key is None else ResumableFolder(out)
        try:
            if resume_key is not None and isinstance(self._folder, ResumableFolder):
                self._resume(self._folder, _work_key(resume_key, shards, config, sidecars, texts), shards)
            self._check_space()
            self._create_shards(shards)
            self._write_files(shards, config, sidecars)
            for name, text in texts.items():
                self.add_text(name, text)
        except OSError as error:
            self.close(keep=bool(self._resumed))
            raise WriteError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error
        except BaseException:
            self.close(keep=bool(self._resumed))
            raise

    def _resume(self, folder: ResumableFolder, key: str, shards: Sequence[Shard]) -> None:
        """Take over what an earlier writer with the same key left, or clear the folder of it."""
        self._journal = Journal(folder.journal_path, key)
        if self._journal.entries and all(is_laid_out(folder.path / shard.name, shard) for shard in shards):
            self._resumed = dict(self._journal.entries)
            logger.info("%s: an interrupted run finished %d tensors, they are kept", self.out, len(self._resumed))
            return
        self._journal.close()
        folder.clear()
        self._journal = Journal(folder.journal_path, key)

    def _check_space(self) -> None:
        """Refuse before anything is written when the disk cannot hold the whole."""
        allocated = self._folder.allocated_bytes() if isinstance(self._folder, ResumableFolder) else 0
        needed = max(0, self.total_bytes - allocated)
        free = shutil.disk_usage(self._folder.path).free
        if free < needed + FREE_SPACE_MARGIN_BYTES:
            raise WriteError(
                f"{self.out}: needs {needed} bytes of disk and {FREE_SPACE_MARGIN_BYTES} to spare, {free} are free; "
                "free some or choose another place"
            )

    def _create_shards(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            descriptor = os.open(self._folder.path / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptors.append(descriptor)
            os.pwrite(descriptor, shard.head, 0)
            os.ftruncate(descriptor, shard.file_bytes)
            for name, offset in shard.offsets.items():
                self._places[name] = (descriptor, offset)

    def _write_files(self, shards: Sequence[Shard], config: Mapping[str, Any], sidecars: Sequence[Path]) -> None:
        folder = self._folder.path
        if len(shards) > 1:
            weight_map = {name: shard.name for shard in shards for name in shard.offsets}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        (folder / CONFIG_NAME).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
        for sidecar in sidecars:
            shutil.copyfile(sidecar, folder / sidecar.name)
        names = [CONFIG_NAME, *(sidecar.name for sidecar in sidecars)]
        self.files = {name: file_sha256(folder / name) for name in names}

    def add_text(self, name: str, text: str) -> None:
        """Write a further small file (a name of `MADE_NAMES`); it counts in the digest like config and sidecars."""
        path = self._folder.path / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise WriteError(f"{self.out}: {name} cannot be written: {error.strerror}") from error
        self.files[name] = file_sha256(path)

    @property
    def scratch(self) -> Path:
        """A folder (to be made) for what the caller wants back after a kill; it goes when the writer commits."""
        if not isinstance(self._folder, ResumableFolder):
            raise CheckpointError(f"{self.out}: a writer without a resume_key keeps nothing for another run")
        return self._folder.scratch_path

    def planned(self, name: str) -> TensorSpec:
        """The plan's entry of a tensor; raises CheckpointError for one that is not planned."""
        if name not in self._specs:
            raise CheckpointError(f"{name!r} is not planned")
        return self._specs[name]

    def finished(self, name: str) -> bool:
        """Whether the planned tensor `name` needs no writing: written before, or by the run that this one resumes.

        What an earlier run left is hashed here and counts only when its bytes are those it recorded.
        """
        if name in self.tensors:
            return True
        entry = self._resumed.get(name)
        spec = self._specs.get(name)
        if entry is None or spec is None:
            return False
        descriptor, offset = self._places[name]
        if _payload_sha256(descriptor, offset, spec.nbytes) != entry.sha256:
            logger.warning("%s: %r is not what the interrupted run recorded; it is written again", self.out, name)
            with self._mutex:
                self._resumed.pop(name, None)
            return False
        with self._mutex:
            self._note(spec, entry)
        return True

    @property
    def resumed_tensors(self) -> int:
        """How many tensors an earlier run had finished, as far as they have been found sound."""
        return len(self._resumed)

    def facts(self, name: str) -> Mapping[str, Any]:
        """What was recorded with a tensor that an earlier run finished; empty for others."""
        entry = self._resumed.get(name)
        return {} if entry is None else entry.facts

    def stream(self, name: str, hash_: Hash | None = None) -> TensorStream:
        """Start a planned tensor; `append` its bytes in order, then `finish` it. `hash_`: a SHA-256."""
        spec = self._specs.get(name)
        if spec is None or name in self.tensors:
            raise CheckpointError(f"{name!r} is {'not planned' if spec is None else 'written twice'}")
        return TensorStream(self, spec, hashlib.sha256() if hash_ is None else hash_, *self._places[name])

    def write(self, name: str, tensor: Tensor, facts: Mapping[str, Any] | None = None) -> None:
        """Write one planned tensor (any strides; stored row-major); records its digest in `tensors`."""
        import torch

        from quantize.torch_dtypes import DTYPE_NAMES

        stream = self.stream(name)
        spec = self._specs[name]
        if DTYPE_NAMES[tensor.dtype] != spec.dtype_name or tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)}, planned as {spec.dtype_name} {list(spec.shape)}"
            )
        if spec.nbytes:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, spec.nbytes, VERIFY_BLOCK_BYTES):
                stream.append(flat[start : start + VERIFY_BLOCK_BYTES])
        stream.finish(facts)

    def _record(self, spec: TensorSpec, entry: Entry) -> None:
        with self._mutex:
            if self._journal is not None:
                self._journal.add(spec.name, entry)
            self._note(spec, entry)

    def _note(self, spec: TensorSpec, entry: Entry) -> None:
        self.tensors[spec.name] = {"dtype": spec.dtype_name, "shape": list(spec.shape), "sha256": entry.sha256}

    def commit(self) -> str:
        """Put the finished checkpoint in place; returns its payload digest. Refuses while a tensor is unwritten."""
        missing = [name for name in self._specs if name not in self.tensors]
        if missing:
            raise CheckpointError(f"{self.out}: {len(missing)} planned tensors unwritten, first {missing[0]!r}")
        self._close_files()
        try:
            self._folder.commit()
        except OSError as error:
            raise WriteError(f"{self.out}: cannot be written: {error.strerror}") from error
        self._done = True
        return combine_digests(self.tensors, self.files)

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self, *, keep: bool = False) -> None:
        """Remove what was written, unless it was committed; `keep` leaves it to a writer that resumes."""
        if self._done:
            return
        self._close_files()
        self._done = True
        if keep and isinstance(self._folder, ResumableFolder):
            logger.warning("%s: what is finished is kept; the same command carries on from there", self.out)
            self._folder.keep()
        else:
            self._folder.discard()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What a rerun would refuse again is not worth keeping; what a rerun may get past is.
        refused = kind is None or (issubclass(kind, QuantizeError) and not issubclass(kind, WriteError))
        self.close(keep=not refused)


def _work_key(
    resume_key: str,
    shards: Sequence[Shard],
    config: Mapping[str, Any],
    sidecars: Sequence[Path],
    texts: Mapping[str, str],
) -> str:
    """sha256 (hex) over all that the folder's bytes depend on; raises OSError for a sidecar that cannot be read."""
    digest = hashlib.sha256(resume_key.encode())
    for shard in shards:
        digest.update(shard.name.encode() + b"\0" + shard.head)
    files = {sidecar.name: file_sha256(sidecar) for sidecar in sidecars}
    digest.update(json.dumps([dict(config), files, dict(texts)], sort_keys=True).encode())
    return digest.hexdigest()


def _payload_sha256(descriptor: int, offset: int, nbytes: int) -> str:
    digest = hashlib.sha256()
    end = offset + nbytes
    while offset < end:
        block = os.pread(descriptor, min(VERIFY_BLOCK_BYTES, end - offset), offset)
        if not block:
            break
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()
