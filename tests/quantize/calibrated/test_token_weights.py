"""What a token counts: its own stream's energy, and at q, k and v the attention that it receives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantize.calibrated import token_weights
from quantize.calibrated.decoder import INPUT_NORM, Layer, run_layer
from quantize.calibrated.token_weights import OWN_SHARE, attention_received, site_weights, stream_weights
from quantize.calibrated.weights import load_layer
from quantize.checkpoint import CheckpointReader
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables

TOKENS = 7


def telling_layer(directory: Path) -> tuple[Layer, ModelConfig, Tensor, tuple[Tensor, Tensor]]:
    """A layer and an input whose values are one-hot by token: what attention mixes are its own probabilities."""
    with CheckpointReader(directory) as reader:
        config, layer = reader.config, load_layer(reader, 1)
    layer.biases.clear()
    rows = torch.linalg.qr(torch.randn(config.hidden_size, TOKENS, generator=torch.Generator().manual_seed(5)))[0].T
    x = rows.contiguous().unsqueeze(0)
    rope = rope_tables(config.head_dim, config.rope_theta, TOKENS, config.rope_scaling)
    normed = x[0] / x[0].square().mean(dim=-1, keepdim=True).sqrt() * layer.norms[INPUT_NORM]
    values = torch.zeros(config.num_kv_heads, config.head_dim, config.hidden_size)
    values[:, :TOKENS] = torch.linalg.pinv(normed).T
    layer.weights["self_attn.v_proj"] = values.reshape(-1, config.hidden_size)
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        layer.weights[name] = layer.weights[name] * 8  # attention that is far from even
    return layer, config, x, rope


def probabilities(layer: Layer, config: ModelConfig, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """`[heads, queries, tokens]`, out of what o_proj reads."""
    seen: dict[str, Tensor] = {}
    run_layer(layer, x, config, rope, observe=lambda site, values: seen.update({site: values.clone()}))
    found = seen["o"][0].view(TOKENS, config.num_heads, config.head_dim)[:, :, :TOKENS].transpose(0, 1)
    assert torch.allclose(found.sum(dim=-1), torch.ones(config.num_heads, TOKENS), atol=1e-3)
    return found


@pytest.mark.parametrize("block", [1, 2**22])
@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_a_token_receives_what_attention_gives_it(
    family: str, block: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_weights, "BLOCK_SCORES", block)
    layer, config, x, rope = telling_layer(request.getfixturevalue(family))
    query_weights = torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(6)) + 0.5
    found = attention_received(layer, x, config, rope, query_weights)
    attention = probabilities(layer, config, x, rope)
    assert float(attention.std()) > 0.05
    expected = torch.einsum("q,hqt->t", query_weights[0], attention.square()) / config.num_heads
    assert torch.allclose(found[0], expected, rtol=1e-3, atol=1e-4)


def test_a_first_token_of_a_large_stream_counts_by_its_readers(tiny_qwen3: Path) -> None:
    """Sensitivity: by its own stream it would count for nothing, and its keys and values reach every token."""
    with CheckpointReader(tiny_qwen3) as reader:
        config, layer = reader.config, load_layer(reader, 0)
    x = torch.randn(2, 12, config.hidden_size, generator=torch.Generator().manual_seed(7))
    x[:, 0] *= 300
    rope = rope_tables(config.head_dim, config.rope_theta, 12, config.rope_scaling)
    output = run_layer(layer, x, config, rope)
    weights = site_weights(layer, x, output, config, rope)
    own = stream_weights(output)
    assert torch.equal(own, 1 / output.square().mean(dim=-1))
    for site in ("o", "gate_up", "down"):
        assert torch.equal(weights[site], own)
    assert float(own[:, 0].max()) < 1e-3 * float(own[:, 1:].min())
    assert float(weights["qkv"][:, 0].min()) > OWN_SHARE * float(own[:, 1:].mean())
