"""How much each calibration token counts at each site of a layer: by how far an error there is felt.

An error in a token's residual stream matters relative to that stream's energy, since the next norm divides by it; a few
tokens (the first one above all) carry streams hundreds of times as large as the others'. But keys and values are
read by every later token: an error in those of the first token, which draws most of the attention in many layers,
reaches the whole window, however little its own stream counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantize.calibrated.decoder import INPUT_NORM, SITES, Layer, attention_heads, rms_norm_fp32
from quantize.model_config import ModelConfig

SMALLEST_ENERGY = 1e-12
OWN_SHARE = 0.1
"""What a token's own stream counts beside the attention it receives: its query is read by itself alone."""
BLOCK_SCORES = 2**22


def stream_weights(stream: Tensor) -> Tensor:
    """`1 / mean(x^2)` of each token of a residual stream FP32 `[..., hidden]`."""
    return 1 / stream.square().mean(dim=-1).clamp_min(SMALLEST_ENERGY)


def attention_received(
    layer: Layer, x: Tensor, config: ModelConfig, rope: tuple[Tensor, Tensor], query_weights: Tensor
) -> Tensor:
    """`sum_q w_q mean_h p_hqt^2` of each token t, FP32 `[windows, tokens]`, p the attention of query q in head h.

    That is the energy, weighted by `query_weights` `[windows, tokens]`, which an error of energy 1 in the values of t
    adds to the heads of all tokens. `x` is the layer's input FP32 `[windows, tokens, hidden]`, `rope` as for
    `run_layer`.
    """
    windows, tokens, _ = x.shape
    normed = rms_norm_fp32(x, layer.norms[INPUT_NORM], config.rms_norm_eps)
    received = torch.zeros(windows, tokens)
    positions = torch.arange(tokens)
    block = max(1, BLOCK_SCORES // (config.num_heads * tokens))
    for window in range(windows):
        q, k = (
            normed[window : window + 1] @ layer.weights[name].T + layer.biases.get(name, torch.zeros(()))
            for name in ("self_attn.q_proj", "self_attn.k_proj")
        )
        queries, keys = attention_heads(layer, q, k, config, rope)
        keys = keys.repeat_interleave(config.q_per_kv, dim=1).transpose(2, 3)
        for start in range(0, tokens, block):
            rows = slice(start, min(start + block, tokens))
            scores = queries[:, :, rows] @ keys * config.head_dim**-0.5
            scores.masked_fill_(positions > positions[rows].unsqueeze(1), float("-inf"))
            energy = scores.softmax(dim=-1).square_().mean(dim=1)[0]
            received[window] += query_weights[window, rows] @ energy
    return received


def site_weights(
    layer: Layer, x: Tensor, output: Tensor, config: ModelConfig, rope: tuple[Tensor, Tensor]
) -> Mapping[str, Tensor]:
    """The weights FP32 `[windows, tokens]` of each site for a layer's input `x` and `output` FP32 `[.., hidden]`."""
    own = stream_weights(output)
    at_qkv = attention_received(layer, x, config, rope, own) + OWN_SHARE * own
    return {site: at_qkv if site == "qkv" else own for site in SITES}
