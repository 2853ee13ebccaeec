"""Where the calculator library is built, and what is asked of the machine at every run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import kernels.calculator
from kernels.calculator import LIBRARY_NAME, build_calculator
from kernels.errors import ToolchainError

BUILD_TAKES_NO_TIME = "a library that is there already"


def _library_below(root: Path) -> Path:
    library = root / "calculator" / kernels.calculator._toolchain_key() / LIBRARY_NAME
    library.parent.mkdir(parents=True)
    library.write_text(BUILD_TAKES_NO_TIME)
    return library


def test_a_missing_compiler_is_known_although_the_library_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _library_below(tmp_path)
    assert build_calculator(tmp_path) == library
    monkeypatch.setattr(kernels.calculator, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler on PATH; install one"):
        build_calculator(tmp_path)


def test_a_cache_folder_without_room_is_passed_over_for_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(kernels.calculator, "BUILD_BYTES", 1 << 60)
    with pytest.raises(ToolchainError, match=r"no folder for the calculator library .*set PYPTO_DEPLOY_CACHE"):
        build_calculator(tmp_path / "cache")
    (fallback,) = (tmp_path / "temporary").iterdir()
    library = fallback / "calculator" / kernels.calculator._toolchain_key() / LIBRARY_NAME
    library.write_text(BUILD_TAKES_NO_TIME)
    assert build_calculator(tmp_path / "cache") == library


def test_a_build_that_fills_the_disk_up_goes_on_in_the_next_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(kernels.calculator, "system_cmake", lambda: None)  # the quickest way to a failing build
    with pytest.raises(ToolchainError, match="no native cmake"):
        build_calculator(tmp_path / "cache")
    monkeypatch.setattr(kernels.calculator, "FULL_BYTES", 1 << 60)
    with pytest.raises(ToolchainError, match="no folder for the calculator library"):
        build_calculator(tmp_path / "cache")
    assert caplog.text.count("whose disk is full") == 2
