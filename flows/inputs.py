"""Check what a release is asked for, before anything is started: name, recipe, platform and the source's shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.settings import check_environment, check_name
from quantize.checkpoint import CONFIG_NAME
from quantize.errors import CheckpointError
from quantize.recipe import Recipe
from quantize.recipe_file import load_recipe, parse_recipe
from tasks.platforms import Platform, check_platform


@dataclass(frozen=True)
class ReleaseInputs:
    """A release's checked parameters."""

    name: str
    recipe: Recipe


def check_inputs(
    source: str, name: str | None, recipe: dict[str, Any] | str | None, platform: Platform
) -> ReleaseInputs:
    """Refuse bad parameters, naming what was found and expected; reads no weights.

    Raises UsageError (name, environment), CheckpointError (source), RecipeError or PlatformError.
    """
    check_environment()
    check_source_path(Path(source))
    release_name = check_name(name or Path(source).resolve().name.removesuffix(".gguf"))
    chosen = (
        parse_recipe(recipe, "recipe") if isinstance(recipe, dict) else load_recipe(Path(recipe) if recipe else None)
    )
    check_platform(platform)
    return ReleaseInputs(release_name, chosen)


def check_checkpoint(source: Path) -> None:
    """Refuse a checkpoint directory that cannot be quantized or served; reads headers and the tokenizer, no weights.

    A `.gguf` file is left to the flow, which converts it first. Raises CheckpointError, and serving's TokenizerError.
    """
    from quantize.preflight import check_source
    from serving.tokenizer import check_tokenizer

    if source.is_dir():
        check_source(source).close()
        check_tokenizer(source)


def check_source_path(source: Path) -> None:
    """Refuse a source that is neither a checkpoint directory nor a `.gguf` file."""
    if source.is_dir() and (source / CONFIG_NAME).is_file():
        return
    if source.is_file() and source.suffix == ".gguf":
        return
    found = f"a directory without {CONFIG_NAME}" if source.is_dir() else "a file" if source.is_file() else "nothing"
    raise CheckpointError(
        f"{source}: found {found}, expected a Hugging Face checkpoint directory or a .gguf file. "
        "`pypto-deploy sample-model DIR` makes one that works"
    )
