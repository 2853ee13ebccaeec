"""Staging: a W8A8 checkpoint becomes slabs, by the rules of the contract, one source tensor at a time.

`kernels.slab_writer` writes them with about one tensor in memory. The folder appears under its final name only when it
is complete. This module knows nothing of how weights were quantized: codes and scales are re-oriented, never
recomputed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.contract import CONTRACT_NAME, CONTRACT_VERSION, DownDtype, ResolvedSlab, fingerprint, slab_specs
from kernels.errors import StagingError
from kernels.layout import source_problem
from kernels.slab_writer import check_space, source_names, write_slabs
from kernels.slabs import (
    MANIFEST_FILE,
    SLAB_FILE,
    Slabs,
    config_to_json,
    load_slabs,
    slabs_digest,
    verify_slabs,
)
from quantize.architecture import by_layer
from quantize.checkpoint import CheckpointReader
from quantize.model_config import ModelConfig
from quantize.staging_folder import StagingFolder

__all__ = ["Slabs", "StageResult", "load_slabs", "stage_checkpoint", "verify_slabs"]

logger = logging.getLogger(__name__)

MAX_PROBLEMS_SHOWN = 50
MAX_LAYERS_SHOWN = 4


@dataclass(frozen=True)
class StageResult:
    """What staging made: the slabs' digest, each slab's dtype, shape and sha256, payload bytes and wall time."""

    digest: str
    tensors: dict[str, dict[str, Any]]
    bytes: int
    seconds: float


def stage_checkpoint(
    checkpoint: Path,
    out: Path,
    down: DownDtype = "int8",
    progress: Callable[[int, int], None] | None = None,
) -> StageResult:
    """Write the slabs of the W8A8 `checkpoint` to the new folder `out`; `progress(done_bytes, total_bytes)` as it goes.

    The result is a function of the checkpoint's content: two runs give equal digests. Raises StagingError listing every
    problem, ContractError when the model does not fit the contract, and quantize's CheckpointError when the checkpoint
    cannot be read or `out` exists; nothing is left at `out` or beside it then.
    """
    started = time.monotonic()
    with CheckpointReader(checkpoint) as reader:
        slabs = slab_specs(reader.config, down)
        check_sources(reader, slabs, down)
        total_bytes = sum(slab.nbytes for slab in slabs)
        folder = StagingFolder(out)
        try:
            check_space(folder.path, total_bytes)
            tensors = write_slabs(reader, slabs, folder.path / SLAB_FILE, progress)
            digest = slabs_digest(reader.config, down, tensors)
            _write_manifest(folder.path / MANIFEST_FILE, reader.config, down, tensors, digest)
            folder.commit()
        except BaseException:
            folder.discard()
            raise
    seconds = time.monotonic() - started
    logger.info("staged %d slabs, %.1f MB, in %.1f s to %s", len(slabs), total_bytes / 1e6, seconds, out)
    return StageResult(digest, tensors, total_bytes, seconds)


def check_sources(reader: CheckpointReader, slabs: Sequence[ResolvedSlab], down: DownDtype) -> None:
    """Compare the checkpoint's tensor table with what the slabs need, reading no weight; all problems in one error."""
    config, infos = reader.config, reader.infos
    problems: list[str] = []
    used = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unquantized = _unquantized_modules(reader, slabs)
    problems += _unquantized_problems(unquantized, config.num_layers, down)
    for slab in slabs:
        for name in source_names(slab, config):
            used.add(name)
            if name.rsplit(".", 1)[0] in unquantized:
                continue
            info = infos.get(name)
            if info is None:
                problems.append(f"{name} is missing (slab {slab.name} of family {config.family} needs it)")
                continue
            problem = source_problem(slab, name, info.dtype, info.shape, config.num_layers, config.vocab_size)
            if problem:
                problems.append(problem)
    extra = infos.keys() - used
    if down == "bf16":
        extra = {name for name in extra if not name.endswith("down_proj.weight_scale")}
    problems += [
        f"unexpected for family {config.family} with {config.num_layers} layers, {group}" for group in by_layer(extra)
    ]
    if problems:
        shown = problems[:MAX_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more")
        raise StagingError(f"{reader.directory} cannot be staged for down={down}: {len(problems)} problem(s)", shown)


def _unquantized_modules(reader: CheckpointReader, slabs: Sequence[ResolvedSlab]) -> set[str]:
    """Modules whose weight the contract wants in INT8 (or whose `down` variant differs) but that are not so stored."""
    wrong = set()
    for slab in slabs:
        if slab.spec.rule == "transpose":
            for name in source_names(slab, reader.config):
                info = reader.infos.get(name)
                if info is not None and (info.dtype == "I8") != (slab.dtype == "INT8"):
                    wrong.add(name.rsplit(".", 1)[0])
    return wrong


def _unquantized_problems(modules: set[str], num_layers: int, down: DownDtype) -> list[str]:
    downs = sorted(module for module in modules if module.endswith(".down_proj"))
    others = sorted(modules - set(downs))
    problems = []
    if downs and down == "bf16":
        problems.append(
            f"{len(downs)} of {num_layers} down_proj are INT8 but down=bf16 was asked for: stage with down=int8, or "
            f"quantize again with down=bf16 ({_few(downs)})"
        )
    elif downs and len(downs) == num_layers:
        problems.append("down_proj of every layer is not quantized in this checkpoint: stage it with down=bf16")
    elif downs:
        problems.append(
            f"down_proj is quantized in some layers and not in others ({_few(downs)}, which is not): "
            "a slab has one dtype, quantize all of them or none"
        )
    if others:
        problems.append(
            f"{len(others)} module(s) not quantized, but the contract has them in INT8: "
            f"{_few(others)}; quantize again without ignoring them"
        )
    return problems


def _few(modules: Sequence[str]) -> str:
    """Modules by layer, on one line; after a few layers only how many more there are."""
    groups = by_layer(modules)
    more = f"; and {len(groups) - MAX_LAYERS_SHOWN} more layers" if len(groups) > MAX_LAYERS_SHOWN else ""
    return "; ".join(groups[:MAX_LAYERS_SHOWN]) + more


def _write_manifest(
    path: Path, config: ModelConfig, down: DownDtype, tensors: dict[str, dict[str, Any]], digest: str
) -> None:
    manifest = {
        "contract": {
            "name": CONTRACT_NAME,
            "version": CONTRACT_VERSION,
            "fingerprint": fingerprint(down),
            "down": down,
        },
        "config": config_to_json(config),
        "tensors": tensors,
        "digest": digest,
    }
    with path.open("w") as file:
        json.dump(manifest, file, indent=1)
