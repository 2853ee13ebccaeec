"""Quantizing by any recipe: plain rounding streams without torch, the rest calibrates a layer at a time."""

from __future__ import annotations

import logging
from pathlib import Path

from quantize.errors import CheckpointError
from quantize.recipe import Recipe
from quantize.rtn import QuantizeResult, quantize_checkpoint
from quantize.streaming import Progress

logger = logging.getLogger(__name__)


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    *,
    memory_bytes: int | None = None,
    workers: int | None = None,
) -> QuantizeResult:
    """Quantize the checkpoint `source` into the new directory `out` by `recipe`.

    `progress(done, total)` counts source bytes (with `auto`, candidates). `memory_bytes` and `workers` bound plain
    rounding (that of `auto` too); calibration needs memory for one decoder layer and its Hessians, and uses torch's
    threads. Raises what `rtn.quantize_checkpoint` and `calibrated.run.quantize_calibrated` raise, and CheckpointError
    for an `out` inside the source.
    """
    if source.resolve() in out.resolve().parents:
        raise CheckpointError(f"{out}: lies in the source {source}, which is only read; choose a place outside it")
    if recipe.idle_settings:
        logger.warning("algorithm %s does not read the recipe's %s", recipe.algorithm, ", ".join(recipe.idle_settings))
    return _quantize(source, out, recipe, progress, max_shard_bytes, memory_bytes, workers)


def _quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None,
    max_shard_bytes: int | None,
    memory_bytes: int | None,
    workers: int | None,
) -> QuantizeResult:
    """`quantize` without its checks, for the candidates of a search too."""
    if not recipe.calibrates:
        return quantize_checkpoint(
            source, out, recipe, progress, max_shard_bytes, memory_bytes=memory_bytes, workers=workers
        )
    if recipe.algorithm == "auto":
        from quantize.calibrated.search import quantize_auto

        def one(source: Path, out: Path, recipe: Recipe) -> QuantizeResult:
            return _quantize(source, out, recipe, None, max_shard_bytes, memory_bytes, workers)

        return quantize_auto(source, out, recipe, one, progress)
    from quantize.calibrated.run import quantize_calibrated

    return quantize_calibrated(source, out, recipe, progress, max_shard_bytes)
