"""Hand-made checkpoint files: safetensors bytes from a header and data, and edits of a copied tiny checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of a header (an object, or raw bytes) and data; `length` overrides the stated length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy of a checkpoint directory that a test may change."""
    shutil.copytree(source, target)
    return target


def edit_json(path: Path, edit: Callable[[Config], None]) -> None:
    """Apply `edit` to the object in a JSON file."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """Apply `edit` to the tensors of a single-file checkpoint; returns the directory."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return directory


def zeros_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of BF16 zeros."""
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}, path)
