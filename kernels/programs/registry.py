"""Programs by name, and their round trip through JSON: how a program reaches the subprocess that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from quantize.rope import RopeScaling

PROGRAM_NAMES = (DecodeLayer.name, LmHeadGreedy.name)


def program_to_json(program: Program) -> dict[str, Any]:
    """Name and specification of `program` as a JSON object."""
    return {"name": program.name, "spec": program.spec.to_json()}


def program_from_json(values: Mapping[str, Any]) -> Program:
    """The program that `program_to_json` described; raises ProgramError for an unknown name."""
    spec = dict(values["spec"])
    if values["name"] == DecodeLayer.name:
        scaling = spec.get("rope_scaling")
        spec["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
        return DecodeLayer(DecodeLayerSpec(**{**spec, "contexts": tuple(spec["contexts"])}))
    if values["name"] == LmHeadGreedy.name:
        return LmHeadGreedy(LmHeadSpec(**spec))
    raise ProgramError(f"no program is called {values['name']!r}; expected one of {', '.join(PROGRAM_NAMES)}")
