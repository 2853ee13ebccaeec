"""Reading what a GGUF file says of itself, without trusting it: every length is held against the file's size first.

The format is ggml's (docs/gguf.md there), versions 2 and 3, little-endian: a fixed head, key-value pairs, one entry a
tensor, then the data at an aligned offset. The `gguf` package's own reader believes the counts, so that a few bytes can
make it loop for ever.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

from quantize.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4
MAX_STRING_BYTES = 2**24
MAX_ENTRIES = 2**20
STRING, ARRAY = 8, 9
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufHeader:
    """Scalar and text metadata by key (arrays are checked and left out), and each tensor's shape and type number."""

    metadata: dict[str, str | int | float | bool]
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)


class _Cursor:
    """Reads values one after the other and refuses to leave the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.position = path, content, 0

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or truncated GGUF file: {reason}; get a sound copy")

    def skip(self, count: int) -> None:
        left = len(self.content) - self.position
        if count > left:
            raise self.damaged(f"{count} bytes are announced at byte {self.position}, {left} are left")
        self.position += count

    def scalar(self, form: str) -> int | float | bool:
        start = self.position
        self.skip(struct.calcsize("<" + form))
        value: int | float | bool = struct.unpack_from("<" + form, self.content, start)[0]
        return value

    def count(self, form: str = "Q") -> int:
        return int(self.scalar(form))

    def text(self) -> str:
        length = self.count()
        start = self.position
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"a text of {length} bytes at byte {start}, expected at most {MAX_STRING_BYTES}")
        self.skip(length)
        return self.content[start : self.position].decode("utf-8", errors="replace")

    def skip_array(self) -> None:
        kind, length = self.count("I"), self.count()
        if kind in SCALAR_FORMATS:
            self.skip(length * struct.calcsize("<" + SCALAR_FORMATS[kind]))
        elif kind == STRING:
            for _ in range(length):  # each text takes eight bytes at least, so the file's end ends the loop
                self.skip(self.count())
        else:
            raise self.damaged(f"an array of values of type {kind} at byte {self.position}")


def _read_metadata(cursor: _Cursor, entries: int) -> dict[str, str | int | float | bool]:
    metadata: dict[str, str | int | float | bool] = {}
    for _ in range(entries):
        key = cursor.text()
        kind = cursor.count("I")
        if kind == ARRAY:
            cursor.skip_array()
        elif kind == STRING:
            metadata[key] = cursor.text()
        elif kind in SCALAR_FORMATS:
            metadata[key] = cursor.scalar(SCALAR_FORMATS[kind])
        else:
            raise cursor.damaged(f"the value of {key[:80]!r} is of unknown type {kind}")
    return metadata


def _read_tensors(cursor: _Cursor, entries: int, alignment_bytes: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Each tensor's shape and type, after checking that its data lies in the file."""
    from gguf.constants import GGML_QUANT_SIZES

    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    tensors: dict[str, tuple[tuple[int, ...], int]] = {}
    ends: dict[str, int] = {}
    for _ in range(entries):
        name = cursor.text()
        dimensions = cursor.count("I")
        if name in tensors or dimensions > MAX_DIMENSIONS:
            raise cursor.damaged(f"tensor {name[:80]!r} is listed twice or has {dimensions} dimensions")
        shape = tuple(cursor.count() for _ in range(dimensions))
        kind, offset = cursor.count("I"), cursor.count()
        if kind not in block_sizes:
            raise cursor.damaged(f"tensor {name[:80]!r} is of unknown type {kind}")
        block_elements, block_bytes = block_sizes[kind]
        tensors[name] = (shape, kind)
        ends[name] = offset + math.prod(shape) // block_elements * block_bytes
    data_start = -(-cursor.position // alignment_bytes) * alignment_bytes
    data_bytes = len(cursor.content) - data_start
    for name, end in ends.items():
        if end > data_bytes:
            raise cursor.damaged(f"the data of tensor {name[:80]!r} ends at {end}, the file's data at {data_bytes}")
    return tensors


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the metadata and tensor list of a GGUF file; no weight is read.

    Raises CheckpointError when it cannot be read, is no GGUF file or of another version, or when anything it announces
    does not lie within it.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it starts with {magic!r}, expected {MAGIC!r})")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    with content:
        cursor = _Cursor(path, content)
        cursor.skip(len(MAGIC))
        version = cursor.count("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path}: GGUF version {version}, expected {VERSIONS[0]} or {VERSIONS[1]} in little-endian order; "
                "convert the model again with a current tool"
            )
        tensor_count, entry_count = cursor.count(), cursor.count()
        if max(tensor_count, entry_count) > MAX_ENTRIES:
            raise cursor.damaged(f"{tensor_count} tensors and {entry_count} metadata entries are announced")
        metadata = _read_metadata(cursor, entry_count)
        alignment_bytes = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment_bytes, int) or not 0 < alignment_bytes <= 2**20:
            raise cursor.damaged(f"general.alignment is {alignment_bytes!r}")
        return GgufHeader(metadata, _read_tensors(cursor, tensor_count, alignment_bytes))
