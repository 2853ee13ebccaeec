"""Case 9: a damaged or hostile file is refused by what it looks like; nothing else than CheckpointError comes out."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantize.errors import CheckpointError
from quantize.safetensors_header import DTYPES, MAX_HEADER_BYTES, TensorInfo, read_header
from quantize.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from tests.quantize.files import safetensors_bytes

ENTRY = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
GOOD = safetensors_bytes({"a": ENTRY}, bytes(12))


def read(path: Path, content: bytes) -> list[TensorInfo]:
    path.write_bytes(content)
    with path.open("rb") as file:
        return read_header(file, path)


def refusal(path: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path, content)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_both_tables_of_dtypes_agree() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == DTYPES


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in TORCH_DTYPES.items() if dtype != torch.bool
    } | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "flag": torch.tensor([True])}
    save_file(tensors, tmp_path / "t.safetensors", metadata={"note": "x"})
    content = (tmp_path / "t.safetensors").read_bytes()
    infos = read(tmp_path / "t.safetensors", content)
    assert {info.name for info in infos} == set(tensors)
    for info in infos:
        tensor = tensors[info.name]
        assert (info.dtype, info.shape) == (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[info.offset : info.offset + info.nbytes] == raw


@pytest.mark.parametrize(
    ("content", "looks_like"),
    [
        (b"", "empty"),
        (b"\x08\0\0", "truncated"),
        (GOOD[:-1], "truncated"),
        (GOOD[:20], "truncated"),
        (GOOD + b"\0", "trailing bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"GGUF" + b"\xff" * 100, "GGUF"),
        (b"<!DOCTYPE html><html></html>" + bytes(100), "HTML"),
        (struct.pack("<Q", 2**63) + b"{}", str(2**63)),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
        (safetensors_bytes(b'{"a":{},"a":{}}'), "duplicate key 'a'"),
        (
            safetensors_bytes(b'{"a":{"dtype":"BF16","dtype":"I8","shape":[],"data_offsets":[0,2]}}', bytes(2)),
            "duplicate",
        ),
        (safetensors_bytes(b"[1]"), "start with"),
        (safetensors_bytes(b'{"a": \xff}'), "header"),
        (safetensors_bytes(b'{"a":' + b"[" * 100_000), "nested too deeply"),
        (safetensors_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "header"),
        (safetensors_bytes({"\ud800": ENTRY}, bytes(12)), "surrogates"),
        (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (safetensors_bytes({"a": ENTRY | {"dtype": "Q4"}}, bytes(12)), "'Q4' is not supported"),
        (safetensors_bytes({"a": ENTRY | {"extra": 1}}, bytes(12)), "expected an object"),
        (safetensors_bytes({"a": ENTRY | {"shape": [2, -3]}}, bytes(12)), "shape"),
        (safetensors_bytes({"a": ENTRY | {"shape": [True, 6]}}, bytes(12)), "shape"),
        (safetensors_bytes({"a": ENTRY | {"shape": [2, 4]}}, bytes(12)), "span 12 bytes, its dtype and shape need 16"),
        (safetensors_bytes({"a": ENTRY | {"data_offsets": [12, 0]}}, bytes(12)), "span -12"),
        (safetensors_bytes({"a": ENTRY | {"data_offsets": [0.0, 12]}}, bytes(12)), "data_offsets"),
        (safetensors_bytes({"a": {"dtype": "I8", "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}}), "elements"),
        (safetensors_bytes({"a": ENTRY, "b": ENTRY}, bytes(12)), "overlaps"),
        (safetensors_bytes({"a": ENTRY | {"data_offsets": [4, 16]}}, bytes(16)), "hole"),
    ],
)
def test_refusals_say_what_the_file_looks_like(tmp_path: Path, content: bytes, looks_like: str) -> None:
    assert looks_like in refusal(tmp_path / "x.safetensors", content)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file, pytest.raises(CheckpointError, match="not a regular file"):
        read_header(file, path)


def test_a_stated_length_allocates_nothing(tmp_path: Path) -> None:
    """A sparse file of 1 TB that states a header just below the bound: read as far as it goes, and no further."""
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES))
        file.truncate(2**40)
    tracemalloc.start()
    try:
        with path.open("rb") as file, pytest.raises(CheckpointError):
            read_header(file, path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * MAX_HEADER_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
sizes = st.integers(-(2**65), 2**65) | st.integers(0, 40)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPES)) | json_values,
        "shape": st.lists(sizes, max_size=9) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | json_values, max_size=4)
fuzz = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def accept_or_refuse(path: Path, content: bytes) -> None:
    """Either infos that lie within the file and tile its data, or a CheckpointError; never anything else."""
    path.write_bytes(content)
    with path.open("rb") as file:
        try:
            infos = read_header(file, path)
        except CheckpointError as error:
            str(error).encode("utf-8")
            return
    position = 8 + struct.unpack("<Q", content[:8])[0]
    for info in infos:
        assert info.offset == position
        position += info.nbytes
        if not info.nbytes:
            torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
    assert position == len(content)


@fuzz
@given(content=st.binary(max_size=200))
@example(content=GOOD)
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    accept_or_refuse(tmp_path / "fuzz.safetensors", content)


@fuzz
@given(
    header=st.binary(max_size=100) | headers.map(lambda value: json.dumps(value).encode()), data=st.binary(max_size=40)
)
def test_any_header(tmp_path: Path, header: bytes, data: bytes) -> None:
    accept_or_refuse(tmp_path / "fuzz.safetensors", safetensors_bytes(header, data))


@fuzz
@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_one_changed_byte_and_a_cut(tmp_path: Path, position: int, value: int, cut: int) -> None:
    changed = bytearray(GOOD)
    changed[position] = value
    accept_or_refuse(tmp_path / "fuzz.safetensors", bytes(changed))
    accept_or_refuse(tmp_path / "fuzz.safetensors", bytes(changed[:cut]))


@fuzz
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=5), kind=st.sampled_from(sorted(DTYPES)))
def test_every_sound_header_is_accepted(tmp_path: Path, shapes: list[list[int]], kind: str) -> None:
    header: dict[str, Any] = {}
    position = 0
    for number, shape in enumerate(shapes):
        end = position + torch.empty(shape, dtype=TORCH_DTYPES[kind]).nbytes
        header[f"t{number}"] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        position = end
    infos = read(tmp_path / "sound.safetensors", safetensors_bytes(header, bytes(position)))
    assert {info.name: info.shape for info in infos} == {f"t{n}": tuple(shape) for n, shape in enumerate(shapes)}
