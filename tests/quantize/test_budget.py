"""Sizes as people write them, cores as the system grants them, and what fits into a memory bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantize.budget import SPARE_BYTES, WorkPlan, parse_bytes, plan_work, usable_cores
from quantize.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("600M", 600 * 10**6), ("2g", 2 * 10**9), ("1.5GiB", 3 * 2**29), (" 5 KB ", 5000), ("1Ti", 2**40)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "0", "0.5", "1e9", "5X", "600 MMB", "nan", "1G2"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(BudgetError, match="is no size"):
        parse_bytes(text)


def test_the_least_quota_of_the_control_groups_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 8
    group = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/"
    )
    folder = tmp_path / group.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text("250000 100000\n")
    assert usable_cores(tmp_path) == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1


def test_blocks_shrink_before_workers_go() -> None:
    def plan(spare_bytes: float, row_bytes: int = 10_000) -> WorkPlan:
        return plan_work(int(50e6 + SPARE_BYTES + spare_bytes), 4, 10**6, 2.0, row_bytes, 50 * 10**6)

    assert plan(8e6) == WorkPlan(4, 10**6)
    assert plan(4e6) == WorkPlan(4, 500_000)
    assert plan(80_000) == WorkPlan(4, 10_000)
    assert plan(79_000) == WorkPlan(3, 13_166)
    assert plan(20_000) == WorkPlan(1, 10_000)
    with pytest.raises(BudgetError, match="expected at least 75M"):
        plan(19_000)


def test_without_a_bound_a_block_holds_a_row_at_least() -> None:
    assert plan_work(None, 2, 10**6, 2.0, 100, 0) == WorkPlan(2, 10**6)
    assert plan_work(None, 2, 10**6, 2.0, 3 * 10**6, 0) == WorkPlan(2, 3 * 10**6)
    with pytest.raises(BudgetError, match="at least 1"):
        plan_work(None, 0, 1, 1.0, 1, 0)
