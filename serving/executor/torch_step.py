"""The decoder step in plain torch: the golden's arithmetic, exact where the native backend is exact.

INT8 products run batched, since their sums are exact in any order. Everything whose rounding depends on the order of
a sum (norms, softmax, LM head) or on vector tails (exp) runs one row at a time, so that a row's numbers do not depend
on its batch mates. It is the fallback when no compiler is at hand, and the second opinion in tests; it is not fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.goldens import LayerWeights, lm_head_logits, paged_attention
from kernels.slabs import Slabs
from quantize.numerics import apply_rope, linear_w8a8, quantize_activation, rms_norm, to_bf16
from serving.executor.base import PAGE_TOKENS
from serving.executor.step import StepRows


class TorchStep:
    """Runs steps with torch on mapped slabs; `k_cache` and `v_cache` are BF16 `[layers * pages * 128, kv_size]`."""

    name = "torch"

    def __init__(self, slabs: Slabs, k_cache: Tensor, v_cache: Tensor) -> None:
        self._slabs = slabs
        self._eps = slabs.config.rms_norm_eps
        self._k_cache = k_cache.view(slabs.config.num_layers, -1, slabs.config.kv_size)
        self._v_cache = v_cache.view(slabs.config.num_layers, -1, slabs.config.kv_size)

    def forward(self, rows: StepRows, logits: Tensor) -> None:
        """Run one step and write `logits` FP32 `[len(rows.logit_rows), real_vocab]` in place."""
        tensors = self._slabs.tensors
        positions = rows.positions.long()
        tables = rows.tables.long()[rows.sequence.long()]
        slots = tables.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0] * PAGE_TOKENS + positions % PAGE_TOKENS
        cos, sin = tensors["rope_cos"][positions], tensors["rope_sin"][positions]
        x = tensors["embed_weight"][rows.token_ids.long()]
        for index in range(self._slabs.config.num_layers):
            x = self._layer(x, index, positions, slots, tables, cos, sin)
        for out, row in enumerate(rows.logit_rows.tolist()):
            normed = to_bf16(rms_norm(x[row].to(torch.float32), tensors["final_norm_weight"][0], self._eps))
            logits[out] = lm_head_logits(normed, tensors["lm_head_weight"], self._slabs.real_vocab)

    def close(self) -> None:
        """Nothing to release beside the tensors."""

    def _layer(
        self, x: Tensor, index: int, positions: Tensor, slots: Tensor, tables: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config, weights = self._slabs.config, self._slabs.layer(index)
        count = x.shape[0]
        residual = x.to(torch.float32)
        codes, scale = self._norm_and_quantize(residual, weights.input_rms)
        q = linear_w8a8(codes, scale, weights.wq, weights.wq_scale)
        k = linear_w8a8(codes, scale, weights.wk, weights.wk_scale)
        v = linear_w8a8(codes, scale, weights.wv, weights.wv_scale)
        if weights.q_bias is not None and weights.k_bias is not None and weights.v_bias is not None:
            q, k, v = q + weights.q_bias, k + weights.k_bias, v + weights.v_bias
        q = q.view(count, config.num_heads, config.head_dim)
        k = k.view(count, config.num_kv_heads, config.head_dim)
        if (q_norm := weights.q_norm) is not None and (k_norm := weights.k_norm) is not None:
            q = _each_row(lambda row: rms_norm(row, q_norm, self._eps), q)
            k = _each_row(lambda row: rms_norm(row, k_norm, self._eps), k)
        q = to_bf16(apply_rope(q, cos, sin))
        self._k_cache[index][slots] = to_bf16(apply_rope(k, cos, sin)).reshape(count, -1)
        self._v_cache[index][slots] = to_bf16(v)
        context = paged_attention(q, self._k_cache[index], self._v_cache[index], positions, tables, config.num_kv_heads)
        codes, scale = quantize_activation(to_bf16(context).reshape(count, -1))
        residual = residual + linear_w8a8(codes, scale, weights.wo, weights.wo_scale)
        return to_bf16(residual + self._mlp(residual, weights))

    def _norm_and_quantize(self, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_activation(to_bf16(_each_row(lambda row: rms_norm(row, gamma, self._eps), x)))

    def _mlp(self, residual: Tensor, weights: LayerWeights) -> Tensor:
        codes, scale = self._norm_and_quantize(residual, weights.post_rms)
        gate = linear_w8a8(codes, scale, weights.w_gate, weights.w_gate_scale)
        up = linear_w8a8(codes, scale, weights.w_up, weights.w_up_scale)
        sigmoid = _each_row(lambda row: 1.0 / (1.0 + torch.exp(-row)), gate)
        activated = to_bf16(gate * sigmoid * up)
        if weights.w_down_scale is not None:
            return linear_w8a8(*quantize_activation(activated), weights.w_down, weights.w_down_scale)
        down = weights.w_down.to(torch.float32).t()
        return _each_row(lambda row: torch.mv(down, row), activated.to(torch.float32))


def _each_row(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply `function` to a fresh copy of every row, so that its rounding depends on the row alone."""
    return torch.stack([function(row.clone()) for row in values])
