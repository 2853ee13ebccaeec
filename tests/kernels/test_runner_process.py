"""A full disk is named as such, before a request and after one that failed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

import kernels.runner_process
from kernels.errors import ProgramError, ToolchainError
from kernels.runner_process import run_request, runner_folder


def test_a_disk_without_room_is_refused_by_its_folder_before_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with runner_folder() as folder:
        assert folder.parent == tmp_path
    monkeypatch.setattr(kernels.runner_process, "MIN_FREE_BYTES", shutil.disk_usage(tmp_path).total + 1)
    with pytest.raises(ToolchainError, match=rf"the disk of {tmp_path} has .* MB free.*set TMPDIR"), runner_folder():
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_fails_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"kind": "check"}
    with pytest.raises(ProgramError, match="KeyError") as caught:
        run_request(tmp_path, request, 60)
    assert "the disk of" not in str(caught.value)
    monkeypatch.setattr(kernels.runner_process, "FULL_BYTES", 1 << 60)
    with pytest.raises(ProgramError, match=rf"the disk of {tmp_path} has .*KeyError"):
        run_request(tmp_path, request, 60)
