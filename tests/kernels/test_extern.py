"""Extern stages: one stage, two implementations, one golden; what cannot run here is refused beforehand.

CANN's operator does not exist on this machine. A stand-in written from its documentation takes its place, to test what
is ours: which tensors in which layout and which numbers the operator is handed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from kernels.calculator import default_cache_dir
from kernels.catalog import builtin_config
from kernels.check_cache import CheckCache
from kernels.contract_decoder import PAGED_ATTENTION
from kernels.errors import ContractError, ProgramError
from kernels.extern import CANN, check_implementation
from kernels.extern_attention import run_paged_attention
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from kernels.toolchain import run_check
from kernels.verdict import ALL_PASSES, TENSOR_GRAPH
from tests.kernels.programs_support import full_check

CONFIG = dataclasses.replace(builtin_config("qwen3-14b"), num_heads=4, num_kv_heads=2, head_dim=32)
CONTEXTS = (2, 130, 128)
STAND_IN = '''
import torch
from torch.nn.functional import scaled_dot_product_attention


def npu_fused_infer_attention_score(
    query, key, value, *, actual_seq_lengths_kv, block_table, block_size, num_heads, num_key_value_heads, scale,
    input_layout
):
    """Documented semantics: query [B, 1, N * D], pages [blocks, block_size, KV * D], one length a row."""
    rows, one, width = query.shape
    if input_layout != "BSH" or one != 1 or key.shape[1] != block_size or block_table.dtype != torch.int32:
        raise RuntimeError("EZ1001: unsupported")
    dim = width // num_heads
    out = torch.empty_like(query)
    for row, tokens in enumerate(actual_seq_lengths_kv):
        pages = block_table[row, : -(-tokens // block_size)].long()
        q = query[row].float().view(1, num_heads, dim).transpose(0, 1)
        k, v = (t[pages].float().view(-1, num_key_value_heads, dim)[:tokens].transpose(0, 1) for t in (key, value))
        k, v = (t.repeat_interleave(num_heads // num_key_value_heads, dim=0) for t in (k, v))
        out[row] = scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1).reshape(1, -1)
    return out, torch.empty(0)
'''


def sample() -> tuple[dict[str, Tensor], Tensor]:
    """The stage's inputs, and the golden of its output."""
    program = PagedAttention(PagedAttentionSpec.of(CONFIG, CONTEXTS))
    tensors = program.sample_inputs(5)
    golden = program.golden(tensors)["context_rows"]
    return {name: tensor for name, tensor in tensors.items() if name != "context_rows"}, golden


def near(have: Tensor, want: Tensor, steps: int) -> bool:
    """Within so many BF16 steps of the row's largest value."""
    largest = want.float().abs().amax(dim=-1, keepdim=True)
    return bool(((have.float() - want.float()).abs() <= steps * largest * 2**-8).all())


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torch_npu with the operator; the folder it is in."""
    (tmp_path / "torch_npu.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    yield tmp_path
    sys.modules.pop("torch_npu", None)


def test_program_and_operator_give_what_the_golden_gives(operator: Path) -> None:
    tensors, golden = sample()
    assert near(run_paged_attention(tensors, CONFIG, "program"), golden, 1)
    assert near(run_paged_attention(tensors, CONFIG, "cann"), golden, 2)


def change(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    changed = {key: tensor.clone() for key, tensor in tensors.items()}
    match name:
        case "swapped caches":
            changed["k_cache"], changed["v_cache"] = changed["v_cache"], changed["k_cache"]
        case "pages in another order":
            changed["block_table"][1] = changed["block_table"][1].flip(0)
        case "one token less":
            changed["context_tokens"][0] -= 1
        case "a missing row":
            changed["v_cache"][int(changed["block_table"][2, 0]) * 128 + 7] = 100.0
        case "swapped heads":
            changed["q_rows"][[0, 2]] = changed["q_rows"][[2, 0]]
    return changed


@pytest.mark.parametrize(
    "mistake", ["swapped caches", "pages in another order", "one token less", "a missing row", "swapped heads"]
)
def test_a_mistake_in_the_arguments_shows(mistake: str, operator: Path) -> None:
    tensors, golden = sample()
    assert not near(run_paged_attention(change(tensors, mistake), CONFIG, "cann"), golden, 2)


def test_without_the_operator_nothing_runs_and_the_contract_says_what_to_use() -> None:
    tensors, _ = sample()
    with pytest.raises(ContractError, match=r"torch_npu is not installed here: use implementation 'program'"):
        run_paged_attention(tensors, CONFIG, "cann")


def test_a_library_without_the_operator_is_named(operator: Path) -> None:
    (operator / "torch_npu.py").write_text("def npu_format_cast(): ...\n")
    with pytest.raises(ContractError, match=rf"{CANN.function}, which the installed torch_npu does not have"):
        check_implementation(PAGED_ATTENTION, "cann", CONFIG)


def test_shapes_the_operator_does_not_take_are_refused_by_rule(operator: Path) -> None:
    wide = dataclasses.replace(CONFIG, num_heads=640, num_kv_heads=640, head_dim=104)
    with pytest.raises(ContractError) as caught:
        check_implementation(PAGED_ATTENTION, "cann", wide)
    assert "head_dim is 104, expected a multiple of 16 (operator-head" in str(caught.value)
    assert "kv_size is 66560, expected at most 65535 (operator-page" in str(caught.value)
    with pytest.raises(ContractError, match=r"no implementation 'cuda'; it has program, cann"):
        check_implementation(PAGED_ATTENTION, "cuda", CONFIG)


@pytest.mark.parametrize("implementation", ["program", "cann"])
def test_bad_arguments_are_refused_by_either_implementation(implementation: str, operator: Path) -> None:
    tensors, _ = sample()
    tensors["block_table"] = tensors["block_table"] + 5
    with pytest.raises(ProgramError, match="are not all in the cache"):
        run_paged_attention(tensors, CONFIG, implementation)
    tensors["q_rows"] = tensors["q_rows"].float()
    with pytest.raises(ProgramError, match=r"`q_rows` is torch.float32, expected torch.bfloat16"):
        run_paged_attention(tensors, CONFIG, implementation)


def test_any_number_of_pages_verifies_through_all_passes(tmp_path: Path) -> None:
    """One to four pages in one loop body, and a body with five after one with four."""
    program = PagedAttention(PagedAttentionSpec.of(CONFIG, (1, 130, 300, 512, 1100)))
    assert program.units() == 1 + 4 + 3
    result = run_check(full_check(program), CheckCache(tmp_path), default_cache_dir(), timeout_s=300)
    assert result.error == ""
    assert result.passes == (TENSOR_GRAPH, *ALL_PASSES)
