"""Every tile rule by name: what it refuses, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.errors import ProgramError
from kernels.tile_rules import (
    RULES,
    CubeTile,
    check_cube_tile,
    check_dequant_tile,
    check_reduction_tile,
    check_vector_tile,
)

GOOD = CubeTile(m=16, k_l0=256, k_left=5120, k_right=1280, n=256)

BROKEN: list[tuple[str, Callable[[], None]]] = [
    ("cube-side", lambda: check_cube_tile(CubeTile(16, 16, 16, 16, 8), 1)),
    ("cube-fractal", lambda: check_cube_tile(CubeTile(16, 64, 64, 64, 48), 1)),
    ("cube-depths", lambda: check_cube_tile(CubeTile(16, 256, 1088, 1088, 256), 1)),
    ("cube-nesting", lambda: check_cube_tile(CubeTile(16, 256, 1024, 768, 256), 1)),
    ("cube-l0a", lambda: check_cube_tile(CubeTile(256, 512, 512, 512, 64), 1)),
    ("cube-l0b", lambda: check_cube_tile(GOOD, 2)),
    ("cube-l0c", lambda: check_cube_tile(CubeTile(128, 128, 1024, 128, 512), 1)),
    ("cube-l1", lambda: check_cube_tile(CubeTile(16, 256, 5120, 2560, 256), 1)),
    ("cube-accumulator", lambda: check_cube_tile(GOOD, 1, "FP32")),
    ("vector-unit", lambda: check_vector_tile(1, 12, 4)),
    ("vector-ub", lambda: check_vector_tile(16, 2560, 8)),
    ("vector-reduction", lambda: check_reduction_tile(1280, 5120)),
    ("dequant-columns", lambda: check_dequant_tile(256, CubeTile(16, 256, 5120, 1280, 224), 5120)),
]


@pytest.mark.parametrize(("rule", "check"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_a_broken_rule_is_named(rule: str, check: Callable[[], None]) -> None:
    with pytest.raises(ProgramError, match=f"{rule}: "):
        check()


def test_every_rule_is_tested() -> None:
    assert [rule for rule, _ in BROKEN] == list(RULES)


def test_what_was_measured_to_work_is_accepted() -> None:
    check_cube_tile(GOOD, 1, "INT32")
    check_cube_tile(CubeTile(16, 128, 5120, 1024, 320), 1)
    check_cube_tile(CubeTile(16, 256, 4096, 1024, 224), 1)
    check_vector_tile(1, 17408, 10)
    check_vector_tile(16, 1024, 8)
    check_vector_tile(1, 32, 4, element_bytes=1)
    check_reduction_tile(17408, 17408)
    check_dequant_tile(448, CubeTile(16, 256, 4096, 1024, 224), 5120)
    check_dequant_tile(96, CubeTile(16, 96, 96, 96, 64), 96)


def test_all_broken_rules_are_named_at_once() -> None:
    with pytest.raises(ProgramError) as caught:
        check_cube_tile(CubeTile(16, 512, 5120, 2560, 300), 2, "INT32")
    assert "cube-l0b" in str(caught.value)
    assert "cube-l1" in str(caught.value)
    assert "cube-accumulator: the result is INT32, expected FP32" in str(caught.value)
