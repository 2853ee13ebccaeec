"""The texts that ship with the package: one to evaluate on, another one to calibrate with, and no work in both.

Activations seen during calibration must not be the ones that judge it, or a checkpoint looks better than it is.
`quantize/data/README.md` says what each text is and where it is from.
"""

from __future__ import annotations

from pathlib import Path

from quantize.errors import QuantizeError

DATA_FOLDER = Path(__file__).parent / "data"
EVALUATION_FILE = DATA_FOLDER / "evaluation.txt"
CALIBRATION_FILE = DATA_FOLDER / "calibration.txt"


def evaluation_text() -> str:
    """The public-domain English prose that checkpoints and releases are evaluated on, one paragraph a line."""
    return EVALUATION_FILE.read_text(encoding="utf-8")


def calibration_text() -> str:
    """The public-domain English that calibrated algorithms see when they are given no text, one paragraph a line."""
    return CALIBRATION_FILE.read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """The UTF-8 text in `path`. Raises QuantizeError for a file that is absent, empty, or not UTF-8."""
    if not path.is_file():
        raise QuantizeError(f"{path}: found no such file; expected a text file in UTF-8")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuantizeError(
            f"{path}: byte {error.start} is not UTF-8; expected a text file in UTF-8 (iconv -t UTF-8 converts it)"
        ) from error
    if not text.strip():
        raise QuantizeError(f"{path}: found no text in it; expected prose, a few thousand words or more")
    return text
