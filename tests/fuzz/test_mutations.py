"""A few hundred mutated checkpoints (run `mutate_checkpoint` for thousands), and whether the harness sees faults."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize import checkpoint
from quantize.errors import CheckpointError, printable
from quantize.json_files import parse_json
from quantize.model_config import parse_model_config
from quantize.preflight import check_source
from quantize.quantization_config import parse_quantization
from tests.fuzz import mutate_checkpoint
from tests.fuzz.base_checkpoint import CONFIG, write_source
from tests.fuzz.mutations import MUTATIONS, STRINGS

# `json` writes NaN and lone surrogates as Python has them, so those are covered as well.
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**60, max_value=10**310)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(STRINGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


def test_bases_are_valid(tmp_path: Path) -> None:
    for shards in (1, 3):
        check_source(write_source(tmp_path / str(shards), shards=shards)).close()


@pytest.mark.parametrize("start", [0, 500_000])
def test_mutated_checkpoints_are_refused_cleanly_or_read(start: int) -> None:
    tally, faults = mutate_checkpoint.run_cases(start, 150)
    assert faults == []
    assert tally["quantized"] > 5
    assert tally["refused by check_source"] > 100


def test_a_case_is_the_same_every_time(tmp_path: Path) -> None:
    outcomes = []
    for name in ("a", "b"):
        directory = write_source(tmp_path / name / "checkpoint", shards=3)
        (tmp_path / name / "outside").mkdir()
        rng = random.Random(7)
        done = [rng.choice(MUTATIONS)(rng, directory) for _ in range(5)]
        content = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        outcomes.append((done, content))
    assert outcomes[0] == outcomes[1]


def raise_value_error(directory: Path) -> None:
    raise ValueError(directory)


def sleep(directory: Path) -> None:
    time.sleep(60)


def allocate(directory: Path) -> None:
    len(bytearray(4 * 2**30))


def write_beside(directory: Path) -> None:
    (directory.parent / "outside" / "new").touch()
    raise CheckpointError("refused")


def touch_the_source(directory: Path) -> None:
    (directory / "new").touch()
    raise CheckpointError("refused")


def print_an_escape(directory: Path) -> None:
    error = CheckpointError("refused")
    error.args = ("\x1b[31m",)
    raise error


@pytest.mark.parametrize(
    ("misbehave", "told"),
    [
        (raise_value_error, "ValueError"),
        (sleep, "more than 0.2 s"),
        (allocate, "MemoryError"),
        (write_beside, "changed outside the output"),
        (touch_the_source, "changed outside the output"),
        (print_an_escape, "not printable"),
    ],
)
def test_the_harness_sees(
    misbehave: Callable[[Path], None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate_checkpoint, "TIME_LIMIT_S", 0.2 if misbehave is sleep else 10)
    monkeypatch.setattr(mutate_checkpoint, "check_quantized", misbehave)
    bases = [write_source(tmp_path / "base")]
    outcome, _ = mutate_checkpoint.run_case(1, bases, tmp_path / "case")
    assert any(told in fault for fault in outcome.faults), outcome.faults


def test_the_harness_sees_a_shard_outside_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of shard names, an index reads (and a quantization succeeds from) files elsewhere."""
    directory = write_source(tmp_path / "case" / "checkpoint", shards=3)
    write_source(tmp_path / "case" / "outside", shards=3)
    index = directory / "model.safetensors.index.json"
    content: dict[str, Any] = json.loads(index.read_text())
    content["weight_map"] = {name: f"../outside/{shard}" for name, shard in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="leads out of the checkpoint directory"):
        check_source(directory)
    monkeypatch.setattr(checkpoint, "_shard_name_problem", lambda shard: None)
    with pytest.raises(CheckpointError, match="lies in"):
        check_source(directory)


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from([*CONFIG, "rope_scaling", "rope_theta", "sliding_window", "layer_types"]), value=JSON_VALUES)
def test_any_value_of_any_key_is_read_or_refused(key: str, value: Any) -> None:
    text = ""
    try:
        parse_model_config({**CONFIG, key: value})
    except CheckpointError as error:
        text = str(error)
    assert text == printable(text)


@settings(max_examples=300, deadline=None)
@given(value=JSON_VALUES, place=st.sampled_from(["section", "groups", "group", "weights", "targets", "ignore"]))
def test_any_quantization_section_is_read_or_refused(value: Any, place: str) -> None:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"strategy": "channel"}, "input_activations": {}}
    section: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    if place in ("weights", "targets"):
        group[place] = value
    elif place == "group":
        section["config_groups"]["a"] = value
    elif place == "groups":
        section["config_groups"] = value
    elif place == "ignore":
        section["ignore"] = value
    quantization = parse_quantization({"quantization_config": value if place == "section" else section})
    assert quantization is None or isinstance(quantization.problems, tuple)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_json_or_not(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(raw)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "beyond the range of floats"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]," * 1_100_000, "more than 1000000 arrays and objects"),
        (b"9" * 5000, "digits"),
        (b"\xff", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_json_that_others_read_differently_or_not_at_all_is_refused(raw: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(raw)
