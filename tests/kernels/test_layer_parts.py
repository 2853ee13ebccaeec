"""The parts of a layer as programs: right in every form, wrong where they should be, and together what the layer is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.catalog import builtin_config
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import check_arguments, compare_outputs
from kernels.programs.layer_parts import PARTS, KvWrite, LayerPart, LayerPartSpec, QkvProject, SwigluMlp
from kernels.programs.layer_slabs import WeightForm
from kernels.programs.registry import program_from_json, program_to_json
from kernels.toolchain import run_check
from tests.kernels.programs_support import full_check

Tensors = dict[str, Tensor]


def part_spec(model: str = "qwen3-14b", down: WeightForm = "int8", weights: WeightForm = "int8") -> LayerPartSpec:
    """Hidden size 64, two query heads to each of two of keys and values, three rows."""
    small = replace(
        builtin_config(model), hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32
    )
    return LayerPartSpec.of(small, down, 3, weights)


@pytest.fixture(scope="module")
def ran() -> dict[str, GuardedRun]:
    """Every part with QK norm and INT8 weights; those with other code for biases or BF16 weights in that form too."""
    programs: dict[str, LayerPart] = {part.name: part(part_spec()) for part in PARTS}
    programs["qkv_project, biases"] = QkvProject(part_spec("qwen2.5-0.5b"))
    programs["qkv_project, BF16"] = QkvProject(part_spec(down="bf16", weights="bf16"))
    programs["swiglu_mlp, BF16 down"] = SwigluMlp(part_spec(down="bf16"))
    programs["swiglu_mlp, BF16"] = SwigluMlp(part_spec(down="bf16", weights="bf16"))
    return dict(zip(programs, run_guarded(list(programs.values())), strict=True))


def test_every_part_agrees_with_its_golden_and_writes_nothing_beyond(ran: dict[str, GuardedRun]) -> None:
    for name, run in ran.items():
        compared = run.compared()
        assert {c.name for c in compared} == {a.name for a in run.program.arguments() if a.direction != "in"}
        assert [c for c in compared if not c.ok] == [], name
        assert run.overrun == (), name


@pytest.mark.parametrize("part", [QkvProject, SwigluMlp])
def test_a_part_agrees_with_its_golden_through_all_passes(part: type[LayerPart], tmp_path: Path) -> None:
    result = run_check(full_check(part(part_spec())), CheckCache(tmp_path), default_cache_dir(), timeout_s=240)
    assert result.error == ""


def _edit(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = edit(tensors[name])

    return apply


def _swap(first: str, second: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return apply


@pytest.mark.parametrize(
    ("part", "edit", "wrong"),
    [
        pytest.param("norm_quantize", _edit("input_rms", lambda t: t.flip(1)), "codes", id="norm in another order"),
        pytest.param("norm_quantize", _edit("x", lambda t: t.roll(1, 0)), "scale", id="scale of another row"),
        pytest.param("qkv_project", _swap("wk_scale", "wv_scale"), "k", id="swapped scales"),
        pytest.param("qkv_project", _swap("q_norm", "k_norm"), "q", id="swapped norms"),
        pytest.param("qkv_project", _edit("cos", lambda t: t.roll(1, 0)), "q", id="position off by one"),
        pytest.param("qkv_project, biases", _swap("k_bias", "v_bias"), "v", id="swapped biases"),
        pytest.param("qkv_project, BF16", _edit("wv", lambda t: t.roll(1, 1)), "v", id="a shifted column"),
        pytest.param("qk_norm_rope", _edit("sin", lambda t: -t), "q", id="turned the other way"),
        pytest.param("kv_write", _edit("slots", lambda t: t ^ 1), "k_cache", id="slot off by one"),
        pytest.param("kv_write", _edit("v", lambda t: t.roll(1, 0)), "v_cache", id="rows in another order"),
        pytest.param("swiglu_mlp", _swap("w_gate", "w_up"), "out", id="gate for up"),
        pytest.param("swiglu_mlp", _edit("w_down_scale", lambda t: t.flip(1)), "out", id="scales in another order"),
        pytest.param("swiglu_mlp, BF16 down", _edit("w_down", lambda t: t.roll(1, 0)), "out", id="a shifted row"),
        pytest.param("swiglu_mlp, BF16", _edit("w_up", lambda t: t.flip(0)), "out", id="depth in another order"),
    ],
)
def test_a_part_of_other_inputs_is_not_within_tolerance(
    part: str, edit: Callable[[Tensors], None], wrong: str, ran: dict[str, GuardedRun]
) -> None:
    run = ran[part]
    tensors = dict(run.inputs)
    edit(tensors)
    compared = compare_outputs(run.program, run.outputs, run.program.golden(tensors))
    assert {c.name: c.ok for c in compared}[wrong] is False


def test_slots_that_the_device_would_drop_are_refused() -> None:
    program = KvWrite(part_spec())
    tensors = program.sample_inputs(1)
    for slots in ([-1, 0, 1], [0, 1, 256], [3, 3, 4]):
        tensors["slots"] = torch.tensor(slots, dtype=torch.int32).unsqueeze(1)
        with pytest.raises(ProgramError, match="are not all different and in the caches"):
            check_arguments(program, tensors)


def test_shapes_that_are_no_window_of_a_layer_are_refused() -> None:
    with pytest.raises(ProgramError, match="17 rows are not one window of 1 to 16"):
        replace(part_spec(), rows=17)
    with pytest.raises(ProgramError, match="hidden_size 65 is not a multiple of 32"):
        replace(part_spec(), hidden_size=65)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_survives_its_trip_through_json(part: type[LayerPart]) -> None:
    program = part(part_spec())
    again = program_from_json(json.loads(json.dumps(program_to_json(program))))
    assert (type(again), again.spec) == (part, program.spec)
