"""One writer at a time, whatever was left by a dead one, and nothing lost that is in place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quantize.errors import CheckpointError
from quantize.staging_folder import ResumableFolder, check_target, sweep_finished


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    folder = ResumableFolder(tmp_path / "out")
    (folder.path / "half").write_bytes(b"x")
    folder.journal_path.write_text("{}")
    folder.keep()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    again = ResumableFolder(tmp_path / "out")
    assert (again.path / "half").read_bytes() == b"x"
    assert again.allocated_bytes() > 0
    again.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["half"]


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = ResumableFolder(tmp_path / "out")
    with pytest.raises(CheckpointError, match="another process is writing it"):
        ResumableFolder(tmp_path / "out")
    other = ResumableFolder(tmp_path / "out2")
    first.discard()
    other.discard()
    ResumableFolder(tmp_path / "out").discard()
    assert list(tmp_path.iterdir()) == []


def test_of_many_writers_at_once_one_wins_each_time(tmp_path: Path) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait()
        for _ in range(20):
            try:
                folder = ResumableFolder(tmp_path / "out")
            except CheckpointError as error:
                outcomes.append(
                    "exists" if "exists" in str(error) else "busy" if "another" in str(error) else str(error)
                )
                continue
            if list(folder.path.iterdir()):
                outcomes.append("two writers in one folder")
            (folder.path / str(number)).write_bytes(b"")
            (folder.path / str(number)).unlink()
            folder.discard()
            outcomes.append("wrote")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"wrote", "busy"}
    assert "wrote" in outcomes
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_bytes(b"x")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be written"):
        ResumableFolder(tmp_path / "out")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["mine"]


def spent_folders(out: Path) -> None:
    """What writers killed right after the last rename leave beside `out`."""
    (out.parent / f".{out.name}.partial" / "scratch").mkdir(parents=True)
    (out.parent / f".{out.name}.partial" / "journal.jsonl").write_text("{}\n")
    (out.parent / f".{out.name}.search").mkdir()
    for name in ("key", "0123456789abcdef.json", "0123456789abcdef.new"):
        (out.parent / f".{out.name}.search" / name).write_text("{}")


def test_a_refusal_removes_what_a_finished_run_left(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    spent_folders(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        check_target(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("held", ["checkpoint/", "notes.txt", "candidate/"])
def test_what_may_still_be_wanted_stays(tmp_path: Path, held: str) -> None:
    spent_folders(tmp_path / "out")
    for folder in (tmp_path / ".out.partial", tmp_path / ".out.search"):
        (folder / held).mkdir() if held.endswith("/") else (folder / held).touch()
    sweep_finished(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", ".out.search"]


def test_a_living_writer_s_folder_stays(tmp_path: Path) -> None:
    folder = ResumableFolder(tmp_path / "out")
    folder.path.rmdir()
    sweep_finished(tmp_path / "out")
    assert (tmp_path / ".out.partial").is_dir()
    folder.discard()
    (tmp_path / ".out.search").symlink_to(tmp_path)
    sweep_finished(tmp_path / "out")
    assert (tmp_path / ".out.search").is_symlink()
