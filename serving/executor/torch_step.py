"""The decoder step in plain torch, bit for bit the native step.

INT8 products are exact in any order; everything else is spelled out in the native step's order (see `lanes`), so a
machine without a compiler gives the same tokens as one with it. It is the fallback, and the second opinion in tests;
it is not fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.goldens import LayerWeights
from kernels.slabs import Slabs
from quantize.numerics import apply_rope, linear_w8a8, quantize_activation, to_bf16
from serving.executor.base import PAGE_TOKENS
from serving.executor.kv_codec import KvCodec
from serving.executor.lanes import exponential, lane_sum, matmul_in_order, rms_norm
from serving.executor.step import StepRows

HEAD_BLOCK_LOGITS = 16384
"""Logits computed at a time in the LM head: bounds its FP32 copy, and keeps single operations from being tiny."""
MAX_ROWS = 64
"""Rows at a time; bounds the FP32 copies of the cached keys and values that attention makes."""


class TorchStep:
    """Runs steps with torch on mapped slabs; `k_cache` and `v_cache` are BF16 `[layers * pages * 128, kv_size]`."""

    name = "torch"

    def __init__(self, slabs: Slabs, k_cache: Tensor, v_cache: Tensor, codec: KvCodec | None = None) -> None:
        self._slabs = slabs
        self._codec = codec
        self._eps = slabs.config.rms_norm_eps
        self._k_cache = k_cache.view(slabs.config.num_layers, -1, slabs.config.kv_size)
        self._v_cache = v_cache.view(slabs.config.num_layers, -1, slabs.config.kv_size)

    def forward(self, rows: StepRows, logits: Tensor) -> None:
        """Run one step and write `logits` FP32 `[len(rows.logit_rows), real_vocab]` in place."""
        done = 0
        for part in rows.split(MAX_ROWS):
            count = part.logit_rows.shape[0]
            self._forward_part(part, logits[done : done + count])
            done += count

    def close(self) -> None:
        """Nothing to release beside the tensors."""

    def _forward_part(self, rows: StepRows, logits: Tensor) -> None:
        tensors = self._slabs.tensors
        positions = rows.positions.long()
        tables = rows.tables.long()[rows.sequence.long()]
        x = tensors["embed_weight"][rows.token_ids.long()].to(torch.float32)
        for index in range(self._slabs.config.num_layers):
            x = self._layer(x, index, positions, tables)
        if not len(rows.logit_rows):
            return
        wanted = x[rows.logit_rows.long()]
        normed = to_bf16(rms_norm(wanted, tensors["final_norm_weight"][0], self._eps)).to(torch.float32)
        block = max(1, HEAD_BLOCK_LOGITS // len(wanted))
        for start in range(0, self._slabs.real_vocab, block):
            stop = min(start + block, self._slabs.real_vocab)
            head = tensors["lm_head_weight"][start:stop].to(torch.float32).t().contiguous()
            logits[:, start:stop] = matmul_in_order(normed, head)

    def _layer(self, x: Tensor, index: int, positions: Tensor, tables: Tensor) -> Tensor:
        """One layer on the FP32 residual (BF16-representable) `[rows, hidden]`; writes keys and values in place."""
        config, weights = self._slabs.config, self._slabs.layer(index)
        tensors, count = self._slabs.tensors, x.shape[0]
        codes, scale = self._norm_and_quantize(x, weights.input_rms)
        q = linear_w8a8(codes, scale, weights.wq, weights.wq_scale)
        k = linear_w8a8(codes, scale, weights.wk, weights.wk_scale)
        v = linear_w8a8(codes, scale, weights.wv, weights.wv_scale)
        if weights.q_bias is not None and weights.k_bias is not None and weights.v_bias is not None:
            q, k, v = q + weights.q_bias, k + weights.k_bias, v + weights.v_bias
        q = q.view(count, config.num_heads, config.head_dim)
        k = k.view(count, config.num_kv_heads, config.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, self._eps), rms_norm(k, weights.k_norm, self._eps)
        cos, sin = tensors["rope_cos"][positions], tensors["rope_sin"][positions]
        pages = tables.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
        slots = pages * PAGE_TOKENS + positions % PAGE_TOKENS
        keys, values = to_bf16(apply_rope(k, cos, sin)), to_bf16(v).view(k.shape)
        if self._codec is not None:
            keys = self._codec.key(index, keys.to(torch.float32))
            values = self._codec.value(index, values.to(torch.float32))
        self._k_cache[index][slots] = keys.reshape(count, -1)
        self._v_cache[index][slots] = values.reshape(count, -1)
        query = to_bf16(apply_rope(q, cos, sin)).to(torch.float32)
        context = self._attention(query, index, positions, tables)
        codes, scale = quantize_activation(to_bf16(context).reshape(count, -1))
        residual = x + linear_w8a8(codes, scale, weights.wo, weights.wo_scale)
        return to_bf16(residual + self._mlp(residual, weights)).to(torch.float32)

    def _norm_and_quantize(self, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_activation(to_bf16(rms_norm(x, gamma, self._eps)))

    def _attention(self, query: Tensor, index: int, positions: Tensor, tables: Tensor) -> Tensor:
        """Online softmax over pages for all rows at once; a page beyond a row's context leaves the row as it was."""
        config = self._slabs.config
        count, dim, kv_heads = query.shape[0], config.head_dim, config.num_kv_heads
        query = query.view(count, kv_heads, -1, 1, dim)
        paged = (-1, PAGE_TOKENS, kv_heads, dim)
        running_max = torch.full((*query.shape[:3], 1), float("-inf"))
        total = torch.zeros_like(running_max)
        out = torch.zeros(*query.shape[:3], dim)
        for page in range(int(positions.max()) // PAGE_TOKENS + 1):
            tokens = min(PAGE_TOKENS, int(positions.max()) + 1 - page * PAGE_TOKENS)
            # [rows, kv_heads, 1, tokens, dim]
            keys = self._k_cache[index].view(paged)[tables[:, page], :tokens].to(torch.float32).transpose(1, 2)
            values = self._v_cache[index].view(paged)[tables[:, page], :tokens].to(torch.float32).transpose(1, 2)
            scores = lane_sum(query * keys.unsqueeze(2)) * dim**-0.5
            position = page * PAGE_TOKENS + torch.arange(tokens)
            scores = scores.masked_fill((position > positions[:, None])[:, None, None], float("-inf"))
            page_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
            p = to_bf16(exponential(scores - page_max)).to(torch.float32)
            rescale = exponential(running_max - page_max)
            total = total * rescale + lane_sum(p).unsqueeze(-1)
            weighed = torch.zeros_like(out)
            for token in range(tokens):
                weighed += p[..., token, None] * values[:, :, None, token]
            out = out * rescale + weighed
            running_max = page_max
        return (out / total).reshape(count, -1)

    def _mlp(self, residual: Tensor, weights: LayerWeights) -> Tensor:
        codes, scale = self._norm_and_quantize(residual, weights.post_rms)
        gate = linear_w8a8(codes, scale, weights.w_gate, weights.w_gate_scale)
        up = linear_w8a8(codes, scale, weights.w_up, weights.w_up_scale)
        activated = to_bf16(gate * (1.0 + exponential(-gate)).reciprocal() * up)
        if weights.w_down_scale is not None:
            return linear_w8a8(*quantize_activation(activated), weights.w_down, weights.w_down_scale)
        return matmul_in_order(activated.to(torch.float32), weights.w_down.to(torch.float32))
