"""The recipe: everything a release decides about quantization and its gates, read from YAML or JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from quantize.architecture import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, linear_modules
from quantize.errors import RecipeError
from quantize.model_config import ModelConfig
from quantize.quantization_config import matches

DOWN_PATTERN = r"re:model\.layers\.\d+\.mlp\.down_proj$"


class Gates(BaseModel):
    """Bounds a bundle must keep to be promoted; compared with the BF16 source (`max_tpot_ms`: milliseconds a token)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_perplexity_ratio: float = Field(default=1.10, ge=1.0, allow_inf_nan=False)
    max_mean_kl: float = Field(default=0.10, gt=0.0, allow_inf_nan=False)
    min_top1_agreement: float = Field(default=0.85, ge=0.0, le=1.0)
    max_tpot_ms: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)


class Recipe(BaseModel):
    """How to quantize, and what the result must reach.

    `arithmetic`: `fp32` computes codes from the scale as stored; `compat` equals llm-compressor's data-free W8A8.
    `ignore`: modules left in the source's dtype, as exact names or `re:` patterns. `down`: `bf16` keeps the MLP's down
    projections in the source's dtype.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    arithmetic: Literal["fp32", "compat"] = "fp32"
    algorithm: Literal["rtn"] = "rtn"
    ignore: tuple[str, ...] = (LM_HEAD,)
    down: Literal["int8", "bf16"] = "int8"
    gates: Gates = Gates()

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            try:
                matches(entry, "")
            except re.error as error:
                raise ValueError(f"{entry!r} is not a valid pattern: {error}") from None
        return entries

    @property
    def effective_ignore(self) -> tuple[str, ...]:
        """The ignore entries, with the down projections when `down` is `bf16`."""
        return self.ignore if self.down == "int8" else (*self.ignore, DOWN_PATTERN)

    def digest(self) -> str:
        """sha256 (hex) of what affects the weights: the gates are left out."""
        content = self.model_dump(mode="json", exclude={"gates"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _other_modules(config: ModelConfig) -> list[str]:
    """Modules with weights that are not Linear; an ignore entry may name them to no effect."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    layers = [layer_prefix(layer) + norm for layer in range(config.num_layers) for norm in norms]
    return [EMBEDDING, FINAL_NORM, *layers]


def ignored_modules(entries: Iterable[str], config: ModelConfig) -> list[str]:
    """The Linear modules of the model that `entries` match, in model order.

    A tied LM head is always among them: it has no weight of its own. Raises RecipeError for entries that match nothing.
    """
    entries = list(entries)
    linear = list(linear_modules(config))
    known = linear + _other_modules(config)
    unmatched = [entry for entry in entries if not any(matches(entry, module) for module in known)]
    if unmatched:
        raise RecipeError(
            f"ignore: {', '.join(repr(entry) for entry in unmatched)} match no module of this {config.family} model; "
            f"modules have names such as {linear[0]!r} and {LM_HEAD!r}, patterns start with 're:'"
        )
    ignored = [module for module in linear if any(matches(entry, module) for entry in entries)]
    if config.tie_word_embeddings and LM_HEAD not in ignored:
        ignored.append(LM_HEAD)
    return ignored


def _explain(error: ValidationError) -> Sequence[str]:
    return [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]


def parse_recipe(content: Mapping[str, Any] | None, origin: str) -> Recipe:
    """Build a recipe from parsed keys and values; None or nothing gives the defaults.

    Raises RecipeError that names `origin` (a file, or where else the content is from) and every bad key.
    """
    if content is not None and not isinstance(content, Mapping):
        raise RecipeError(f"{origin}: found a {type(content).__name__}, expected keys and values")
    try:
        return Recipe.model_validate(dict(content or {}))
    except ValidationError as error:
        raise RecipeError("\n  - ".join([f"{origin}: not a valid recipe", *_explain(error)])) from None


def load_recipe(path: Path | None) -> Recipe:
    """Read a recipe file (YAML, so JSON too); None gives the defaults. Raises RecipeError naming file and keys."""
    if path is None:
        return Recipe()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from None
    return parse_recipe(content, str(path))
