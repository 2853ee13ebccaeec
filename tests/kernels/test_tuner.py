"""The tile search: candidates obey the rules, the budget holds, only gains are kept, and the table is read back."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.calculator import default_cache_dir
from kernels.catalog import builtin_config
from kernels.check_cache import CheckCache
from kernels.errors import ContractError, ProgramError
from kernels.head_tuner import head_tiles, tune_lm_head
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer
from kernels.programs.decode_tiles import choose_stream_tile
from kernels.programs.linear import LinearW8A8, LinearW8A8Spec
from kernels.programs.lm_head import LmHeadGreedy
from kernels.step_estimate import estimate_steps
from kernels.tile_rules import CubeTile, check_cube_tile
from kernels.tiles import choose_cube_tile
from kernels.toolchain import Selection, check_key, run_check, validate_all
from kernels.tuned_tiles import (
    SHIPPED_TABLE,
    TABLE_VARIABLE,
    TunedTile,
    check_target,
    merge_table,
    read_table,
    tuned_tile,
)
from kernels.tuner import FINALISTS, TableNotWrittenError, TuneResult, candidate_tiles, tune_decode_layer
from kernels.verdict import ALL_PASSES, TENSOR_GRAPH
from tests.kernels.programs_support import full_check

CONFIG = builtin_config("qwen3-0.6b")
TILE = CubeTile(16, 128, 512, 512, 96)


def prefers(columns: int, layer_us: Callable[[], float]) -> Callable[[Program], float]:
    """A cost model on which tiles of `columns` are fastest."""

    def simulate(program: Program) -> float:
        if isinstance(program, DecodeLayer):
            return layer_us()
        assert isinstance(program, LinearW8A8)
        return 1000.0 + abs(program.spec.tile_n - columns)

    return simulate


def test_candidates_obey_the_rules_and_begin_with_what_is_reckoned_fast() -> None:
    tiles = candidate_tiles(5120, 5120, 16)
    assert len(tiles) == len(set(tiles)) > 100
    for tile in tiles:
        check_cube_tile(tile, 1)
    assert (tiles[0].k_left, tiles[0].n) == (5120, 224)
    assert candidate_tiles(64, 96, 16)


def test_gains_go_into_the_table_and_from_there_to_the_choice_of_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(500, -1)
    table = tmp_path / "tiles.json"
    result = tune_decode_layer(CONFIG, prefers(160, lambda: float(next(times))), table, budget_s=1e9)
    assert (result.before_us, result.after_us, result.dropped) == (500, 497, ())
    assert {(entry.k, entry.n) for entry in result.kept} == {(2048, 1024), (1024, 3072), (3072, 1024)}
    assert all(entry.tile.n == 160 and entry.simulated_us < entry.before_us for entry in result.kept)
    assert choose_cube_tile(1024, 3072, 1).n != 160
    monkeypatch.setenv(TABLE_VARIABLE, str(table))
    assert choose_cube_tile(1024, 3072, 1).n == choose_stream_tile(1024, 3072).n == 160
    assert choose_stream_tile(1024, 3072, columns=128).n == 128
    assert choose_cube_tile(1024, 3072, 1, rows=64).n != 160
    assert choose_cube_tile(1024, 3072, 1, columns=96).n == 96


def test_nothing_is_kept_when_the_whole_layer_gains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tiles.json"
    result = tune_decode_layer(CONFIG, prefers(160, lambda: 500.0), table, budget_s=1e9)
    assert (result.kept, len(result.dropped), result.after_us) == ((), 3 * FINALISTS, 500)
    assert sorted(read_table(table), key=lambda entry: entry.key) == sorted(
        result.confirmed, key=lambda entry: entry.key
    )
    table.write_text('{"tiles": []}')
    monkeypatch.setenv(TABLE_VARIABLE, str(table))
    for entry in result.confirmed:
        assert entry.tile == choose_stream_tile(entry.k, entry.n)
        assert entry.tried > 10


def test_the_budget_ends_the_search(tmp_path: Path) -> None:
    now = itertools.count(0, 1)
    result = tune_decode_layer(
        CONFIG, prefers(160, lambda: 1.0), tmp_path / "t", budget_s=30, clock=lambda: float(next(now))
    )
    assert 3 <= result.tried < 40


def test_a_matmul_at_its_bandwidth_is_not_searched(tmp_path: Path) -> None:
    result = tune_decode_layer(CONFIG, lambda program: 0.1, tmp_path / "t", budget_s=1e9)
    assert (result.tried, result.kept, result.dropped, len(result.confirmed)) == (3, (), (), 3)


def test_windows_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="1 to 16 rows, not 17"):
        tune_decode_layer(CONFIG, lambda program: 1.0, tmp_path / "t", rows=17)


def prefers_depth(depth: int, gain_us: float) -> Callable[[Program], float]:
    """A cost model on which LM heads whose tile is `depth` deep in L0 gain."""

    def simulate(program: Program) -> float:
        assert isinstance(program, LmHeadGreedy)
        spec = program.spec
        tile = choose_cube_tile(spec.hidden_size, spec.chunk_tokens, 2, rows=16, columns=spec.block_tokens)
        return 100.0 * spec.chunks - (gain_us if tile.k_l0 == depth else 0.0)

    return simulate


def test_the_tile_of_the_lm_head_is_searched_in_the_head_and_read_where_it_is_as_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tiles.json"
    result = tune_lm_head(CONFIG, prefers_depth(64, 7.0), table)
    chunks = -(-CONFIG.vocab_size // 6144)
    (kept,) = result.kept
    assert (result.before_us, result.after_us) == (100.0 * chunks, 100.0 * chunks - 7.0)
    assert (kept.key, kept.tile.k_l0, kept.tile.n) == ((1024, 6144, 16, 2), 64, 256)
    monkeypatch.setenv(TABLE_VARIABLE, str(table))
    assert choose_cube_tile(1024, 6144, 2, rows=16, columns=256) == kept.tile
    assert choose_cube_tile(1024, 6144, 2, rows=16, columns=128).n == 128
    assert choose_cube_tile(1024, 6144, 2, rows=32, columns=256).k_l0 == 128


def test_a_head_that_gains_nothing_keeps_its_tile_and_the_budget_ends_its_search(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    in_use = choose_cube_tile(1024, 6144, 2, rows=16, columns=256)
    assert tune_lm_head(CONFIG, prefers_depth(64, 0.0), table).kept == ()
    assert [entry.tile for entry in read_table(table)] == [in_use]
    now = itertools.count(0, 1)
    result = tune_lm_head(CONFIG, prefers_depth(8, 0.0), table, budget_s=5, clock=lambda: float(next(now)))
    assert 1 < result.tried <= 6
    assert [entry.tried for entry in read_table(table)] == [result.tried]
    tiles = head_tiles(5120, 256)
    assert len(tiles) == len(set(tiles)) > 10
    for tile in tiles:
        check_cube_tile(tile, 2)


def test_the_table_comes_back_as_it_was_and_new_entries_replace_old_ones(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    entry = TunedTile(512, 512, 16, 1, TILE, 30.0, 20.0, 9)
    other = dataclasses.replace(entry, n=1024)
    merge_table(table, [entry, other])
    merge_table(table, [dataclasses.replace(entry, simulated_us=10.0)])
    assert read_table(table) == [dataclasses.replace(entry, simulated_us=10.0), other]


GOOD = {
    "k": 512,
    "n": 512,
    "rows": 16,
    "element_bytes": 1,
    "tile": [16, 128, 512, 512, 96],
    "before_us": 30,
    "simulated_us": 20.0,
    "tried": 9,
}
BAD_TABLES = [
    b"",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b"[]",
    b'{"tiles": 3}',
    b'{"tiles": [5]}',
    b'{"tiles": [{}]}',
    b'{"tiles": [], "tiles": []}',
    json.dumps({"tiles": [GOOD, {**GOOD, "tile": [16, 64, 512, 512, 96]}]}).encode(),
    *(
        json.dumps({"tiles": [{**GOOD, **changed}]}).encode()
        for changed in (
            {"k": "512"},
            {"k": [1]},
            {"k": -1},
            {"n": True},
            {"rows": 16.0},
            {"rows": 32},
            {"element_bytes": 7},
            {"tried": 0},
            {"before_us": "NaN"},
            {"before_us": float("nan")},
            {"simulated_us": -1},
            {"tile": [32, 128, 512, 512, 96]},
            {"tile": [16, 128, 512, 512]},
            {"tile": [16, 128, 512, 512, 2048]},
            {"more": 1},
        )
    ),
]


def test_a_table_behind_a_link_is_written_where_it_is_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    table = tmp_path / "tiles.json"
    table.symlink_to(tmp_path / "elsewhere" / "shared.json")
    (tmp_path / "elsewhere" / ".shared.json.new").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("untouched")
    merge_table(table, [TunedTile(512, 512, 16, 1, TILE, 30.0, 20.0, 9)])
    assert table.is_symlink()
    assert len(read_table(tmp_path / "elsewhere" / "shared.json")) == 1
    assert (tmp_path / "victim").read_text() == "untouched"


def test_a_model_beyond_the_contract_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    huge = dataclasses.replace(CONFIG, vocab_size=2**39)

    def simulate(program: Program) -> float:
        raise AssertionError("simulated")

    with pytest.raises(ContractError, match="vocab_size is 549755813888"):
        tune_decode_layer(huge, simulate, tmp_path / "t")
    with pytest.raises(ContractError, match="vocab_size is 549755813888"):
        tune_lm_head(huge, simulate, tmp_path / "t")
    with pytest.raises(ContractError, match="vocab_size is 549755813888"):
        estimate_steps(huge, simulate, model="huge")


@pytest.mark.parametrize("raw", BAD_TABLES, ids=lambda raw: raw[-60:].decode(errors="replace"))
def test_a_table_that_cannot_be_used_is_refused_by_path(raw: bytes, tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    table.write_bytes(json.dumps({"tiles": [GOOD]}).encode())
    (entry,) = read_table(table)
    table.write_bytes(raw)
    for use in (lambda: read_table(table), lambda: check_target(table), lambda: merge_table(table, [entry])):
        with pytest.raises(ProgramError, match=r"tiles.json is no table of tiles .* tune again"):
            use()
    assert table.read_bytes() == raw


def test_a_named_table_that_is_absent_or_no_file_is_refused_and_may_be_made_by_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tiles.json"
    monkeypatch.setenv(TABLE_VARIABLE, str(table))
    with pytest.raises(ProgramError, match=r"tiles.json cannot be read .*name another in PYPTO_DEPLOY_TILES"):
        tuned_tile(512, 512, 16, 1)
    with pytest.raises(ProgramError, match=r"tiles.json cannot be read"):
        validate_all([Selection(CONFIG)])
    tune_decode_layer(CONFIG, lambda program: 0.1, table)
    assert tuned_tile(2048, 1024, 16, 1) is not None
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path))
    with pytest.raises(ProgramError, match="is no file"):
        tuned_tile(512, 512, 16, 1)


@pytest.mark.parametrize("search", [tune_decode_layer, tune_lm_head])
def test_a_table_that_cannot_be_written_is_known_before_the_search(
    search: Callable[..., TuneResult], tmp_path: Path
) -> None:
    def simulate(program: Program) -> float:
        raise AssertionError(program)

    (tmp_path / "file").write_text("")
    for table, words in (
        (tmp_path / "file", "no table of tiles"),
        (tmp_path / "file" / "t", "its folder does not exist"),
        (tmp_path, "is no file"),
        (Path("/proc/tiles.json"), "cannot be written"),
    ):
        with pytest.raises(ProgramError, match=words):
            search(CONFIG, simulate, table)


@pytest.mark.parametrize("search", [tune_decode_layer, tune_lm_head])
def test_a_table_that_breaks_during_the_search_does_not_lose_what_was_found(
    search: Callable[..., TuneResult], tmp_path: Path
) -> None:
    table = tmp_path / "folder" / "tiles.json"
    table.parent.mkdir()

    def simulate(program: Program) -> float:
        if table.parent.exists():
            table.parent.rmdir()
        return 0.1

    with pytest.raises(TableNotWrittenError, match=r"tiles.json: not written") as caught:
        search(CONFIG, simulate, table)
    assert len(caught.value.result.confirmed) >= 1
    assert not table.exists()


def test_the_shipped_table_can_be_read_and_a_changed_table_is_a_new_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in read_table(SHIPPED_TABLE):
        assert entry.simulated_us <= entry.before_us
        assert entry.tried >= 1
    check = full_check(LinearW8A8(LinearW8A8Spec.of(512, 512, 16, TILE)))
    before = check_key(check)
    table = tmp_path / "tiles.json"
    monkeypatch.setenv(TABLE_VARIABLE, str(table))
    merge_table(table, [TunedTile(512, 512, 16, 1, TILE, 30.0, 20.0, 9)])
    assert tuned_tile(512, 512, 16, 1) == TILE
    assert check_key(check) != before


def test_the_program_that_tiles_are_tuned_on_verifies_through_all_passes(tmp_path: Path) -> None:
    program = LinearW8A8(LinearW8A8Spec.of(96, 160, 3, CubeTile(16, 32, 96, 32, 64)))
    result = run_check(full_check(program), CheckCache(tmp_path), default_cache_dir(), timeout_s=300)
    assert result.error == ""
    assert result.passes == (TENSOR_GRAPH, *ALL_PASSES)


@pytest.mark.parametrize("mistake", ["swapped scales", "a shifted column", "rows in another order"])
def test_the_golden_of_the_linear_sees_mistakes(mistake: str) -> None:
    program = LinearW8A8(LinearW8A8Spec.of(96, 160, 3, TILE))
    tensors = program.sample_inputs(3)
    want = program.golden(tensors)["out"]
    match mistake:
        case "swapped scales":
            tensors["weight_scale"] = tensors["weight_scale"].flip(1)
        case "a shifted column":
            tensors["weight"] = tensors["weight"].roll(1, 1)
        case "rows in another order":
            tensors["x"] = tensors["x"].flip(0)
    assert not program.golden(tensors)["out"].equal(want)
