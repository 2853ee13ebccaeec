"""A whole model in FP32 torch with one decoder layer in memory at a time: what a W8A8 checkpoint computes, simulated.

Activations are quantized and dequantized per token as the numeric contract says; products are FP32. Slower than an
executor, but it needs memory for one layer only, and reads any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantize.architecture import EMBEDDING, FINAL_NORM, LM_HEAD
from quantize.calibrated.decoder import fake_quantize, rms_norm_fp32, run_layer
from quantize.calibrated.weights import finite_fp32, load_layer
from quantize.checkpoint import CheckpointReader
from quantize.numerics import rope_tables
from quantize.quality import PositionFigures, compare

CHUNK_WINDOWS = 8


def final_hidden(reader: CheckpointReader, windows: Tensor) -> Tensor:
    """The normalised last hidden states FP32 `[windows, tokens, hidden]` of ids INT64 `[windows, tokens]`."""
    config = reader.config
    rope = rope_tables(config.head_dim, config.rope_theta, windows.shape[1], config.rope_scaling)
    stream = reader.tensor(EMBEDDING + ".weight")[windows].to(torch.float32)
    for number in range(config.num_layers):
        layer = load_layer(reader, number)
        for start in range(0, len(windows), CHUNK_WINDOWS):
            chunk = slice(start, start + CHUNK_WINDOWS)
            stream[chunk] = run_layer(layer, stream[chunk], config, rope, quantized=reader.quantization is not None)
        del layer  # before the next one is loaded
    return rms_norm_fp32(stream, finite_fp32(reader, FINAL_NORM + ".weight"), config.rms_norm_eps)


def _logits(reader: CheckpointReader, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    """Logits of one window after the other, as `compare` asks for them."""
    name = EMBEDDING if reader.config.tie_word_embeddings else LM_HEAD
    head = reader.tensor(name + ".weight").to(torch.float32)
    if name == LM_HEAD and reader.quantization is not None and reader.quantization.is_quantized(name):
        head, hidden = head * reader.weight_scale(name).unsqueeze(1), fake_quantize(hidden)
    following: Iterator[Tensor] = iter(hidden)

    def logits(window: Tensor) -> Tensor:
        return next(following) @ head.T

    return logits


def compare_simulated(
    source: CheckpointReader, source_hidden: Tensor, candidate: CheckpointReader, windows: Tensor
) -> PositionFigures:
    """`quality.compare` of a W8A8 `candidate` with its `source`, on ids INT64 `[windows, tokens]`.

    `source_hidden` is `final_hidden(source, windows)`, computed once for many candidates.
    """
    return compare(
        windows.reshape(-1),
        _logits(source, source_hidden),
        _logits(candidate, final_hidden(candidate, windows)),
        windows.shape[1],
    )
