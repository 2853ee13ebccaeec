"""The parts of a decoder layer as programs of their own: norm, projections, QK norm and rotation, cache write, MLP.

They are made of the functions that `decode_layer` and `prefill_layer` inline, over one window of at most 16 rows. Where
a layer disagrees with its golden, on a device above all, they tell which part of it does.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from kernels.contract import BATCH_WINDOW_ROWS
from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, LayerShape, LayerWeights, TokenRows, attention_inputs, mlp
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.programs.layer_slabs import WeightForm, golden_weights, sample_slabs, shape_problems, slab_arguments
from kernels.tile_plan import check_layer_tiles
from quantize.model_config import ModelConfig
from quantize.numerics import apply_rope, quantize_activation, rms_norm, rope_tables, to_bf16

__all__ = ["PARTS", "KvWrite", "LayerPart", "LayerPartSpec", "NormQuantize", "QkNormRope", "QkvProject", "SwigluMlp"]

SAMPLE_ROPE_THETA = 10_000.0
"""Of the angles in the sample inputs: the programs take sines and cosines as they come."""


@dataclass(frozen=True)
class LayerPartSpec(ProgramSpec):
    """Shape of a part of a layer over `rows` rows; fields as in `DecodeLayerSpec`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    down: WeightForm
    weights: WeightForm
    rows: int

    def __post_init__(self) -> None:
        problems = shape_problems(self)
        if not 1 <= self.rows <= BATCH_WINDOW_ROWS:
            problems.append(f"{self.rows} rows are not one window of 1 to {BATCH_WINDOW_ROWS}")
        if problems:
            raise ProgramError(f"no part of a layer for this shape: {'; '.join(problems)}")

    @classmethod
    def of(cls, config: ModelConfig, down: WeightForm, rows: int, weights: WeightForm = "int8") -> LayerPartSpec:
        """The parts of `config`'s layers."""
        sizes = {name: getattr(config, name) for name in inspect.signature(cls).parameters if hasattr(config, name)}
        return cls(**sizes, down=down, weights=weights, rows=rows)

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection."""
        return self.num_kv_heads * self.head_dim


class LayerPart(Program):
    """A part at one shape: rows in and out, and the slabs that it reads."""

    kernel_module = "kernels.programs.layer_parts_kernel"
    spec: LayerPartSpec
    slabs: tuple[str, ...] = ()
    """Names of the layer's slabs among the arguments, in call order."""

    @abstractmethod
    def rows_in(self) -> tuple[Argument, ...]:
        """Arguments that are not slabs and are read."""

    @abstractmethod
    def rows_out(self) -> tuple[Argument, ...]:
        """Arguments that are written."""

    def arguments(self) -> tuple[Argument, ...]:
        """Rows in, slabs, rows out."""
        by_name = {argument.name: argument for argument in slab_arguments(self.spec)}
        return (*self.rows_in(), *(by_name[name] for name in self.slabs), *self.rows_out())

    def check_tiles(self) -> None:
        """Those of the layer."""
        check_layer_tiles(self.spec, self.spec.rows)

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random rows and slabs."""
        generator = torch.Generator().manual_seed(seed)
        slabs = sample_slabs(self.spec, generator)
        tensors = self.shape_inputs() | {name: slabs[name] for name in self.slabs}
        return tensors | {a.name: self._sample(a, generator) for a in self.rows_in()}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros: no value steers the control flow."""
        return {a.name: torch.zeros([size or 0 for size in a.shape], dtype=a.dtype) for a in self.arguments()}

    def units(self) -> int:
        """One body."""
        return 1

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Every argument once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _sample(self, argument: Argument, generator: Generator) -> Tensor:
        shape = [size or 0 for size in argument.shape]
        if argument.name in ("cos", "sin"):
            tables = rope_tables(self.spec.head_dim, SAMPLE_ROPE_THETA, 2 * shape[0])
            return tables[("cos", "sin").index(argument.name)][shape[0] :].contiguous()
        return torch.randn(shape, generator=generator).to(argument.dtype)

    def _rows(self, name: str, width: int, dtype: torch.dtype = torch.bfloat16) -> Argument:
        return Argument(name, dtype, (self.spec.rows, width))

    def _weights(self, tensors: Mapping[str, Tensor]) -> LayerWeights:
        """The golden's view of the slabs, nothing in place of those that the part does not read."""
        nothing = {argument.name: torch.empty(1, 0) for argument in slab_arguments(self.spec)}
        return golden_weights(self.spec, {**nothing, **tensors})


class NormQuantize(LayerPart):
    """RMS norm of BF16 rows, and their dynamic INT8 quantization."""

    name = "norm_quantize"
    slabs = ("input_rms",)

    def rows_in(self) -> tuple[Argument, ...]:
        """Hidden rows."""
        return (self._rows("x", self.spec.hidden_size),)

    def rows_out(self) -> tuple[Argument, ...]:
        """The normed rows narrowed to BF16, their codes, and their scales."""
        hidden = self.spec.hidden_size
        out = (
            self._rows("normed", hidden),
            self._rows("codes", hidden, torch.int8),
            self._rows("scale", 1, torch.float32),
        )
        return tuple(replace(argument, direction="out") for argument in out)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Norm in FP32, narrowed once, then quantized per row."""
        x_fp32 = tensors["x"].to(torch.float32)
        normed = to_bf16(rms_norm(x_fp32, tensors["input_rms"][0], self.spec.rms_norm_eps))
        codes, scale = quantize_activation(normed)
        return {"normed": normed, "codes": codes, "scale": scale}


class QkvProject(LayerPart):
    """All before attention: norm, Q, K and V from rows quantized once, their biases, QK norm, rotation."""

    name = "qkv_project"
    slabs = (
        *("input_rms", "wq", "wk", "wv", "wq_scale", "wk_scale", "wv_scale"),
        *("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"),
    )

    def rows_in(self) -> tuple[Argument, ...]:
        """Hidden rows and their rotation."""
        dim, fp32 = self.spec.head_dim, torch.float32
        return self._rows("x", self.spec.hidden_size), self._rows("cos", dim, fp32), self._rows("sin", dim, fp32)

    def rows_out(self) -> tuple[Argument, ...]:
        """Queries, keys and values."""
        out = [self._rows(name, self.spec.kv_size if name != "q" else self.spec.q_size) for name in ("q", "k", "v")]
        return tuple(replace(argument, direction="out") for argument in out)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden layer's own."""
        s = self.spec
        nowhere = torch.zeros(s.rows, dtype=torch.int64)
        rows = TokenRows(nowhere, nowhere, nowhere[:, None], tensors["cos"], tensors["sin"])
        shape = LayerShape(s.num_heads, s.num_kv_heads, s.head_dim, s.rms_norm_eps)
        q, k, v = attention_inputs(tensors["x"], self._weights(tensors), shape, rows)
        return {"q": q.reshape(s.rows, -1), "k": k, "v": v}

    def tolerances(self) -> dict[str, str]:
        """INT8 products are exact; FP32 sums of BF16 weights may run in another order."""
        return {} if self.spec.weights == "int8" else dict.fromkeys(("q", "k", "v"), "1 BF16 ulp")


class QkNormRope(LayerPart):
    """Norm of every query head (where the family has it) and its rotation."""

    name = "qk_norm_rope"
    slabs = ("q_norm",)

    def rows_in(self) -> tuple[Argument, ...]:
        """Projected queries and their rotation."""
        dim, fp32 = self.spec.head_dim, torch.float32
        return (
            self._rows("projected", self.spec.q_size, fp32),
            self._rows("cos", dim, fp32),
            self._rows("sin", dim, fp32),
        )

    def rows_out(self) -> tuple[Argument, ...]:
        """Queries."""
        return (replace(self._rows("q", self.spec.q_size), direction="out"),)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Norm in FP32, rotation, one narrowing."""
        s = self.spec
        heads = tensors["projected"].view(s.rows, s.num_heads, s.head_dim)
        if s.qk_norm:
            heads = rms_norm(heads, tensors["q_norm"][0], s.rms_norm_eps)
        return {"q": to_bf16(apply_rope(heads, tensors["cos"], tensors["sin"])).reshape(s.rows, -1)}


class KvWrite(LayerPart):
    """The write of the rows' keys and values to their slots of the paged caches."""

    name = "kv_write"

    def rows_in(self) -> tuple[Argument, ...]:
        """Keys, values and slots."""
        kv = self.spec.kv_size
        return self._rows("k", kv), self._rows("v", kv), self._rows("slots", 1, torch.int32)

    def rows_out(self) -> tuple[Argument, ...]:
        """Both caches, of two pages."""
        cache = Argument("k_cache", torch.bfloat16, (2 * PAGE_TOKENS, self.spec.kv_size), "inout")
        return cache, replace(cache, name="v_cache")

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random rows and caches, and slots of both pages in no order."""
        generator = torch.Generator().manual_seed(seed)
        tensors = super().sample_inputs(seed)
        tensors |= {a.name: self._sample(a, generator) for a in self.rows_out()}
        slots = torch.randperm(2 * PAGE_TOKENS, generator=generator)[: self.spec.rows]
        return tensors | {"slots": slots.to(torch.int32).unsqueeze(1)}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for the slots, which must differ."""
        return super().shape_inputs() | {"slots": torch.arange(self.spec.rows, dtype=torch.int32).unsqueeze(1)}

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The caches with the rows at their slots."""
        caches = {name: tensors[name].clone() for name in ("k_cache", "v_cache")}
        for name, cache in caches.items():
            cache[tensors["slots"][:, 0].to(torch.int64)] = tensors[name[0]]
        return caches

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse slots outside the caches, after the first of which the device writes nothing, and equal ones."""
        slots = tensors["slots"].flatten().tolist()
        if min(slots) < 0 or max(slots) >= 2 * PAGE_TOKENS or len(set(slots)) < len(slots):
            raise ProgramError(f"{self.name} cannot be called: slots {slots} are not all different and in the caches")

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The rows, read and written."""
        return 2 * sum(tensors[name].numel() * tensors[name].element_size() for name in ("k", "v"))


class SwigluMlp(LayerPart):
    """The MLP: norm, gate and up, SwiGLU, down, residual."""

    name = "swiglu_mlp"
    slabs = ("post_rms", "w_gate", "w_up", "w_gate_scale", "w_up_scale", "w_down", "w_down_scale")

    def rows_in(self) -> tuple[Argument, ...]:
        """The FP32 residual."""
        return (self._rows("residual", self.spec.hidden_size, torch.float32),)

    def rows_out(self) -> tuple[Argument, ...]:
        """The layer's hidden rows."""
        return (replace(self._rows("out", self.spec.hidden_size), direction="out"),)

    def units(self) -> int:
        """Norm, gate and up, down."""
        return 3

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden MLP on the residual, narrowed once."""
        residual = tensors["residual"]
        return {"out": to_bf16(residual + mlp(residual, self._weights(tensors), self.spec.rms_norm_eps))}

    def tolerances(self) -> dict[str, str]:
        """The activation's exponential and FP32 sums differ by a last place."""
        return {"out": "1 BF16 ulp"}


PARTS: tuple[type[LayerPart], ...] = (NormQuantize, QkvProject, QkNormRope, KvWrite, SwigluMlp)
"""Every part, in the order of a layer."""
