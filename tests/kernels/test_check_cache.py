"""What stands in the place of an entry and is none, and what killed writers leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.check_cache import RESULT_FILE, SWEEP_AGE_S, CheckCache
from kernels.report import CheckResult

RESULT = CheckResult(kind="small", key="k" * 64, shape={}, ok=True, outputs={"out": 0.0})


def _file(entry: Path) -> None:
    entry.write_text("")


def _link(entry: Path) -> None:
    kept = entry.with_name("elsewhere")
    CheckCache(kept).put(RESULT)
    entry.symlink_to(kept / RESULT.key)


def _dangling(entry: Path) -> None:
    entry.symlink_to("nowhere")


def _empty(entry: Path) -> None:
    entry.mkdir()


def _nested(entry: Path) -> None:
    entry.mkdir()
    (entry / RESULT_FILE).write_text("[" * 200_000)


def _not_text(entry: Path) -> None:
    entry.mkdir()
    (entry / RESULT_FILE).write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("spoil", [_file, _link, _dangling, _empty, _nested, _not_text])
def test_what_is_no_entry_is_removed_and_made_again(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, entry = CheckCache(tmp_path), tmp_path / RESULT.key
    spoil(entry)
    assert cache.get(RESULT.key) is None
    assert "is damaged" in caplog.text
    assert not entry.exists()
    spoil(entry)
    cache.put(RESULT)
    kept = cache.get(RESULT.key)
    assert kept is not None
    assert (kept.cached, kept.outputs) == (True, RESULT.outputs)


def test_what_a_killed_writer_left_is_swept_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    old, new = tmp_path / ".new-old", tmp_path / ".new-now"
    for folder in (old, new):
        folder.mkdir()
        (folder / RESULT_FILE).write_text("{}")
    past = old.stat().st_mtime - SWEEP_AGE_S - 1
    os.utime(old, (past, past))
    CheckCache(tmp_path).put(RESULT)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-now", RESULT.key]
