"""The decode layer over a TurboQuant cache: right in any batch, and wrong where its check must notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import check_arguments, compare_outputs
from kernels.programs.decode_layer import DecodeLayer, TurboQuantDecodeLayer, decode_layer
from kernels.programs.decode_step import DecodeStepSpec
from kernels.programs.lm_head import LmHeadSpec
from kernels.programs.registry import program_from_json, program_to_json
from kernels.toolchain import run_check
from tests.kernels.programs_support import full_check, layer_program


def program(kv: str = "turboquant4", contexts: tuple[int, ...] = (2, 130)) -> DecodeLayer:
    """Four query heads on two of keys and values; a context that ends in a second page."""
    return decode_layer(replace(layer_program(contexts=contexts).spec, kv=kv))


@pytest.fixture(scope="module")
def ran() -> GuardedRun:
    """A window and a row, interpreted."""
    return run_guarded([program(contexts=(2, 130, *range(3, 18)))])[0]


def test_a_layer_with_a_sketch_agrees_with_the_golden_through_all_passes(tmp_path: Path) -> None:
    checked = program("turboquant4-qjl")
    result = run_check(full_check(checked), CheckCache(tmp_path), default_cache_dir(), timeout_s=240)
    assert result.error == ""
    assert {"k_codes", "k_norms", "v_codes", "v_norms", "q_rows", "out"} == set(result.outputs)


def test_any_batch_agrees_with_the_golden_and_nothing_beyond_is_written(ran: GuardedRun) -> None:
    assert [c.name for c in ran.compared() if not c.ok] == []
    assert ran.overrun == ()


def agrees(ran: GuardedRun, golden: dict[str, Tensor]) -> dict[str, bool]:
    kept = {name: want for name, want in golden.items() if name in ran.outputs}
    return {c.name: c.ok for c in compare_outputs(ran.program, ran.outputs, kept)}


def _turn(name: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].t().contiguous()

    return edit


def _swap_heads(name: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].flip(1)

    return edit


def _forget_token(name: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][int(tensors["block_table"][1, 0]) * 128 + 7] = -128

    return edit


def _earlier(tensors: dict[str, Tensor]) -> None:
    tensors["context_tokens"] = tensors["context_tokens"] - 1


@pytest.mark.parametrize(
    ("edit", "output"),
    [
        pytest.param(_turn("k_matrices"), "k_codes", id="keys by the rotation's inverse"),
        pytest.param(_turn("v_matrices"), "v_codes", id="values by the rotation's inverse"),
        pytest.param(_swap_heads("k_norms"), "out", id="norms of another head's keys"),
        pytest.param(_swap_heads("v_norms"), "out", id="norms of another head's values"),
        pytest.param(_forget_token("k_codes"), "out", id="codes of a key missing"),
        pytest.param(_forget_token("v_codes"), "out", id="codes of a value missing"),
        pytest.param(_earlier, "out", id="position off by one"),
    ],
)
def test_another_cache_is_not_within_tolerance(
    edit: Callable[[dict[str, Tensor]], None], output: str, ran: GuardedRun
) -> None:
    tensors = dict(ran.inputs)
    edit(tensors)
    assert not agrees(ran, ran.program.golden(tensors))[output]


@pytest.mark.parametrize("output", ["k_codes", "k_norms", "v_codes", "v_norms", "out"])
def test_a_row_that_was_not_written_is_not_within_tolerance(output: str, ran: GuardedRun) -> None:
    golden = ran.program.golden(ran.inputs)
    row = -1 if output == "out" else int(ran.inputs["slots"][-1])
    golden[output] = golden[output].clone()
    golden[output][row] = ran.inputs[output][row]
    assert [name for name, ok in agrees(ran, golden).items() if not ok] == [output]


def test_formats_that_no_layer_keeps_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"kv 'turboquant5' is not one of bf16, turboquant2, "):
        program("turboquant5")
    with pytest.raises(ProgramError, match="kv turboquant4 beside BF16 weights; expected bf16"):
        replace(layer_program(down="bf16", weights="bf16").spec, kv="turboquant4")
    spec = program().spec
    with pytest.raises(ProgramError, match="kv is turboquant4; steps keep bf16"):
        DecodeStepSpec(spec, LmHeadSpec(64, 300, 512, 1e-6, 2, 128), 1)


def test_caches_of_different_length_are_refused() -> None:
    tensors = program().sample_inputs(1)
    with pytest.raises(ProgramError, match="caches must be equal in length"):
        check_arguments(program(), tensors | {"v_norms": tensors["v_norms"][:-128]})


def test_the_layer_survives_its_trip_through_json() -> None:
    back = program_from_json(json.loads(json.dumps(program_to_json(program("turboquant3-qjl")))))
    assert isinstance(back, TurboQuantDecodeLayer)
    assert back.spec == program("turboquant3-qjl").spec
