"""The decode programs over more rows than one window: one program for any batch, and nothing beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from kernels.catalog import builtin_config
from kernels.errors import ProgramError
from kernels.guard import GuardedRun, run_guarded
from kernels.interpreter import run_program
from kernels.programs.base import check_arguments, compare_outputs
from kernels.programs.decode_layer import row_arguments
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from quantize.numerics import rope_tables
from tests.kernels.programs_support import layer_program

BATCH = 17


def step_program() -> DecodeStep:
    """One layer of hidden size 64, one step."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    config = replace(builtin_config("qwen3-14b"), vocab_size=300, **small)
    return DecodeStep(DecodeStepSpec.of(config, "int8", (3,) * BATCH, layers=1, chunk_tokens=128))


@pytest.fixture(scope="module")
def ran() -> dict[str, GuardedRun]:
    """A step over a window and a row of it, interpreted."""
    return {"step": run_guarded([step_program()])[0]}


def one_sequence() -> dict[str, Tensor]:
    """Seventeen rows of a layer's sample, which are the tokens of one sequence from position 125 on."""
    program = layer_program(2, 1, 16, contexts=(130,) * BATCH)
    tensors = program.sample_inputs(1)
    cos, sin = rope_tables(16, 1e4, 256, None)
    return tensors | row_arguments(list(range(125, 125 + BATCH)), [[3, 1]] * BATCH, cos, sin)


@pytest.fixture(scope="module")
def sequence() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """These rows, and what the layer makes of them; compiled from the specification of another batch."""
    tensors = one_sequence()
    return tensors, run_program(layer_program(2, 1, 16, contexts=(1,)), tensors)


def test_a_window_and_a_row_agree_with_the_golden_and_nothing_beyond_is_written(ran: dict[str, GuardedRun]) -> None:
    for name, run in ran.items():
        assert [c.name for c in run.compared() if not c.ok] == [], name
        assert run.overrun == (), name


@pytest.mark.parametrize("output", ["x", "k_cache", "v_cache", "logits", "ids"])
def test_a_last_row_that_was_not_written_is_not_within_tolerance(output: str, ran: dict[str, GuardedRun]) -> None:
    run = ran["step"]
    golden = run.program.golden(run.inputs)
    row = int(run.inputs["slots"][-1]) if output.endswith("cache") else BATCH - 1
    golden[output][row] = run.inputs[output][row]
    assert [c.name for c in compare_outputs(run.program, run.outputs, golden) if not c.ok] == [output]


def test_a_row_attends_to_what_an_earlier_window_wrote(
    sequence: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> None:
    tensors, found = sequence
    program = layer_program(2, 1, 16, contexts=(1,))
    golden = {name: want for name, want in program.golden(tensors).items() if name in found}
    assert [c.name for c in compare_outputs(program, found, golden) if not c.ok] == []
    first_window = {**tensors, "x": tensors["x"].clone()}
    first_window["x"][0] = tensors["x"][1]
    assert not compare_outputs(program, found, {"out": program.golden(first_window)["out"][-1:]})[0].ok


def test_rows_of_a_sequence_in_another_order_are_refused_where_a_window_would_miss_a_key() -> None:
    tensors = one_sequence()
    program = layer_program(2, 1, 16, contexts=(1,))
    check_arguments(program, tensors)
    for name in ("cos", "sin", "slots", "context_tokens"):
        tensors[name] = tensors[name].flip(0).contiguous()
    with pytest.raises(ProgramError, match=r"row 0 attends to slot 509, which row 16 of a later window of 16 rows"):
        check_arguments(program, tensors)


def test_rows_that_differ_in_number_are_refused() -> None:
    tensors = one_sequence()
    tensors["slots"] = tensors["slots"][:-1]
    with pytest.raises(ProgramError, match=r"rows differ: `x` 17, .*`slots` 16"):
        check_arguments(layer_program(2, 1, 16), tensors)
