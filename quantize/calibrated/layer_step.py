"""Quantizing one decoder layer with the calibration set at hand: smooth, round, and see what it did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.calibrated.compensation import Judges, compensated, judging_windows
from quantize.calibrated.decoder import SITES, Layer, fake_quantize, run_layer
from quantize.calibrated.gptq import GptqFactor, InputMoments, factor_hessian, gptq_codes
from quantize.calibrated.smoothing import (
    MAPPING_PRODUCERS,
    SiteStatistics,
    SmoothingChoice,
    fold_scale,
    producer_channels,
    search_scale,
)
from quantize.calibrated.token_weights import SMALLEST_ENERGY, site_weights, stream_weights
from quantize.clipping import search_clipping
from quantize.errors import CalibrationError
from quantize.model_config import ModelConfig
from quantize.numerics import smallest_scale, weight_codes, weight_scales
from quantize.recipe import Recipe

CHUNK_TOKENS = 4096
SAMPLE_TOKENS = 4096
GPTQ_WEIGHT_SHARE = 0.3
"""The part of plain rounding's weight noise that smoothing is to expect when GPTQ follows."""


@dataclass(frozen=True)
class LayerPlan:
    """What a layer is to become: the Linears to quantize, and the dtype each parameter is stored in (by name)."""

    name: str
    quantized: frozenset[str]
    stored: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class LayerOutcome:
    """A quantized layer: `codes` INT8 and scales `[out, 1]` as stored, the `layer` as readers compute it, and `facts`.

    `facts` are JSON values: what was done at each site, and the error of each Linear and of the layer.
    """

    layer: Layer
    codes: dict[str, tuple[Tensor, Tensor]]
    facts: dict[str, Any]


def _chunks(windows: int, tokens: int) -> Iterator[slice]:
    """Windows enough at a time for a few thousand tokens."""
    size = max(1, CHUNK_TOKENS // tokens)
    for start in range(0, windows, size):
        yield slice(start, min(start + size, windows))


def quantize_layer(
    layer: Layer,
    plan: LayerPlan,
    config: ModelConfig,
    recipe: Recipe,
    rope: tuple[Tensor, Tensor],
    streams: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
) -> LayerOutcome:
    """Quantize `layer` (changed in place) by `recipe`; writes what it gives to `outputs`.

    `streams` and `outputs` are the source's and the quantized residual stream FP32 `[windows, tokens, hidden]`, before
    and after the layer. `rope` as in `run_layer`. Raises CalibrationError for activations that are not finite, and when
    GPTQ cannot invert a Hessian.
    """
    exact, quantized = streams
    statistics, token_weights = _observe(layer, plan, config, rope, exact, outputs[0])
    layer.float_linears = frozenset(layer.weights) - plan.quantized
    choices = []
    if recipe.algorithm in ("smoothquant", "smoothquant+gptq"):
        choices = _smooth(layer, plan, config, recipe, statistics)
    factors: dict[str, GptqFactor] = {}
    judges: dict[str, Judges] = {}
    if recipe.algorithm in ("gptq", "smoothquant+gptq"):
        factors, judges = _factors(layer, plan, config, recipe, rope, quantized, token_weights)
    codes, linears = {}, []
    for site, names in SITES.items():
        for name in names:
            if name not in plan.quantized:
                layer.weights[name] = layer.weights[name].to(plan.stored[name]).to(torch.float32)
                continue
            weight, factor, share = layer.weights[name], factors.get(site), None
            if factor is None:
                scale = _scales(weight, plan.stored[name], recipe)
                found = weight_codes(weight, scale)
            else:
                wanted = weight
                if factor.compensation is not None:
                    wanted, share = compensated(weight, factor.compensation, judges[site])
                scale = _scales(wanted, plan.stored[name], recipe)
                found = gptq_codes(wanted, scale.to(torch.float32), factor, recipe.gptq.block_columns)
            scale_fp32 = scale.to(torch.float32)
            codes[name] = (found, scale)
            layer.weights[name] = found.to(torch.float32) * scale_fp32
            noise = float((layer.weights[name] - weight).square().sum() / weight.square().sum().clamp_min(1e-30))
            linears.append(
                {
                    "name": name,
                    "site": site,
                    "rel_rms_error": math.sqrt(noise),
                    "damping": factor.damping if factor else None,
                    "attempts": factor.attempts if factor else None,
                    "compensated": share,
                }
            )
    for name, bias in layer.biases.items():
        layer.biases[name] = bias.to(plan.stored[name + ".bias"]).to(torch.float32)
    carried = _carry(layer, config, rope, quantized, outputs)
    facts = {"sites": [asdict(choice) for choice in choices], "linears": linears, "carried_sqnr_db": carried}
    return LayerOutcome(layer, codes, facts)


def _observe(
    layer: Layer, plan: LayerPlan, config: ModelConfig, rope: tuple[Tensor, Tensor], exact: Tensor, output: Tensor
) -> tuple[dict[str, SiteStatistics], dict[str, Tensor]]:
    """Run the source's stream through the layer; statistics and token weights `[windows, tokens]` of each site.

    Smoothing counts tokens by their own stream everywhere: its scales are shared by all tokens, and counted by the
    attention they receive, as for GPTQ, a few would shape them.
    """
    windows, tokens, _ = exact.shape
    stride = max(1, windows * tokens // SAMPLE_TOKENS)
    samples: dict[str, list[Tensor]] = {site: [] for site in SITES}
    amax: dict[str, Tensor] = {}
    weights = {site: torch.empty(windows, tokens) for site in SITES}
    sampled: list[Tensor] = []
    for chunk in _chunks(windows, tokens):
        # Every stride-th token of the whole set, wherever the chunks are cut.
        first = -(chunk.start * tokens) % stride

        def observe(site: str, values: Tensor, first: int = first) -> None:
            flat = values.reshape(-1, values.shape[-1])
            largest = flat.abs().amax(dim=0)
            amax[site] = torch.maximum(amax[site], largest) if site in amax else largest
            samples[site].append(flat[first::stride].clone())

        output[chunk] = run_layer(layer, exact[chunk], config, rope, observe=observe)
        if not bool(torch.isfinite(output[chunk]).all()):
            raise CalibrationError(
                f"{plan.name}: what the source computes from the calibration text is not finite in FP32; repair the "
                "checkpoint, or use algorithm rtn"
            )
        sampled.append(stream_weights(output[chunk]).reshape(-1)[first::stride])
        for site, found in site_weights(layer, exact[chunk], output[chunk], config, rope).items():
            weights[site][chunk] = found
        if not all(bool(found[chunk].all()) for found in weights.values()):
            raise CalibrationError(
                f"{plan.name}: what the source computes reaches {float(output[chunk].abs().max()):.1e}, whose square "
                "is no FP32 number; a weight of this layer is far too large. Repair the checkpoint or use rtn"
            )
    return {site: SiteStatistics(amax[site], torch.cat(samples[site]), torch.cat(sampled)) for site in SITES}, weights


def _smooth(
    layer: Layer, plan: LayerPlan, config: ModelConfig, recipe: Recipe, statistics: Mapping[str, SiteStatistics]
) -> list[SmoothingChoice]:
    """Scale every site that the recipe maps; one that would change a Linear left unquantized is left alone."""
    choices = []
    share = GPTQ_WEIGHT_SHARE if recipe.algorithm == "smoothquant+gptq" else 1.0
    for site in recipe.smoothing.mappings:
        touched = {*SITES[site], MAPPING_PRODUCERS[site]} & layer.weights.keys()
        if not touched <= plan.quantized:
            continue
        weights = [layer.weights[name] for name in SITES[site]]
        scale, choice = search_scale(
            site,
            statistics[site],
            weights,
            recipe.smoothing.strength,
            channels=producer_channels(site, config),
            weight_share=share,
        )
        norm = plan.stored[MAPPING_PRODUCERS[site]]
        fold_scale(layer, site, scale, config, norm)
        choices.append(choice)
    return choices


def _factors(
    layer: Layer,
    plan: LayerPlan,
    config: ModelConfig,
    recipe: Recipe,
    rope: tuple[Tensor, Tensor],
    quantized: Tensor,
    token_weights: Mapping[str, Tensor],
) -> tuple[dict[str, GptqFactor], dict[str, Judges]]:
    """The factored Hessian of each site that feeds a quantized Linear, over what the layer will really read.

    With `gptq.compensate`, the windows that judge are in no Hessian; the tokens of each site's come second.
    """
    moments: dict[str, InputMoments] = {}
    judges: dict[str, Judges] = {}
    windows, tokens, _ = quantized.shape
    judging = judging_windows(windows, tokens) & recipe.gptq.compensate
    for chunk in _chunks(windows, tokens):

        def observe(site: str, values: Tensor, chunk: slice = chunk) -> None:
            if plan.quantized.isdisjoint(SITES[site]):
                return
            if site not in moments:
                moments[site] = InputMoments(values.shape[-1], compensate=bool(judging.any()))
                judges[site] = Judges([])
            rounded, weights = fake_quantize(values), token_weights[site][chunk]
            for taker, these in ((moments[site], ~judging[chunk]), (judges[site], judging[chunk])):
                if bool(these.any()):
                    taker.add(values[these].flatten(0, 1), rounded[these].flatten(0, 1), weights[these].flatten())

        run_layer(layer, quantized[chunk], config, rope, quantized=True, observe=observe)
    factors = {
        site: factor_hessian(found, recipe.gptq.damping, recipe.gptq.act_order, f"{plan.name}, {site}")
        for site, found in moments.items()
    }
    return factors, judges


def _scales(weight: Tensor, stored: torch.dtype, recipe: Recipe) -> Tensor:
    """Scales `[out, 1]` in the stored dtype, of the largest weight or (clipped) of least squared error."""
    if recipe.clip == "mse":
        scale = search_clipping(weight).scale
    else:
        scale = weight_scales(weight.abs().amax(dim=1, keepdim=True))
    # Weights are FP32 here, and FP16 has no such small numbers: a scale must not become zero.
    return scale.clamp_min(smallest_scale(stored)).to(stored)


def _carry(
    layer: Layer, config: ModelConfig, rope: tuple[Tensor, Tensor], quantized: Tensor, outputs: tuple[Tensor, Tensor]
) -> float | None:
    """Run the quantized stream through the quantized layer; signal to noise against the source's, mean over tokens."""
    ratios = []
    for chunk in _chunks(*quantized.shape[:2]):
        outputs[1][chunk] = run_layer(layer, quantized[chunk], config, rope, quantized=True)
        energy = outputs[0][chunk].square().sum(dim=-1).clamp_min(SMALLEST_ENERGY)
        ratios.append(((outputs[1][chunk] - outputs[0][chunk]).square().sum(dim=-1) / energy).reshape(-1))
    noise = float(torch.cat(ratios).mean())
    return -10 * math.log10(noise) if noise else None
