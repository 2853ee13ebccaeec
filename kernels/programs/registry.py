"""Programs by name, and their round trip through JSON: how a program reaches the subprocess that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, TurboQuantDecodeLayer
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.embedding import EmbeddingGather, EmbeddingGatherSpec
from kernels.programs.layer_parts import PARTS, LayerPart, LayerPartSpec
from kernels.programs.linear import LinearW8A8, LinearW8A8Spec
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.programs.sampling import GreedySample, GreedySampleSpec, TopkSelect, TopkSelectSpec
from kernels.programs.turboquant_attention import TurboQuantAttention, TurboQuantAttentionSpec
from kernels.programs.turboquant_encode import TurboQuantEncode, TurboQuantEncodeSpec
from quantize.rope import RopeScaling


def program_to_json(program: Program) -> dict[str, Any]:
    """Name and specification of `program` as a JSON object."""
    return {"name": program.name, "spec": program.spec.to_json()}


def program_from_json(values: Mapping[str, Any]) -> Program:
    """The program that `program_to_json` described; raises ProgramError for an unknown name."""
    read = _READERS.get(values["name"])
    if read is None:
        raise ProgramError(f"no program is called {values['name']!r}; expected one of {', '.join(PROGRAM_NAMES)}")
    return read(dict(values["spec"]))


def _decode_layer_spec(spec: Mapping[str, Any]) -> DecodeLayerSpec:
    return DecodeLayerSpec(**{**spec, "contexts": tuple(spec["contexts"]), "rope_scaling": _rope_scaling(spec)})


def _decode_step(spec: dict[str, Any]) -> DecodeStep:
    layer, head = _decode_layer_spec(spec.pop("layer")), LmHeadSpec(**spec.pop("head"))
    return DecodeStep(DecodeStepSpec(layer, head, **spec))


def _prefill_layer_spec(spec: Mapping[str, Any]) -> PrefillLayerSpec:
    chunks = tuple((before, new) for before, new in spec["chunks"])
    return PrefillLayerSpec(**{**spec, "chunks": chunks, "rope_scaling": _rope_scaling(spec)})


def _prefill_step(spec: dict[str, Any]) -> PrefillStep:
    layer, head = _prefill_layer_spec(spec.pop("layer")), LmHeadSpec(**spec.pop("head"))
    return PrefillStep(PrefillStepSpec(layer, head, **spec))


def _paged_attention(spec: dict[str, Any]) -> PagedAttention:
    return PagedAttention(PagedAttentionSpec(**{**spec, "contexts": tuple(spec["contexts"])}))


def _turboquant_attention(spec: dict[str, Any]) -> TurboQuantAttention:
    return TurboQuantAttention(TurboQuantAttentionSpec(**{**spec, "contexts": tuple(spec["contexts"])}))


def _layer_part(part: type[LayerPart]) -> Callable[[dict[str, Any]], Program]:
    return lambda spec: part(LayerPartSpec(**spec))


def _rope_scaling(spec: Mapping[str, Any]) -> RopeScaling | None:
    scaling = spec.get("rope_scaling")
    return None if scaling is None else RopeScaling(**scaling)


_READERS: dict[str, Callable[[dict[str, Any]], Program]] = {
    DecodeLayer.name: lambda spec: DecodeLayer(_decode_layer_spec(spec)),
    TurboQuantDecodeLayer.name: lambda spec: TurboQuantDecodeLayer(_decode_layer_spec(spec)),
    PrefillLayer.name: lambda spec: PrefillLayer(_prefill_layer_spec(spec)),
    PrefillStep.name: _prefill_step,
    LmHeadGreedy.name: lambda spec: LmHeadGreedy(LmHeadSpec(**spec)),
    DecodeStep.name: _decode_step,
    PagedAttention.name: _paged_attention,
    GreedySample.name: lambda spec: GreedySample(GreedySampleSpec(**spec)),
    TopkSelect.name: lambda spec: TopkSelect(TopkSelectSpec(**spec)),
    LinearW8A8.name: lambda spec: LinearW8A8(LinearW8A8Spec(**spec)),
    TurboQuantAttention.name: _turboquant_attention,
    TurboQuantEncode.name: lambda spec: TurboQuantEncode(TurboQuantEncodeSpec(**spec)),
    EmbeddingGather.name: lambda spec: EmbeddingGather(EmbeddingGatherSpec(**spec)),
    **{part.name: _layer_part(part) for part in PARTS},
}
PROGRAM_NAMES = tuple(_READERS)
