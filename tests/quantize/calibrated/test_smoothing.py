"""Scales fold exactly, their predicted noise is the measured one, and a search never predicts worse than no scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantize.calibrated.decoder import SITES, Layer, fake_quantize
from quantize.calibrated.smoothing import (
    MAPPING_PRODUCERS,
    SiteStatistics,
    _Noise,
    fold_scale,
    producer_channels,
    search_scale,
)
from quantize.checkpoint import CheckpointReader
from quantize.numerics import weight_codes, weight_scales
from tests.quantize.calibrated.support import FAMILIES, IDS, distance, family_source, source_logits


def outlier_site(seed: int, rows: tuple[int, ...] = (48, 24)) -> tuple[SiteStatistics, list[Tensor]]:
    """Inputs with a few large channels and tokens, and the weights of two Linears that read them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(512, 64, generator=generator)
    inputs[:, ::13] *= 25
    inputs[::29] *= 4
    weights = [torch.randn(count, 64, generator=generator) / 8 for count in rows]
    shares = torch.rand(512, generator=generator) + 0.5
    return SiteStatistics(inputs.abs().amax(dim=0), inputs, shares), weights


def random_scale(size: int, seed: int) -> Tensor:
    return (2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).exp2()


@pytest.mark.parametrize("site", list(SITES))
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_changes_nothing(family: str, site: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Norms are narrowed to BF16 on the way, and the Linears make up for it."""
    with CheckpointReader(family_source(family, tmp_path, request)) as reader:
        config = reader.config

        def fold(number: int, layer: Layer) -> None:
            producer = MAPPING_PRODUCERS[site]
            values = layer.norms.get(producer)
            size = len(layer.weights[producer] if values is None else values)
            fold_scale(layer, site, random_scale(size, number), config, torch.bfloat16)
            if values is not None:
                assert torch.equal(layer.norms[producer], layer.norms[producer].to(torch.bfloat16).float())
                assert not torch.equal(layer.norms[producer], values)

        assert distance(source_logits(reader, IDS, fold), source_logits(reader, IDS)) < 2e-5


@pytest.mark.parametrize("site", list(SITES))
def test_folding_only_one_side_shows(site: str, tiny_qwen2: Path) -> None:
    """Sensitivity of the test above: with the producer as it was, the logits are far off."""
    with CheckpointReader(tiny_qwen2) as reader:

        def fold(number: int, layer: Layer) -> None:
            producer = MAPPING_PRODUCERS[site]
            kept = layer.norms if producer in layer.norms else layer.weights
            before = kept[producer].clone()
            fold_scale(layer, site, random_scale(len(before), number), reader.config, torch.bfloat16)
            kept[producer] = before

        assert distance(source_logits(reader, IDS, fold), source_logits(reader, IDS)) > 1e-2


def test_a_norm_that_would_leave_its_dtype_keeps_that_channel() -> None:
    """FP16 holds neither 20 * 4096 nor 1e-5 / 4096."""
    norm = torch.tensor([20.0, 1e-5, 1.0, 0.0]).to(torch.float16).float()
    weights = {name: torch.ones(2, 4) for name in SITES["gate_up"]}
    layer = Layer(dict(weights), {}, {"post_attention_layernorm": norm.clone()})
    scale = torch.tensor([2.0**-12, 2.0**12, 3.0, 5.0])
    fold_scale(layer, "gate_up", scale, None, torch.float16)  # type: ignore[arg-type]
    folded = layer.norms["post_attention_layernorm"]
    assert torch.equal(folded, folded.to(torch.float16).float())
    assert torch.allclose(folded * layer.weights["mlp.up_proj"], norm.expand(2, 4), rtol=1e-6)
    assert folded[2] != norm[2]


@pytest.mark.parametrize("weight_share", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_never_predicts_worse(seed: int, weight_share: float) -> None:
    statistics, weights = outlier_site(seed)
    scale, choice = search_scale("gate_up", statistics, weights, None, weight_share=weight_share)
    assert choice.sqnr_after_db > choice.sqnr_before_db + 3
    assert choice.refined
    noise = _Noise(statistics, weights, weight_share)
    assert noise(scale)[0] < noise(torch.ones(64))[0]
    for strength in (0.3, 0.5, 0.7):
        assert noise(scale)[0] < noise(search_scale("gate_up", statistics, weights, strength)[0])[0]


def test_nothing_is_done_where_nothing_is_to_be_gained() -> None:
    """Every input and weight of one size: any scale would make it worse."""
    signs = torch.randint(0, 2, (64, 32), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
    statistics = SiteStatistics(torch.ones(32), signs, torch.ones(64))
    scale, choice = search_scale("qkv", statistics, [signs[:16]], None)
    assert torch.allclose(scale, torch.ones(32), atol=1e-3)
    assert choice.sqnr_after_db >= choice.sqnr_before_db


@pytest.mark.parametrize("silent", ["inputs", "weights"])
def test_a_dead_site_is_left_alone_with_finite_figures(silent: str) -> None:
    statistics, weights = outlier_site(0)
    if silent == "inputs":
        statistics = SiteStatistics(torch.zeros(64), torch.zeros(512, 64), torch.ones(512))
    else:
        weights = [torch.zeros_like(weight) for weight in weights]
    scale, choice = search_scale("qkv", statistics, weights, None)
    assert torch.equal(scale, torch.ones(64))
    assert choice.sqnr_before_db == choice.sqnr_after_db == pytest.approx(300)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_fixed_strength_is_the_formula(strength: float) -> None:
    """`amax(x)^a / amax(W)^(1 - a)`, over its geometric mean."""
    statistics, weights = outlier_site(1)
    scale, choice = search_scale("gate_up", statistics, weights, strength)
    largest = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    expected = statistics.amax**strength / largest ** (1 - strength)
    assert torch.allclose(scale, expected / expected.log().mean().exp(), rtol=1e-4)
    assert (choice.strength, choice.refined) == (strength, False)


def test_the_slope_is_the_noise_s(tiny_qwen2: Path) -> None:
    """Against central differences, where the largest entries stay the largest."""
    statistics, weights = outlier_site(2)
    double = SiteStatistics(*(part.double() for part in (statistics.amax, statistics.sample, statistics.token_weights)))
    noise = _Noise(double, [weight.double() for weight in weights], 0.7)
    scale = random_scale(64, 3).double()
    value, slope = noise(scale)
    for channel in range(0, 64, 5):
        step = torch.zeros(64, dtype=torch.float64)
        step[channel] = 1e-5
        difference = (noise(scale * step.exp())[0] - noise(scale * (-step).exp())[0]) / 2e-5
        assert difference == pytest.approx(float(slope[channel]), rel=1e-3, abs=1e-6 * value)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_is_the_measured_one(scaled: bool) -> None:
    """Of one Linear that reads rounded inputs through rounded weights, relative to its output's energy."""
    statistics, (weight,) = outlier_site(5, rows=(96,))
    scale = search_scale("o", statistics, [weight], None)[0] if scaled else torch.ones(64)
    inputs, scaled_weight = statistics.sample / scale, weight * scale
    steps = weight_scales(scaled_weight.abs().amax(dim=1, keepdim=True))
    rounded = weight_codes(scaled_weight, steps).float() * steps
    share = (statistics.token_weights / statistics.token_weights.sum()).unsqueeze(1)
    exact = statistics.sample @ weight.T
    error = fake_quantize(inputs) @ rounded.T - exact
    measured = (error.square() * share).sum() / (exact.square() * share).sum()
    predicted = _Noise(statistics, [weight], 1.0)(scale)[0]
    # The formula has neither the rounding to BF16 nor that every row's and token's largest entry rounds exactly.
    assert 0.75 < float(measured) / predicted < 1.35


def test_inputs_of_o_proj_share_a_scale_per_channel_of_v(tiny_qwen2: Path) -> None:
    with CheckpointReader(tiny_qwen2) as reader:
        channels = producer_channels("o", reader.config)
        assert producer_channels("down", reader.config) is None
    assert channels is not None
    # Heads 0 and 1 read v's head 0, heads 2 and 3 its head 1; a head has 16 channels.
    assert channels.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(256, 64, generator=generator)
    sample[:, 3] *= 30
    statistics = SiteStatistics(sample.abs().amax(dim=0), sample, torch.ones(256))
    weight = torch.randn(64, 64, generator=generator)
    scale, choice = search_scale("o", statistics, [weight], None, channels=channels)
    assert scale.shape == (32,)
    assert scale.argmax() == 3
    assert choice.sqnr_after_db > choice.sqnr_before_db
