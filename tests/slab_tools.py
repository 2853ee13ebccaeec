"""Helpers for tests on staged models: quantize and stage tiny checkpoints, and edit W8A8 checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from kernels.slabs import Slabs, load_slabs
from kernels.staging import stage_checkpoint
from quantize.checkpoint import CheckpointReader
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint


def quantize(source: Path, out: Path, recipe: Recipe | None = None) -> Path:
    """Quantize a tiny checkpoint to W8A8; returns `out`."""
    quantize_checkpoint(source, out, recipe or Recipe())
    return out


def stage(source: Path, folder: Path, down: str = "int8") -> Slabs:
    """Quantize `source` and stage it under `folder`; returns the loaded slabs."""
    checkpoint = quantize(source, folder / "w8a8", Recipe(down=down))  # type: ignore[arg-type]
    stage_checkpoint(checkpoint, folder / "slabs", down)  # type: ignore[arg-type]
    return load_slabs(folder / "slabs")


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, copied."""
    with CheckpointReader(checkpoint) as reader:
        return {name: reader.tensor(name).clone() for name in reader.infos}


def edit_checkpoint(checkpoint: Path, out: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """Copy `checkpoint` to `out` as one file with `edit` applied to its tensors; returns `out`."""
    tensors = read_tensors(checkpoint)
    edit(tensors)
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out
