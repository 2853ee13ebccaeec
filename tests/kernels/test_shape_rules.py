"""What a rule says when it is broken: both numbers, with every digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.catalog import builtin_config, programs_for
from kernels.contract import MAX_VOCAB, SHAPE_RULES
from kernels.contract_registry import CONTRACTS
from kernels.errors import ContractError
from kernels.shape_rules import ShapeRule, shape_problems

CONFIG = builtin_config("qwen3-14b")


def test_large_sizes_are_written_out_and_other_numbers_are_not_cut_to_whole_ones() -> None:
    (problem, *_) = shape_problems(SHAPE_RULES, replace(CONFIG, hidden_size=549755813889))
    assert problem.startswith("hidden_size is 549755813889, expected at most 65536 ")
    rule = ShapeRule("epsilon", "rms_norm_eps", "is", "1e-5", "fixed")
    assert rule.problem(CONFIG) == "rms_norm_eps is 1e-06, expected 1e-05 (epsilon: fixed)"


def test_a_vocabulary_whose_ids_fp32_cannot_carry_is_refused() -> None:
    assert shape_problems(SHAPE_RULES, replace(CONFIG, vocab_size=MAX_VOCAB)) == []
    with pytest.raises(ContractError, match="vocab_size is 16777217, expected at most 16777216"):
        programs_for(replace(CONFIG, vocab_size=MAX_VOCAB + 1))


def test_our_contracts_need_as_many_ids_as_topk_select_gives() -> None:
    (ours,) = (each for each in CONTRACTS if each.name == "pypto-deploy/qwen3/w8a8")
    assert ours.problems(replace(CONFIG, vocab_size=32)) == []
    (problem,) = ours.problems(replace(CONFIG, vocab_size=31))
    assert "vocab_size is 31, expected at least 32" in problem
