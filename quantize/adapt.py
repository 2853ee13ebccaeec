"""What a checkpoint written for one reader has beyond the common format: decided before a weight is read.

Nothing here changes a quantized value. Modules may join `ignore` (readers that fuse Linears need one scheme for all
members), `config.json` says rotary settings and dtype in the old spelling too, and tensors may be copied. The plan is
then held against the reader's own rules, so that a recipe it cannot take is refused before the work starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.architecture import EMBEDDING, LM_HEAD, layer_of, layer_prefix, linear_modules
from quantize.checkpoint import CheckpointScan
from quantize.errors import RecipeError
from quantize.model_config import ModelConfig
from quantize.quantization_config import parse_quantization
from quantize.readers import READERS, acceptance
from quantize.readers.vllm import FUSED
from quantize.rope import RopeSettings, both_spellings
from quantize.safetensors_header import TensorInfo

FUSING_READERS = ("vllm", "vllm-ascend")
HEAD_COPYING_READERS = ("pypto-serving",)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """The changes: modules left unquantized, `config.json` without its quantization section, and tensors to copy.

    `copies` maps a tensor name of the output to the source's tensor whose values it holds.
    """

    ignored: list[str]
    config: dict[str, Any]
    copies: dict[str, str]


def close_fused(ignored: Sequence[str], config: ModelConfig) -> list[str]:
    """`ignored` with the other members of every fused Linear that it touches, in model order."""
    closed = set(ignored)
    for module in ignored:
        layer = layer_of(module)
        if layer is None:
            continue
        for members in FUSED.values():
            names = [layer_prefix(layer) + member for member in members]
            if module in names:
                closed.update(names)
    added = sorted(closed - set(ignored))
    if added:
        logger.warning("%s stay unquantized too: the reader needs one scheme for fused modules", ", ".join(added))
    return [module for module in linear_modules(config) if module in closed]


def adapt(reader: str, config: ModelConfig, raw_config: Mapping[str, Any], ignored: Sequence[str]) -> Adaptation:
    """What to write for `reader` (a key of `READERS`, or `any` for the common format, which changes nothing).

    `raw_config` is the source's `config.json` without a quantization section.
    """
    if reader == "any":
        return Adaptation(list(ignored), dict(raw_config), {})
    adapted = both_spellings(raw_config, RopeSettings(config.rope_theta, config.rope_scaling))
    if raw_config.get("dtype") or raw_config.get("torch_dtype"):
        adapted["dtype"] = adapted["torch_dtype"] = config.dtype
    copies = {}
    if reader in HEAD_COPYING_READERS and config.tie_word_embeddings:
        copies[LM_HEAD + ".weight"] = EMBEDDING + ".weight"
    closed = close_fused(ignored, config) if reader in FUSING_READERS else list(ignored)
    return Adaptation(closed, adapted, copies)


def check_plan(
    reader: str, config: ModelConfig, raw_config: Mapping[str, Any], planned: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Hold the tensors to be written (name to dtype, as safetensors spells it, and shape) against the reader's rules.

    `raw_config` is the `config.json` to be written. Raises RecipeError with every reason why `reader` would not take
    the result; notes on what the reader leaves out are logged.
    """
    if reader == "any":
        return
    infos = {name: TensorInfo(name, dtype, shape, Path(), 0, 0) for name, (dtype, shape) in planned.items()}
    scan = CheckpointScan(Path(), dict(raw_config), config, parse_quantization(raw_config), infos)
    verdict = acceptance(scan, reader)
    if verdict.problems:
        title = READERS[reader].title
        told = "\n  - ".join([f"the checkpoint would not suit {reader} ({title})", *verdict.problems])
        raise RecipeError(told)
    for note in verdict.notes:
        logger.warning("%s: %s", reader, note)
