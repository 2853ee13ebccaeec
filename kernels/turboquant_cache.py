"""How TurboQuant's vectors stand in a paged cache, and attention over such a cache: what the two programs must give.

A cache is INT8 codes `[slots, kv_heads * head_dim / codes_per_byte]` and FP32 norms `[slots, kv_heads]`. Within a head
codes share a byte as in `pack_codes`, less 128. With a sketch the sign takes the top bit of its coordinate's code, and
behind the norms stand `kv_heads` more numbers: what a sign stands for. So a format takes the same bytes with a sketch
as without, but for these.

Attention reads such a cache in the rotated space: queries are turned once instead of every key, and the context is
turned back once. Turning keeps inner products, so this is decoding and then attending, but for what narrowing to BF16
in one space or the other does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.goldens import (
    LayerShape,
    LayerWeights,
    TokenRows,
    after_attention,
    attention_inputs,
    paged_attention,
)
from kernels.turboquant import TurboQuant, codes_per_byte, pack_codes, unpack_codes
from quantize.numerics import to_bf16

BYTE_OFFSET = 128
"""Taken off a packed byte, whose type is signed: the device's conversions from bytes are."""


def code_columns(kv_heads: int, head_dim: int, bits: int) -> int:
    """Bytes of a token's codes."""
    return kv_heads * head_dim // codes_per_byte(bits)


def norm_columns(kv_heads: int, sketch: bool) -> int:
    """FP32 numbers of a token beside its codes."""
    return kv_heads * (2 if sketch else 1)


def encode_rows(codec: TurboQuant, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of all heads BF16 `[n, kv_heads * d]` as they are kept: codes INT8 `[n, code columns]`, norms FP32."""
    count = rows.shape[0]
    encoded = codec.encode(rows.to(torch.float32).view(-1, codec.head_dim))
    codes, norms = encoded.codes, encoded.norms.view(count, -1)
    if encoded.signs is not None and encoded.residual_norms is not None:
        codes = codes | (encoded.signs > 0).to(torch.uint8) << (codec.bits - 1)
        steps = encoded.residual_norms * codec.sign_scale * encoded.norms
        norms = torch.cat([norms, steps.view(count, -1)], dim=1)
    packed = pack_codes(codes, codec.bits).to(torch.int16) - BYTE_OFFSET
    return packed.to(torch.int8).view(count, -1), norms


def read_rows(codec: TurboQuant, codes: Tensor, norms: Tensor) -> Tensor:
    """What attention reads of kept rows, in the rotated space: BF16 `[n, kv_heads, d]`.

    With a sketch `[n, kv_heads, 2 d]`, and the second half is the sketch's: a sign times what it stands for. Its
    product with a query that is turned and projected adds what rounding took from the product with the first half.
    """
    count = codes.shape[0]
    per, levels = codes_per_byte(codec.bits), codec.centroids.numel()
    packed = (codes.to(torch.int16) + BYTE_OFFSET).to(torch.uint8).view(-1, codec.head_dim // per)
    joint = unpack_codes(packed, codec.bits).view(count, -1, codec.head_dim).long()
    heads = joint.shape[1]
    kept = to_bf16(codec.centroids[joint % levels] * norms[:, :heads, None])
    if not codec.sketch:
        return kept
    signs = torch.where(joint >= levels, 1.0, -1.0)
    return torch.cat([kept, to_bf16(signs * norms[:, heads:, None])], dim=2)


def turn_queries(codec: TurboQuant, q: Tensor) -> Tensor:
    """Queries BF16 `[..., d]` for keys as `read_rows` gives them: turned, and with a sketch their projection behind."""
    turned = to_bf16(q.to(torch.float32) @ codec.rotation)
    if codec.projection is None:
        return turned
    return torch.cat([turned, to_bf16(turned.to(torch.float32) @ codec.projection.t())], dim=-1)


def turboquant_attention(
    q: Tensor,
    keys: tuple[TurboQuant, Tensor, Tensor],
    values: tuple[TurboQuant, Tensor, Tensor],
    positions: Tensor,
    block_table: Tensor,
) -> Tensor:
    """As `goldens.paged_attention` over kept keys and values; BF16 `[rows, heads, d]`.

    `keys` and `values` are a codec and the cache's codes and norms; the values' codec has no sketch.
    """
    codec, codes, norms = keys
    read = read_rows(codec, codes, norms)
    kv_heads = read.shape[1]
    value_codec, value_codes, value_norms = values
    context = paged_attention(
        turn_queries(codec, q),
        read.flatten(1),
        read_rows(value_codec, value_codes, value_norms).flatten(1),
        positions,
        block_table,
        kv_heads,
    )
    return to_bf16(to_bf16(context).to(torch.float32) @ value_codec.rotation.t())


@dataclass(frozen=True)
class KeptRows:
    """Keys or values of one layer: their codec, and the cache's codes and norms."""

    codec: TurboQuant
    codes: Tensor
    norms: Tensor

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Encode BF16 `[n, kv_heads * d]` and put it into `slots` INT64 `[n]`."""
        self.codes[slots], self.norms[slots] = encode_rows(self.codec, rows)


def turboquant_decoder_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, rows: TokenRows, keys: KeptRows, values: KeptRows
) -> Tensor:
    """As `goldens.decoder_layer` over a TurboQuant cache, written in place."""
    q, k, v = attention_inputs(x, weights, shape, rows)
    keys.write(rows.slots, k)
    values.write(rows.slots, v)
    kept_keys, kept_values = ((kept.codec, kept.codes, kept.norms) for kept in (keys, values))
    context = turboquant_attention(q, kept_keys, kept_values, rows.positions, rows.block_table)
    return after_attention(x, context, weights, shape.rms_norm_eps)
