"""Which programs a model needs, and at which shapes each is checked.

Three checks per program: verified at a small shape through all passes, verified at the model's own widths as far as
memory and disk allow, and simulated at the serving shape (16 rows, 256 tokens of context each). The steps have no
check at own width: their code there is that of the layers and of `lm_head_greedy`. Nor have the BF16 forms, listed as
`..._bf16`, whose code differs in their linears, nor the layer over a TurboQuant cache, whose parts are checked alone.
This module decides the shapes; `kernels.toolchain` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kernels.builtin_models import BUILTIN_NAMES, builtin_config
from kernels.contract import BATCH_WINDOW_ROWS, DownDtype, check_limits
from kernels.kv_format import KvFormat
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, decode_layer
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.embedding import EmbeddingGather, EmbeddingGatherSpec
from kernels.programs.layer_parts import PARTS, LayerPart, LayerPartSpec
from kernels.programs.layer_slabs import WeightForm
from kernels.programs.lm_head import CHUNK_TOKENS, LmHeadGreedy, LmHeadSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.programs.sampling import GreedySample, GreedySampleSpec, TopkSelect, TopkSelectSpec
from kernels.programs.turboquant_attention import TurboQuantAttention, TurboQuantAttentionSpec
from kernels.programs.turboquant_encode import TurboQuantEncode, TurboQuantEncodeSpec
from kernels.verdict import ALL_PASSES, EARLY_PASSES
from quantize.model_config import ModelConfig

__all__ = [
    "BUILTIN_NAMES",
    "CHECK_KINDS",
    "SERVED_NAMES",
    "Check",
    "CheckKind",
    "ProgramCase",
    "builtin_config",
    "programs_for",
]

SERVED_NAMES = (DecodeLayer.name, LmHeadGreedy.name)
"""The programs that the `pypto` executor runs, which a release checks; the others are checked from the command line."""

CheckKind = Literal["small", "own width", "simulated"]
CHECK_KINDS: tuple[CheckKind, ...] = ("small", "own width", "simulated")

SIMULATED_CONTEXT_TOKENS = 256
SIMULATED_PROMPT_TOKENS = 256
FULL_VERIFY_WEIGHT_BYTES = 24 << 20
"""Largest weights verified through all passes: the late ones write about 24 copies of them to disk."""
SIMULATED_STEP_LAYERS = 2
"""Layers in the simulated step: its code does not depend on their number, its memory does."""
SERVED_KV_NAME = "turboquant4"
SMALL_KV_FORMAT, SERVED_KV_FORMAT = KvFormat(3, sketch=True), KvFormat(4, sketch=False)
"""TurboQuant at the small shape, where a key has a sketch too, and at the others."""
VERIFIED_HEAD_BYTES = 512 << 20
"""Bound on chunks x LM head bytes at verification: the interpreter holds the whole weight once per chunk."""


@dataclass(frozen=True)
class Check:
    """One shape of a program to check: `passes` are verified after the tensor graph; None means simulate only."""

    kind: CheckKind
    program: Program
    passes: tuple[str, ...] | None
    note: str = ""


@dataclass(frozen=True)
class ProgramCase:
    """A program of a model with its checks."""

    name: str
    checks: tuple[Check, ...]

    def describe(self) -> dict[str, Any]:
        """Name, shapes and depth of verification, for a listing."""
        described: dict[str, Any] = {"name": self.name}
        for check in self.checks:
            described[check.kind] = _shape_text(check.program) + (f" ({check.note})" if check.note else "")
        return described


def programs_for(config: ModelConfig, down: DownDtype = "int8") -> list[ProgramCase]:
    """The programs that serve `config`, with the shapes they are checked at.

    Raises ContractError or ProgramError when the model has a shape that the programs do not cover.
    """
    check_limits(config, down)
    return [
        ProgramCase(DecodeLayer.name, _decode_layer_checks(config, down)),
        ProgramCase(LmHeadGreedy.name, _lm_head_checks(config)),
        ProgramCase(DecodeStep.name, _decode_step_checks(config, down)),
        ProgramCase(PrefillLayer.name, _prefill_layer_checks(config, down)),
        ProgramCase(PrefillStep.name, _prefill_step_checks(config, down)),
        ProgramCase(f"{DecodeLayer.name}_bf16", _decode_layer_checks(config, "bf16", "bf16")),
        ProgramCase(f"{DecodeStep.name}_bf16", _decode_step_checks(config, "bf16", "bf16")),
        ProgramCase(f"{PrefillLayer.name}_bf16", _prefill_layer_checks(config, "bf16", "bf16")),
        ProgramCase(f"{PrefillStep.name}_bf16", _prefill_step_checks(config, "bf16", "bf16")),
        ProgramCase(GreedySample.name, _sampling_checks(config, lambda *of: GreedySample(GreedySampleSpec.of(*of)))),
        ProgramCase(TopkSelect.name, _sampling_checks(config, lambda *of: TopkSelect(TopkSelectSpec.of(*of)))),
        ProgramCase(EmbeddingGather.name, _embedding_checks(config)),
        ProgramCase(f"{DecodeLayer.name}_{SERVED_KV_NAME}", _turboquant_layer_checks(config, down)),
        *(ProgramCase(part.name, _layer_part_checks(config, down, part)) for part in PARTS),
        ProgramCase(TurboQuantEncode.name, _turboquant_encode_checks(config)),
        ProgramCase(TurboQuantAttention.name, _turboquant_attention_checks(config)),
    ]


def _decode_layer_checks(config: ModelConfig, down: DownDtype, weights: WeightForm = "int8") -> tuple[Check, ...]:
    small = DecodeLayerSpec.of(_small_config(config), down, (1, 130, 128), weights=weights)
    heavy = _layer_weight_bytes(config, down) > FULL_VERIFY_WEIGHT_BYTES
    own = DecodeLayerSpec.of(config, down, (130, 5))
    contexts = (SIMULATED_CONTEXT_TOKENS,) * BATCH_WINDOW_ROWS
    served = DecodeLayerSpec.of(config, down, contexts, weights=weights)
    if weights == "bf16":
        return Check("small", DecodeLayer(small), ALL_PASSES), Check("simulated", DecodeLayer(served), None)
    return (
        Check("small", DecodeLayer(small), ALL_PASSES),
        Check(
            "own width", DecodeLayer(own), EARLY_PASSES if heavy else ALL_PASSES, _early_note(config) if heavy else ""
        ),
        Check("simulated", DecodeLayer(served), None),
    )


def _lm_head_checks(config: ModelConfig) -> tuple[Check, ...]:
    small = replace(config, hidden_size=64, vocab_size=300)
    own, notes = _with_affordable_vocabulary(config)
    heavy = own.vocab_size * own.hidden_size * 2 > FULL_VERIFY_WEIGHT_BYTES
    if heavy:
        notes.append(_early_note(config))
    return (
        Check("small", LmHeadGreedy(LmHeadSpec.of(small, batch_rows=3, chunk_tokens=128)), ALL_PASSES),
        Check(
            "own width",
            LmHeadGreedy(LmHeadSpec.of(own, batch_rows=2)),
            EARLY_PASSES if heavy else ALL_PASSES,
            "; ".join(notes),
        ),
        Check("simulated", LmHeadGreedy(LmHeadSpec.of(config, batch_rows=BATCH_WINDOW_ROWS)), None),
    )


def _decode_step_checks(config: ModelConfig, down: DownDtype, weights: WeightForm = "int8") -> tuple[Check, ...]:
    # The second step of the second row starts a page of its own.
    small = DecodeStepSpec.of(
        replace(_small_config(config), vocab_size=300),
        down,
        (1, 128),
        layers=2,
        steps=2,
        chunk_tokens=128,
        weights=weights,
    )
    cut, notes = _with_affordable_vocabulary(config)
    layers = min(SIMULATED_STEP_LAYERS, config.num_layers)
    contexts = (SIMULATED_CONTEXT_TOKENS,) * BATCH_WINDOW_ROWS
    served = DecodeStepSpec.of(cut, down, contexts, layers=layers, weights=weights)
    notes.insert(0, f"{layers} of {config.num_layers} layers")
    return (
        Check("small", DecodeStep(small), ALL_PASSES),
        Check("simulated", DecodeStep(served), None, "; ".join(notes)),
    )


def _prefill_layer_checks(config: ModelConfig, down: DownDtype, weights: WeightForm = "int8") -> tuple[Check, ...]:
    # One chunk goes on behind cached tokens and crosses into a page; the other is a prompt of one token.
    small = PrefillLayerSpec.of(
        _small_config(config), down, ((126, 3), (0, 1)), window_rows=BATCH_WINDOW_ROWS, weights=weights
    )
    own = PrefillLayerSpec.of(config, down, ((127, 2), (0, 1)))
    served = PrefillLayerSpec.of(config, down, ((0, SIMULATED_PROMPT_TOKENS),), weights=weights)
    if weights == "bf16":
        return Check("small", PrefillLayer(small), ALL_PASSES), Check("simulated", PrefillLayer(served), None)
    return (
        Check("small", PrefillLayer(small), ALL_PASSES),
        Check("own width", PrefillLayer(own), EARLY_PASSES, _early_note(config)),
        Check("simulated", PrefillLayer(served), None),
    )


def _prefill_step_checks(config: ModelConfig, down: DownDtype, weights: WeightForm = "int8") -> tuple[Check, ...]:
    # As in the layer: a chunk behind cached tokens that crosses into a page, and a prompt of one token.
    small = PrefillStepSpec.of(
        replace(_small_config(config), vocab_size=300),
        down,
        ((127, 2), (0, 1)),
        layers=2,
        window_rows=BATCH_WINDOW_ROWS,
        chunk_tokens=128,
        weights=weights,
    )
    cut, notes = _with_affordable_vocabulary(config)
    layers = min(SIMULATED_STEP_LAYERS, config.num_layers)
    served = PrefillStepSpec.of(cut, down, ((0, SIMULATED_PROMPT_TOKENS),), layers=layers, weights=weights)
    notes.insert(0, f"{layers} of {config.num_layers} layers")
    return (
        Check("small", PrefillStep(small), ALL_PASSES),
        Check("simulated", PrefillStep(served), None, "; ".join(notes)),
    )


def _layer_part_checks(config: ModelConfig, down: DownDtype, part: type[LayerPart]) -> tuple[Check, ...]:
    small = part(LayerPartSpec.of(_small_config(config), down, 3))
    own = part(LayerPartSpec.of(config, down, 2))
    slabs = [argument for argument in own.arguments() if argument.name in part.slabs]
    weights_bytes = sum(math.prod(size or 1 for size in slab.shape) * slab.dtype.itemsize for slab in slabs)
    heavy = weights_bytes > FULL_VERIFY_WEIGHT_BYTES
    return (
        Check("small", small, ALL_PASSES),
        Check("own width", own, EARLY_PASSES if heavy else ALL_PASSES, _early_note(config) if heavy else ""),
        Check("simulated", part(LayerPartSpec.of(config, down, BATCH_WINDOW_ROWS)), None),
    )


def _sampling_checks(
    config: ModelConfig, build: Callable[[ModelConfig, int, int | None], Program]
) -> tuple[Check, ...]:
    """Checks of a program over logits: `build` makes it for a model, a number of rows and a chunk (None: its own)."""
    note = f"passes up to {EARLY_PASSES[-1]}, as the vocabulary is read whole by every chunk in the later ones"
    return (
        Check("small", build(replace(config, vocab_size=300), 17, 128), ALL_PASSES),
        Check("own width", build(config, 2, None), EARLY_PASSES, note),
        Check("simulated", build(config, BATCH_WINDOW_ROWS, None), None),
    )


def _embedding_checks(config: ModelConfig) -> tuple[Check, ...]:
    small = replace(config, hidden_size=64, vocab_size=300)
    # The program reads the rows of its ids only, however many there are.
    own, notes = _with_affordable_vocabulary(config)
    return (
        Check("small", EmbeddingGather(EmbeddingGatherSpec.of(small, 17)), ALL_PASSES),
        Check(
            "own width",
            EmbeddingGather(EmbeddingGatherSpec.of(own, 2)),
            EARLY_PASSES,
            "; ".join([*notes, _early_note(config)]),
        ),
        Check("simulated", EmbeddingGather(EmbeddingGatherSpec.of(own, BATCH_WINDOW_ROWS)), None, "; ".join(notes)),
    )


def _turboquant_layer_checks(config: ModelConfig, down: DownDtype) -> tuple[Check, ...]:
    small = DecodeLayerSpec.of(_small_config(config), down, (1, 130, 128), kv=SERVED_KV_NAME)
    contexts = (SIMULATED_CONTEXT_TOKENS,) * BATCH_WINDOW_ROWS
    served = DecodeLayerSpec.of(config, down, contexts, kv=SERVED_KV_NAME)
    return Check("small", decode_layer(small), ALL_PASSES), Check("simulated", decode_layer(served), None)


def _turboquant_encode_checks(config: ModelConfig) -> tuple[Check, ...]:
    small = TurboQuantEncodeSpec.of(_small_config(config), SMALL_KV_FORMAT, 17)
    own = TurboQuantEncodeSpec.of(config, SERVED_KV_FORMAT, 2)
    served = TurboQuantEncodeSpec.of(config, SERVED_KV_FORMAT, BATCH_WINDOW_ROWS)
    return (
        Check("small", TurboQuantEncode(small), ALL_PASSES),
        Check("own width", TurboQuantEncode(own), ALL_PASSES),
        Check("simulated", TurboQuantEncode(served), None),
    )


def _turboquant_attention_checks(config: ModelConfig) -> tuple[Check, ...]:
    small = TurboQuantAttentionSpec.over(_small_config(config), SMALL_KV_FORMAT, (1, 130))
    own = TurboQuantAttentionSpec.over(config, SERVED_KV_FORMAT, (130, 5))
    contexts = (SIMULATED_CONTEXT_TOKENS,) * BATCH_WINDOW_ROWS
    return (
        Check("small", TurboQuantAttention(small), ALL_PASSES),
        Check("own width", TurboQuantAttention(own), ALL_PASSES),
        Check("simulated", TurboQuantAttention(TurboQuantAttentionSpec.over(config, SERVED_KV_FORMAT, contexts)), None),
    )


def _with_affordable_vocabulary(config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """`config` with as many ids as can be checked with their LM head, and a note if these are not all."""
    chunks = max(2, math.isqrt(VERIFIED_HEAD_BYTES // (CHUNK_TOKENS * config.hidden_size * 2)))
    if chunks * CHUNK_TOKENS >= config.vocab_size:
        return config, []
    # Not a multiple of a chunk, so that the last two overlap as they do in the whole vocabulary.
    cut = replace(config, vocab_size=chunks * CHUNK_TOKENS - 256)
    return cut, [f"{cut.vocab_size} of {config.vocab_size} ids: the interpreter holds the weight once per chunk"]


def _small_config(config: ModelConfig) -> ModelConfig:
    """The model's options, head_dim and GQA ratio at the smallest widths: at most 2 key/value heads."""
    kv_heads = min(config.num_kv_heads, 2)
    return replace(
        config, hidden_size=64, intermediate_size=96, num_kv_heads=kv_heads, num_heads=kv_heads * config.q_per_kv
    )


def _layer_weight_bytes(config: ModelConfig, down: DownDtype) -> int:
    hidden, inter = config.hidden_size, config.intermediate_size
    attention = 2 * hidden * (config.q_size + config.kv_size)
    return attention + hidden * inter * (4 if down == "bf16" else 3)


def _early_note(config: ModelConfig) -> str:
    """Why the later passes are left to the small shape."""
    return (
        f"passes up to {EARLY_PASSES[-1]}: the later ones write every leaf call's whole inputs, "
        f"too much at hidden size {config.hidden_size}"
    )


def _shape_text(program: Program) -> str:
    values = program.spec.to_json()
    skipped = ("rms_norm_eps", "rope_theta", "rope_scaling")
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items() if name not in skipped)


def _short(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4 and len(set(value)) == 1:
        return f"{len(value)}x{value[0]}"
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
