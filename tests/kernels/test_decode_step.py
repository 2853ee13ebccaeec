"""Whole decode steps in one program, against the golden; and what their check must notice."""

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
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec, step_rows
from kernels.programs.layer_slabs import WeightForm, stacked_slabs
from kernels.programs.registry import program_from_json, program_to_json
from kernels.toolchain import run_check
from kernels.verdict import ALL_PASSES, TENSOR_GRAPH
from tests.kernels.programs_support import full_check

LAYERS, STEPS, CONTEXTS = 2, 2, (1, 128)


def step_program(layers: int = LAYERS, steps: int = STEPS, weights: WeightForm = "int8") -> DecodeStep:
    """Two layers of hidden size 64; the second row's second step starts a page."""
    config = replace(
        builtin_config("qwen3-14b"),
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=300,
    )
    return DecodeStep(
        DecodeStepSpec.of(config, weights, CONTEXTS, layers=layers, steps=steps, chunk_tokens=128, weights=weights)
    )


def test_two_steps_through_two_layers_agree_with_the_golden_through_all_passes(tmp_path: Path) -> None:
    program = step_program()
    result = run_check(full_check(program), CheckCache(tmp_path), default_cache_dir(), timeout_s=240)
    assert result.error == ""
    assert result.ok
    assert result.passes == (TENSOR_GRAPH, *ALL_PASSES)
    assert set(result.outputs) == {"x", "k_cache", "v_cache", "logits", "ids"}
    assert result.rows >= len(result.outputs) + len(ALL_PASSES) * program.units()


@pytest.fixture(scope="module")
def ran_in_bf16() -> GuardedRun:
    """BF16 weights and activations, interpreted."""
    return run_guarded([step_program(weights="bf16")])[0]


def test_steps_in_bf16_agree_with_the_golden(ran_in_bf16: GuardedRun) -> None:
    assert all(comparison.ok for comparison in ran_in_bf16.compared())
    assert ran_in_bf16.overrun == ()
    assert ran_in_bf16.inputs["w_down"].dtype == ran_in_bf16.inputs["wq"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["wq", "wv", "wo", "w_gate", "w_down"])
def test_a_transposed_bf16_weight_is_not_within_tolerance(name: str, ran_in_bf16: GuardedRun) -> None:
    tensors = dict(ran_in_bf16.inputs)
    tensors[name] = torch.cat([part.t().reshape(part.shape) for part in tensors[name].chunk(LAYERS)])
    golden = ran_in_bf16.program.golden(tensors)
    verdicts = {c.name: c.ok for c in compare_outputs(ran_in_bf16.program, ran_in_bf16.outputs, golden)}
    assert not verdicts["logits"]


def _swap_layers(name: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat(list(reversed(tensors[name].chunk(LAYERS))))

    return edit


def _swap(first: str, second: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def _earlier(tensors: dict[str, Tensor]) -> None:
    tensors["context_tokens"] = tensors["context_tokens"] - 1 + (tensors["context_tokens"] == 1)


def _transpose_output_projection(tensors: dict[str, Tensor]) -> None:
    transposed = [part.t().reshape(part.shape) for part in tensors["wo"].chunk(LAYERS)]
    tensors["wo"] = torch.cat(transposed)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_swap_layers("wq"), id="queries of another layer"),
        pytest.param(_swap_layers("w_down_scale"), id="scales of another layer"),
        pytest.param(_swap_layers("k_cache"), id="cache of another layer"),
        pytest.param(_swap("w_gate_scale", "w_up_scale"), id="swapped scales"),
        pytest.param(_swap("lm_head_weight", "embed_weight"), id="head for embedding"),
        pytest.param(_transpose_output_projection, id="transposed weight"),
        pytest.param(_earlier, id="position off by one"),
    ],
)
def test_a_step_on_other_inputs_is_not_within_tolerance(edit: Callable[[dict[str, Tensor]], None]) -> None:
    """The program gives the golden's outputs (above), so these stand for it here."""
    program = step_program()
    tensors = program.sample_inputs(3)
    right = program.golden(tensors)
    assert all(comparison.ok for comparison in compare_outputs(program, right, program.golden(tensors)))
    edit(tensors)
    assert not all(comparison.ok for comparison in compare_outputs(program, right, program.golden(tensors)))


@pytest.mark.parametrize("output", ["x", "k_cache", "v_cache"])
def test_a_row_that_was_not_written_is_not_within_tolerance(output: str) -> None:
    program = step_program()
    tensors = program.sample_inputs(3)
    right = program.golden(tensors)
    changed = (right[output] != tensors[output]).any(dim=-1).nonzero().flatten()
    assert len(changed) == (len(CONTEXTS) if output == "x" else LAYERS * STEPS * len(CONTEXTS))
    broken = right[output].clone()
    broken[changed[-1]] = tensors[output][changed[-1]]
    verdicts = {c.name: c.ok for c in compare_outputs(program, {**right, output: broken}, right)}
    assert [name for name, ok in verdicts.items() if not ok] == [output]


def test_steps_in_one_call_are_steps_in_turn() -> None:
    program, single = step_program(), step_program(steps=1)
    tensors = program.sample_inputs(3)
    together = program.golden(tensors)
    rows, batch = dict(tensors), len(CONTEXTS)
    for step in range(STEPS):
        at = slice(step * batch, (step + 1) * batch)
        for name in ("cos", "sin", "context_tokens", "logits", "ids"):
            rows[name] = tensors[name][at]
        rows["slots"] = tensors["slots"].view(STEPS, -1, 1)[step]
        check_arguments(single, rows)
        rows |= single.golden(rows)
        assert torch.equal(rows["ids"], together["ids"][at])
    for name in ("x", "k_cache", "v_cache"):
        assert torch.equal(rows[name], together[name])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.update(wq=t["wq"][:64].contiguous()), "`wq` has 64 rows, 2 layers and 2 steps of 2 rows need 128"),
        (lambda t: t.update(slots=t["slots"][:4].contiguous()), "`slots` has 4 rows.* need 8"),
        (lambda t: t.update(logits=t["logits"][:2].contiguous()), "`logits` has 2 rows"),
        (lambda t: t.update(k_cache=t["k_cache"][:-128].contiguous()), "no whole pages of 128 for 2 layers"),
        (lambda t: t.update(slots=t["slots"].view(2, 2, 2).flip(1).reshape(-1, 1)), "a step's slots once per layer"),
        (lambda t: t.update(block_table=t["block_table"] + 100), "are not all in the cache"),
        (lambda t: t.update(context_tokens=t["context_tokens"].view(2, 2).flip(0).flatten()), "grow by one a step"),
        (lambda t: t.update(context_tokens=t["context_tokens"] + 1), "is not where token"),
    ],
)
def test_stacks_and_rows_that_do_not_fit_are_refused(edit: Callable[[dict[str, Tensor]], None], reason: str) -> None:
    program = step_program()
    tensors = program.sample_inputs(1)
    check_arguments(program, tensors)
    edit(tensors)
    with pytest.raises(ProgramError, match=reason):
        check_arguments(program, tensors)


def test_a_step_that_no_kernel_covers_is_refused() -> None:
    spec = step_program().spec
    with pytest.raises(ProgramError, match="the layer's batch_rows is 2, the LM head's 3"):
        replace(spec, head=replace(spec.head, batch_rows=3))
    with pytest.raises(ProgramError, match="0 layers and 2 steps"):
        replace(spec, layers=0)
    with pytest.raises(ProgramError, match="cannot hold a context that grows to 1127 tokens"):
        replace(spec, steps=1000)


def test_a_step_survives_its_trip_through_json() -> None:
    program = step_program()
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))).spec == program.spec


def test_slots_and_lengths_of_later_steps_are_known_beforehand() -> None:
    table = torch.arange(300.0).unsqueeze(1).expand(-1, 4)
    rows = step_rows([0, 127], [[3], [1, 2]], table, table, layers=2, layer_slots=512, steps=2)
    assert rows["context_tokens"].tolist() == [1, 128, 2, 129]
    assert rows["slots"].flatten().tolist() == [384, 255, 896, 767, 385, 256, 897, 768]
    assert rows["cos"][:, 0].tolist() == [0, 127, 1, 128]
    assert rows["block_table"].tolist() == [[3, 0], [1, 2]]


def test_stacked_slabs_take_the_contracts_names_and_placeholders_for_absent_ones() -> None:
    slabs = {"input_rms_weight": torch.ones(3, 8), "wq": torch.ones(24, 8, dtype=torch.int8)}
    stacked = stacked_slabs(slabs)
    assert stacked["input_rms"] is slabs["input_rms_weight"]
    assert stacked["wq"] is slabs["wq"]
    assert stacked["q_bias"].shape == (1, 16)
