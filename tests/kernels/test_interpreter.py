"""Programs run for their results."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import ProgramError
from kernels.interpreter import Call, interpret, run_program
from tests.kernels.programs_support import head_program, layer_program


def test_two_layers_in_turn_leave_what_the_golden_leaves_and_inputs_stay_as_they_were() -> None:
    program = layer_program()
    tensors = program.sample_inputs(5)
    given = {a.name: tensors[a.name] for a in program.arguments() if a.direction in ("in", "inout")}
    before = {name: tensor.clone() for name, tensor in given.items()}
    bindings = {name: name for name in given}
    calls = [
        Call(program, bindings, {"out": "middle"}),
        Call(program, {**bindings, "x": "middle"}, {"out": "last"}),
    ]
    done = interpret(calls, given, ["middle", "last", "k_cache"])
    first = program.golden(tensors)
    second = program.golden({**tensors, "x": done["middle"], "k_cache": first["k_cache"], "v_cache": first["v_cache"]})
    assert torch.equal(done["middle"], first["out"])
    assert torch.equal(done["last"], second["out"])
    assert torch.equal(done["k_cache"], second["k_cache"])
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_greedy_ids_break_ties_low_and_ignore_the_padding() -> None:
    program = head_program(real_vocab=300)
    tensors = program.sample_inputs(5)
    tensors["weight"][300:] *= 4  # padding that would win if it were read
    done = run_program(program, {name: tensors[name] for name in ("x", "final_norm", "weight")})
    golden = program.golden(tensors)
    assert torch.equal(done["ids"], golden["ids"])
    assert done["ids"].flatten().tolist() == [0, 100, 150]
    assert done["logits"].shape == (3, 300)
    assert torch.allclose(done["logits"], golden["logits"], rtol=0, atol=1e-5)


def test_arguments_that_do_not_fit_are_refused() -> None:
    program = head_program()
    tensors = program.sample_inputs(5)
    given = {name: tensors[name] for name in ("x", "final_norm", "weight")}
    with pytest.raises(ProgramError, match=r"`x` is torch\.float32, expected torch\.bfloat16"):
        run_program(program, {**given, "x": given["x"].float()})


def test_bindings_are_checked_before_anything_runs() -> None:
    program = head_program()
    with pytest.raises(ProgramError, match="bound to tensors that do not exist: nowhere"):
        interpret([Call(program, {"x": "nowhere"})], {}, [])
    with pytest.raises(ProgramError, match="no call leaves the tensors logits"):
        interpret([], {}, ["logits"])
