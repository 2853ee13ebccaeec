from __future__ import annotations

import pytest

from kernels.errors import ProgramError
from kernels.tiles import CubeTile, check_cube_tile, check_vector_tile, choose_cube_tile, row_columns

GOOD = CubeTile(m=16, k_l0=256, k_left=5120, k_right=1280, n=256)


def test_the_best_measured_tile_is_accepted() -> None:
    check_cube_tile(GOOD, element_bytes=1)


@pytest.mark.parametrize(
    ("tile", "element_bytes", "reason"),
    [
        (CubeTile(16, 256, 1088, 1088, 256), 1, "not a multiple of k_l0=256"),
        (CubeTile(16, 256, 1024, 768, 256), 1, "do not divide one another"),
        (CubeTile(16, 512, 5120, 512, 256), 1, "L0B needs 131072 bytes and has 65536"),
        (CubeTile(16, 256, 5120, 2560, 256), 1, "L1 needs"),
        (GOOD, 2, "L0B needs"),
        (CubeTile(128, 128, 1024, 128, 512), 1, "L0C needs 262144 bytes and has 131072"),
        (CubeTile(16, 16, 16, 16, 8), 1, "at least 16"),
        (CubeTile(16, 64, 64, 64, 48), 1, "cube-fractal: n=48"),
        (CubeTile(16, 17, 17, 17, 32), 2, "cube-fractal: k_l0=17"),
    ],
)
def test_a_tile_that_cannot_be_laid_out_is_refused_by_name(tile: CubeTile, element_bytes: int, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        check_cube_tile(tile, element_bytes)


def test_a_vector_tile_too_large_for_the_unified_buffer_is_refused() -> None:
    check_vector_tile(1, 17408, 10)
    with pytest.raises(ProgramError, match="unified buffer has 196608"):
        check_vector_tile(16, 2560, 8)


@pytest.mark.parametrize("element_bytes", [1, 2])
def test_chosen_tiles_fit_for_every_width(element_bytes: int) -> None:
    widths = [32, 64, 96, 192, 576, 1024, 1536, 2560, 3072, 5120, 8960, 17408, 29568]
    for k in widths:
        for n in [*widths, 151936]:
            for rows in (1, 16, 64):
                check_cube_tile(choose_cube_tile(k, n, element_bytes, rows), element_bytes)


def test_a_linear_is_spread_over_the_cores_in_one_wave_where_it_can_be() -> None:
    # None of them is in the table of tuned tiles.
    for k, n in ((4096, 5120), (5120, 1024), (17408, 2560), (608, 1536)):
        tasks = -(-n // choose_cube_tile(k, n, 1).n)
        assert 16 <= tasks <= 24


@pytest.mark.parametrize(
    ("width", "columns"), [(576, 576), (17408, 17408), (24576, 24576), (25600, 12800), (49184, 16416)]
)
def test_a_row_is_one_tile_where_it_fits_and_few_equal_ones_elsewhere(width: int, columns: int) -> None:
    assert row_columns(width) == columns
    check_vector_tile(1, columns, 8)
