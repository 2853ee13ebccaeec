"""The programs against their goldens, through all compiler passes, and the ways in which that must fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.programs.base import Program, check_arguments, compare_outputs
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.programs.lm_head import LmHeadSpec
from kernels.programs.registry import program_from_json, program_to_json
from kernels.report import CheckResult
from kernels.toolchain import run_check
from kernels.verdict import ALL_PASSES, TENSOR_GRAPH
from quantize.rope import RopeScaling
from tests.kernels.programs_support import full_check, head_program, layer_program, sabotage


def checked(program: Program, folder: Path) -> CheckResult:
    return run_check(full_check(program), CheckCache(folder / "checks"), default_cache_dir(), timeout_s=240)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(layer_program(5, 1, 128), id="qwen3-like: head_dim 128, 5 queries per kv head, QK norm"),
        pytest.param(layer_program(6, 2, 64, qk_norm=False), id="llama-like: head_dim 64, 3 per kv head"),
        pytest.param(layer_program(2, 2, 32, qk_norm=False, qkv_bias=True), id="qwen2-like: MHA, QKV bias"),
        pytest.param(layer_program(down="bf16", contexts=(257, 1)), id="BF16 down, three pages"),
        pytest.param(layer_program(qkv_bias=True, down="bf16", weights="bf16"), id="BF16 weights and activations"),
        pytest.param(head_program(), id="LM head"),
    ],
)
def test_program_agrees_with_its_golden_through_all_passes(program: Program, tmp_path: Path) -> None:
    result = checked(program, tmp_path)
    assert result.error == ""
    assert result.ok
    assert result.passes == (TENSOR_GRAPH, *ALL_PASSES)
    assert result.rows >= len(result.outputs) + len(ALL_PASSES) * program.units()
    for name, difference in result.outputs.items():
        assert result.tolerances[name] != "exact" or difference == 0


WRONG_GOLDEN = """
import torch
from kernels.programs.decode_layer import DecodeLayer
right = DecodeLayer.golden
def wrong(self, tensors):
    tensors = dict(tensors)
    {before}
    golden = right(self, tensors)
    {after}
    return golden
DecodeLayer.golden = wrong
"""


@pytest.mark.parametrize(
    ("before", "after", "output"),
    [
        pytest.param("pass", "golden['out'][0, 0] += 1", "out", id="one element"),
        pytest.param(
            "t = tensors; t['w_gate_scale'], t['w_up_scale'] = t['w_up_scale'], t['w_gate_scale']",
            "pass",
            "out",
            id="swapped scales",
        ),
        pytest.param(
            "pass",
            "golden['k_cache'][int(tensors['slots'][1])] = tensors['k_cache'][int(tensors['slots'][1])]",
            "k_cache",
            id="missing cache row",
        ),
        pytest.param(
            "tensors['context_tokens'] = tensors['context_tokens'] - 1 + (tensors['context_tokens'] == 1)",
            "pass",
            "out",
            id="position off by one",
        ),
    ],
)
def test_a_wrong_golden_fails(
    before: str, after: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, tmp_path / "site", WRONG_GOLDEN.format(before=before, after=after))
    result = checked(layer_program(), tmp_path)
    assert not result.ok
    assert f"{output} differs from its golden" in result.error
    assert not list((tmp_path / "checks").glob("*/result.json")), "a failed check must not be kept"


def test_a_kernels_parameters_are_the_programs_arguments_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from kernels.programs.lm_head import LmHeadGreedy
right = LmHeadGreedy.arguments
LmHeadGreedy.arguments = lambda self: right(self)[1:] + right(self)[:1]
"""
    sabotage(monkeypatch, tmp_path / "site", code)
    result = checked(head_program(), tmp_path)
    assert result.error == ""


def _cut(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = edit(tensors[name])

    return apply


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_cut("x", lambda t: t.to(torch.float16)), "`x` is torch.float16, expected torch.bfloat16"),
        (_cut("wq", lambda t: t[:, :-1].contiguous()), r"`wq` has shape \[64, 127\], expected \[64, 128\]"),
        (_cut("wq", lambda t: t.t().contiguous().t()), "`wq` is not contiguous"),
        (_cut("k_cache", lambda t: t[:0]), "`k_cache` is empty"),
        (_cut("k_cache", lambda t: t[:-1].contiguous()), "whole pages of 128"),
        (_cut("slots", lambda t: t.to(torch.int64)), "`slots` is torch.int64"),
        (_cut("slots", lambda t: t.flip(0)), "is not where token"),
        (_cut("slots", lambda t: torch.full_like(t, -1)), "must be distinct and in 0"),
        (_cut("block_table", lambda t: t + 100), "are not all in the cache"),
        (_cut("context_tokens", lambda t: t * 0), r"context of 0 tokens is not in 1\.\.256"),
        (lambda tensors: tensors.pop("wo_scale"), "`wo_scale` is missing"),
        (lambda tensors: tensors.update(w_typo=tensors["x"]), "unknown argument `w_typo`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_call(
    edit: Callable[[dict[str, Tensor]], object], reason: str
) -> None:
    program = layer_program()
    tensors = program.sample_inputs(1)
    check_arguments(program, tensors)
    edit(tensors)
    with pytest.raises(ProgramError, match=reason):
        check_arguments(program, tensors)


def test_every_mismatch_is_named_at_once() -> None:
    program = layer_program()
    tensors = program.sample_inputs(1)
    tensors["x"], tensors["wk"] = tensors["x"].float(), tensors["wk"][:-1]
    with pytest.raises(ProgramError, match=r"`x` is torch\.float32.*`wk` has shape"):
        check_arguments(program, tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_heads": 3}, "3 heads are not a multiple of 2"),
        ({"head_dim": 40}, "head_dim 40"),
        ({"hidden_size": 100}, "hidden_size 100 is not a multiple of 32"),
        ({"contexts": (1, 0)}, "one length >= 1"),
        ({"contexts": (1, 100000)}, "pages cannot hold"),
        ({"weights": "bf16"}, "down is int8 beside BF16 weights; expected bf16"),
    ],
)
def test_a_layer_that_no_kernel_covers_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        DecodeLayerSpec(**{**layer_program().spec.__dict__, **change})


def test_lm_head_chunks_cover_the_real_ids_once_and_never_the_padding() -> None:
    for real_vocab in (300, 320, 384, 513, 49152, 151936):
        chunk = min(6144, real_vocab // 32 * 32)
        spec = LmHeadSpec(64, real_vocab, -(-real_vocab // 512) * 512, 1e-6, 1, chunk)
        starts = [min(index * chunk, spec.last_chunk_start) for index in range(spec.chunks)]
        assert starts[-1] + chunk == real_vocab
        assert all(later - earlier <= chunk for earlier, later in itertools.pairwise(starts))
        assert spec.chunk_tokens % spec.block_tokens == 0
        assert spec.block_columns >= spec.chunks * spec.chunk_blocks


def test_the_tolerance_of_the_layer_is_one_bf16_step() -> None:
    program = layer_program()
    golden = program.golden(program.sample_inputs(1))
    assert all(comparison.ok for comparison in compare_outputs(program, golden, golden))
    position = tuple(int(i) for i in (golden["out"].abs() == golden["out"].abs().max()).nonzero()[0])
    for steps, accepted in ((1, True), (2, False)):
        moved = golden["out"].clone()
        bits = moved.view(torch.int16)
        bits[position] += steps
        verdicts = {c.name: c.ok for c in compare_outputs(program, {**golden, "out": moved}, golden)}
        assert verdicts == {"k_cache": True, "v_cache": True, "q_rows": True, "out": accepted}
    moved = golden["k_cache"].clone()
    moved.view(torch.int16)[0, 0] += 1
    assert not compare_outputs(program, {**golden, "k_cache": moved}, golden)[0].ok


def test_nan_is_never_within_tolerance() -> None:
    program = layer_program()
    golden = program.golden(program.sample_inputs(1))
    broken = golden["out"].clone()
    broken[0, 0] = float("nan")
    verdict = compare_outputs(program, {**golden, "out": broken}, golden)[-1]
    assert not verdict.ok
    assert verdict.max_abs_diff == float("inf")


def test_samples_are_seeded_and_scatter_the_pages() -> None:
    program = layer_program(contexts=(300, 130, 5))
    first, again, other = (program.sample_inputs(seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["wq"], other["wq"])
    pages = first["block_table"][0].tolist()
    assert pages != sorted(pages) or first["block_table"][1].tolist() != [3, 4, 0]


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 16)])
def test_a_program_survives_its_trip_through_json(scaling: RopeScaling | None) -> None:
    program = layer_program()
    program = type(program)(dataclasses.replace(program.spec, rope_scaling=scaling))
    back = program_from_json(json.loads(json.dumps(program_to_json(program))))
    assert back.spec == program.spec
    inputs, again = program.sample_inputs(1), back.sample_inputs(1)
    assert torch.equal(inputs["cos"], again["cos"])
    assert torch.equal(inputs["cos"], layer_program().sample_inputs(1)["cos"]) == (scaling is None)
