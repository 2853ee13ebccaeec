"""What must hold before any weight is read: every problem of a checkpoint at once, in one message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantize.architecture import compare_tensors, expected_tensors, linear_modules
from quantize.checkpoint import CheckpointReader, CheckpointScan, scan_checkpoint
from quantize.errors import CheckpointError
from quantize.model_config import ModelConfig
from quantize.quantization_config import Quantization
from quantize.safetensors_header import TensorInfo

SOURCE_DTYPES = ("BF16", "F16", "F32")
QUANTIZED_SUFFIXES = (
    ".weight_scale",
    ".weight_packed",
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_scale_inv",
    ".g_idx",
)


def _already_quantized(scan: CheckpointScan) -> list[str]:
    """Signs that a source checkpoint is quantized, in its configuration or in its tensors."""
    advice = "quantize from the original BF16, FP16 or FP32 checkpoint instead"
    if scan.quantization is not None:
        return [f"already quantized: config.json states quant_method {scan.quantization.method!r}; {advice}"]
    marked = sorted(name for name in scan.infos if name.endswith(QUANTIZED_SUFFIXES))
    if marked:
        return [f"already quantized: {len(marked)} tensors such as {marked[0][:120]} say so; {advice}"]
    return []


def _odd_dtypes(infos: Mapping[str, TensorInfo]) -> list[str]:
    return [
        f"{name[:120]} is {info.dtype}, expected one of {', '.join(SOURCE_DTYPES)}"
        for name, info in sorted(infos.items())
        if info.dtype not in SOURCE_DTYPES and not name.endswith("rotary_emb.inv_freq")
    ]


def source_problems(scan: CheckpointScan) -> list[str]:
    """Everything that keeps a scanned checkpoint from being a source of quantization; empty when it is one."""
    quantized = _already_quantized(scan)
    problems = [*scan.problems, *quantized]
    if not quantized:
        if scan.config is not None and scan.infos:
            problems += compare_tensors(scan.infos, expected_tensors(scan.config), scan.config)
        problems += _odd_dtypes(scan.infos)
    return problems


def check_source(directory: Path) -> CheckpointReader:
    """Check an unquantized source checkpoint without reading a weight; returns an open reader.

    Raises CheckpointError whose `problems` lists everything found: absent or damaged shards, index entries that lie,
    unsupported settings, missing or unexpected names per layer, wrong shapes, quantized input.
    """
    scan = scan_checkpoint(directory)
    problems = source_problems(scan)
    if problems:
        raise CheckpointError(f"{directory}: the checkpoint cannot be quantized", problems)
    return CheckpointReader(directory, scan)


def _expected_quantized(config: ModelConfig, quantization: Quantization) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a W8A8 checkpoint: those of the source and one scale a quantized module."""
    expected = expected_tensors(config)
    for module, (out_features, _) in linear_modules(config).items():
        if quantization.is_quantized(module) and module + ".weight" in expected:
            expected[module + ".weight_scale"] = (out_features, 1)
    return expected


def quantized_problems(scan: CheckpointScan) -> list[str]:
    """Everything that keeps a scanned checkpoint from being a usable W8A8 one; empty when it is one.

    Beside what `source_problems` looks at: the scheme is one that can be honoured, every quantized module has INT8
    codes and one scale a channel (`[out, 1]` or `[out]`), and every ignored one is floating-point.
    """
    problems = list(scan.problems)
    quantization = scan.quantization
    if quantization is None:
        problems.append("config.json has no quantization_config: expected a W8A8 checkpoint; quantize it first")
    else:
        problems += quantization.problems
    if scan.config is not None and quantization is not None and not quantization.problems and scan.infos:
        config, modules = scan.config, linear_modules(scan.config)
        for target in quantization.unmatched_targets(modules):
            problems.append(f"quantization_config: target {target!r} matches no Linear module of the model")
        expected = _expected_quantized(config, quantization)
        for name, shape in expected.items():
            info = scan.infos.get(name)
            if name.endswith(".weight_scale") and info is not None and info.shape == shape[:1]:
                expected[name] = shape[:1]
        problems += compare_tensors(scan.infos, expected, config)
        codes = {module + ".weight" for module in modules if quantization.is_quantized(module)}
        for name in sorted(set(expected) & set(scan.infos)):
            allowed = ("I8",) if name in codes else SOURCE_DTYPES
            if scan.infos[name].dtype not in allowed:
                problems.append(f"{name} is {scan.infos[name].dtype}, expected {' or '.join(allowed)}")
    return problems


def check_quantized(directory: Path) -> CheckpointReader:
    """Check a W8A8 checkpoint (ours or another tool's) without reading a weight; returns an open reader.

    Raises CheckpointError whose `problems` lists everything that `quantized_problems` finds.
    """
    scan = scan_checkpoint(directory)
    problems = quantized_problems(scan)
    if problems:
        raise CheckpointError(f"{directory}: not a usable W8A8 checkpoint", problems)
    return CheckpointReader(directory, scan)
