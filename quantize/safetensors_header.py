"""A reader of safetensors headers that holds against any bytes.

Nothing is allocated before it is known to be backed by the file, the header's length is bounded, and every offset
is checked: entries must tile the data section exactly. The format is described at
https://github.com/huggingface/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantize.errors import CheckpointError
from quantize.json_files import parse_json

MAX_HEADER_BYTES = 25 * 10**6
"""Longest header accepted; about 150,000 tensors in one file."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
DTYPES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""The dtypes that are read, as safetensors spells them, and the bytes of an element."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `dtype` as safetensors spells it, `offset` bytes from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def _looks_like(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer: run `git lfs pull` to get the real file"
    if head.startswith(b"PK"):
        return "it is a zip archive, such as a PyTorch checkpoint: convert it to safetensors"
    if head.startswith(b"GGUF"):
        return "it is a GGUF file: pass it as a `.gguf` source"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is an HTML page: the download went wrong"
    return "it is no safetensors file, or its start is damaged"


def _is_size(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _entry(name: str, entry: Any, data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """Validate one header entry; returns dtype, shape, begin and end (bytes in the data section)."""
    label = f"tensor {name[:120]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{label}: expected an object with dtype, shape and data_offsets")
    name.encode("utf-8")  # a lone surrogate is refused here rather than where the name is printed
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{label}: dtype {str(dtype)[:40]!r} is not supported, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(n, MAX_ELEMENTS) for n in shape):
        raise ValueError(f"{label}: shape is not a list of at most {MAX_DIMENSIONS} sizes")
    if math.prod(n for n in shape if n) > MAX_ELEMENTS:  # also when a zero hides it: torch multiplies the strides
        raise ValueError(f"{label}: shape spans more than {MAX_ELEMENTS} elements")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n, 2**63) for n in offsets):
        raise ValueError(f"{label}: data_offsets is not a pair of sizes")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype]
    if end - begin != nbytes:
        raise ValueError(f"{label}: data_offsets span {end - begin} bytes, its dtype and shape need {nbytes}")
    if end > data_bytes:
        raise ValueError(f"{label} ends at byte {end} of {data_bytes} bytes of data: the file is truncated")
    return dtype, tuple(shape), begin, end


def _parse(raw: bytes, data_bytes: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Parse the JSON header; raises ValueError saying what is wrong."""
    if not raw.startswith(b"{"):
        raise ValueError("the header does not start with '{'")
    header = parse_json(raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")
    entries = [(name, *_entry(name, entry, data_bytes)) for name, entry in header.items()]
    entries.sort(key=lambda entry: (entry[3], entry[4]))
    position = 0
    for name, _, _, begin, end in entries:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise ValueError(f"tensor {name[:120]!r} {kind} (starts at byte {begin}, expected {position})")
        position = end
    if position != data_bytes:
        raise ValueError(f"{data_bytes - position} trailing bytes after the last tensor")
    return entries


def read_header(file: BinaryIO, path: Path) -> list[TensorInfo]:
    """Read and validate the header of an open safetensors file; returns its tensors in order of their data.

    Raises CheckpointError naming `path` and what the file looks like. Reads at most 25 MB, whatever the file says.
    """
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    file_bytes = status.st_size
    file.seek(0)
    head = file.read(64)
    if file_bytes == 0:
        raise CheckpointError(f"{path}: the file is empty")
    if len(head) < 8:
        raise CheckpointError(f"{path}: the file has {file_bytes} bytes: it is truncated, or no safetensors file")
    (header_bytes,) = struct.unpack("<Q", head[:8])
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header states a length of {header_bytes} bytes, at most {MAX_HEADER_BYTES} is accepted; "
            + _looks_like(head)
        )
    if header_bytes > file_bytes - 8:
        raise CheckpointError(
            f"{path}: the header needs {header_bytes} bytes and the file has {file_bytes - 8} left: it is truncated"
        )
    file.seek(8)
    try:
        entries = _parse(file.read(header_bytes), file_bytes - 8 - header_bytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: bad safetensors header: {str(error)[:300]}") from None
    start = 8 + header_bytes
    return [
        TensorInfo(name, dtype, shape, path, start + begin, end - begin) for name, dtype, shape, begin, end in entries
    ]
