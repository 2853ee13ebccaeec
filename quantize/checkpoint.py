"""Reading a checkpoint directory: one place that knows about shards, indexes and sidecar files.

`scan_checkpoint` looks at everything but the weights and collects problems; `CheckpointReader` refuses a scan with
problems and reads single tensors, memory-mapped. Works on source checkpoints and on W8A8 ones; what a model should
hold is the business of `preflight`. Links are followed as they stand (a Hugging Face snapshot links to blobs).
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from quantize.errors import CheckpointError
from quantize.json_files import read_json_object
from quantize.model_config import ModelConfig, parse_model_config
from quantize.quantization_config import CONFIG_KEYS, Quantization, parse_quantization
from quantize.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:  # torch takes over a second to load: it is imported where a tensor is made
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
MADE_NAMES = ("recipe.yaml", "calibration.json", "search.json")
"""Files that quantizing writes beside the tensors: how it was done. Those of a source are not carried over."""
SIDECAR_PATTERNS = (
    *MADE_NAMES,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
MAX_NAME_CHARACTERS = 255
MAX_INDEX_BYTES = 32 * 2**20
"""Longest index read: about 400,000 tensors."""
MAX_SHARDS = 10_000
MAX_SIDECAR_BYTES = 2**30
HASH_BLOCK_BYTES = 2**24


@dataclass
class CheckpointScan:
    """What a directory holds, seen without reading a weight; `problems` says what keeps it from being read."""

    directory: Path
    raw_config: dict[str, Any] = field(default_factory=dict)
    config: ModelConfig | None = None
    quantization: Quantization | None = None
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    sidecars: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _shard_name_problem(shard: Any) -> str | None:
    """Why an index entry is not the plain name of a safetensors file beside it, or None."""
    if not isinstance(shard, str) or not shard or not shard.isprintable() or len(shard) > MAX_NAME_CHARACTERS:
        return "is not a file name"
    if any(character in shard for character in "/\\:") or shard in (".", ".."):
        return "leads out of the checkpoint directory or into a folder; only plain file names are read"
    if not shard.endswith(".safetensors"):
        return "is not a .safetensors file"
    return None


def _read_index(scan: CheckpointScan) -> dict[str, str] | None:
    """The weight map of the index, with unusable entries reported and left out; None when there is no usable map."""
    try:
        index = read_json_object(scan.directory / INDEX_NAME, MAX_INDEX_BYTES)
    except CheckpointError as error:
        scan.problems.append(str(error))
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        scan.problems.append(f"{INDEX_NAME}: weight_map is empty or absent, expected tensor names and their shards")
        return None
    bad: dict[str, str] = {}
    good: dict[str, str] = {}
    for name, shard in weight_map.items():
        problem = _shard_name_problem(shard)
        if problem:
            bad.setdefault(f"{INDEX_NAME}: shard {str(shard)[:120]!r} {problem}", name)
        else:
            good[name] = shard
    scan.problems += [f"{problem} (listed for {name[:120]})" for problem, name in bad.items()]
    return good


def _read_shard(scan: CheckpointScan, shard: str) -> list[TensorInfo] | None:
    path = scan.directory / shard
    try:
        if path.exists() and not path.is_file():
            scan.problems.append(f"{path}: not a regular file")
            return None
        with path.open("rb") as file:
            return read_header(file, path)
    except FileNotFoundError:
        scan.problems.append(f"{path}: the shard is absent")
    except OSError as error:
        scan.problems.append(f"{path}: cannot be read: {error.strerror}")
    except CheckpointError as error:
        scan.problems.append(str(error))
    return None


def _scan_tensors(scan: CheckpointScan) -> None:
    single = scan.directory / SINGLE_NAME
    weight_map: dict[str, str] | None = None
    if (scan.directory / INDEX_NAME).exists():
        weight_map = _read_index(scan)
        if weight_map is None:
            return
        if single.exists() and SINGLE_NAME not in weight_map.values():
            scan.problems.append(
                f"both {SINGLE_NAME} and {INDEX_NAME} are there and the index does not list it: remove one of them"
            )
        shards = sorted(set(weight_map.values()))
        if len(shards) > MAX_SHARDS:
            scan.problems.append(f"{INDEX_NAME}: lists {len(shards)} shards, expected at most {MAX_SHARDS}")
            return
    elif single.exists() or single.is_symlink():
        shards = [SINGLE_NAME]
    else:
        others = sorted(
            path.name for path in scan.directory.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf", ".pth")
        )
        hint = f" (found {', '.join(others[:5])})" if others else ""
        scan.problems.append(f"no weights: expected {SINGLE_NAME} or {INDEX_NAME}{hint}")
        return
    unreadable: set[str] = set()
    for shard in shards:
        infos = _read_shard(scan, shard)
        if infos is None:
            unreadable.add(shard)
            continue
        for info in infos:
            earlier = scan.infos.get(info.name)
            if earlier is not None:
                scan.problems.append(f"tensor {info.name[:120]} is in {earlier.file.name} and again in {shard}")
            elif weight_map is not None and info.name not in weight_map:
                scan.problems.append(f"tensor {info.name[:120]} of {shard} is not in {INDEX_NAME}")
            scan.infos.setdefault(info.name, info)
    for name, shard in (weight_map or {}).items():
        found = scan.infos.get(name)
        if found is None and shard not in unreadable:
            scan.problems.append(f"tensor {name[:120]} is listed in {INDEX_NAME} for {shard}, which does not hold it")
        elif found is not None and found.file.name != shard:
            scan.problems.append(
                f"tensor {name[:120]} is listed in {INDEX_NAME} for {shard} and lies in {found.file.name}"
            )


def _sidecars(scan: CheckpointScan) -> list[Path]:
    """The tokenizer, template and licence files, sorted; one too large to be any of these is reported and left out."""
    found = sorted({path for pattern in SIDECAR_PATTERNS for path in scan.directory.glob(pattern) if path.is_file()})
    large = [path for path in found if path.stat().st_size > MAX_SIDECAR_BYTES]
    scan.problems += [
        f"{path}: has {path.stat().st_size} bytes, expected at most {MAX_SIDECAR_BYTES} for a file beside the weights"
        for path in large
    ]
    return [path for path in found if path not in large]


def scan_checkpoint(directory: Path) -> CheckpointScan:
    """Look at a checkpoint directory without reading weights; all problems are collected, none raised.

    A quantization that cannot be honoured is left to the caller (`scan.quantization.problems`).
    """
    scan = CheckpointScan(directory)
    if not directory.is_dir():
        kind = "not a directory" if directory.exists() else "does not exist"
        scan.problems.append(f"{directory}: {kind}; expected a Hugging Face checkpoint directory")
        return scan
    generation_config = None
    generation = directory / "generation_config.json"
    if generation.exists():
        try:
            generation_config = read_json_object(generation)
        except CheckpointError as error:
            scan.problems.append(str(error))
    try:
        scan.raw_config = read_json_object(directory / CONFIG_NAME)
        scan.quantization = parse_quantization(scan.raw_config)
        scan.config = parse_model_config(scan.raw_config, generation_config)
    except CheckpointError as error:
        scan.problems += error.problems or [str(error)]
    try:
        _scan_tensors(scan)
        scan.sidecars = _sidecars(scan)
    except OSError as error:
        scan.problems.append(f"{directory}: cannot be read: {error.strerror}")
    return scan


class CheckpointReader:
    """Reads single tensors of a checkpoint; use as a context manager, or call `close`.

    The constructor reads headers and configuration only and raises CheckpointError with every problem found.
    """

    def __init__(self, directory: Path, scan: CheckpointScan | None = None) -> None:
        scan = scan if scan is not None else scan_checkpoint(directory)
        problems = list(scan.problems)
        if scan.quantization is not None:
            problems += scan.quantization.problems
        if problems or scan.config is None:
            raise CheckpointError(f"{directory}: the checkpoint cannot be used", problems)
        self.directory = directory
        self.config: ModelConfig = scan.config
        self.raw_config: Mapping[str, Any] = scan.raw_config
        self.quantization = scan.quantization
        self.infos = scan.infos
        self.sidecars = scan.sidecars
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shard files; tensors already handed out stay valid."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("rb")
        return self._files[path]

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` in its own dtype and shape, mapped copy-on-write: its pages live while the tensor does.

        Raises CheckpointError when there is no such tensor, or its file has become shorter since the scan.
        """
        import torch

        from quantize.torch_dtypes import TORCH_DTYPES

        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(f"{self.directory}: there is no tensor {name!r}")
        dtype = TORCH_DTYPES[info.dtype]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        file = self._open(info.file)
        start = info.offset - info.offset % mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(file.fileno(), info.offset - start + info.nbytes, access=mmap.ACCESS_COPY, offset=start)
        except ValueError as error:
            raise CheckpointError(f"{info.file}: changed while being read, tensor {name!r}: {error}") from error
        count = info.nbytes // dtype.itemsize
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=info.offset - start).view(info.shape)

    def weight_scale(self, module: str) -> Tensor:
        """The scale of a quantized module as FP32 `[out]`, whether stored as `[out]` or `[out, 1]`."""
        import torch

        scale = self.tensor(module + ".weight_scale")
        if scale.dim() not in (1, 2) or (scale.dim() == 2 and scale.shape[1] != 1):
            raise CheckpointError(
                f"{module}.weight_scale has shape {list(scale.shape)}, expected [out] or [out, 1] (one scale a channel)"
            )
        return scale.reshape(-1).to(torch.float32)


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's elements in row-major order, as hex digits."""
    import torch

    digest = hashlib.sha256()
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), HASH_BLOCK_BYTES):
        digest.update(flat[start : start + HASH_BLOCK_BYTES].numpy().data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_digests(directory: Path) -> dict[str, dict[str, Any]]:
    """`{"dtype", "shape", "sha256"}` of every tensor of a checkpoint, by name (sorted); reads all weights once."""
    with CheckpointReader(directory) as reader:
        return {
            name: {
                "dtype": reader.infos[name].dtype,
                "shape": list(reader.infos[name].shape),
                "sha256": tensor_sha256(reader.tensor(name)),
            }
            for name in sorted(reader.infos)
        }


def combine_digests(tensors: Mapping[str, Mapping[str, Any]], files: Mapping[str, str]) -> str:
    """The digest of a checkpoint from its tensors' digests and its files' sha256 by name."""
    canonical = json.dumps({"tensors": tensors, "files": files}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def payload_digest(directory: Path) -> str:
    """Digest of what a checkpoint holds, independent of sharding and header bytes.

    sha256 over (name, dtype, shape, sha256 of payload) of all tensors, and the sha256 of config and sidecar files.
    """
    files = [directory / CONFIG_NAME, *scan_checkpoint(directory).sidecars]
    return combine_digests(tensor_digests(directory), {path.name: file_sha256(path) for path in files})


def without_quantization(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parsed `config.json` without any quantization section."""
    return {key: value for key, value in raw_config.items() if key not in CONFIG_KEYS}
