"""`prefill_layer` against its golden: chunks of prompts, packed, behind tokens that are in the cache already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import check_arguments, compare_outputs, make_outputs
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.layer_slabs import slab_arguments
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.registry import program_from_json, program_to_json
from kernels.toolchain import run_check
from tests.kernels.programs_support import full_check

Tensors = dict[str, Tensor]


def prefill_program(
    chunks: tuple[tuple[int, int], ...], heads: int = 4, kv_heads: int = 2, **options: object
) -> PrefillLayer:
    """A prefill layer of hidden size 64, with every option that changes a layer's arithmetic."""
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "qk_norm": True,
        "qkv_bias": True,
        "down": "int8",
        "window_rows": 16,
        "pages": 1 + sum(-(-(before + new) // PAGE_TOKENS) for before, new in chunks),
        "chunks": chunks,
    }
    return PrefillLayer(PrefillLayerSpec(**{**values, **options}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ran() -> GuardedRun:
    """Seventeen rows in two windows: a chunk that crosses a page, one token after others, a prompt of its own."""
    return run_guarded([prefill_program(((122, 9), (3, 1), (0, 7)), heads=2, kv_heads=1)])[0]


def test_chunks_agree_with_the_golden_through_all_passes(tmp_path: Path) -> None:
    result = run_check(
        full_check(prefill_program(((126, 3), (0, 1)))), CheckCache(tmp_path), default_cache_dir(), timeout_s=240
    )
    assert result.error == ""
    assert (result.outputs["k_cache"], result.outputs["v_cache"]) == (0, 0)


def test_rows_in_two_windows_agree_and_nothing_beyond_them_is_written(ran: GuardedRun) -> None:
    assert ran.inputs["x"].shape[0] == 17
    assert all(comparison.ok for comparison in ran.compared())
    assert ran.overrun == ()
    assert not torch.equal(ran.outputs["k_cache"], ran.inputs["k_cache"])


def _swap(first: str, second: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return apply


def _edit(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = edit(tensors[name])

    return apply


def _forget_row(tensors: Tensors) -> None:
    """A key of an earlier chunk is missing from the cache."""
    tensors["k_cache"] = tensors["k_cache"].clone()
    tensors["k_cache"][int(tensors["block_table"][0, 0]) * PAGE_TOKENS + 5] = 0


@pytest.mark.parametrize(
    ("edit", "output"),
    [
        pytest.param(_swap("w_gate_scale", "w_up_scale"), "out", id="swapped scales"),
        pytest.param(_edit("wo", lambda t: t.t().reshape(t.shape)), "out", id="transposed weight"),
        pytest.param(_edit("k_bias", torch.zeros_like), "k_cache", id="bias left out"),
        pytest.param(_edit("q_norm", torch.ones_like), "out", id="head norm left out"),
        pytest.param(_edit("cos", lambda t: t.roll(1, 0)), "k_cache", id="position off by one"),
        pytest.param(_edit("context_tokens", lambda t: t - torch.tensor([1, 0, 0])), "out", id="mask off by one"),
        pytest.param(_edit("context_tokens", lambda t: t - torch.tensor([0, 1, 0])), "v_cache", id="slot off by one"),
        pytest.param(_edit("block_table", lambda t: t.flip(1)), "out", id="pages in another order"),
        pytest.param(_forget_row, "out", id="missing cache row of an earlier chunk"),
    ],
)
def test_a_layer_of_other_inputs_is_not_within_tolerance(
    edit: Callable[[Tensors], None], output: str, ran: GuardedRun
) -> None:
    tensors = dict(ran.inputs)
    edit(tensors)
    verdicts = {c.name: c.ok for c in compare_outputs(ran.program, ran.outputs, ran.program.golden(tensors))}
    assert not verdicts[output]


def test_the_golden_is_that_of_decoding_the_same_tokens() -> None:
    """Every row of a chunk as a decode row: the two programs have one definition, bit for bit."""
    prefill = prefill_program(((122, 9), (3, 1), (0, 7)))
    tensors = prefill.sample_inputs(3)
    starts, ends = tensors["row_starts"].tolist(), tensors["context_tokens"].tolist()
    sequence = [index for index in range(3) for _ in range(starts[index], starts[index + 1])]
    contexts = [ends[at] - starts[at + 1] + row + 1 for row, at in enumerate(sequence)]
    fields = {
        name: getattr(prefill.spec, name) for name in DecodeLayerSpec.__dataclass_fields__ if name in vars(prefill.spec)
    }
    decode = DecodeLayer(DecodeLayerSpec(**fields, batch_rows=17, contexts=tuple(contexts)))
    names = [argument.name for argument in slab_arguments(prefill.spec)]
    rows = {name: tensors[name] for name in (*names, "x", "cos", "sin", "k_cache", "v_cache")}
    rows["slots"] = prefill.golden_rows(tensors).slots.to(torch.int32).unsqueeze(1)
    rows["context_tokens"] = torch.tensor(contexts, dtype=torch.int32)
    rows["block_table"] = tensors["block_table"][sequence].contiguous()
    decoded, filled = decode.golden({**make_outputs(decode, rows), **rows}), prefill.golden(tensors)
    assert all(torch.equal(decoded[name], filled[name]) for name in filled)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_edit("x", lambda t: t[:-1]), "`cos` has 17 rows, expected 16"),
        (_edit("q_rows", lambda t: t[:17]), "`q_rows` has 17 rows, expected 32"),
        (_edit("row_starts", lambda t: t.flip(0)), r"row_starts \[17, 10, 9, 0\] must rise from 0 to 17"),
        (_edit("row_starts", lambda t: t[:-1]), "`row_starts` has 3 rows, expected 4"),
        (_edit("context_tokens", lambda t: t * 0), r"sequence 0: context of 0 tokens is not in 9\.\.256"),
        (_edit("context_tokens", lambda t: t + 128), "sequence 0: context of 259 tokens is not in"),
        (_edit("block_table", lambda t: t + 100), "are not all in the cache of 5"),
        (_edit("block_table", torch.zeros_like), "two tokens would be written to one slot"),
        (_edit("causal_bias", torch.zeros_like), "causal_bias is not what `causal_bias` gives"),
        (_edit("k_cache", lambda t: t[:-1]), "whole pages of 128"),
        (_edit("row_starts", lambda t: t.to(torch.int64)), "`row_starts` is torch.int64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_call(edit: Callable[[Tensors], None], reason: str) -> None:
    program = prefill_program(((122, 9), (3, 1), (0, 7)))
    tensors = program.sample_inputs(1)
    check_arguments(program, tensors)
    edit(tensors)
    with pytest.raises(ProgramError, match=reason):
        check_arguments(program, tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_heads": 3}, "3 heads are not a multiple of 2"),
        ({"hidden_size": 100}, "hidden_size 100 is not a multiple of 32"),
        ({"window_rows": 20}, r"window_rows 20 is not 16, 32, 48, \.\.\. 128"),
        ({"chunks": ((3, 0),)}, "new tokens >= 1"),
        ({"chunks": ((0, 1000),)}, "3 pages cannot hold"),
    ],
)
def test_a_layer_that_no_kernel_covers_is_refused(change: dict[str, object], reason: str) -> None:
    spec = prefill_program(((126, 3),)).spec
    with pytest.raises(ProgramError, match=reason):
        PrefillLayerSpec(**{**spec.__dict__, **change})  # type: ignore[arg-type]


def test_a_prefill_layer_survives_its_trip_through_json() -> None:
    program = prefill_program(((126, 3), (0, 1)))
    back = program_from_json(json.loads(json.dumps(program_to_json(program))))
    assert back.spec == program.spec
