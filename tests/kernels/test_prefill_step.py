"""`prefill_step` against its golden: prompts through two layers, to each sequence's next token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.catalog import builtin_config
from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import check_arguments, compare_outputs
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec, step_rows
from kernels.programs.layer_slabs import STACKED_SLABS, WeightForm
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.programs.registry import program_from_json, program_to_json

Tensors = dict[str, Tensor]
LAYERS = 2
CHUNKS = ((126, 3), (3, 1), (0, 13))
"""A chunk that crosses a page, one token after others, and a prompt of its own: seventeen rows, two windows."""


def step_program(weights: WeightForm = "int8", chunks: tuple[tuple[int, int], ...] = CHUNKS) -> PrefillStep:
    """Two layers of hidden size 64 and 300 ids in three chunks."""
    config = replace(
        builtin_config("qwen3-14b"),
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=300,
    )
    return PrefillStep(
        PrefillStepSpec.of(config, weights, chunks, layers=LAYERS, window_rows=16, chunk_tokens=128, weights=weights)
    )


@pytest.fixture(scope="module")
def runs() -> dict[WeightForm, GuardedRun]:
    """Both forms of the weights, interpreted."""
    forms: tuple[WeightForm, ...] = ("int8", "bf16")
    return dict(zip(forms, run_guarded([step_program(form) for form in forms]), strict=True))


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_prompts_through_two_layers_agree_and_nothing_beyond_them_is_written(
    form: WeightForm, runs: dict[WeightForm, GuardedRun]
) -> None:
    run = runs[form]
    assert {c.name: c.ok for c in run.compared()} == dict.fromkeys(
        ("x", "k_cache", "v_cache", "logits", "ids", "next_rows"), True
    )
    assert run.overrun == ()
    embedded = run.inputs["embed_weight"][run.outputs["ids"].flatten().to(torch.int64)]
    assert torch.equal(run.outputs["next_rows"], embedded)


def _swap(first: str, second: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return apply


def _edit(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = edit(tensors[name])

    return apply


def _other_layer(stacked: Tensor) -> Tensor:
    return torch.cat(list(reversed(stacked.chunk(LAYERS))))


def _transposed(stacked: Tensor) -> Tensor:
    return torch.cat([part.t().reshape(part.shape) for part in stacked.chunk(LAYERS)])


def _forget_row(tensors: Tensors) -> None:
    """One of the three tokens that the second sequence had already has no key in the second layer's cache."""
    tensors["k_cache"] = tensors["k_cache"].clone()
    slot = int(tensors["block_table"][1, 0]) * PAGE_TOKENS + 1
    tensors["k_cache"][tensors["k_cache"].shape[0] // LAYERS + slot] = 0


@pytest.mark.parametrize("form", ["int8", "bf16"])
@pytest.mark.parametrize(
    ("edit", "output"),
    [
        pytest.param(_edit("wo", _transposed), "logits", id="transposed weight"),
        pytest.param(_edit("w_down", _other_layer), "logits", id="weight of another layer"),
        pytest.param(_edit("cos", lambda t: t.roll(1, 0)), "k_cache", id="position off by one"),
        pytest.param(_edit("context_tokens", lambda t: t - torch.tensor([0, 1, 0])), "v_cache", id="slot off by one"),
        pytest.param(_edit("row_starts", lambda t: t - torch.tensor([0, 0, 1, 0])), "logits", id="last row off by one"),
        pytest.param(_forget_row, "logits", id="missing cache row of an earlier chunk"),
        pytest.param(_swap("lm_head_weight", "embed_weight"), "next_rows", id="head for embedding"),
    ],
)
def test_a_step_of_other_inputs_is_not_within_tolerance(
    form: WeightForm, edit: Callable[[Tensors], None], output: str, runs: dict[WeightForm, GuardedRun]
) -> None:
    assert not _verdict(runs[form], edit, output)


@pytest.mark.parametrize("names", [("w_gate_scale", "w_up_scale"), ("input_rms", "post_rms")])
def test_swapped_vectors_are_not_within_tolerance(names: tuple[str, str], runs: dict[WeightForm, GuardedRun]) -> None:
    assert not _verdict(runs["int8"], _swap(*names), "logits")


def _verdict(run: GuardedRun, edit: Callable[[Tensors], None], output: str) -> bool:
    tensors = dict(run.inputs)
    edit(tensors)
    return {c.name: c.ok for c in compare_outputs(run.program, run.outputs, run.program.golden(tensors))}[output]


def test_scales_beside_bf16_weights_are_not_read() -> None:
    program = step_program("bf16")
    tensors = program.sample_inputs(3)
    assert {tensors[name].shape[1] for name in STACKED_SLABS if name.endswith("_scale")} == {16}
    alone = {name: tensors[name][:1] if name.endswith("_scale") else tensors[name] for name in tensors}
    check_arguments(program, alone)
    assert torch.equal(program.golden(tensors)["logits"], program.golden(alone)["logits"])


def test_decoding_goes_on_where_the_prompts_end() -> None:
    """A prompt and one decode step give the logits of the prompt with the chosen token behind it."""
    program, longer = step_program(chunks=((0, 13),)), step_program(chunks=((0, 14),))
    tensors, table = program.sample_inputs(5), longer.sample_inputs(5)
    done = program.golden(tensors)
    spec = DecodeStepSpec.of(
        replace(
            builtin_config("qwen3-14b"),
            hidden_size=64,
            intermediate_size=96,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            vocab_size=300,
        ),
        "int8",
        (14,),
        layers=LAYERS,
        pages=program.spec.layer.pages,
        chunk_tokens=128,
    )
    pages = tensors["block_table"].tolist()
    slots = program.spec.layer.pages * PAGE_TOKENS
    rows = step_rows([13], pages, table["cos"], table["sin"], LAYERS, slots)
    decoded = DecodeStep(spec).golden({**tensors, **done, **rows, "x": done["next_rows"]})
    x = torch.cat([tensors["x"], done["next_rows"]])
    whole = {name: tensors[name] for name in ("block_table", "k_cache", "v_cache", "lm_head_weight", "embed_weight")}
    whole |= {name: tensors[name] for name in (*STACKED_SLABS, "final_norm")}
    filled = longer.golden({**table, **whole, "x": x})
    assert torch.allclose(decoded["logits"], filled["logits"], rtol=0, atol=1e-5 * float(filled["logits"].abs().max()))
    assert torch.equal(decoded["k_cache"], filled["k_cache"])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_edit("wq", lambda t: t[:64].contiguous()), "`wq` has 64 rows, 2 layers and 3 sequences need 128"),
        (_edit("logits", lambda t: t[:2].contiguous()), "`logits` has 2 rows"),
        (_edit("k_cache", lambda t: t[:-128].contiguous()), "no whole pages of 128 for 2 layers"),
        (_edit("block_table", lambda t: t + 100), "one of its layers: .* are not all in the cache"),
        (_edit("q_rows", lambda t: t[:17].contiguous()), "`q_rows` has 17 rows, expected 32"),
    ],
)
def test_stacks_and_rows_that_do_not_fit_are_refused(edit: Callable[[Tensors], None], reason: str) -> None:
    program = step_program()
    tensors = program.sample_inputs(1)
    check_arguments(program, tensors)
    edit(tensors)
    with pytest.raises(ProgramError, match=reason):
        check_arguments(program, tensors)


def test_a_step_that_no_kernel_covers_is_refused() -> None:
    spec = step_program().spec
    with pytest.raises(ProgramError, match="the layer's number of sequences is 3, the LM head's 2"):
        replace(spec, head=replace(spec.head, batch_rows=2))
    with pytest.raises(ProgramError, match="0 layers"):
        replace(spec, layers=0)


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_a_step_survives_its_trip_through_json(form: WeightForm) -> None:
    program = step_program(form)
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))).spec == program.spec
