"""What the inputs of a model's Linear modules look like: how far outliers stretch the scale of a token.

A token is quantized with one scale, its largest magnitude over 127. The larger that is beside the typical value (the
RMS), the fewer of the 255 levels the other channels get. Outliers sit in few channels, the same ones for most tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.numerics import quantize_activation
from quantize.transformers_model import TransformersModel

TOP_CHANNELS = 5
INPUTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The four distinct inputs in a decoder layer, and the Linear modules that read each."""


@dataclass(frozen=True)
class ActivationStatistics:
    """One input of a decoder layer over all tokens seen.

    `amax` and `rms` are over all values. `amax_to_rms_mean` and `_max` are of the tokens' own largest magnitude over
    their RMS. `kurtosis` is `mean(x^4) / mean(x^2)^2` of a token, averaged over tokens: 3 for a normal distribution, 1
    at the least. `sqnr_db` is what INT8 with one scale a token leaves, by the numeric contract, from the tokens' mean
    noise to signal ratio; None without error. `top_channels` are the channels of the largest magnitudes, with those
    magnitudes over the median channel's.
    """

    layer: int
    input: str
    modules: tuple[str, ...]
    amax: float
    rms: float
    amax_to_rms_mean: float
    amax_to_rms_max: float
    kurtosis: float
    sqnr_db: float | None
    top_channels: tuple[tuple[int, float], ...]


class _Sums:
    """Running sums over the tokens that one input has seen."""

    def __init__(self) -> None:
        self.channel_amax = torch.zeros(0)
        self.square = 0.0
        self.values = 0
        self.tokens = 0
        self.ratio = self.ratio_max = self.kurtosis = self.noise = 0.0

    def add(self, values: Tensor) -> None:
        """Take in `values` `[tokens, channels]`; tokens of zeros say nothing and are left out."""
        x = values.to(torch.float32)
        x = x[x.any(dim=-1)]
        if not len(x):
            return
        magnitude = x.abs()
        columns = magnitude.amax(dim=0)
        self.channel_amax = torch.maximum(self.channel_amax, columns) if len(self.channel_amax) else columns
        squares = x.square()
        square = squares.mean(dim=-1, dtype=torch.float64)
        ratio = magnitude.amax(dim=-1) / square.sqrt()
        codes, scale = quantize_activation(x.to(torch.bfloat16))
        noise = (codes * scale - x).square().mean(dim=-1, dtype=torch.float64)
        self.square += float(square.sum()) * x.shape[1]
        self.values += x.numel()
        self.tokens += len(x)
        self.ratio += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.kurtosis += float((squares.square().mean(dim=-1, dtype=torch.float64) / square.square()).sum())
        self.noise += float((noise / square).sum())

    def result(self, layer: int, name: str) -> ActivationStatistics:
        """The statistics of what was added."""
        tokens = max(1, self.tokens)
        amax = self.channel_amax if len(self.channel_amax) else torch.zeros(1)
        median = float(amax.median())
        top = amax.topk(min(TOP_CHANNELS, len(amax)))
        noise = self.noise / tokens
        return ActivationStatistics(
            layer=layer,
            input=name,
            modules=INPUTS[name],
            amax=float(amax.max()),
            rms=math.sqrt(self.square / max(1, self.values)),
            amax_to_rms_mean=self.ratio / tokens,
            amax_to_rms_max=self.ratio_max,
            kurtosis=self.kurtosis / tokens,
            sqnr_db=-10 * math.log10(noise) if noise > 0 else None,
            top_channels=tuple(
                (channel, value / median if median else math.inf)
                for channel, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ),
        )


def activation_statistics(model: TransformersModel, windows: Sequence[Tensor]) -> list[ActivationStatistics]:
    """Statistics of the four inputs of every decoder layer over `windows` (ids INT64 `[tokens]` each)."""
    sums = {(layer, name): _Sums() for layer in range(len(model.layers)) for name in INPUTS}
    hooks = []

    def watch(place: tuple[int, str], args: Any) -> None:
        sums[place].add(args[0].reshape(-1, args[0].shape[-1]))

    for layer, module in enumerate(model.layers):
        for name, readers in INPUTS.items():
            reader = module.get_submodule(readers[0])
            # A default argument binds the place at once; the hook is called much later.
            hooks.append(reader.register_forward_pre_hook(lambda _, args, place=(layer, name): watch(place, args)))
    try:
        for window in windows:
            model.logits(window)
    finally:
        for hook in hooks:
            hook.remove()
    return [sums[place].result(*place) for place in sums]
