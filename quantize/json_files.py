"""Reading JSON that nobody vouches for: bounded in size and structure, and strict where Python's parser is lenient.

Python takes `NaN`, numbers beyond the range of floats, and the last of two equal keys; other readers do not, so files
with them are refused rather than read as one reader in several does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from quantize.errors import CheckpointError

MAX_JSON_BYTES = 4 * 2**20
"""Longest JSON file read unless a caller knows of longer ones; a real `config.json` has some kilobytes."""
MAX_CONTAINERS = 10**6
"""Most arrays and objects in one text: each costs some hundred bytes of memory for two bytes of file."""


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is beyond the range of floats")
    return number


def parse_json(raw: bytes) -> Any:
    """Parse JSON in UTF-8; raises ValueError saying what is wrong, whatever the bytes are."""
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} arrays and objects")
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse a JSON file that must hold an object; raises CheckpointError naming the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > limit_bytes:
            raise CheckpointError(f"{path}: not a JSON file of at most {limit_bytes} bytes")
        parsed = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is absent") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {str(error)[:120]}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: found a JSON {type(parsed).__name__}, expected an object")
    return parsed
