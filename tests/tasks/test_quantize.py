"""The quantize step's key covers the calibration text itself, not where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantize.checkpoint import payload_digest
from quantize.errors import CalibrationError
from tasks.quantize import quantize_key, quantize_source
from tasks.source import Source, identify
from tests.quantize.calibrated.support import recipe


@pytest.fixture
def origin(tiny_qwen3: Path, tmp_path: Path) -> Source:
    return identify(tiny_qwen3, tmp_path / "work")


def test_the_key_follows_the_text(origin: Source, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one")
    chosen, plain = (recipe(name, calibration={"data": str(text)}) for name in ("gptq", "rtn"))
    keys, plain_keys = [quantize_key(origin, chosen)], [quantize_key(origin, plain)]
    text.write_text("two")
    keys.append(quantize_key(origin, chosen))
    plain_keys.append(quantize_key(origin, plain))
    text.write_text("one")
    keys.append(quantize_key(origin, chosen))
    assert keys[0] == keys[2] != keys[1]
    assert plain_keys[0] == plain_keys[1]
    text.unlink()
    with pytest.raises(CalibrationError, match="no such file"):
        quantize_key(origin, chosen)


def test_the_step_calibrates(origin: Source, tiny_qwen3: Path, tmp_path: Path) -> None:
    chosen = recipe("gptq")
    record = quantize_source(tmp_path, quantize_key(origin, chosen), tiny_qwen3, chosen)
    assert record.facts["digest"] == payload_digest(record.out)
    assert [layer["layer"] for layer in record.facts["layers"]] == [0, 1]
