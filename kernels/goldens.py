"""The golden decoder in plain torch: the definition that programs and executors are compared with.

One function serves prefill and decode: a batch is a list of token rows, each with its own position and page list,
and all keys and values of the batch are written before any row attends. So the same tokens give the same numbers
however they are cut into chunks.

Page layout: a layer's cache is BF16 `[slots, kv_heads * head_dim]` with `slot = page * 128 + offset`; the softmax
runs online over pages of 128 tokens, with probabilities narrowed to BF16 before they meet the values, as on the
device's matrix unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.errors import KernelsError
from quantize.numerics import apply_rope, linear_w8a8, quantize_activation, rms_norm, to_bf16

PAGE_TOKENS = 128


@dataclass(frozen=True)
class LayerShape:
    """What a decoder layer's arithmetic depends on, beside its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer's slabs: projections INT8 or BF16 `[in, out]`, scales FP32 `[out]`, norms FP32 `[n]`.

    The scale of a BF16 weight is not read; `w_down_scale` may be None then. `q_norm`/`k_norm` FP32 `[head_dim]` and the
    QKV biases FP32 `[out]` are None where the family has none.
    """

    input_rms: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wq_scale: Tensor
    wk_scale: Tensor
    wv_scale: Tensor
    wo: Tensor
    wo_scale: Tensor
    post_rms: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_gate_scale: Tensor
    w_up_scale: Tensor
    w_down: Tensor
    w_down_scale: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


@dataclass(frozen=True)
class TokenRows:
    """Where each token row of a batch stands.

    `positions` INT64 `[rows]`; `slots` INT64 `[rows]`, the cache row each token's K and V go to; `block_table` INT64
    `[rows, pages]`, the pages of the row's sequence in order; `cos`/`sin` FP32 `[rows, head_dim]` at the positions.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cos: Tensor
    sin: Tensor


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, block_table: Tensor, num_kv_heads: int
) -> Tensor:
    """Attend each row of `q` to the `position + 1` cached tokens of its sequence; returns FP32 `[rows, heads, dim]`.

    `q` BF16 `[rows, heads, key_dim]`, `k_cache` BF16 `[slots, kv_heads * key_dim]`, `v_cache` BF16
    `[slots, kv_heads * dim]`; `key_dim` is `dim`, or twice that where a key has a sketch. Online softmax over pages of
    128 tokens (Milakov and Gimelshein, 2018): scores `FP32(q . k) * dim^-0.5`, probabilities narrowed to BF16 and
    summed as narrowed, running maximum and rescaling in FP32.
    """
    rows, heads, key_dim = q.shape
    group, dim = heads // num_kv_heads, v_cache.shape[1] // num_kv_heads
    out = torch.empty(rows, heads, dim, dtype=torch.float32)
    q_fp32 = q.to(torch.float32).view(rows, num_kv_heads, group, key_dim)
    for row in range(rows):
        context = int(positions[row]) + 1
        running_max = torch.full((num_kv_heads, group, 1), float("-inf"))
        total = torch.zeros(num_kv_heads, group, 1)
        accumulator = torch.zeros(num_kv_heads, group, dim)
        for page_index in range((context + PAGE_TOKENS - 1) // PAGE_TOKENS):
            first = int(block_table[row, page_index]) * PAGE_TOKENS
            tokens = min(PAGE_TOKENS, context - page_index * PAGE_TOKENS)
            keys = k_cache[first : first + tokens].to(torch.float32).view(tokens, num_kv_heads, key_dim).transpose(0, 1)
            values = v_cache[first : first + tokens].to(torch.float32).view(tokens, num_kv_heads, dim).transpose(0, 1)
            scores = (q_fp32[row] @ keys.transpose(1, 2)) * dim**-0.5
            page_max = torch.maximum(running_max, scores.amax(dim=-1, keepdim=True))
            probabilities = to_bf16(torch.exp(scores - page_max)).to(torch.float32)
            rescale = torch.exp(running_max - page_max)
            total = total * rescale + probabilities.sum(dim=-1, keepdim=True)
            accumulator = accumulator * rescale + probabilities @ values
            running_max = page_max
        out[row] = (accumulator / total).reshape(heads, dim)
    return out


def linear(x_bf16: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """BF16 rows `[rows, in]` by a weight `[in, out]`, FP32 `[rows, out]`: the weight's dtype decides the arithmetic.

    INT8: the rows are quantized, see `linear_w8a8`. BF16: products of BF16 values, summed in FP32. Raises KernelsError
    for an INT8 weight without its scale.
    """
    if weight.dtype != torch.int8:
        return x_bf16.to(torch.float32) @ weight.to(torch.float32)
    if weight_scale is None:
        raise KernelsError("an INT8 weight came without its scale; pass the scale, or a BF16 weight")
    return linear_w8a8(*quantize_activation(x_bf16), weight, weight_scale)


def attention_inputs(x: Tensor, weights: LayerWeights, shape: LayerShape, rows: TokenRows) -> tuple[Tensor, ...]:
    """Norm, project, QK-norm and rotate: BF16 `[rows, hidden]` to BF16 q `[rows, heads, dim]`, k, v 2-D."""
    count = x.shape[0]
    normed = to_bf16(rms_norm(x.to(torch.float32), weights.input_rms, shape.rms_norm_eps))
    q = linear(normed, weights.wq, weights.wq_scale)
    k = linear(normed, weights.wk, weights.wk_scale)
    v = linear(normed, weights.wv, weights.wv_scale)
    if weights.q_bias is not None and weights.k_bias is not None and weights.v_bias is not None:
        q, k, v = q + weights.q_bias, k + weights.k_bias, v + weights.v_bias
    q = q.view(count, shape.num_heads, shape.head_dim)
    k = k.view(count, shape.num_kv_heads, shape.head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, shape.rms_norm_eps)
        k = rms_norm(k, weights.k_norm, shape.rms_norm_eps)
    q = to_bf16(apply_rope(q, rows.cos, rows.sin))
    k = to_bf16(apply_rope(k, rows.cos, rows.sin))
    return q, k.reshape(count, -1), to_bf16(v)


def mlp(h_fp32: Tensor, weights: LayerWeights, eps: float) -> Tensor:
    """SwiGLU MLP of the FP32 residual `[rows, hidden]`: norm, gate/up, SiLU, down; returns FP32."""
    normed = to_bf16(rms_norm(h_fp32, weights.post_rms, eps))
    gate = linear(normed, weights.w_gate, weights.w_gate_scale)
    up = linear(normed, weights.w_up, weights.w_up_scale)
    activated = to_bf16(gate * (1.0 / (1.0 + torch.exp(-gate))) * up)
    return linear(activated, weights.w_down, weights.w_down_scale)


def decoder_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, rows: TokenRows, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Run one decoder layer on BF16 `[rows, hidden]`; writes the rows' K and V to the caches in place; returns BF16.

    The residual stays FP32 inside the layer and is narrowed once, at its end.
    """
    q, k, v = attention_inputs(x, weights, shape, rows)
    k_cache[rows.slots] = k
    v_cache[rows.slots] = v
    context = paged_attention(q, k_cache, v_cache, rows.positions, rows.block_table, shape.num_kv_heads)
    return after_attention(x, to_bf16(context), weights, shape.rms_norm_eps)


def after_attention(x: Tensor, context: Tensor, weights: LayerWeights, eps: float) -> Tensor:
    """The rest of a layer: its input BF16 `[rows, hidden]` and context BF16 `[rows, heads, dim]` to its output BF16."""
    residual = x.to(torch.float32) + linear(context.reshape(x.shape[0], -1), weights.wo, weights.wo_scale)
    return to_bf16(residual + mlp(residual, weights, eps))


def lm_head(x: Tensor, final_norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Final norm and LM head: BF16 `[rows, hidden]` x BF16 `[vocab, hidden]` to logits FP32 `[rows, vocab]`."""
    normed = to_bf16(rms_norm(x.to(torch.float32), final_norm, eps))
    return normed.to(torch.float32) @ weight.to(torch.float32).t()


def decoder_layers(
    x: Tensor, layers: Sequence[LayerWeights], shape: LayerShape, rows: TokenRows, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Run BF16 hidden rows `[rows, hidden]` through `layers`; caches BF16 `[layers, slots, kv_size]`, in place."""
    for index, weights in enumerate(layers):
        x = decoder_layer(x, weights, shape, rows, k_cache[index], v_cache[index])
    return x


def next_tokens(
    x: Tensor, final_norm: Tensor, lm_head_weight: Tensor, embed_weight: Tensor, real_vocab: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Final norm, LM head and greedy sampling of BF16 hidden rows `[rows, hidden]`.

    Returns logits FP32 `[rows, real_vocab]`, ids INT64 `[rows]`, and the embedding rows of the ids, BF16
    `[rows, hidden]`, which are the next step's hidden rows.
    """
    logits = lm_head(x, final_norm, lm_head_weight[:real_vocab], eps)
    ids = greedy(logits, real_vocab)
    return logits, ids, embed_weight[ids]


class DecoderWeights(Protocol):
    """A whole model's weights as the golden reads them; `kernels.slabs.Slabs` is one."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Slabs by their contract names."""
        ...

    @property
    def layer_shape(self) -> LayerShape:
        """Heads, head_dim and eps."""
        ...

    @property
    def real_vocab(self) -> int:
        """Vocabulary rows that are not padding."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Views of one layer's slabs."""
        ...


def forward(
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Run the whole golden decoder on token rows; returns logits FP32 `[rows, real_vocab]` of every row.

    `token_ids` and `positions` INT64 `[rows]`, `block_table` INT64 `[rows, pages]`, caches BF16
    `[layers, slots, kv_size]`, written in place.
    """
    pages = block_table.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
    rows = TokenRows(
        positions,
        pages * PAGE_TOKENS + positions % PAGE_TOKENS,
        block_table,
        weights.tensors["rope_cos"][positions],
        weights.tensors["rope_sin"][positions],
    )
    x = weights.tensors["embed_weight"][token_ids]
    layers = [weights.layer(index) for index in range(k_cache.shape[0])]
    x = decoder_layers(x, layers, weights.layer_shape, rows, k_cache, v_cache)
    final_norm = weights.tensors["final_norm_weight"][0]
    head = weights.tensors["lm_head_weight"][: weights.real_vocab]
    return lm_head(x, final_norm, head, weights.layer_shape.rms_norm_eps)


def greedy(logits: Tensor, real_vocab: int) -> Tensor:
    """Ids INT64 `[rows]` of the largest logit below `real_vocab`; ties go to the lowest id; padded ids never win."""
    return logits[:, :real_vocab].argmax(dim=-1)


def top_ids(logits: Tensor, real_vocab: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits below `real_vocab` and their INT64 ids, `[rows, count]` each, largest first.

    Ties go to the lowest id, at the last place too.
    """
    values, ids = logits[:, :real_vocab].sort(dim=-1, descending=True, stable=True)
    return values[:, :count].contiguous(), ids[:, :count].contiguous()
