"""`linear_w8a8`: one W8A8 projection of BF16 rows, in tiles that its specification states.

The decode and prefill programs hold the same blocks among others. Alone it is what tiles are tuned on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.tile_rules import CubeTile, check_cube_tile, check_dequant_tile, check_vector_tile
from kernels.tiles import FP32_IN_AND_OUT_BYTES, dequant_rows, row_columns
from quantize.numerics import linear_w8a8, quantize_activation, to_bf16

__all__ = ["LinearW8A8", "LinearW8A8Spec"]


@dataclass(frozen=True)
class LinearW8A8Spec(ProgramSpec):
    """`[rows, k] x [k, n]` in a matmul tile given by its five sides."""

    k: int
    n: int
    rows: int
    tile_m: int
    tile_k_l0: int
    tile_k_left: int
    tile_k_right: int
    tile_n: int

    def __post_init__(self) -> None:
        problems = [f"{name} {size} is no multiple of 32" for name, size in (("k", self.k), ("n", self.n)) if size % 32]
        if self.rows < 1:
            problems.append(f"rows {self.rows} must be at least 1")
        if problems:
            raise ProgramError(f"no linear_w8a8 program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(cls, k: int, n: int, rows: int, tile: CubeTile) -> LinearW8A8Spec:
        """The projection in `tile`."""
        return cls(k, n, rows, tile.m, tile.k_l0, tile.k_left, tile.k_right, tile.n)

    @property
    def tile(self) -> CubeTile:
        """The matmul's tile."""
        return CubeTile(self.tile_m, self.tile_k_l0, self.tile_k_left, self.tile_k_right, self.tile_n)


class LinearW8A8(Program):
    """The projection at one shape, in one tile."""

    name = "linear_w8a8"
    kernel_module = "kernels.programs.linear_kernel"
    spec: LinearW8A8Spec

    def arguments(self) -> tuple[Argument, ...]:
        """Rows, weight, its scales; FP32 rows out."""
        s = self.spec
        return (
            Argument("x", torch.bfloat16, (s.rows, s.k)),
            Argument("weight", torch.int8, (s.k, s.n)),
            Argument("weight_scale", torch.float32, (1, s.n)),
            Argument("out", torch.float32, (s.rows, s.n), "out"),
        )

    def check_tiles(self) -> None:
        """The matmul's tile, the rows quantized before it and the tile that takes its result."""
        s = self.spec
        check_cube_tile(s.tile, 1)
        check_vector_tile(1, row_columns(s.k), FP32_IN_AND_OUT_BYTES)
        check_dequant_tile(2 * s.tile.n, s.tile, s.n)
        check_vector_tile(dequant_rows(s.rows, s.tile), 2 * s.tile.n, FP32_IN_AND_OUT_BYTES)

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random rows, codes and scales."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(-127, 128, (s.k, s.n), dtype=torch.int16, generator=generator)
        return {
            **self.shape_inputs(),
            "x": to_bf16(torch.randn(s.rows, s.k, generator=generator)),
            "weight": codes.to(torch.int8),
            "weight_scale": (0.5 + torch.rand(1, s.n, generator=generator)) / (73.0 * math.sqrt(s.k)),
        }

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros: no value steers the control flow."""
        return {a.name: torch.zeros([size or 0 for size in a.shape], dtype=a.dtype) for a in self.arguments()}

    def units(self) -> int:
        """One body."""
        return 1

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Quantize per row, multiply exactly, scale."""
        codes, scale = quantize_activation(tensors["x"])
        return {"out": linear_w8a8(codes, scale, tensors["weight"], tensors["weight_scale"][0])}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Every argument once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
