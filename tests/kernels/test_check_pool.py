"""Checks side by side: the same reports as one after the other, bounded memory, deadlines, and an end for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kernels.calculator import build_calculator, default_cache_dir
from kernels.catalog import Check, builtin_config, programs_for
from kernels.check_cache import CheckCache
from kernels.check_pool import CheckPool, available_bytes, checked_workers, total_bytes
from kernels.errors import ProgramError, ToolchainError
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.toolchain import Selection, argument_bytes, expected_peak_bytes, run_check, validate, validate_all
from tests.kernels.programs_support import full_check, head_program, sabotage
from tests.serving.golden_executor import CONFIG

ROOT = Path(__file__).parents[2]


def linked_cache(folder: Path) -> Path:
    """An empty cache with the user's calculator library, which takes half a minute to build."""
    build_calculator()
    folder.mkdir()
    (folder / "calculator").symlink_to(default_cache_dir() / "calculator")
    return folder


def running(mark: str) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if mark in line]


def sleep_in_runners(monkeypatch: pytest.MonkeyPatch, folder: Path, mark: str) -> None:
    """Make every runner start a child that sleeps, and wait for it; other Python processes go on."""
    code = (
        "import subprocess, sys\n"
        "if 'kernels.program_runner' in sys.orig_argv:\n"
        f"    subprocess.run(['/bin/sh', '-c', 'sleep 120; : {mark}'])\n"
    )
    sabotage(monkeypatch, folder, code)


def test_reports_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    selections = [Selection(CONFIG, names=("greedy_sample", "embedding_gather"), kinds=("small",))]
    found: list[Any] = []
    for workers in (1, 2):
        cache = linked_cache(tmp_path / f"cache-{workers}")
        (reports,) = validate_all(selections, cache_dir=cache, workers=workers)
        described = [report.to_json() for report in reports]
        for each in described:
            for entry in (each, *each["checks"]):
                assert entry.pop("seconds") > 0
                entry.pop("peak_rss_bytes", None)
        found.append(described)
    assert found[0] == found[1]
    assert [(each["name"], each["status"]) for each in found[0]] == [
        ("greedy_sample", "READY"),
        ("embedding_gather", "READY"),
    ]


def test_every_check_has_a_deadline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_calculator()
    sleep_in_runners(monkeypatch, tmp_path / "site", "sleeping-for-deadlines")
    pool, cache = CheckPool(1), CheckCache(tmp_path / "cache")
    checks = [full_check(head_program(batch_rows=rows)) for rows in (1, 2)]
    started = time.monotonic()
    results = pool.run([lambda each=each: run_check(each, cache, default_cache_dir(), 1.5, pool) for each in checks])
    assert 3.0 <= time.monotonic() - started < 30.0
    assert ["did not end within 2 s" in result.error for result in results] == [True, True]
    assert running("sleeping-for-deadlines") == []


def test_an_error_ends_what_runs_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_calculator()
    sleep_in_runners(monkeypatch, tmp_path / "site", "sleeping-beside-an-error")
    pool, cache = CheckPool(2), CheckCache(tmp_path / "cache")

    def broken() -> Any:
        while not running("sleeping-beside-an-error"):
            time.sleep(0.05)
        raise ToolchainError("the toolchain is gone")

    def check() -> Any:
        return run_check(full_check(head_program()), cache, default_cache_dir(), 100.0, pool)

    started = time.monotonic()
    with pytest.raises(ToolchainError, match="the toolchain is gone"):
        pool.run([check, broken, check])
    assert time.monotonic() - started < 30.0
    assert running("sleeping-beside-an-error") == []
    assert list((tmp_path / "cache").glob("[!.]*")) == []


def test_an_interrupt_ends_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_in_runners(monkeypatch, tmp_path / "site", "sleeping-for-the-interrupt")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from kernels.toolchain import Selection, validate_all\n"
        "from tests.serving.golden_executor import CONFIG\n"
        "validate_all([Selection(CONFIG, kinds=('small',))], cache_dir=Path(sys.argv[1]), workers=2)\n"
    )
    command = [sys.executable, "-c", code, str(linked_cache(tmp_path / "cache"))]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while len(running("sleep 120; : sleeping-for-the-interrupt")) < 2:
        assert time.monotonic() < deadline, "no two checks are running"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, complained = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in complained
    assert running("sleeping-for-the-interrupt") == []
    assert list(temporary.iterdir()) == []


def test_checks_run_together_only_where_their_memory_fits() -> None:
    pool, together, most = CheckPool(4, memory_bytes=100), threading.Semaphore(0), []
    lock, held = threading.Lock(), []

    def work(peak_bytes: int) -> int:
        with pool.holding(peak_bytes):
            with lock:
                held.append(peak_bytes)
                most.append(list(held))
            together.acquire(timeout=0.05)
            with lock:
                held.remove(peak_bytes)
        return peak_bytes

    sizes = [40, 50, 1000, 60, 30, 1000, 10]
    assert pool.run([lambda size=size: work(size) for size in sizes]) == sizes
    assert all(sum(sizes) <= 100 or len(sizes) == 1 for sizes in most)
    assert any(len(sizes) > 1 for sizes in most)


def test_large_checks_are_reckoned_large() -> None:
    checks = {check.kind: check for check in programs_for(builtin_config("qwen3-14b"))[0].checks}
    peaks = {kind: expected_peak_bytes(check) for kind, check in checks.items()}
    assert peaks["small"] < 700 * 10**6
    assert 1.4e9 < peaks["simulated"] < 4e9  # 2.1 GB were seen
    assert peaks["own width"] > 4.3e9  # as much was seen
    assert 0 < available_bytes() < 1 << 50


def test_the_memory_that_is_free_is_at_most_what_the_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 600_000


def test_a_check_that_the_machine_cannot_hold_fails_without_allocating_anything(tmp_path: Path) -> None:
    head = LmHeadGreedy(LmHeadSpec(16384, 1 << 24, 1 << 24, 1e-6, 16, 6144))
    assert argument_bytes(head) > 1 << 39
    check = Check("simulated", head, None)
    result = run_check(check, CheckCache(tmp_path), tmp_path, timeout_s=1, pool=CheckPool(1))
    assert not result.ok
    needed, total = 2 * argument_bytes(head) / 1e9, total_bytes() / 1e9
    assert f"needs {needed:.1f} GB for its arguments alone, and this machine has {total:.1f} GB" in result.error


def test_sizes_are_reckoned_without_allocating_as_they_would_be(tmp_path: Path) -> None:
    for case in programs_for(builtin_config("smollm2-135m")):
        program = case.checks[0].program
        assert argument_bytes(program) == sum(tensor.nbytes for tensor in program.shape_inputs().values())
    (tmp_path / "memory.max").write_text("1000000\n")
    assert total_bytes(tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path) >= available_bytes()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"timeout_s": 0}, "timeout of 0 s"),
        ({"timeout_s": -5}, "timeout of -5 s"),
        ({"timeout_s": float("nan")}, "timeout of nan s"),
        ({"kinds": ("nope",)}, "found nope, expected some of small, own width, simulated"),
        ({"kinds": ()}, "found none, expected some of"),
        ({"names": []}, "no program is named"),
    ],
)
def test_selections_that_mean_nothing_are_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=words):
        validate(builtin_config("smollm2-135m"), cache_dir=tmp_path, **changed)
    assert list(tmp_path.iterdir()) == []


def test_no_workers_are_refused() -> None:
    assert checked_workers(None, 3) == 3
    with pytest.raises(ToolchainError, match="0 workers: expected at least 1"):
        checked_workers(0, 3)


def test_a_key_is_computed_without_importing_kernels() -> None:
    code = (
        "import sys; from kernels.toolchain import check_key\n"
        "from tests.kernels.programs_support import full_check, layer_program\n"
        "check_key(full_check(layer_program()))\n"
        "sys.exit('pypto' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
