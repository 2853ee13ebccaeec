"""A journal gives back whole lines of the same work, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantize.journal import Entry, Journal

FIRST, SECOND = Entry("ab" * 32, {"noise": 0.1}), Entry("cd" * 32)


def fill(path: Path) -> bytes:
    journal = Journal(path, "key")
    journal.add("one", FIRST)
    journal.add("two", SECOND)
    journal.close()
    return path.read_bytes()


def reopened(path: Path, key: str = "key") -> dict[str, Entry]:
    journal = Journal(path, key)
    journal.close()
    return journal.entries


def test_entries_come_back(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    assert reopened(tmp_path / "j") == {"one": FIRST, "two": SECOND}


def test_another_key_gives_nothing_and_starts_anew(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    assert reopened(tmp_path / "j", "other") == {}
    assert reopened(tmp_path / "j") == {}


def test_a_journal_cut_anywhere_gives_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    content = fill(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        journal = Journal(path, "key")
        whole = content[:length].count(b"\n")
        assert list(journal.entries) == ["one", "two"][: max(0, whole - 1)]
        journal.add("three", FIRST)
        journal.close()
        assert list(reopened(path)) == [*["one", "two"][: max(0, whole - 1)], "three"]


@pytest.mark.parametrize("line", [b"\0\0\0\n", b"[1]\n", b'{"tensor": 1}\n', b"\xff\xfe\n", b"\n"])
def test_a_line_that_is_none_ends_it(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "j"
    content = fill(path)
    path.write_bytes(content + line + content.splitlines(keepends=True)[1].replace(b"one", b"six"))
    assert list(reopened(path)) == ["one", "two"]
