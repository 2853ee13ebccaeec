"""The texts that ship: plain, long enough, apart from each other, and the beginning that releases are measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from quantize.errors import QuantizeError
from quantize.texts import calibration_text, evaluation_text, read_text


@pytest.mark.parametrize(
    ("text", "least", "most"), [(evaluation_text, 45_000, 60_000), (calibration_text, 160e3, 200e3)]
)
def test_a_text_is_plain_prose_one_paragraph_a_line(text: Callable[[], str], least: int, most: int) -> None:
    prose = text()
    assert prose.isascii()
    assert least < len(prose) < most
    paragraphs = prose.removesuffix("\n").split("\n\n")
    assert all("\n" not in paragraph and paragraph == paragraph.strip() != "" for paragraph in paragraphs)
    assert not any(mark in prose for mark in ("+++", "***", "  ", "`", "\t"))


def test_evaluation_and_calibration_share_no_paragraph() -> None:
    assert not {p for p in evaluation_text().split("\n\n") if len(p) > 60} & set(calibration_text().split("\n\n"))


def test_the_first_excerpts_are_those_that_releases_were_measured_on() -> None:
    start = evaluation_text()[:16_382].encode()
    assert hashlib.sha256(start).hexdigest() == "435317da063e3b6b9569b3ad2a258bbbc4a14f53daf61a6a41fe85f61e72fa74"


def test_a_text_of_ones_own_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("Ein Satz über Öl.", encoding="utf-8")
    assert read_text(tmp_path / "prose.txt") == "Ein Satz über Öl."
    (tmp_path / "latin.txt").write_bytes("über".encode("latin-1"))
    with pytest.raises(QuantizeError, match=r"latin\.txt: byte 0 is not UTF-8"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(QuantizeError, match=r"empty\.txt: found no text"):
        read_text(tmp_path / "empty.txt")
    with pytest.raises(QuantizeError, match=r"absent\.txt: found no such file"):
        read_text(tmp_path / "absent.txt")
