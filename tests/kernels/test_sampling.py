"""`greedy_sample`, `topk_select`, `embedding_gather` and `lm_head_greedy` on batches of any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels.calculator import default_cache_dir
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.goldens import greedy, top_ids
from kernels.guard import GuardedRun, run_guarded
from kernels.programs.base import Program, check_arguments, compare_outputs
from kernels.programs.embedding import EmbeddingGather, EmbeddingGatherSpec
from kernels.programs.registry import program_from_json, program_to_json
from kernels.programs.sampling import TOP_IDS, GreedySample, GreedySampleSpec, TopkSelect, TopkSelectSpec
from kernels.toolchain import run_check
from tests.kernels.programs_support import full_check, head_program

VOCAB = 301
PADDED = 512


def greedy_program(batch_rows: int) -> GreedySample:
    """Three chunks, the last overlapping the one before."""
    return GreedySample(GreedySampleSpec(PADDED, VOCAB, batch_rows, 128))


def topk_program(batch_rows: int, real_vocab: int = 101, chunk_tokens: int = 64) -> TopkSelect:
    """Two chunks, the last overlapping the one before."""
    return TopkSelect(TopkSelectSpec(PADDED, real_vocab, batch_rows, chunk_tokens))


def embedding_program(batch_rows: int) -> EmbeddingGather:
    """Rows of 64."""
    return EmbeddingGather(EmbeddingGatherSpec(64, VOCAB, PADDED, batch_rows))


@pytest.fixture(scope="module")
def ran() -> dict[str, GuardedRun]:
    """The programs on seventeen rows, one more than a window, and on fewer than a window."""
    programs: dict[str, Program] = {
        "greedy 17": greedy_program(17),
        "greedy 5": greedy_program(5),
        "topk 17": topk_program(17),
        "topk one chunk": topk_program(3, TOP_IDS, TOP_IDS),
        "embedding 17": embedding_program(17),
        "embedding 1": embedding_program(1),
        "head 17": head_program(batch_rows=17),
    }
    return dict(zip(programs, run_guarded(list(programs.values())), strict=True))


def test_any_number_of_rows_agrees_with_the_golden_and_nothing_beyond_is_written(ran: dict[str, GuardedRun]) -> None:
    for name, run in ran.items():
        assert [c.name for c in run.compared() if not c.ok] == [], name
        assert run.overrun == (), name


@pytest.mark.parametrize("program", [greedy_program(3), topk_program(3), embedding_program(3)], ids=lambda p: p.name)
def test_program_agrees_with_its_golden_through_all_passes(program: Program, tmp_path: Path) -> None:
    result = run_check(full_check(program), CheckCache(tmp_path), default_cache_dir(), timeout_s=240)
    assert result.error == ""
    assert set(result.outputs.values()) == {0}


def test_other_goldens_are_not_within_tolerance(ran: dict[str, GuardedRun]) -> None:
    """Ties to the highest id, padding counted in, ids that are off by one, one candidate out of order."""

    def agrees(run: GuardedRun, name: str, want: torch.Tensor) -> bool:
        return compare_outputs(run.program, run.outputs, {name: want.to(run.outputs[name].dtype)})[0].ok

    run = ran["greedy 17"]
    logits = run.inputs["logits"]
    assert agrees(run, "ids", greedy(logits, VOCAB)[:, None])
    assert not agrees(run, "ids", VOCAB - 1 - greedy(logits[:, :VOCAB].flip(1), VOCAB)[:, None])
    assert not agrees(run, "ids", greedy(logits, PADDED)[:, None])
    run = ran["topk 17"]
    values, ids = top_ids(run.inputs["logits"], 101, TOP_IDS)
    assert agrees(run, "ids", ids)
    assert agrees(run, "values", values)
    assert not agrees(run, "ids", top_ids(run.inputs["logits"], 102, TOP_IDS)[1])
    assert not agrees(run, "ids", torch.cat([ids[:, 1:2], ids[:, :1], ids[:, 2:]], dim=1))
    assert not agrees(run, "ids", 100 - top_ids(run.inputs["logits"][:, :101].flip(1), 101, TOP_IDS)[1])
    run = ran["embedding 17"]
    rows = run.inputs["embed_weight"]
    assert not agrees(run, "hidden", rows[(run.inputs["ids"].long() + 1) % VOCAB])


def test_the_samples_tie_at_the_last_place_of_the_candidates() -> None:
    """Otherwise nothing says which of equal logits `topk_select` leaves out."""
    logits = topk_program(17).sample_inputs(1)["logits"][:, :101]
    values, _ = top_ids(logits, 101, TOP_IDS)
    assert ((logits == values[:, -1:]).sum(1) > (values == values[:, -1:]).sum(1)).any()


def test_ids_outside_the_vocabulary_are_refused_by_row() -> None:
    program = embedding_program(4)
    tensors = program.sample_inputs(1)
    check_arguments(program, tensors)
    tensors["ids"] = torch.tensor([3, -1, 300, 301], dtype=torch.int32)
    with pytest.raises(ProgramError, match=r"ids are in 0\.\.300, but row 1: -1, row 3: 301"):
        check_arguments(program, tensors)


def test_logits_that_are_not_finite_and_rows_that_differ_are_refused() -> None:
    program = topk_program(4)
    tensors = program.sample_inputs(1)
    tensors["logits"][2, 7] = float("nan")
    with pytest.raises(ProgramError, match="logit 7 of row 2 is nan; expected finite"):
        check_arguments(program, tensors)
    head = head_program()
    tensors = head.sample_inputs(1)
    tensors["ids"] = tensors["ids"][:1]
    with pytest.raises(ProgramError, match="rows differ: `x` 3, `logits` 3, `ids` 1"):
        check_arguments(head, tensors)


def test_shapes_that_no_kernel_covers_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"31 real ids are not in 32\.\.512"):
        topk_program(1, real_vocab=31, chunk_tokens=32)
    with pytest.raises(ProgramError, match="chunk_tokens 100 is not a multiple of 32"):
        topk_program(1, chunk_tokens=100)
    with pytest.raises(ProgramError, match="batch_rows 0 must be at least 1"):
        greedy_program(0)
    with pytest.raises(ProgramError, match="hidden_size 24 is not a multiple of 16"):
        EmbeddingGatherSpec(24, 10, 16, 1)


@pytest.mark.parametrize("program", [greedy_program(3), topk_program(3), embedding_program(3)], ids=lambda p: p.name)
def test_a_program_survives_its_trip_through_json(program: Program) -> None:
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))).spec == program.spec
