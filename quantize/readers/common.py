"""What the rules of every reader share: looking at a scan, and the W8A8 scheme itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantize.architecture import LM_HEAD, by_layer
from quantize.checkpoint import CheckpointScan
from quantize.model_config import ModelConfig
from quantize.quantization_config import CONFIG_KEYS

Check = Callable[[CheckpointScan, ModelConfig], list[str]]
"""A rule: the problems of a scan; the model's configuration is the scan's, known to be there."""
MAX_LAYERS_SHOWN = 4


def grouped(names: Iterable[str]) -> str:
    """Names by layer on one line, cut after a few layers."""
    groups = by_layer(names)
    return "; ".join(groups[:MAX_LAYERS_SHOWN]) + (
        f"; and {len(groups) - MAX_LAYERS_SHOWN} more layers" if len(groups) > MAX_LAYERS_SHOWN else ""
    )


def is_codes(scan: CheckpointScan, module: str) -> bool:
    """Whether the weight of a module is stored as INT8."""
    info = scan.infos.get(module + ".weight")
    return info is not None and info.dtype == "I8"


def section_of(scan: CheckpointScan) -> Mapping[str, Any]:
    """The quantization section itself, also one level down as compressed-tensors once wrote it; empty when absent."""
    section = next((scan.raw_config[key] for key in CONFIG_KEYS if scan.raw_config.get(key) is not None), None)
    if isinstance(section, Mapping) and isinstance(section.get("quantization_config"), Mapping):
        section = section["quantization_config"]
    return section if isinstance(section, Mapping) else {}


def quantized_w8a8(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """W8A8: static INT8 weights symmetric per channel, dynamic INT8 inputs symmetric per token."""
    if scan.quantization is None:
        return ["config.json has no quantization_config: found an unquantized checkpoint, expected W8A8; quantize it"]
    return list(scan.quantization.problems)


def plain_head(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """The LM head is no Linear there: INT8 codes are taken for weights, or the scale has no parameter to go to."""
    if not is_codes(scan, LM_HEAD):
        return []
    return ["lm_head.weight is I8, expected a floating-point LM head; quantize again with lm_head in ignore"]
