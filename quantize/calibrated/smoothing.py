"""SmoothQuant, with every producer that can take a scale: range moves from an activation into the weights that read it.

`x W^T = (x / s) (W s)^T` for any positive s per channel; `1 / s` goes into whatever makes x (a norm, v_proj, up_proj).
After Xiao et al., "SmoothQuant" (2022), `s = amax(x)^a / amax(W)^(1 - a)`; here the strength a is searched, and the
best s refined by gradient descent on what it is for: the noise that rounding x and W leaves in the output.

The noise of rounding to steps of width d is `d^2 / 12`. With `d_t = max_j |x_tj| / s_j / 127` per token and
`d_r = max_j |W_rj| s_j / 127` per row, the output's noise is
`mean_t d_t^2 / 12 * sum_rj (W_rj s_j)^2 + sum_r d_r^2 / 12 * mean_t sum_j (x_tj / s_j)^2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.calibrated.decoder import INPUT_NORM, POST_NORM, SITES, Layer
from quantize.calibrated.rotation import V_PROJ
from quantize.model_config import ModelConfig
from quantize.numerics import INT8_MAX

STRENGTHS = tuple(step / 10 for step in range(1, 10))
REFINE_STEPS = 60
REFINE_RATE = 0.15
ADAM_BETAS = (0.9, 0.999)
SMALLEST_RANGE = 1e-5
LEAST_ENERGY = 1e-30
MAX_SCALE_OCTAVES = 12.0
"""Scales stay within 2^+-12: a norm's weight or a row of up_proj must remain an ordinary number in its stored dtype."""
MAPPING_PRODUCERS: Mapping[str, str] = {"qkv": INPUT_NORM, "o": V_PROJ, "gate_up": POST_NORM, "down": "mlp.up_proj"}


@dataclass(frozen=True)
class SiteStatistics:
    """What smoothing needs of one activation: `amax` FP32 `[k]` over all tokens, and a sample.

    `sample` FP32 `[tokens, k]` are some of the tokens, `token_weights` FP32 `[tokens]` how much each counts.
    """

    amax: Tensor
    sample: Tensor
    token_weights: Tensor


@dataclass(frozen=True)
class SmoothingChoice:
    """What was done at one site: the strength it started from (None: left alone) and the noise predicted, in dB.

    Signal to noise of the site's outputs as the formula predicts it, without and with the scale.
    """

    site: str
    strength: float | None
    refined: bool
    sqnr_before_db: float
    sqnr_after_db: float


class _Noise:
    """The predicted noise of a site's outputs as a function of the scale; relative to the outputs' energy."""

    def __init__(self, statistics: SiteStatistics, weights: Sequence[Tensor], weight_share: float) -> None:
        share = statistics.token_weights / statistics.token_weights.sum()
        self._token_share = share
        self._inputs = statistics.sample.abs()
        self._input_energy = (statistics.sample.square() * share.unsqueeze(1)).sum(dim=0)
        self._weights = [weight.abs() for weight in weights]
        energies = [((statistics.sample @ weight.T).square().sum(dim=1) * share).sum() for weight in weights]
        # An output that is always zero has no noise to speak of; its gain would be infinite.
        self._gains = [torch.where(energy > 0, 1 / energy.clamp_min(LEAST_ENERGY), 0.0) for energy in energies]
        self._column_energy = sum(
            (weight.square().sum(dim=0) * gain for weight, gain in zip(weights, self._gains, strict=True)),
            start=torch.zeros_like(self._input_energy),
        ) / len(weights)
        self._weight_share = weight_share

    def __call__(self, scale: Tensor) -> tuple[float, Tensor]:
        """The noise under `scale` FP32 `[k]`, and its derivative by each scale's natural logarithm, FP32 `[k]`.

        A maximum moves with the one channel that attains it, so gradients of the steps go to those channels alone.
        """
        inverse = 1 / scale
        steps, channel = (self._inputs * inverse).max(dim=1)
        token_noise = steps.square() * self._token_share
        column = self._column_energy * scale.square()
        rounding, spread = token_noise.sum(), column.sum()
        carried_column = self._input_energy * inverse.square() * self._weight_share
        carried, row_noise = carried_column.sum(), torch.zeros(())
        by_row = torch.zeros_like(scale)
        for weight, gain in zip(self._weights, self._gains, strict=True):
            row_steps, row_channel = (weight * scale).max(dim=1)
            noises = row_steps.square() * (gain / len(self._weights))
            row_noise = row_noise + noises.sum()
            by_row.index_add_(0, row_channel, noises)
        by_token = torch.zeros_like(scale).index_add_(0, channel, token_noise)
        unit = 1 / (12 * INT8_MAX**2)
        value = unit * (rounding * spread + row_noise * carried)
        slope = 2 * unit * (rounding * column - by_token * spread + by_row * carried - row_noise * carried_column)
        return float(value), slope


def search_scale(
    site: str,
    statistics: SiteStatistics,
    weights: Sequence[Tensor],
    strength: float | None,
    *,
    channels: Tensor | None = None,
    weight_share: float = 1.0,
) -> tuple[Tensor, SmoothingChoice]:
    """The scale of a site, FP32 per channel of its producer, and what it is predicted to do.

    `weights` FP32 `[out, k]` are those of the Linears that will be quantized. `strength` fixes the migration exponent;
    None searches it and refines the best. `channels` INT64 `[k]` says which channel of the producer each input is
    (o_proj reads each of v's once per query head of its group); None is one to one. `weight_share` is the part of plain
    rounding's weight noise that will be left (GPTQ makes up for some of it). Ones where nothing is gained.
    """
    noise = _Noise(statistics, weights, weight_share)
    index = torch.arange(len(statistics.amax)) if channels is None else channels
    size = int(index.max()) + 1
    inputs = _largest(statistics.amax, index, size)
    largest = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    ranges = _largest(largest, index, size)

    def migrate(exponent: float) -> Tensor:
        octaves = exponent * inputs.log2() - (1 - exponent) * ranges.log2()
        return (octaves - octaves.mean()).clamp(-MAX_SCALE_OCTAVES, MAX_SCALE_OCTAVES)

    alone = torch.zeros(size)
    before = noise(alone.exp2()[index])[0]
    if strength is not None:
        octaves = migrate(strength)
        after = noise(octaves.exp2()[index])[0]
        return octaves.exp2(), SmoothingChoice(site, strength, False, _decibels(before), _decibels(after))
    tried: list[tuple[float, float | None, Tensor]] = [(before, None, alone)]
    for exponent in STRENGTHS:
        octaves = migrate(exponent)
        tried.append((noise(octaves.exp2()[index])[0], exponent, octaves))
    best, chosen, octaves = min(tried, key=lambda entry: entry[0])
    refined_octaves, refined_noise = _refine(noise, octaves, index)
    refined = refined_noise < best
    if refined:
        best, octaves = refined_noise, refined_octaves
    return octaves.exp2(), SmoothingChoice(site, chosen, refined, _decibels(before), _decibels(best))


def _largest(values: Tensor, index: Tensor, size: int) -> Tensor:
    """The largest of `values` of each producer channel, kept off zero."""
    floor = torch.full((size,), SMALLEST_RANGE)
    return floor.scatter_reduce(0, index, values, reduce="amax")


def _refine(noise: _Noise, octaves: Tensor, index: Tensor) -> tuple[Tensor, float]:
    """Follow the noise's logarithm downhill from `octaves`; returns the best found and its noise.

    Adam (Kingma & Ba, 2015) with its usual constants and a rate that falls to zero.
    """
    best, best_noise = octaves, float("inf")
    position = octaves.clone()
    mean, square = torch.zeros_like(position), torch.zeros_like(position)
    for step in range(1, REFINE_STEPS + 1):
        value, slope = noise(position.exp2()[index])
        if value < best_noise:
            best, best_noise = position.clone(), value
        gradient = torch.zeros_like(position).index_add_(0, index, slope / value)
        mean.mul_(ADAM_BETAS[0]).add_(gradient, alpha=1 - ADAM_BETAS[0])
        square.mul_(ADAM_BETAS[1]).addcmul_(gradient, gradient, value=1 - ADAM_BETAS[1])
        rate = REFINE_RATE * (1 - (step - 1) / REFINE_STEPS) / (1 - ADAM_BETAS[0] ** step)
        position.addcdiv_(mean, (square / (1 - ADAM_BETAS[1] ** step)).sqrt_().add_(1e-12), value=-rate)
        position.clamp_(-MAX_SCALE_OCTAVES, MAX_SCALE_OCTAVES)
    return best, best_noise


def _decibels(noise: float) -> float:
    return -10 * torch.tensor(noise, dtype=torch.float64).clamp_min(1e-30).log10().item()


def producer_channels(site: str, config: ModelConfig) -> Tensor | None:
    """For each input of the site, the channel of its producer; None when they are one to one."""
    if site != "o":
        return None
    head = torch.arange(config.num_heads) // config.q_per_kv
    return (head.unsqueeze(1) * config.head_dim + torch.arange(config.head_dim)).reshape(-1)


def fold_scale(layer: Layer, site: str, scale: Tensor, config: ModelConfig, stored: torch.dtype) -> None:
    """Divide the site's producer by `scale` FP32 `[producer channels]` and multiply the Linears that read it, in place.

    The layer computes what it did, to FP32 rounding: a norm's weight is first narrowed to the dtype it is `stored` in,
    and the Linears get the scale that this really is. A channel whose norm would leave that dtype's range stays as it
    is.
    """
    producer = MAPPING_PRODUCERS[site]
    if producer in layer.norms:
        norm = layer.norms[producer]
        narrowed = (norm / scale).to(stored).to(torch.float32)
        narrowed = torch.where((narrowed != 0) & narrowed.isfinite(), narrowed, norm)
        scale = torch.where(narrowed != 0, norm / narrowed, 1.0)
        layer.norms[producer] = narrowed
    else:
        layer.weights[producer] = layer.weights[producer] / scale.unsqueeze(1)
        if producer in layer.biases:
            layer.biases[producer] = layer.biases[producer] / scale
    channels = producer_channels(site, config)
    columns = scale if channels is None else scale[channels]
    for name in SITES[site]:
        layer.weights[name] = layer.weights[name] * columns
