"""Step estimates: the sum over programs, windows, the floor, and what is interpolated."""

from __future__ import annotations

import dataclasses

import pytest

from kernels.catalog import builtin_config
from kernels.errors import ProgramError
from kernels.estimate_plot import plot_estimate
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer
from kernels.programs.lm_head import LmHeadGreedy
from kernels.report import HBM_BYTES_PER_US
from kernels.step_estimate import StepCell, estimate_steps

CONFIG = builtin_config("qwen3-14b")
HEAD_BYTES = 151936 * 5120 * 2
LAYER_BYTES = 2 * 5120 * (5120 + 1024) + 3 * 5120 * 17408


def slow(program: Program) -> float:
    """Times far above any bound, linear in rows and context."""
    if isinstance(program, LmHeadGreedy):
        return 5000.0 + program.spec.batch_rows
    assert isinstance(program, DecodeLayer)
    return 1000.0 + 10.0 * program.spec.batch_rows * program.spec.contexts[0] / 128


def cells(simulate: object = slow, **options: object) -> dict[tuple[int, int], StepCell]:
    result = estimate_steps(CONFIG, simulate, model="qwen3-14b", **options)  # type: ignore[arg-type]
    return {(cell.batch, cell.context_tokens): cell for cell in result.cells}


def test_a_step_is_every_layer_and_one_head() -> None:
    cell = cells()[16, 1024]
    assert cell.origin == "simulated"
    assert (cell.layer_us, cell.head_us, cell.windows) == (1000 + 160 * 8, 5016, 1)
    assert cell.step_us == 40 * 2280 + 5016


def test_a_program_takes_no_less_than_its_bytes_need() -> None:
    cell = cells(lambda program: 0.5)[1, 128]
    assert cell.layer_us == pytest.approx(LAYER_BYTES / HBM_BYTES_PER_US, rel=0.01)
    assert cell.head_us == pytest.approx(HEAD_BYTES / HBM_BYTES_PER_US, rel=0.01)
    assert cell.layer_simulated_us == 0.5
    assert cell.ratio == pytest.approx(1.0, rel=1e-3)


def test_more_than_16_rows_read_the_weights_once_a_window_and_the_floor_once() -> None:
    found = cells(lambda program: 0.5)
    assert (found[64, 128].windows, found[64, 128].window_rows) == (4, 16)
    assert found[64, 128].step_us == pytest.approx(4 * found[16, 128].step_us, rel=1e-4)
    assert found[64, 128].hbm_floor_us < 1.2 * found[16, 128].hbm_floor_us
    kv_bytes = 40 * 2 * 1024 * 2 * 48 * (4096 - 128)
    grown = (found[64, 4096].hbm_floor_us - found[64, 128].hbm_floor_us) * HBM_BYTES_PER_US
    assert grown == pytest.approx(kv_bytes * 64 / 48, rel=1e-3)


def test_cells_between_the_simulated_are_interpolated_and_say_so() -> None:
    asked: list[tuple[int, int]] = []

    def simulate(program: Program) -> float:
        if isinstance(program, DecodeLayer):
            asked.append((program.spec.batch_rows, program.spec.contexts[0]))
        return slow(program)

    found = cells(simulate)
    assert sorted(asked) == [(rows, tokens) for rows in (1, 4, 16) for tokens in (128, 1024, 4096)]
    assert {key for key, cell in found.items() if cell.origin == "simulated"} == {
        (batch, tokens) for batch in (1, 4, 16, 32, 64) for tokens in (128, 1024, 4096)
    }
    for (batch, tokens), cell in found.items():
        rows = min(batch, 16)
        assert cell.layer_simulated_us == pytest.approx(1000 + 10 * rows * tokens / 128), (batch, tokens)


def test_nothing_is_extrapolated_and_sizes_out_of_range_are_named() -> None:
    with pytest.raises(ProgramError, match=r"batch of 1 to 16 lies outside the simulated 4 to 16: nothing is extra"):
        cells(simulated_batches=(4, 16))
    with pytest.raises(ProgramError, match=r"context of 128 to 8192: expected 1 to 4096"):
        cells(contexts=(128, 8192))
    with pytest.raises(ProgramError, match=r"simulated batch of 1 to 32: expected 1 to 16"):
        cells(simulated_batches=(1, 32))
    with pytest.raises(ProgramError, match="no batch is given"):
        cells(batches=())


def test_tables_mark_what_is_interpolated() -> None:
    result = estimate_steps(CONFIG, slow, model="m", batches=(1, 2), contexts=(128, 256))
    lines = result.to_markdown().splitlines()
    assert lines[0] == "| batch \\ context | 128 | 256 |"
    assert lines[2].startswith("| 1 | 45.40 (")
    assert lines[2].split("|")[3].strip().startswith("~45.80 (")
    assert lines[3].split("|")[2].strip().startswith("~")
    described = result.to_json()
    assert "nothing is measured" in described["device"]
    assert [cell["origin"] for cell in described["cells"]] == ["simulated"] + ["interpolated"] * 3
    assert plot_estimate(result).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("positions", "contexts"), [(2048, [128, 256, 512, 1024, 2048]), (300, [128, 256, 300]), (1, [1])]
)
def test_contexts_that_are_not_given_go_as_far_as_the_model(positions: int, contexts: list[int]) -> None:
    short = dataclasses.replace(CONFIG, max_position_tokens=positions)
    result = estimate_steps(short, slow, model="short", batches=(1,))
    assert [cell.context_tokens for cell in result.cells] == contexts
    assert result.cells[-1].origin == "simulated"
    with pytest.raises(
        ProgramError, match=rf"expected 1 to {positions}, as the model's positions .*leave the others out"
    ):
        estimate_steps(short, slow, model="short", contexts=(positions, positions + 1))


def test_sizes_given_twice_are_estimated_once_and_batches_have_an_end() -> None:
    assert list(cells(batches=(1, 2, 1), contexts=(128, 128))) == [(1, 128), (2, 128)]
    result = estimate_steps(CONFIG, slow, model="qwen3-14b", batches=(1, 1), contexts=(128, 128))
    assert len(result.cells) == 1
    with pytest.raises(ProgramError, match="batch of 1 to 100000000000000000000: expected 1 to 65536"):
        cells(batches=(1, 10**20))
