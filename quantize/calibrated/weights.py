"""A decoder layer's parameters out of a checkpoint, source or W8A8, as FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from quantize.architecture import LAYER_PROJECTIONS, expected_tensors, layer_prefix
from quantize.calibrated.decoder import INPUT_NORM, K_NORM, POST_NORM, Q_NORM, Layer
from quantize.checkpoint import CheckpointReader
from quantize.errors import NonFiniteWeightError


def finite_fp32(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor as FP32; raises NonFiniteWeightError naming tensor and row for NaN or infinity."""
    values = reader.tensor(name).to(torch.float32)
    rows = values if values.dim() > 1 else values.unsqueeze(1)
    finite = torch.isfinite(rows).all(dim=1)
    if not bool(finite.all()):
        raise NonFiniteWeightError(
            f"{name}: row {int((~finite).nonzero()[0])} holds NaN or infinity; repair or retrain the checkpoint"
        )
    return values


def load_layer(reader: CheckpointReader, layer: int) -> Layer:
    """One decoder layer of a source (as it is) or of a W8A8 checkpoint (codes times scales).

    Of a W8A8 checkpoint, the Linears that are not quantized are the layer's `float_linears`.
    """
    prefix, config, quantization = layer_prefix(layer), reader.config, reader.quantization
    weights: dict[str, Tensor] = {}
    floats = set()
    for name in LAYER_PROJECTIONS:
        weight = finite_fp32(reader, f"{prefix}{name}.weight")
        if quantization is not None and quantization.is_quantized(prefix + name):
            weight = weight * reader.weight_scale(prefix + name).unsqueeze(1)
        elif quantization is not None:
            floats.add(name)
        weights[name] = weight
    names = expected_tensors(config)
    biases = {
        name: finite_fp32(reader, f"{prefix}{name}.bias")
        for name in LAYER_PROJECTIONS
        if f"{prefix}{name}.bias" in names
    }
    norms = [INPUT_NORM, POST_NORM, *((Q_NORM, K_NORM) if config.qk_norm else ())]
    return Layer(
        weights, biases, {norm: finite_fp32(reader, f"{prefix}{norm}.weight") for norm in norms}, frozenset(floats)
    )
