"""`turboquant_encode` and `turboquant_attention`, interpreted: right in any batch, and wrong where they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import Program, check_arguments, compare_outputs
from kernels.programs.registry import program_from_json, program_to_json
from kernels.programs.turboquant_attention import TurboQuantAttention, TurboQuantAttentionSpec
from kernels.programs.turboquant_encode import TurboQuantEncode, TurboQuantEncodeSpec
from kernels.toolchain import run_check
from tests.kernels.programs_support import full_check


def encode_program(bits: int = 4, sketch: bool = False, count: int = 17) -> TurboQuantEncode:
    """Two heads of 32."""
    return TurboQuantEncode(TurboQuantEncodeSpec(2, 32, bits, sketch, count))


def attention_program(bits: int = 4, sketch: bool = False, contexts: tuple[int, ...] = (3, 130)) -> TurboQuantAttention:
    """Four query heads on two of keys and values; a context that ends in a second page."""
    pages = 1 + sum(-(-tokens // 128) for tokens in contexts)
    return TurboQuantAttention(TurboQuantAttentionSpec(4, 2, 32, len(contexts), pages, contexts, bits, sketch))


@pytest.fixture(scope="module")
def ran() -> dict[str, GuardedRun]:
    """A window and a row of it, fewer rows than a window with a sketch, and attention with and without one."""
    programs: dict[str, Program] = {
        "encode": encode_program(),
        "encode sketch": encode_program(2, sketch=True, count=3),
        "attention": attention_program(),
        "attention sketch": attention_program(2, sketch=True, contexts=(5,)),
    }
    return dict(zip(programs, run_guarded(list(programs.values())), strict=True))


def test_any_number_of_rows_agrees_with_the_golden_and_nothing_beyond_is_written(ran: dict[str, GuardedRun]) -> None:
    for name, run in ran.items():
        assert [c.name for c in run.compared() if not c.ok] == [], name
        assert run.overrun == (), name


@pytest.mark.parametrize(
    "program", [encode_program(3, sketch=True, count=3), attention_program(3, sketch=True, contexts=(130,))]
)
def test_program_agrees_with_its_golden_through_all_passes(program: Program, tmp_path: Path) -> None:
    result = run_check(full_check(program), CheckCache(tmp_path), default_cache_dir(), timeout_s=240)
    assert result.error == ""


def swap_nibbles(codes: Tensor) -> Tensor:
    """The two codes of every byte exchanged, INT8."""
    byte = codes.to(torch.int16) + 128
    return (byte % 16 * 16 + byte // 16 - 128).to(torch.int8)


def test_another_encoding_is_not_within_tolerance(ran: dict[str, GuardedRun]) -> None:
    run = ran["encode"]
    golden = run.program.golden(run.inputs)

    def agrees(name: str, want: Tensor) -> bool:
        return compare_outputs(run.program, run.outputs, {name: want})[0].ok

    slots = run.inputs["slots"].flatten().long()
    written = golden["k_codes"][slots]
    missing, shifted = golden["k_codes"].clone(), run.inputs["k_codes"].clone()
    missing[slots[16]] = run.inputs["k_codes"][slots[16]]
    shifted[(slots + 1) % 128] = written
    turned = golden["k_codes"].clone()
    turned[slots] = swap_nibbles(written)
    assert agrees("k_codes", golden["k_codes"])
    for wrong in (missing, shifted, turned, golden["v_codes"]):
        assert not agrees("k_codes", wrong)
    assert not agrees("k_norms", golden["k_norms"].flip(1))
    wrong_matrix = run.inputs | {"k_matrices": run.inputs["k_matrices"].t().contiguous()}
    assert not agrees("k_codes", run.program.golden(wrong_matrix)["k_codes"])


@pytest.mark.parametrize("kept", ["k", "v"])
def test_attention_over_another_cache_is_not_within_tolerance(kept: str, ran: dict[str, GuardedRun]) -> None:
    run = ran["attention"]

    def agrees(**changed: Tensor) -> bool:
        return compare_outputs(run.program, run.outputs, run.program.golden({**run.inputs, **changed}))[0].ok

    codes, norms, matrices = (run.inputs[f"{kept}_{part}"] for part in ("codes", "norms", "matrices"))
    page = int(run.inputs["block_table"][1, 1])
    missing = codes.clone()
    missing[page * 128 + 1] = -128
    assert agrees()
    assert not agrees(**{f"{kept}_norms": norms.flip(1)})
    assert not agrees(**{f"{kept}_codes": codes.roll(1, dims=0), f"{kept}_norms": norms.roll(1, dims=0)})
    assert not agrees(**{f"{kept}_codes": missing})
    assert not agrees(**{f"{kept}_codes": swap_nibbles(codes)})
    assert not agrees(**{f"{kept}_matrices": matrices.t().contiguous()})


def test_attention_without_the_signs_or_with_other_lengths_is_not_within_tolerance(ran: dict[str, GuardedRun]) -> None:
    run = ran["attention sketch"]
    for name, value in {
        "k_norms": torch.cat([run.inputs["k_norms"][:, :2], run.inputs["k_norms"][:, 2:].flip(1)], dim=1),
        "k_codes": run.inputs["k_codes"] ^ -128,
        "context_tokens": run.inputs["context_tokens"] - 1,
    }.items():
        golden = run.program.golden({**run.inputs, name: value})
        assert not compare_outputs(run.program, run.outputs, golden)[0].ok, name


def test_slots_and_pages_outside_the_cache_are_refused() -> None:
    encode = encode_program(count=3)
    tensors = encode.sample_inputs(1)
    tensors["slots"] = torch.tensor([[0], [128], [0]], dtype=torch.int32)
    with pytest.raises(ProgramError, match=r"slots \[0, 128, 0\] must be distinct and in 0\.\.127"):
        check_arguments(encode, tensors)
    attention = attention_program()
    tensors = attention.sample_inputs(1)
    with pytest.raises(ProgramError, match="rows differ: `k_codes` 512, `k_norms` 511"):
        check_arguments(attention, tensors | {"k_norms": tensors["k_norms"][:511]})
    tensors["block_table"][1, 1] = 4
    with pytest.raises(ProgramError, match=r"row 1: pages \[\d, 4\] are not all in the cache of 4"):
        check_arguments(attention, tensors)


def test_shapes_that_no_kernel_covers_are_refused() -> None:
    with pytest.raises(ProgramError, match="5 bits a coordinate are not 2, 3 or 4"):
        encode_program(bits=5)
    with pytest.raises(ProgramError, match=r"129 rows are not in 1\.\.128, the slots of 1 pages"):
        encode_program(count=129)
    with pytest.raises(ProgramError, match="no turboquant_attention program for this shape: 1 bits"):
        attention_program(bits=1)


@pytest.mark.parametrize("program", [encode_program(), attention_program(sketch=True)], ids=lambda p: p.name)
def test_a_program_survives_its_trip_through_json(program: Program) -> None:
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))).spec == program.spec
