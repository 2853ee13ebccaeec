"""One decoder layer in FP32 torch, over many windows at a time, for calibration.

A layer is its weights and four places where a Linear reads an activation (`SITES`); whoever runs it may look at those
activations, and may have them quantized as W8A8 would. This module knows nothing of files or of how weights are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from quantize.model_config import ModelConfig
from quantize.numerics import ACTIVATION_AMAX_EPS, INT8_MAX

SITES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The Linears that read each activation of a layer, in the order of computation."""
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"

Observer = Callable[[str, Tensor], None]
"""Called with a site and its activation FP32 `[windows, tokens, k]`, before any quantization."""


@dataclass
class Layer:
    """A layer's parameters in FP32: `weights[name]` `[out, in]`, `biases[name]` `[out]`, `norms[name]` `[n]`.

    Names are those within the layer (`self_attn.q_proj`, `input_layernorm`). Linears in `float_linears` read their
    input unquantized.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    norms: dict[str, Tensor]
    float_linears: frozenset[str] = frozenset()


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` over the last dimension, FP32."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def fake_quantize(x: Tensor) -> Tensor:
    """`x` FP32 as W8A8 sees it: rounded to BF16, then to 255 levels per token, and back to FP32."""
    x = x.to(torch.bfloat16).to(torch.float32)
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(ACTIVATION_AMAX_EPS) / INT8_MAX
    return (x / scale).round_().clamp_(-INT8_MAX, INT8_MAX).mul_(scale)


def _rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[windows, heads, tokens, head_dim]` by `[tokens, head_dim]` tables, half split."""
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return heads * cos + turned * sin


def _heads(values: Tensor, head_dim: int) -> Tensor:
    """`[windows, tokens, heads * head_dim]` as `[windows, heads, tokens, head_dim]`."""
    return values.view(*values.shape[:2], -1, head_dim).transpose(1, 2)


def attention_heads(
    layer: Layer, q: Tensor, k: Tensor, config: ModelConfig, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries and keys as attention compares them, FP32 `[windows, heads, tokens, head_dim]`: normalised and turned.

    `q` and `k` are what their Linears give, FP32 `[windows, tokens, heads * head_dim]`.
    """
    q, k = _heads(q, config.head_dim), _heads(k, config.head_dim)
    if config.qk_norm:
        q = rms_norm_fp32(q, layer.norms[Q_NORM], config.rms_norm_eps)
        k = rms_norm_fp32(k, layer.norms[K_NORM], config.rms_norm_eps)
    return _rope(q, *rope), _rope(k, *rope)


def run_layer(
    layer: Layer,
    x: Tensor,
    config: ModelConfig,
    rope: tuple[Tensor, Tensor],
    *,
    quantized: bool = False,
    observe: Observer | None = None,
) -> Tensor:
    """Run one layer on the residual `x` FP32 `[windows, tokens, hidden]`; returns the next residual, same shape.

    `rope` has cos and sin FP32 `[tokens, head_dim]`. With `quantized`, the input of every Linear is quantized per token
    and back, except of those in `float_linears`; weights are used as they are given.
    """

    def linears(site: str, values: Tensor) -> list[Tensor]:
        if observe is not None:
            observe(site, values)
        rounded = fake_quantize(values) if quantized and not layer.float_linears.issuperset(SITES[site]) else values
        outputs = []
        for name in SITES[site]:
            source = values if name in layer.float_linears else rounded
            output = source @ layer.weights[name].T
            outputs.append(output + layer.biases[name] if name in layer.biases else output)
        return outputs

    q, k, v = linears("qkv", rms_norm_fp32(x, layer.norms[INPUT_NORM], config.rms_norm_eps))
    q, k = attention_heads(layer, q, k, config, rope)
    v = _heads(v, config.head_dim)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (attended,) = linears("o", mixed.transpose(1, 2).flatten(2))
    x = x + attended
    gate, up = linears("gate_up", rms_norm_fp32(x, layer.norms[POST_NORM], config.rms_norm_eps))
    (output,) = linears("down", silu(gate).mul_(up))
    return x + output
