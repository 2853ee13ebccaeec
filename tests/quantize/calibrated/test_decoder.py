"""The FP32 decoder computes what transformers computes, for every family; what it quantizes, the contract quantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantize.calibrated.decoder import SITES, fake_quantize, run_layer
from quantize.calibrated.simulate import compare_simulated, final_hidden
from quantize.calibrated.weights import load_layer
from quantize.checkpoint import CheckpointReader
from quantize.numerics import quantize_activation, rope_tables
from quantize.quality import summarize
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.calibrated.support import FAMILIES, IDS, distance, family_source, source_logits


def transformers_logits(directory: Path, ids: Tensor, *, integers: bool = True) -> Tensor:
    """FP32 logits as transformers runs the checkpoint; quantized activations can be left out."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_enabled = integers
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = family_source(family, tmp_path, request)
    with CheckpointReader(source) as reader:
        hidden = final_hidden(reader, IDS)
        head = "model.embed_tokens" if reader.config.tie_word_embeddings else "lm_head"
        logits = hidden @ reader.tensor(head + ".weight").float().T
        assert distance(source_logits(reader, IDS), logits) < 1e-6
    assert distance(logits, transformers_logits(source, IDS)) < 1e-4


@pytest.mark.parametrize("name", ["norms:self_attn.k_norm", "norms:input_layernorm", "biases:self_attn.v_proj"])
def test_a_norm_or_bias_of_one_layer_shows(name: str, tiny_qwen3: Path, tiny_qwen2: Path) -> None:
    """Sensitivity: parameters that random models could hide are random in these."""
    kind, _, key = name.partition(":")
    with CheckpointReader(tiny_qwen2 if kind == "biases" else tiny_qwen3) as reader:

        def change(number: int, layer: Any) -> None:
            if number == 1:
                values = getattr(layer, kind)
                values[key] = torch.full_like(values[key], float(kind == "norms"))

        assert distance(source_logits(reader, IDS, change), source_logits(reader, IDS)) > 1e-3


def test_the_observer_sees_every_site_before_rounding(tiny_qwen3: Path) -> None:
    with CheckpointReader(tiny_qwen3) as reader:
        config, layer = reader.config, load_layer(reader, 0)
    x = torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(1))
    rope = rope_tables(config.head_dim, config.rope_theta, 7, config.rope_scaling)
    seen: dict[str, Tensor] = {}
    plain = run_layer(layer, x, config, rope, observe=lambda site, values: seen.update({site: values.clone()}))
    assert list(seen) == list(SITES)
    widths = {"qkv": config.hidden_size, "o": config.q_size, "gate_up": config.hidden_size}
    assert {site: tuple(values.shape) for site, values in seen.items()} == {
        **{site: (2, 7, width) for site, width in widths.items()},
        "down": (2, 7, config.intermediate_size),
    }
    again: dict[str, Tensor] = {}
    rounded = run_layer(
        layer, x, config, rope, quantized=True, observe=lambda site, values: again.update({site: values})
    )
    assert torch.equal(again["qkv"], seen["qkv"])
    assert not torch.equal(again["o"], seen["o"])
    assert 1e-4 < distance(rounded, plain) < 0.05


def test_float_linears_read_their_input_as_it_is(tiny_qwen3: Path) -> None:
    with CheckpointReader(tiny_qwen3) as reader:
        config, layer = reader.config, load_layer(reader, 0)
    x = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    rope = rope_tables(config.head_dim, config.rope_theta, 5, config.rope_scaling)
    plain = run_layer(layer, x, config, rope)
    layer.float_linears = frozenset(layer.weights)
    assert torch.equal(run_layer(layer, x, config, rope, quantized=True), plain)
    layer.float_linears = frozenset(layer.weights) - {"self_attn.k_proj"}
    assert 0 < distance(run_layer(layer, x, config, rope, quantized=True), plain) < 0.01


def test_fake_quantization_is_the_contract(tiny_qwen3: Path) -> None:
    """The contract multiplies by a reciprocal, so a code may differ by one where both are equally near."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 3, 64).unsqueeze(1)
    codes, scale = quantize_activation(x.to(torch.bfloat16))
    found = fake_quantize(x)
    steps = (found / scale - codes.float()).abs()
    assert float(steps.max()) < 1 + 1e-4
    assert float((steps > 1e-3).float().mean()) < 1e-3
    assert not torch.equal(fake_quantize(x), x)


def test_a_w8a8_checkpoint_is_simulated_as_transformers_runs_it(tiny_qwen3: Path, tmp_path: Path) -> None:
    """To FP32 rounding without activation quantization; with it (theirs has other steps), the noise is as large."""
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(down="bf16"))
    with CheckpointReader(tmp_path / "out") as reader:
        assert load_layer(reader, 0).float_linears == {"mlp.down_proj"}
        assert distance(source_logits(reader, IDS), transformers_logits(tmp_path / "out", IDS, integers=False)) < 1e-4
        simulated = final_hidden(reader, IDS) @ reader.tensor("lm_head.weight").float().T
    plain = transformers_logits(tiny_qwen3, IDS)
    noise = (simulated - plain).square().mean()
    served_noise = (transformers_logits(tmp_path / "out", IDS) - plain).square().mean()
    assert 0.7 < noise / served_noise < 1.4


def test_a_quantized_head_is_simulated_too(tiny_qwen3: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_qwen3, tmp_path / "head", Recipe(ignore=("re:model.*",)))
    windows = IDS[:, :33]
    with CheckpointReader(tiny_qwen3) as source, CheckpointReader(tmp_path / "head") as candidate:
        figures = summarize(compare_simulated(source, final_hidden(source, windows), candidate, windows))
    assert 1e-7 < figures.mean_kl < 1e-3
