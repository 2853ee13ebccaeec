"""`prefill_step`: chunks of prompts through a whole model as one program, up to each sequence's next token.

In: the stacked slabs of all layers, the embedding and LM head, and what `prefill_layer` takes of tokens and sequences.
Out: the caches with the tokens' keys and values, and for the last row of every sequence its logits, greedy id, and the
id's embedding row, which is where `decode_step` goes on. The number of layers is not compiled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, decoder_layers, next_tokens
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.programs.layer_slabs import (
    STACKED_SLABS,
    WeightForm,
    golden_weights,
    slab_arguments,
    slabs_of_layer,
    stacked_arguments,
    stacked_rows,
)
from kernels.programs.lm_head import CHUNK_TOKENS, LmHeadGreedy, LmHeadSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from quantize.model_config import ModelConfig

__all__ = ["PrefillStep", "PrefillStepSpec"]

_CACHES = ("k_cache", "v_cache")
_PER_SEQUENCE = ("logits", "ids", "next_rows")
_OF_LAYER_INPUTS = ("cos", "sin", "row_starts", "context_tokens", "block_table", "causal_bias")
_OF_LAYER_SCRATCH = ("q_rows", "k_rows", "v_rows", "context_rows")


@dataclass(frozen=True)
class PrefillStepSpec(ProgramSpec):
    """Shape of the step over `layer.chunks`; the kernel depends on neither `layers` nor the chunks.

    `layers` shapes the sample inputs; `head.batch_rows` is the number of sequences among them.
    """

    layer: PrefillLayerSpec
    head: LmHeadSpec
    layers: int

    def __post_init__(self) -> None:
        problems = [
            f"the layer's {name} is {of_layer}, the LM head's {of_head}"
            for name, of_layer, of_head in (
                ("hidden_size", self.layer.hidden_size, self.head.hidden_size),
                ("rms_norm_eps", self.layer.rms_norm_eps, self.head.rms_norm_eps),
                ("number of sequences", len(self.layer.chunks), self.head.batch_rows),
            )
            if of_layer != of_head
        ]
        if self.layers < 1:
            problems.append(f"{self.layers} layers; expected at least 1")
        if problems:
            raise ProgramError(f"no prefill_step program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        down: WeightForm,
        chunks: tuple[tuple[int, int], ...],
        *,
        layers: int | None = None,
        window_rows: int = PAGE_TOKENS,
        chunk_tokens: int = CHUNK_TOKENS,
        weights: WeightForm = "int8",
    ) -> PrefillStepSpec:
        """The step of `config` over `chunks` (see `PrefillLayerSpec.of`), by default through all its layers."""
        return cls(
            layer=PrefillLayerSpec.of(config, down, chunks, window_rows, weights),
            head=LmHeadSpec.of(config, len(chunks), chunk_tokens),
            layers=config.num_layers if layers is None else layers,
        )


class PrefillStep(Program):
    """The prefill step of one model; any number of sequences, tokens and layers."""

    name = "prefill_step"
    kernel_module = "kernels.programs.prefill_step_kernel"
    spec: PrefillStepSpec

    def __init__(self, spec: PrefillStepSpec) -> None:
        super().__init__(spec)
        self._layer = PrefillLayer(spec.layer)
        self._head = LmHeadGreedy(spec.head)

    def arguments(self) -> tuple[Argument, ...]:
        """Hidden rows, stacked slabs, head and embedding, token and sequence data, caches, scratch, outputs."""
        layer = {argument.name: argument for argument in self._layer.arguments()}
        head = {argument.name: argument for argument in self._head.arguments()}
        hidden = (None, self.spec.layer.hidden_size)
        return (
            replace(layer["x"], direction="inout"),
            *stacked_arguments(self.spec.layer),
            head["final_norm"],
            replace(head["weight"], name="lm_head_weight"),
            Argument("embed_weight", torch.bfloat16, head["weight"].shape),
            *(layer[name] for name in (*_OF_LAYER_INPUTS, *_CACHES, *_OF_LAYER_SCRATCH)),
            Argument("hidden_rows", torch.bfloat16, hidden, "scratch"),
            *(head[name] for name in ("normed_rows", "block_maxima", "block_ids", "logits", "ids")),
            Argument("next_rows", torch.bfloat16, hidden, "out"),
        )

    def check_tiles(self) -> None:
        """Those of the layer and of the LM head."""
        self._layer.check_tiles()
        self._head.check_tiles()

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random slabs of every layer, a random embedding and head, rows, caches and pages as in `prefill_layer`."""
        s = self.spec
        each = [self._layer.sample_inputs(seed + index) for index in range(s.layers)]
        head = self._head.sample_inputs(seed)
        tensors = self.shape_inputs()
        tensors |= {name: each[0][name] for name in ("x", *_OF_LAYER_INPUTS)}
        tensors |= {name: torch.cat([one[name] for one in each]) for name in (*STACKED_SLABS, *_CACHES)}
        tensors |= {"final_norm": head["final_norm"], "lm_head_weight": head["weight"]}
        # A seed that no layer has.
        generator = torch.Generator().manual_seed(seed + 1000)
        tensors["embed_weight"] = torch.randn(tensors["embed_weight"].shape, generator=generator).to(torch.bfloat16)
        return tensors

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for the sequences' lengths and pages."""
        s = self.spec
        layer = self._layer.shape_inputs()
        rows = {a.name: s.layers * (a.shape[0] or 1) for a in slab_arguments(s.layer)}
        rows |= dict.fromkeys(_CACHES, s.layers * s.layer.pages * PAGE_TOKENS)
        rows |= dict.fromkeys(_PER_SEQUENCE, len(s.layer.chunks))
        rows["hidden_rows"] = self._layer.padded_rows(s.layer.tokens)
        kept = {name: layer[name] for name in ("x", *_OF_LAYER_INPUTS, *_OF_LAYER_SCRATCH)}
        return {
            a.name: torch.zeros([rows[a.name] if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
            if a.name not in kept
        } | kept

    def dynamic_rows(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """One row a sequence after the layers, whole windows for the rows kept, else as in `prefill_layer`."""
        if name in _PER_SEQUENCE:
            return tensors["context_tokens"].shape[0]
        if name == "hidden_rows":
            return self._layer.padded_rows(tensors["x"].shape[0])
        return self._layer.dynamic_rows(name, tensors)

    def units(self) -> int:
        """The layers' bodies, two per sequence, and the LM head's."""
        return self.spec.layers * self._layer.units() + 2 * len(self.spec.layer.chunks) + self._head.units()

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden layers on copies of the caches, and the next tokens of the sequences' last rows."""
        s = self.spec
        layers = tensors["input_rms"].shape[0]
        caches = {name: tensors[name].clone() for name in _CACHES}
        weights = [golden_weights(s.layer, slabs_of_layer(tensors, index, layers)) for index in range(layers)]
        split = [caches[name].view(layers, -1, s.layer.kv_size) for name in _CACHES]
        x = decoder_layers(tensors["x"], weights, s.layer.layer_shape, self._layer.golden_rows(tensors), *split)
        last = x[tensors["row_starts"][1:].to(torch.int64) - 1]
        head = (tensors["final_norm"][0], tensors["lm_head_weight"], tensors["embed_weight"], s.head.real_vocab)
        logits, ids, next_rows = next_tokens(last, *head, s.head.rms_norm_eps)
        return {"x": x, **caches, "logits": logits, "ids": ids.to(torch.int32).unsqueeze(1), "next_rows": next_rows}

    def tolerances(self) -> dict[str, str]:
        """Ids and the next rows are exact; the FP32 sums of attention, LM head and BF16 weights have no fixed order."""
        if self.spec.layer.weights == "int8":
            return {"x": "1 BF16 ulp", "logits": "FP32 summation order"}
        return {"logits": "1 BF16 ulp of an input", **dict.fromkeys(("x", *_CACHES), "1 BF16 ulp")}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The layers' bytes, the LM head's, and the embedding rows read and written."""
        s = self.spec
        layer = self._layer.hbm_bytes(self._layer.shape_inputs())
        return s.layers * layer + self._head.hbm_bytes(tensors) + 2 * len(s.layer.chunks) * s.layer.hidden_size * 2

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse stacks of different depth, and rows, pages and lengths that do not fit one another or the cache."""
        layers, sequences = tensors["input_rms"].shape[0], tensors["context_tokens"].shape[0]
        expected = stacked_rows(self.spec.layer, layers) | dict.fromkeys(_PER_SEQUENCE, sequences)
        expected["hidden_rows"] = self._layer.padded_rows(tensors["x"].shape[0])
        problems = [
            f"`{name}` has {tensors[name].shape[0]} rows, {layers} layers and {sequences} sequences need {rows}"
            for name, rows in expected.items()
            if tensors[name].shape[0] != rows
        ]
        problems += [
            f"`{name}` has {tensors[name].shape[0]} rows, which are no whole pages of {PAGE_TOKENS} for {layers} layers"
            for name in _CACHES
            if tensors[name].shape[0] % (layers * PAGE_TOKENS)
        ]
        if problems:
            raise ProgramError(f"{self.name} cannot be called: " + "; ".join(problems))
        first = {name: tensors[name][: tensors[name].shape[0] // layers] for name in _CACHES}
        try:
            self._layer.check_values({**tensors, **first, "out": tensors["x"]})
        except ProgramError as error:
            raise ProgramError(f"{self.name}, one of its layers: {error}") from error
