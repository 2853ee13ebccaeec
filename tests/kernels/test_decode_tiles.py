"""Tiles of the decode stages: they fit, they keep every core busy, and they copy no more than they must."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.catalog import BUILTIN_NAMES, builtin_config
from kernels.errors import ProgramError
from kernels.programs.decode_layer import spread_queries
from kernels.programs.decode_tiles import choose_stream_tile, one_wave_columns, tasks_per_core
from kernels.tiles import CUBE_CORES, CubeTile, check_cube_tile


@pytest.fixture(autouse=True)
def without_tuned_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The choice itself is tested, not what tuning found better."""
    (tmp_path / "none.json").write_text('{"tiles": []}')
    monkeypatch.setenv("PYPTO_DEPLOY_TILES", str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", BUILTIN_NAMES)
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_every_matmul_of_a_built_in_model_gets_a_tile_that_fits(name: str, element_bytes: int) -> None:
    config = builtin_config(name)
    wave = one_wave_columns(config.q_size, config.kv_size, config.kv_size)
    for k, n, columns in (
        (config.hidden_size, wave, wave),
        (config.q_size, config.hidden_size, None),
        (config.hidden_size, config.intermediate_size, None),
        (config.intermediate_size, config.hidden_size, None),
    ):
        tile = choose_stream_tile(k, n, columns, element_bytes)
        check_cube_tile(tile, element_bytes)
        assert columns is None or tile.n == columns
        assert tile.k_right <= k + tile.k_l0
        assert tile.k_left % tile.k_right == 0


def test_the_tiles_of_qwen3_14b_are_those_that_were_measured() -> None:
    assert choose_stream_tile(5120, 320, 320) == CubeTile(16, 128, 5120, 1024, 320)
    assert choose_stream_tile(5120, 5120) == CubeTile(16, 256, 5120, 1280, 224)
    assert choose_stream_tile(5120, 17408) == CubeTile(16, 256, 5120, 1280, 256)
    assert choose_stream_tile(17408, 5120) == CubeTile(16, 256, 3584, 1792, 224)


@pytest.mark.parametrize("k", [32, 64, 96, 576, 1536])
def test_a_short_reduction_stays_whole(k: int) -> None:
    tile = choose_stream_tile(k, 64)
    assert tile.k_left >= k
    assert tile.k_right >= k


def test_projections_share_a_wave_where_they_can() -> None:
    columns = one_wave_columns(5120, 1024, 1024)
    assert columns == 320
    assert sum(-(-width // columns) for width in (5120, 1024, 1024)) == CUBE_CORES
    assert one_wave_columns(8192, 1024, 1024) == 256, "too wide for one wave"
    assert one_wave_columns(128, 64, 64) == 32


def test_merged_tasks_are_one_wave() -> None:
    merged = tasks_per_core(256, 17408, 17408)
    assert merged == 6
    assert -(-2 * 68 // merged) <= CUBE_CORES
    assert tasks_per_core(32, 96, 96) == 1


def test_columns_that_fit_no_memory_are_refused() -> None:
    with pytest.raises(ProgramError, match="no tile of 4096 columns of 1 bytes each fits; use at most 256"):
        choose_stream_tile(5120, 4096, 4096)


def test_spread_queries_meet_their_own_keys_only() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 6, 4, generator=generator)
    keys = torch.randn(5, 3 * 4, generator=generator)
    spread = spread_queries(query, kv_heads=3)
    assert spread.shape == (12, 12)
    assert int((spread != 0).sum()) == query.numel()
    by_head = torch.einsum("rhd,thd->rht", query, keys.view(5, 3, 4).repeat_interleave(2, dim=1))
    assert torch.allclose(spread @ keys.t(), by_head.reshape(12, 5), atol=1e-6)
