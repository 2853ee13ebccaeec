"""What a call is checked for before PyPTO sees it, and what may be missing when it is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.programs.base import check_arguments, compare_outputs
from tests.kernels.programs_support import head_program, layer_program

PROGRAM = layer_program()


def inputs() -> dict[str, Tensor]:
    """Sample inputs, outputs and scratch among them."""
    return PROGRAM.sample_inputs(0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "`x` is a list, expected a tensor"),
        (inputs()["x"].float().numpy(), "`x` is a ndarray, expected a tensor"),
        (inputs()["x"].to("meta"), "`x` is a torch.strided tensor on meta, expected one with memory"),
        (inputs()["x"].to_sparse(), "`x` is a torch.sparse_coo tensor on cpu"),
    ],
)
def test_what_is_no_tensor_with_memory_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        check_arguments(PROGRAM, {**inputs(), "x": value})


def test_a_written_argument_shares_memory_with_no_other() -> None:
    tensors = inputs()
    check_arguments(PROGRAM, tensors)
    whole = torch.zeros(2 * tensors["k_cache"].shape[0], tensors["k_cache"].shape[1], dtype=torch.bfloat16)
    halves = whole.chunk(2)
    check_arguments(PROGRAM, {**tensors, "k_cache": halves[0], "v_cache": halves[1]})
    for shared, words in (
        ({"k_cache": tensors["v_cache"]}, "`k_cache`, which is written, shares memory with `v_cache`"),
        ({"out": tensors["x"]}, "`out`, which is written, shares memory with `x`"),
        ({"k_cache": halves[0], "v_cache": whole[1 : len(halves[0]) + 1]}, "`k_cache`, which is written"),
    ):
        with pytest.raises(ProgramError, match=words) as caught:
            check_arguments(PROGRAM, {**tensors, **shared})
        assert str(caught.value).count("which is written") == 1
    check_arguments(PROGRAM, {**tensors, "q_norm": tensors["k_norm"]})


def test_scratch_that_a_call_does_not_return_is_not_compared_and_a_missing_output_is_named() -> None:
    for program in (PROGRAM, head_program()):
        tensors = program.sample_inputs(0)
        golden = program.golden(tensors)
        scratch = {a.name: torch.zeros(1) for a in program.arguments() if a.direction == "scratch"}
        returned = {a.name: golden[a.name] for a in program.arguments() if a.direction in ("out", "inout")}
        compared = compare_outputs(program, returned, {**golden, **scratch})
        assert {each.name for each in compared} == set(returned)
        assert all(each.ok for each in compared)
        first = next(iter(returned))
        with pytest.raises(ProgramError, match=f"outputs {first} are missing"):
            compare_outputs(program, {name: returned[name] for name in returned if name != first}, golden)
