"""The folder of reports: known to be writable before the work, and gone when nothing was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.output import FailedError
from flows.cli.report_folder import report_folder, writing_reports
from flows.settings import UsageError


def test_a_new_or_empty_folder_is_taken_and_kept_with_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "new" / "below"):
        with report_folder(out):
            (out / "report.md").write_text("")
        assert [path.name for path in out.iterdir()] == ["report.md"]
        with pytest.raises(UsageError, match="exists; expected a path to create"), report_folder(out):
            raise AssertionError


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_folder_that_got_no_report_is_removed_so_that_the_command_can_be_repeated(
    stop: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        for out in (tmp_path / "empty", tmp_path / "new" / "below"):
            with pytest.raises(stop), report_folder(out):
                raise stop
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out, words in (
        (tmp_path / "file" / "below", r"cannot be made \(Not a directory\)"),
        (tmp_path / "file", "exists; expected a path to create"),
        (Path("/proc/none"), "cannot be made"),
    ):
        with pytest.raises(UsageError, match=words), report_folder(out):
            raise AssertionError
    assert (tmp_path / "file").read_text() == "kept"


def test_a_report_that_cannot_be_written_fails_after_the_answer(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"not all reports were written .*No such file"), writing_reports(tmp_path):
        (tmp_path / "none" / "report.md").write_text("")
