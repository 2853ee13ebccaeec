"""TurboQuant for the CPU executor: one codec for the keys and one for the values of each layer.

The cache holds what decoding gives, in BF16: the numbers that attention would read of the kept codes, so that a
format's effect on quality is measured end to end. The memory that the codes would save is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_format import parse_kv_format
from kernels.turboquant import Sums, TurboQuant
from quantize.model_config import ModelConfig
from serving.executor.lanes import lane_sum, matmul_in_order

IN_ORDER = Sums(matmul_in_order, lane_sum)
"""The sums of the native step, so that both backends keep the same bits."""


class KvCodec:
    """What is done to keys and values before they are cached; `row_bytes` is what a packed key and value would take."""

    def __init__(self, keys: Sequence[TurboQuant], values: Sequence[TurboQuant]) -> None:
        self.keys, self.values = tuple(keys), tuple(values)
        self.row_bytes = self.keys[0].row_bytes + self.values[0].row_bytes

    def key(self, layer: int, rows: Tensor) -> Tensor:
        """Keys FP32 `[rows, heads, head_dim]` (values of BF16) as they will be read, BF16 of the same shape."""
        return self.keys[layer].round_trip(rows.reshape(-1, rows.shape[-1])).view(rows.shape)

    def value(self, layer: int, rows: Tensor) -> Tensor:
        """As `key`, of values."""
        return self.values[layer].round_trip(rows.reshape(-1, rows.shape[-1])).view(rows.shape)

    def native_tables(self) -> dict[str, Tensor | None]:
        """FP32 tables by the names of the native step's fields.

        Rotations are `[layers, 2, 2, d, d]` (keys and values, each as it is and transposed), projections
        `[layers, 2, d, d]`, codebooks vectors.
        """
        rotations, projections = [], []
        for key, value in zip(self.keys, self.values, strict=True):
            rotations += [key.rotation, key.rotation.t(), value.rotation, value.rotation.t()]
            if key.projection is not None:
                projections += [key.projection, key.projection.t()]
        return {
            "kv_rotations": torch.stack(rotations).contiguous(),
            "key_projections": torch.stack(projections).contiguous() if projections else None,
            "key_centroids": self.keys[0].centroids,
            "key_boundaries": self.keys[0].boundaries,
            "value_centroids": self.values[0].centroids,
            "value_boundaries": self.values[0].boundaries,
        }


def open_codec(name: str, config: ModelConfig) -> KvCodec | None:
    """The codec of KV format `name` for a model, None for `bf16`; raises ContractError for an unknown name.

    Layer l is seeded with 2 l for keys and 2 l + 1 for values, so every run and backend turns by the same matrices.
    """
    kv_format = parse_kv_format(name)
    if kv_format is None:
        return None
    bits, dim = kv_format.bits, config.head_dim
    layers = range(config.num_layers)
    return KvCodec(
        [TurboQuant(dim, bits, sketch=kv_format.sketch, seed=2 * layer, sums=IN_ORDER) for layer in layers],
        [TurboQuant(dim, bits, seed=2 * layer + 1, sums=IN_ORDER) for layer in layers],
    )
