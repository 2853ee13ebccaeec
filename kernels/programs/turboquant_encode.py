"""`turboquant_encode`: keys and values of new tokens into a TurboQuant cache, by slot, as a program with its golden.

In: BF16 rows of keys (after the rotary embedding) and values, slots, and the layer's matrices. Out: codes and norms of
both at the rows' slots. Any number of rows; what is beyond them writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS
from kernels.kv_format import KvFormat
from kernels.programs.base import Argument, Program, ProgramSpec, check_rows
from kernels.turboquant import TurboQuant, codes_per_byte
from kernels.turboquant_cache import code_columns, encode_rows, norm_columns
from quantize.model_config import ModelConfig
from quantize.numerics import to_bf16

__all__ = ["WINDOW_ROWS", "TurboQuantEncode", "TurboQuantEncodeSpec", "format_problems", "sample_matrices", "sure_rows"]

WINDOW_ROWS = 16
"""Rows that the kernel takes at a time."""
SURE = 1e-6
"""Least distance, relative, of a sample's values from where rounding turns: FP32 sums of any order stay within it."""
SURE_PROJECTED = 2e-4
"""As much for a residual's projection: a step of BF16 in one of its coordinates moves it by less."""


def format_problems(kv_heads: int, head_dim: int, bits: int) -> list[str]:
    """What of a shape no TurboQuant program covers, as messages."""
    problems = []
    if head_dim % 16 or not 16 <= head_dim <= 256:
        problems.append(f"head_dim {head_dim} is not 16, 32, 48, ... 256")
    if bits not in (2, 3, 4):
        problems.append(f"{bits} bits a coordinate are not 2, 3 or 4")
    elif head_dim % codes_per_byte(bits):
        problems.append(f"head_dim {head_dim} is not a multiple of the {codes_per_byte(bits)} codes in a byte")
    if kv_heads < 1:
        problems.append(f"{kv_heads} key/value heads are fewer than 1")
    return problems


@dataclass(frozen=True)
class TurboQuantEncodeSpec(ProgramSpec):
    """Shape of the rows and format of the cache; `rows` and `pages` shape the sample inputs only.

    `sketch` is that of the keys; values have none.
    """

    kv_heads: int
    head_dim: int
    bits: int
    sketch: bool
    rows: int
    pages: int = 1

    def __post_init__(self) -> None:
        problems = format_problems(self.kv_heads, self.head_dim, self.bits)
        if not 1 <= self.rows <= self.pages * PAGE_TOKENS:
            problems.append(
                f"{self.rows} rows are not in 1..{self.pages * PAGE_TOKENS}, the slots of {self.pages} pages"
            )
        if problems:
            raise ProgramError(f"no turboquant_encode program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(cls, config: ModelConfig, kv_format: KvFormat, rows: int, pages: int = 1) -> TurboQuantEncodeSpec:
        """The encoder of `config`'s keys and values."""
        return cls(config.num_kv_heads, config.head_dim, kv_format.bits, kv_format.sketch, rows, pages)

    @property
    def kv_size(self) -> int:
        """Width of a row of keys or values."""
        return self.kv_heads * self.head_dim


class TurboQuantEncode(Program):
    """The encoder at one shape."""

    name = "turboquant_encode"
    kernel_module = "kernels.programs.turboquant_encode_kernel"
    spec: TurboQuantEncodeSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Rows and slots, matrices, and the four caches."""
        s = self.spec
        bf16, int8, fp32 = torch.bfloat16, torch.int8, torch.float32
        codes, dim = code_columns(s.kv_heads, s.head_dim, s.bits), s.head_dim
        return (
            Argument("k_rows", bf16, (None, s.kv_size)),
            Argument("v_rows", bf16, (None, s.kv_size)),
            Argument("slots", torch.int32, (None, 1)),
            Argument("k_matrices", bf16, (2 * dim if s.sketch else dim, dim)),
            Argument("v_matrices", bf16, (dim, dim)),
            Argument("k_codes", int8, (None, codes), "inout"),
            Argument("k_norms", fp32, (None, norm_columns(s.kv_heads, s.sketch)), "inout"),
            Argument("v_codes", int8, (None, codes), "inout"),
            Argument("v_norms", fp32, (None, norm_columns(s.kv_heads, sketch=False)), "inout"),
        )

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Rows of heavy tails and many magnitudes, scattered slots, caches that are full already."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        tensors = self.shape_inputs()
        for name, sketch in (("k_matrices", s.sketch), ("v_matrices", False)):
            tensors[name] = sample_matrices(s.head_dim, s.bits, sketch, generator)
        for name in ("k", "v"):
            codec = TurboQuant.from_matrices(tensors[f"{name}_matrices"], s.bits)
            tensors[f"{name}_rows"] = sure_rows(codec, s.rows, s.kv_heads, generator)
            shape = tensors[f"{name}_codes"].shape
            tensors[f"{name}_codes"] = torch.randint(-128, 128, shape, dtype=torch.int16, generator=generator).to(
                torch.int8
            )
            tensors[f"{name}_norms"] = 1 + torch.rand(tensors[f"{name}_norms"].shape, generator=generator)
        order = torch.randperm(s.pages * PAGE_TOKENS, generator=generator)[: s.rows]
        return tensors | {"slots": order.to(torch.int32).unsqueeze(1)}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, and slots in order."""
        s = self.spec
        tensors = {}
        for argument in self.arguments():
            rows = s.rows if argument.direction == "in" else s.pages * PAGE_TOKENS
            shape = [rows if size is None else size for size in argument.shape]
            tensors[argument.name] = torch.zeros(shape, dtype=argument.dtype)
        return tensors | {"slots": torch.arange(s.rows, dtype=torch.int32).unsqueeze(1)}

    def units(self) -> int:
        """One body per window."""
        return -(-self.spec.rows // WINDOW_ROWS)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row encoded and put into its slot, on copies of the caches."""
        slots = tensors["slots"].flatten().to(torch.int64)
        written = {}
        for name in ("k", "v"):
            codec = TurboQuant.from_matrices(tensors[f"{name}_matrices"], self.spec.bits)
            for part, new in zip(("codes", "norms"), encode_rows(codec, tensors[f"{name}_rows"]), strict=True):
                cache = tensors[f"{name}_{part}"].clone()
                cache[slots] = new
                written[f"{name}_{part}"] = cache
        return written

    def tolerances(self) -> dict[str, str]:
        """Codes are exact; the sum of a head's squares may run in another order."""
        return {"k_norms": "FP32 summation order", "v_norms": "FP32 summation order"}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Rows, slots and matrices read; codes and norms written."""
        fixed = sum(tensors[a.name].nbytes for a in self.arguments() if a.direction == "in")
        rows = tensors["k_rows"].shape[0]
        return fixed + sum(
            rows * tensors[a.name].shape[1] * tensors[a.name].element_size()
            for a in self.arguments()
            if a.direction == "inout"
        )

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse slots outside the caches, of which PyPTO drops the first and every row after it without a word."""
        check_rows(self.name, tensors, ("k_rows", "v_rows", "slots"))
        check_rows(self.name, tensors, ("k_codes", "k_norms", "v_codes", "v_norms"))
        slots, capacity = tensors["slots"].flatten().tolist(), tensors["k_codes"].shape[0]
        if any(not 0 <= slot < capacity for slot in slots) or len(set(slots)) != len(slots):
            raise ProgramError(f"{self.name} cannot be called: slots {slots} must be distinct and in 0..{capacity - 1}")


def sample_matrices(head_dim: int, bits: int, sketch: bool, generator: torch.Generator) -> Tensor:
    """The matrices of a codec drawn by `generator`."""
    seed = int(torch.randint(2**31, (), generator=generator))
    return TurboQuant(head_dim, bits, sketch=sketch, seed=seed).matrices


def sure_rows(codec: TurboQuant, rows: int, kv_heads: int, generator: torch.Generator) -> Tensor:
    """Rows BF16 `[rows, kv_heads * d]` whose codes do not depend on the order of sums: none is near a boundary."""
    dim = codec.head_dim
    x = torch.empty(rows * kv_heads, dim)
    pending = torch.ones(rows * kv_heads, dtype=torch.bool)
    while bool(pending.any()):
        count = int(pending.sum())
        drawn = torch.randn(count, dim, generator=generator) ** 3
        drawn *= torch.exp(torch.randn(count, 1, generator=generator))
        x[pending] = to_bf16(drawn).to(torch.float32)
        pending[pending.clone()] = ~_is_sure(codec, x[pending])
    return to_bf16(x).view(rows, kv_heads * dim)


def _is_sure(codec: TurboQuant, x: Tensor) -> Tensor:
    """Which vectors FP32 `[n, d]` keep their codes and signs when sums are a little off, BOOL `[n]`."""
    norms = (x.to(torch.float64).square().sum(dim=1, keepdim=True) + 1e-6).sqrt()
    unit = x.to(torch.float64) / norms
    sure = (to_bf16((unit * (1 - SURE)).float()) == to_bf16((unit * (1 + SURE)).float())).all(dim=1)
    turned = to_bf16(unit.float()).to(torch.float64) @ codec.rotation.to(torch.float64)
    distance = (turned.unsqueeze(-1) - codec.boundaries.to(torch.float64)).abs().amin(dim=(1, 2))
    sure &= distance > SURE
    if codec.projection is not None:
        codes = (turned.unsqueeze(-1) >= codec.boundaries).sum(dim=-1)
        residual = to_bf16((turned - codec.centroids[codes]).float()).to(torch.float64)
        projected = residual @ codec.projection.t().to(torch.float64)
        sure &= projected.abs().amin(dim=1) > SURE_PROJECTED
    return sure
