"""How a decode layer keeps keys and values: the cache's arguments, sample contents, and the golden layer over it.

A cache is BF16 rows, or TurboQuant's codes and norms with the matrices by which the layer turns its vectors. This
module knows nothing of pypto; `decode_stages` has the code for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from kernels.goldens import LayerShape, LayerWeights, TokenRows, attention_inputs, decoder_layer
from kernels.kv_format import KvFormat
from kernels.programs.base import Argument
from kernels.programs.turboquant_encode import sample_matrices
from kernels.turboquant import TurboQuant
from kernels.turboquant_cache import (
    KeptRows,
    code_columns,
    encode_rows,
    norm_columns,
    turboquant_decoder_layer,
    turn_queries,
)

__all__ = ["GoldenLayer", "KeptHeads", "cache_arguments", "cache_names", "golden_layer", "key_width", "sample_cache"]

BF16_CACHES = ("k_cache", "v_cache")
TURBOQUANT_CACHES = ("k_codes", "k_norms", "v_codes", "v_norms")


class KeptHeads(Protocol):
    """What of a layer's specification its cache depends on."""

    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def head_dim(self) -> int: ...  # noqa: D102 - a field of the configuration
    @property
    def kv_format(self) -> KvFormat | None: ...  # noqa: D102 - None is BF16


@dataclass(frozen=True)
class GoldenLayer:
    """What the golden layer gives: hidden rows, the query rows `[rows, heads, key_dim]`, and the caches by name."""

    out: Tensor
    query: Tensor
    caches: dict[str, Tensor]


def cache_names(kv_format: KvFormat | None) -> tuple[str, ...]:
    """The arguments that are written by slot."""
    return BF16_CACHES if kv_format is None else TURBOQUANT_CACHES


def key_width(spec: KeptHeads) -> int:
    """Width of a key or query of one head as attention multiplies them; a sketch doubles it."""
    return spec.head_dim * (2 if spec.kv_format is not None and spec.kv_format.sketch else 1)


def cache_arguments(spec: KeptHeads) -> tuple[Argument, ...]:
    """The caches in call order; for TurboQuant the matrices of keys and values before them."""
    heads, dim, kv_format = spec.num_kv_heads, spec.head_dim, spec.kv_format
    if kv_format is None:
        return tuple(Argument(name, torch.bfloat16, (None, heads * dim), "inout") for name in BF16_CACHES)
    codes = code_columns(heads, dim, kv_format.bits)
    return (
        Argument("k_matrices", torch.bfloat16, (key_width(spec), dim)),
        Argument("v_matrices", torch.bfloat16, (dim, dim)),
        Argument("k_codes", torch.int8, (None, codes), "inout"),
        Argument("k_norms", torch.float32, (None, norm_columns(heads, kv_format.sketch)), "inout"),
        Argument("v_codes", torch.int8, (None, codes), "inout"),
        Argument("v_norms", torch.float32, (None, norm_columns(heads, sketch=False)), "inout"),
    )


def sample_cache(spec: KeptHeads, slots: int, generator: Generator) -> dict[str, Tensor]:
    """A cache of `slots` slots full of random keys and values, and the matrices where there are any."""
    width, kv_format = spec.num_kv_heads * spec.head_dim, spec.kv_format
    rows = {name: torch.randn(slots, width, generator=generator).to(torch.bfloat16) for name in ("k", "v")}
    if kv_format is None:
        return {f"{name}_cache": values for name, values in rows.items()}
    tensors: dict[str, Tensor] = {}
    for name, sketch in (("k", kv_format.sketch), ("v", False)):
        matrices = sample_matrices(spec.head_dim, kv_format.bits, sketch, generator)
        codes, norms = encode_rows(TurboQuant.from_matrices(matrices, kv_format.bits), rows[name])
        tensors |= {f"{name}_matrices": matrices, f"{name}_codes": codes, f"{name}_norms": norms.contiguous()}
    return tensors


def golden_layer(
    spec: KeptHeads,
    x: Tensor,
    weights: LayerWeights,
    shape: LayerShape,
    rows: TokenRows,
    tensors: Mapping[str, Tensor],
) -> GoldenLayer:
    """The golden layer on copies of the caches in `tensors`."""
    caches = {name: tensors[name].clone() for name in cache_names(spec.kv_format)}
    query, _, _ = attention_inputs(x, weights, shape, rows)
    if spec.kv_format is None:
        return GoldenLayer(decoder_layer(x, weights, shape, rows, caches["k_cache"], caches["v_cache"]), query, caches)
    keys, values = (
        KeptRows(
            TurboQuant.from_matrices(tensors[f"{name}_matrices"], spec.kv_format.bits),
            caches[f"{name}_codes"],
            caches[f"{name}_norms"],
        )
        for name in ("k", "v")
    )
    out = turboquant_decoder_layer(x, weights, shape, rows, keys, values)
    return GoldenLayer(out, turn_queries(keys.codec, query), caches)
