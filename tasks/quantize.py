"""The quantize step: source checkpoint in, W8A8 checkpoint and per-tensor errors out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task

from quantize.calibration import data_digest
from quantize.pipeline import quantize
from quantize.recipe import Recipe
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.source import Source
from tasks.steps import StepRecord, run_step, step_key


def quantize_key(source: Source, recipe: Recipe) -> str:
    """Content key of the step: the source's digest, what of the recipe affects weights, and its calibration text."""
    text = data_digest(recipe.calibration) if recipe.calibrates else None
    return step_key("quantize", ("quantize",), source=source.digest, recipe=recipe.digest(), text=text)


def quantize_source(work: Path, key: str, source: Path, recipe: Recipe) -> StepRecord:
    """Quantize `source`; facts: checkpoint digest, counts, bytes and the error of every quantized tensor."""

    def build(out: Path) -> dict[str, Any]:
        result = quantize(source, out, recipe, progress=progress.advance)
        return asdict(result)

    return run_step(work, "quantize", key, build)


@task(name="quantize", **STEP_TASK)
def quantize_step(step: str, key: str, work: str, source: str, recipe: dict[str, Any]) -> StepRecord:
    """Prefect task over `quantize_source`, cached under `key`."""
    return quantize_source(Path(work), key, Path(source), Recipe.model_validate(recipe))
