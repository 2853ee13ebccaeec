"""The recipe: everything a release decides about quantization and its gates, read from YAML or JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quantize.architecture import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, linear_modules
from quantize.errors import RecipeError
from quantize.model_config import ModelConfig
from quantize.quantization_config import matches

DOWN_PATTERN = r"re:model\.layers\.\d+\.mlp\.down_proj$"
RECIPE_NAME = "recipe.yaml"
"""The file in a W8A8 checkpoint that says how it was made."""


def _check_patterns(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        try:
            matches(entry, "")
        except re.error as error:
            raise ValueError(f"{entry!r} is not a valid pattern: {error}") from None
    return entries


class Gates(BaseModel):
    """Bounds a bundle must keep to be promoted; compared with the BF16 source (`max_tpot_ms`: milliseconds a token)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_perplexity_ratio: float = Field(strict=True, default=1.10, ge=1.0, allow_inf_nan=False)
    max_mean_kl: float = Field(strict=True, default=0.10, gt=0.0, allow_inf_nan=False)
    min_top1_agreement: float = Field(strict=True, default=0.85, ge=0.0, le=1.0)
    max_tpot_ms: float | None = Field(strict=True, default=None, gt=0.0, allow_inf_nan=False)


class ModuleScheme(BaseModel):
    """A scheme for the Linear modules that `targets` name: exact names, `re:` patterns, or the class `Linear`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: tuple[str, ...] = Field(min_length=1)
    scheme: Literal["int8", "bf16"]

    @field_validator("targets")
    @classmethod
    def _patterns_compile(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return _check_patterns(entries)


class Calibration(BaseModel):
    """The text that calibrated algorithms run through the model.

    `data`: a text file, a JSON Lines file or a folder of them; None is the package's own text. `tokens` are taken, in
    windows of `window_tokens`, by `seed`. `chat_template` renders JSON Lines conversations (`messages`) with the
    checkpoint's own template; without it their contents are joined as plain text. `held_out_tokens` (rounded up to
    windows) are set aside first and never calibrated on: what `auto` judges by, which sets aside 4096 when told none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str | None = None
    tokens: int = Field(strict=True, default=16_384, ge=2, le=2**24)
    window_tokens: int = Field(strict=True, default=512, ge=2, le=2**17)
    held_out_tokens: int = Field(strict=True, default=0, ge=0, le=2**24)
    seed: int = Field(strict=True, default=0, ge=0, lt=2**63)
    chat_template: bool = Field(default=True, strict=True)


class Smoothing(BaseModel):
    """SmoothQuant: how much of the activations' range moves into the weights, and where.

    `strength` is the migration exponent, 0 to 1; None searches it per layer and mapping. `mappings` are the pairs of a
    producer and the Linears that read it: `qkv` and `gate_up` (through the norms), `o` (through v) and `down`
    (through up). `rotate` first turns the residual stream and the heads of v by orthogonal matrices folded into the
    weights, which spreads outliers that no diagonal scaling reaches; it unties a tied LM head.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    strength: float | None = Field(strict=True, default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    mappings: tuple[Literal["qkv", "o", "gate_up", "down"], ...] = Field(
        default=("qkv", "o", "gate_up", "down"), min_length=1
    )
    rotate: bool = Field(default=False, strict=True)

    @field_validator("mappings")
    @classmethod
    def _each_once(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        # A second scale would be computed from activations that the first has changed.
        if len(set(entries)) != len(entries):
            raise ValueError(f"found {', '.join(entries)}, expected each mapping once")
        return entries


class Gptq(BaseModel):
    """GPTQ: `damping` is the share of the Hessian's mean diagonal added to it; `act_order` goes by size of inputs.

    `compensate`: weights also make up for what rounding their inputs loses, where a part of the windows confirms it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    damping: float = Field(strict=True, default=0.1, gt=0.0, le=1.0, allow_inf_nan=False)
    act_order: bool = Field(default=True, strict=True)
    compensate: bool = Field(default=True, strict=True)
    block_columns: int = Field(strict=True, default=128, ge=1, le=2**14)


class Search(BaseModel):
    """What `auto` must reach, and what it may spend.

    `max_kl_share` and `max_perplexity_share` bound what is left of plain rounding's mean KL and perplexity increase on
    held-out calibration text; `max_bf16_share` is the share of the Linear weights that may stay BF16 for it. Text of
    another kind is met with more KL than held-out text of the same work (0.28 for 0.20 in docs/quality.md).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_kl_share: float = Field(strict=True, default=0.20, gt=0.0, allow_inf_nan=False)
    max_perplexity_share: float = Field(strict=True, default=0.25, gt=0.0, allow_inf_nan=False)
    max_bf16_share: float = Field(strict=True, default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)


Algorithm = Literal["rtn", "smoothquant", "gptq", "smoothquant+gptq", "auto"]
Reader = Literal["any", "vllm", "vllm-ascend", "pypto-serving"]


_READ_BY: Mapping[Algorithm, frozenset[str]] = {
    "rtn": frozenset(),
    "smoothquant": frozenset({"smoothing", "calibration"}),
    "gptq": frozenset({"gptq", "smoothing.rotate", "calibration"}),
    "smoothquant+gptq": frozenset({"smoothing", "gptq", "calibration"}),
    "auto": frozenset({"smoothing", "gptq", "search", "calibration"}),
}
"""Which sections, or keys of one, each algorithm reads."""


class Recipe(BaseModel):
    """How to quantize, and what the result must reach.

    `algorithm` is the preset: plain rounding, or one that calibrates. `arithmetic`: `fp32` computes codes from the
    scale as stored; `compat` equals llm-compressor's data-free W8A8. `clip: mse` searches the scale of least squared
    error per channel. `ignore`: modules left in the source's dtype, as exact names or `re:` patterns; `schemes` say it
    target by target, the last match wins; `down: bf16` keeps the MLP's down projections. `reader`: whose loader the
    checkpoint must suit beyond the common format.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Algorithm = "rtn"
    arithmetic: Literal["fp32", "compat"] = "fp32"
    clip: Literal["none", "mse"] = "none"
    ignore: tuple[str, ...] = (LM_HEAD,)
    schemes: tuple[ModuleScheme, ...] = ()
    down: Literal["int8", "bf16"] = "int8"
    smoothing: Smoothing = Smoothing()
    gptq: Gptq = Gptq()
    search: Search = Search()
    calibration: Calibration = Calibration()
    reader: Reader = "any"
    gates: Gates = Gates()

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return _check_patterns(entries)

    @model_validator(mode="after")
    def _compat_is_plain_rounding(self) -> Recipe:
        if self.arithmetic == "compat" and (self.algorithm != "rtn" or self.clip != "none"):
            raise ValueError(
                f"arithmetic compat is llm-compressor's data-free rounding to the bit; found algorithm "
                f"{self.algorithm} and clip {self.clip}: use arithmetic fp32 with them, or algorithm rtn and clip none"
            )
        return self

    @model_validator(mode="after")
    def _plain_rounding_does_not_rotate(self) -> Recipe:
        if self.algorithm == "rtn" and self.smoothing.rotate:
            raise ValueError(
                "smoothing.rotate does nothing under algorithm rtn; use smoothquant, gptq or smoothquant+gptq with it"
            )
        return self

    @property
    def calibrates(self) -> bool:
        """Whether the algorithm runs text through the model."""
        return self.algorithm != "rtn"

    @property
    def compensates(self) -> bool:
        """Whether GPTQ is to make up for rounded inputs."""
        return "gptq" in self.algorithm and self.gptq.compensate

    @property
    def idle_settings(self) -> list[str]:
        """Settings that are not their defaults and that the algorithm does not read, as `section.key`.

        They are no error: a recipe's algorithm may be overridden (`--preset`), and the sections are kept for the other.
        """
        read = _READ_BY[self.algorithm]
        idle = []
        for section in ("smoothing", "gptq", "search", "calibration"):
            settings = getattr(self, section)
            defaults = type(settings)()
            for key in type(settings).model_fields:
                if getattr(settings, key) != getattr(defaults, key) and not {section, f"{section}.{key}"} & read:
                    idle.append(f"{section}.{key}")
        return idle

    @property
    def effective_ignore(self) -> tuple[str, ...]:
        """The ignore entries, with the down projections when `down` is `bf16`."""
        return self.ignore if self.down == "int8" else (*self.ignore, DOWN_PATTERN)

    def digest(self) -> str:
        """sha256 (hex) of what affects the weights: the gates are left out."""
        content = self.model_dump(mode="json", exclude={"gates"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_recipe` reads back to an equal one: what is stored with a checkpoint."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _other_modules(config: ModelConfig) -> list[str]:
    """Modules with weights that are not Linear; an ignore entry may name them to no effect."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    layers = [layer_prefix(layer) + norm for layer in range(config.num_layers) for norm in norms]
    return [EMBEDDING, FINAL_NORM, *layers]


def ignored_modules(entries: Iterable[str], config: ModelConfig, schemes: Sequence[ModuleScheme] = ()) -> list[str]:
    """The Linear modules of the model that stay as they are, in model order: `entries`, then `schemes` in their order.

    A tied LM head is always among them: it has no weight of its own. Raises RecipeError for entries that match nothing.
    """
    entries = list(entries)
    linear = list(linear_modules(config))
    known = linear + _other_modules(config)
    named = [(entry, "ignore") for entry in entries]
    named += [(entry, f"schemes.{n}.targets") for n, scheme in enumerate(schemes) for entry in scheme.targets]
    unmatched = [(entry, key) for entry, key in named if not any(matches(entry, module) for module in known)]
    if unmatched:
        raise RecipeError(
            f"{', '.join(f'{key}: {entry!r}' for entry, key in unmatched)} match no module of this {config.family} "
            f"model; modules have names such as {linear[0]!r} and {LM_HEAD!r}, patterns start with 're:'"
        )
    ignored = {module for module in linear if any(matches(entry, module) for entry in entries)}
    for scheme in schemes:
        targeted = {module for module in linear if any(matches(entry, module) for entry in scheme.targets)}
        ignored = ignored | targeted if scheme.scheme == "bf16" else ignored - targeted
    if config.tie_word_embeddings:
        if any(LM_HEAD in scheme.targets and scheme.scheme == "int8" for scheme in schemes):
            raise RecipeError(
                f"schemes: {LM_HEAD!r} as int8, but this model's LM head is its embedding (tie_word_embeddings), which "
                "stays as it is; leave it out"
            )
        ignored.add(LM_HEAD)
    return [module for module in linear if module in ignored]


def recipe_ignored_modules(recipe: Recipe, config: ModelConfig) -> list[str]:
    """The Linear modules that `recipe` leaves in the source's dtype, in model order; see `ignored_modules`."""
    return ignored_modules(recipe.effective_ignore, config, recipe.schemes)
