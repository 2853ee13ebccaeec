"""Which tensor goes into which safetensors file, and where in it: known before a byte of any is written."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantize.checkpoint import SINGLE_NAME
from quantize.safetensors_header import DTYPES

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, dtype (torch's, or as safetensors spells it) and shape.

    `group` keeps tensors together when shards are not cut by size: the name of the source's shard, for instance.
    """

    name: str
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    group: str = ""

    @property
    def dtype_name(self) -> str:
        """The dtype as safetensors spells it."""
        if isinstance(self.dtype, str):
            return self.dtype
        from quantize.torch_dtypes import DTYPE_NAMES

        return DTYPE_NAMES[self.dtype]

    @property
    def item_bytes(self) -> int:
        """Size of an element."""
        return DTYPES[self.dtype_name]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, header bytes, size, and where in it each tensor's payload starts."""

    name: str
    head: bytes
    file_bytes: int
    offsets: Mapping[str, int]


def cut_shards(specs: Sequence[TensorSpec], max_shard_bytes: int | None) -> list[list[TensorSpec]]:
    """Cut the specs into shards in their order, by size or (None) by group."""
    if max_shard_bytes is None:
        groups: dict[str, list[TensorSpec]] = {}
        for spec in specs:
            groups.setdefault(spec.group, []).append(spec)
        return list(groups.values()) or [[]]
    shards: list[list[TensorSpec]] = [[]]
    filled_bytes = 0
    for spec in specs:
        if shards[-1] and filled_bytes + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(spec)
        filled_bytes += spec.nbytes
    return shards


def _place(spec: TensorSpec) -> tuple[bool, int, str]:
    """Sorts whole pages before what would leave the next tensor between two, wide before narrow, so that each is
    aligned to its elements."""
    return spec.nbytes % PAGE_BYTES != 0, -spec.item_bytes, spec.name


def lay_out(shards: Sequence[Sequence[TensorSpec]]) -> list[Shard]:
    """Name the shards and place their tensors: whole pages first, then, as safetensors does, by width and name.

    The header is padded to a page. So every matrix of whole pages starts on one: it is written in whole pages, which
    costs the kernel less than across them, and a reader may map it by itself.
    """
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    result = []
    for name, shard in zip(names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins: dict[str, int] = {}
        position = 0
        for spec in sorted(shard, key=_place):
            begins[spec.name], end = position, position + spec.nbytes
            header[spec.name] = {
                "dtype": spec.dtype_name,
                "shape": list(spec.shape),
                "data_offsets": [position, end],
            }
            position = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(LENGTH_BYTES + len(raw)) % PAGE_BYTES)
        head = struct.pack("<Q", len(raw)) + raw
        offsets = {tensor: len(head) + begin for tensor, begin in begins.items()}
        result.append(Shard(name, head, len(head) + position, offsets))
    return result


def is_laid_out(path: Path, shard: Shard) -> bool:
    """Whether the file holds the shard's header and has its size."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == shard.file_bytes and file.read(len(shard.head)) == shard.head
    except FileNotFoundError:
        return False
