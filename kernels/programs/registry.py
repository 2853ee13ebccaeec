"""Programs by name, and their round trip through JSON: how a program reaches the subprocess that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from quantize.rope import RopeScaling

PROGRAM_NAMES = (DecodeLayer.name, PrefillLayer.name, LmHeadGreedy.name, DecodeStep.name, PagedAttention.name)


def program_to_json(program: Program) -> dict[str, Any]:
    """Name and specification of `program` as a JSON object."""
    return {"name": program.name, "spec": program.spec.to_json()}


def program_from_json(values: Mapping[str, Any]) -> Program:
    """The program that `program_to_json` described; raises ProgramError for an unknown name."""
    spec = dict(values["spec"])
    if values["name"] == DecodeLayer.name:
        return DecodeLayer(_decode_layer_spec(spec))
    if values["name"] == DecodeStep.name:
        layer, head = _decode_layer_spec(spec.pop("layer")), LmHeadSpec(**spec.pop("head"))
        return DecodeStep(DecodeStepSpec(layer, head, **spec))
    if values["name"] == PrefillLayer.name:
        scaling = spec.get("rope_scaling")
        spec["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
        return PrefillLayer(PrefillLayerSpec(**{**spec, "chunks": tuple(map(tuple, spec["chunks"]))}))
    if values["name"] == LmHeadGreedy.name:
        return LmHeadGreedy(LmHeadSpec(**spec))
    if values["name"] == PagedAttention.name:
        return PagedAttention(PagedAttentionSpec(**{**spec, "contexts": tuple(spec["contexts"])}))
    raise ProgramError(f"no program is called {values['name']!r}; expected one of {', '.join(PROGRAM_NAMES)}")


def _decode_layer_spec(values: Mapping[str, Any]) -> DecodeLayerSpec:
    scaling = values.get("rope_scaling")
    rope_scaling = None if scaling is None else RopeScaling(**scaling)
    return DecodeLayerSpec(**{**values, "contexts": tuple(values["contexts"]), "rope_scaling": rope_scaling})
