"""Cases 6 to 9 and 14: indexes that lie, writers that must not, digests of content rather than of files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointReader,
    payload_digest,
    scan_checkpoint,
    tensor_digests,
    tensor_sha256,
)
from quantize.checkpoint_writer import CheckpointWriter
from quantize.errors import CheckpointError
from quantize.shard_layout import PAGE_BYTES, TensorSpec, lay_out
from quantize.staging_folder import StagingFolder
from quantize.torch_dtypes import TORCH_DTYPES
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors, zeros_file
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

Index = dict[str, Any]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("sharded") / "qwen3", max_shard_size="100KB")


def shards_of(directory: Path) -> list[str]:
    return sorted(set(json.loads((directory / INDEX_NAME).read_text())["weight_map"].values()))


def problems_of(directory: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return list(caught.value.problems)


def write(out: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, **options: Any) -> str:
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with CheckpointWriter(out, specs, config or {}, **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        return writer.commit()


def test_tensors_read_as_the_library_reads_them(sharded: Path) -> None:
    expected = {name: tensor for shard in shards_of(sharded) for name, tensor in load_file(sharded / shard).items()}
    assert len(shards_of(sharded)) > 2
    with CheckpointReader(sharded) as reader:
        assert set(reader.infos) == set(expected)
        held = {name: reader.tensor(name) for name in expected}
    # The reader is closed: what it handed out must stay valid.
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor)


def test_writing_into_a_read_tensor_leaves_the_file_alone(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    before = payload_digest(directory)
    with CheckpointReader(directory) as reader:
        reader.tensor("model.norm.weight").zero_()
    assert payload_digest(directory) == before


def test_a_stray_shard_is_not_read(sharded: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    digest = payload_digest(directory)
    (directory / "consolidated.safetensors").write_bytes(b"not even a header")
    zeros_file(directory / "model-00009-of-00009.safetensors", {"model.norm.weight": (64,)})
    assert payload_digest(directory) == digest


@pytest.mark.parametrize(
    "shard",
    [
        "../m.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "a\\b.safetensors",
        "C:x.safetensors",
        "",
        "model.bin",
        "x\0",
        "\ud800.safetensors",
        "\x1b[31m.safetensors",
        "n" * 300 + ".safetensors",
    ],
)
def test_an_index_entry_that_leads_elsewhere_is_refused(sharded: Path, tmp_path: Path, shard: str) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    zeros_file(tmp_path / "m.safetensors", {"model.norm.weight": (64,)})

    def edit(index: Index) -> None:
        index["weight_map"]["model.norm.weight"] = shard

    edit_json(directory / INDEX_NAME, edit)
    problems = problems_of(directory)
    assert any(repr(shard[:120]) in problem and "model.norm.weight" in problem for problem in problems)


def test_an_index_of_more_shards_than_anybody_has_is_refused_at_once(sharded: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    edit_json(
        directory / INDEX_NAME,
        lambda index: index["weight_map"].update({f"t{n}": f"s{n}.safetensors" for n in range(10_001)}),
    )
    problems = problems_of(directory)
    assert len(problems) == 1
    assert "shards, expected at most 10000" in problems[0]


def test_a_file_too_large_to_be_a_tokenizer_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    with (directory / "LICENSE").open("wb") as file:
        file.truncate(2**40)
    assert f"LICENSE: has {2**40} bytes, expected at most" in "".join(problems_of(directory))


def test_both_configs_are_read_and_told_of_together(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    (directory / "generation_config.json").write_text("{")
    edit_json(directory / "config.json", lambda config: config.update(hidden_act="gelu"))
    text = "".join(problems_of(directory))
    assert "generation_config.json: not valid JSON" in text
    assert "hidden_act" in text


def test_all_problems_of_an_index_come_in_one_message(sharded: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    first, second, *_ = shards_of(directory)
    moved = next(
        name for name, shard in json.loads((directory / INDEX_NAME).read_text())["weight_map"].items() if shard == first
    )

    def edit(index: Index) -> None:
        index["weight_map"][moved] = second
        index["weight_map"]["model.norm.weight"] = "../x.safetensors"
        index["weight_map"]["ghost"] = first
        index["weight_map"]["far.ghost"] = "model-00099.safetensors"
        del index["weight_map"]["lm_head.weight"]

    edit_json(directory / INDEX_NAME, edit)
    text = "\n".join(problems_of(directory))
    assert f"{moved} is listed in {INDEX_NAME} for {second} and lies in {first}" in text
    assert "'../x.safetensors' leads out" in text
    assert f"ghost is listed in {INDEX_NAME} for {first}, which does not hold it" in text
    assert "model-00099.safetensors: the shard is absent" in text
    assert "lm_head.weight of" in text


@pytest.mark.parametrize("weight_map", [{}, None, [], "x", {"a": 3}, {"a": None}])
def test_an_unusable_weight_map_is_refused(sharded: Path, tmp_path: Path, weight_map: Any) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    edit_json(directory / INDEX_NAME, lambda index: index.update(weight_map=weight_map))
    assert any(INDEX_NAME in problem for problem in problems_of(directory))


def test_a_tensor_in_two_shards_is_refused(sharded: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    first, second, *_ = shards_of(directory)
    save_file({**load_file(directory / second), **load_file(directory / first)}, directory / second)
    assert any("again in" in problem for problem in problems_of(directory))


def test_index_and_single_file_together_are_refused(sharded: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(sharded, tmp_path / "m")
    zeros_file(directory / SINGLE_NAME, {"model.norm.weight": (64,)})
    assert any("remove one" in problem for problem in problems_of(directory))


def test_directories_without_a_checkpoint_say_what_is_there(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(tmp_path / "nowhere")[0]
    (tmp_path / "file").write_text("x")
    assert "not a directory" in problems_of(tmp_path / "file")[0]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    text = "\n".join(problems_of(folder))
    assert "config.json: the file is absent" in text
    assert "found pytorch_model.bin" in text


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "truncated"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (make_pipe, "not a regular file"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "cannot be read"),
        (lambda path: (path.unlink(), path.symlink_to("gone")), "absent"),
    ],
)
def test_a_damaged_shard_is_named(tiny_qwen3: Path, tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    damage(directory / SINGLE_NAME)
    assert any(SINGLE_NAME in problem and named in problem for problem in problems_of(directory))


def test_links_into_a_blob_store_are_followed_as_they_stand(tiny_qwen3: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in tiny_qwen3.iterdir():
        (blobs / tensor_sha256(torch.tensor(list(path.name.encode())))).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blobs / tensor_sha256(torch.tensor(list(path.name.encode()))))
    assert payload_digest(snapshot) == payload_digest(tiny_qwen3)


def test_a_file_cut_after_the_scan_is_an_error_not_a_crash(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    with CheckpointReader(directory) as reader:
        last = max(reader.infos.values(), key=lambda info: info.offset)
        with (directory / SINGLE_NAME).open("r+b") as file:
            file.truncate(last.offset)
        with pytest.raises(CheckpointError, match="changed while being read"):
            reader.tensor(last.name)


def test_an_unknown_tensor_is_refused_by_name(tiny_qwen3: Path) -> None:
    with CheckpointReader(tiny_qwen3) as reader, pytest.raises(CheckpointError, match="'nothing'"):
        reader.tensor("nothing")


def test_strided_and_transposed_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": base[:1].expand(3, 6),
        "flipped": base.flip(1),
        "offset": base[1:],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "codes": torch.arange(-128, 128, dtype=torch.int8).reshape(16, 16).t(),
    }
    write(tmp_path / "out", tensors)
    read = load_file(tmp_path / "out" / SINGLE_NAME)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


def test_every_matrix_of_whole_pages_starts_on_one(tmp_path: Path) -> None:
    specs = [
        TensorSpec("a.weight", "I8", (64, 128)),
        TensorSpec("a.weight_scale", "BF16", (64, 1)),
        TensorSpec("b.norm", "F32", (5,)),
        TensorSpec("c.weight", "F32", (32, 32)),
        TensorSpec("odd", "I8", (3,)),
    ]
    (shard,) = lay_out([specs])
    assert [shard.offsets[name] % PAGE_BYTES for name in ("a.weight", "c.weight")] == [0, 0]
    assert all(shard.offsets[spec.name] % spec.item_bytes == 0 for spec in specs)
    with CheckpointWriter(tmp_path / "out", specs, {}) as writer:
        for spec in specs:
            writer.write(spec.name, torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype_name]))
        writer.commit()
    found = load_file(tmp_path / "out" / SINGLE_NAME)
    assert {name: tensor.sum().item() for name, tensor in found.items()} == {
        spec.name: math.prod(spec.shape) for spec in specs
    }


def test_the_writers_digest_is_that_of_what_lies_on_disk(tiny_qwen3: Path, tmp_path: Path) -> None:
    with CheckpointReader(tiny_qwen3) as reader:
        tensors = {name: reader.tensor(name) for name in reader.infos}
        config, sidecars = dict(reader.raw_config), reader.sidecars
    assert {path.name for path in sidecars} >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    single = write(tmp_path / "single", tensors, config, sidecars=sidecars)
    many = write(tmp_path / "many", dict(reversed(tensors.items())), config, sidecars=sidecars, max_shard_bytes=50_000)
    assert len(shards_of(tmp_path / "many")) > 3
    assert single == many == payload_digest(tmp_path / "single") == payload_digest(tmp_path / "many")


def test_the_digest_ignores_header_bytes_and_sees_everything_else(tiny_qwen3: Path, tmp_path: Path) -> None:
    base = payload_digest(tiny_qwen3)
    same = copy_checkpoint(tiny_qwen3, tmp_path / "same")
    tensors = load_file(same / SINGLE_NAME)
    save_file(tensors, same / SINGLE_NAME, metadata={"format": "pt", "written": "at another time"})
    assert (same / SINGLE_NAME).read_bytes() != (tiny_qwen3 / SINGLE_NAME).read_bytes()
    assert payload_digest(same) == base

    def one_bit(all_tensors: dict[str, torch.Tensor]) -> None:
        all_tensors["model.norm.weight"].view(torch.uint8)[0] ^= 1

    def retype(all_tensors: dict[str, torch.Tensor]) -> None:
        all_tensors["model.norm.weight"] = all_tensors["model.norm.weight"].view(torch.float16)

    def rename(all_tensors: dict[str, torch.Tensor]) -> None:
        all_tensors["model.norm.weights"] = all_tensors.pop("model.norm.weight")

    digests = {base}
    for number, edit in enumerate((one_bit, retype, rename)):
        digests.add(payload_digest(edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / str(number)), edit)))
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        changed = copy_checkpoint(tiny_qwen3, tmp_path / name)
        (changed / name).write_text((changed / name).read_text() + "\n")
        digests.add(payload_digest(changed))
    assert len(digests) == 7


def test_tensor_digests_state_dtype_shape_and_content(tiny_qwen3: Path) -> None:
    digests = tensor_digests(tiny_qwen3)
    assert list(digests) == sorted(digests)
    assert digests["model.norm.weight"]["dtype"] == "BF16"
    assert digests["model.norm.weight"]["shape"] == [64]
    assert digests["model.norm.weight"]["sha256"] == tensor_sha256(
        load_file(tiny_qwen3 / SINGLE_NAME)["model.norm.weight"]
    )


def test_a_writer_that_does_not_finish_leaves_nothing(tmp_path: Path) -> None:
    spec = TensorSpec("a", torch.float32, (3,))
    with CheckpointWriter(tmp_path / "out", [spec], {}) as writer:
        writer.write("a", torch.zeros(3))
    with CheckpointWriter(tmp_path / "out", [spec], {}) as writer, pytest.raises(CheckpointError, match="unwritten"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (3,))]
    with CheckpointWriter(tmp_path / "out", specs, {}) as writer:
        with pytest.raises(CheckpointError, match="not planned"):
            writer.write("b", torch.zeros(3))
        with pytest.raises(CheckpointError, match="planned as"):
            writer.write("a", torch.zeros(4))
        with pytest.raises(CheckpointError, match="planned as"):
            writer.write("a", torch.zeros(3, dtype=torch.float64))
        writer.write("a", torch.zeros(3))
        with pytest.raises(CheckpointError, match="twice"):
            writer.write("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match="twice"):
        CheckpointWriter(tmp_path / "out", specs * 2, {})
    huge = [TensorSpec("a", torch.int8, (2**50,))]
    with pytest.raises(CheckpointError, match="bytes of disk"):
        CheckpointWriter(tmp_path / "out", huge, {})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_target_is_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        StagingFolder(out)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="exists already"):
        StagingFolder(tmp_path / "link")
    with pytest.raises(CheckpointError, match="cannot be written"):
        StagingFolder(out / "mine" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_leftovers_of_a_dead_writer_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".out.partial-0123456789ab"
    dead.mkdir()
    (dead / "half").write_bytes(b"x")
    other = tmp_path / ".out2.partial-0123456789ab"
    other.mkdir()
    living = StagingFolder(tmp_path / "out")
    second = StagingFolder(tmp_path / "out")
    assert not dead.exists()
    assert other.exists()
    assert living.path.exists()
    living.commit()
    (second.path / "file").write_bytes(b"x")
    (tmp_path / "out" / "first").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be put in place"):
        second.commit()
    second.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out2.partial-0123456789ab", "out"]


def test_a_scale_of_one_dimension_reads_like_one_of_two(tiny_qwen3: Path, tmp_path: Path) -> None:
    scale = torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16)
    config = json.loads((tiny_qwen3 / "config.json").read_text())
    tensors = {"flat.weight_scale": scale[:, 0], "column.weight_scale": scale, "row.weight_scale": scale.t()}
    write(tmp_path / "out", tensors, config)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.weight_scale("flat").tolist() == reader.weight_scale("column").tolist() == [0.5, 0.25]
        assert reader.weight_scale("flat").dtype == torch.float32
        with pytest.raises(CheckpointError, match=r"row.weight_scale has shape \[1, 2\]"):
            reader.weight_scale("row")


def test_scanning_reads_no_weight(tmp_path: Path) -> None:
    """A checkpoint whose data is a hole of 64 GB is scanned at once."""
    directory = make_tiny_llama(tmp_path / "m")
    header = json.dumps({"a": {"dtype": "I8", "shape": [2**36], "data_offsets": [0, 2**36]}}).encode()
    with (directory / SINGLE_NAME).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**36)
    scan = scan_checkpoint(directory)
    assert scan.problems == []
    assert scan.infos["a"].nbytes == 2**36
