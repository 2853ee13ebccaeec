"""Running in parallel, in little memory, after kills and beside other runs changes nothing of what comes out."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.quantize_kill import run_kills
from quantize import streaming
from quantize.checkpoint import CheckpointReader, payload_digest
from quantize.checkpoint_writer import CheckpointWriter, TensorStream
from quantize.errors import BudgetError, CheckpointError, NonFiniteWeightError, WriteError
from quantize.hashing import Hash
from quantize.recipe import Recipe
from quantize.row_kernel import NativeKernel, TorchKernel
from quantize.rtn import QuantizeResult, quantize_checkpoint
from tests.quantize.files import copy_checkpoint, edit_tensors
from tests.tiny_models import make_tiny_qwen3

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


class StoppedError(Exception):
    """Stands for whatever ends a run from outside."""


def interrupt_after(out: Path, source: Path, tensors: int, error: type[BaseException] = StoppedError) -> None:
    """Run with one worker until `tensors` of the output are finished, then fail."""
    finish = TensorStream.finish
    count = 0

    def counted(stream: TensorStream, *arguments: object) -> None:
        nonlocal count
        if count == tensors:
            raise error("stopped")
        count += 1
        finish(stream, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorStream, "finish", counted)
        with pytest.raises(error):
            quantize_checkpoint(source, out, Recipe(), workers=1)


def count_streams(run: Callable[[], QuantizeResult]) -> tuple[QuantizeResult, int]:
    """Run, and count the tensors that were written anew."""
    stream = CheckpointWriter.stream
    names: list[str] = []

    def counted(writer: CheckpointWriter, name: str, hash_: Hash | None = None) -> TensorStream:
        names.append(name)
        return stream(writer, name, hash_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "stream", counted)
        return run(), len(names)


@pytest.mark.parametrize("workers", [1, 2, 5, 100])
@pytest.mark.parametrize("kernel", [NativeKernel, TorchKernel])
def test_workers_do_not_show(
    tiny_qwen3: Path, tmp_path: Path, workers: int, kernel: type[NativeKernel] | type[TorchKernel]
) -> None:
    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe(), workers=1, kernel=NativeKernel())
    many = quantize_checkpoint(tiny_qwen3, tmp_path / "many", Recipe(), workers=workers, kernel=kernel())
    assert many.digest == plain.digest == payload_digest(tmp_path / "many")
    if kernel is NativeKernel:
        assert many.errors == plain.errors


def test_the_output_is_sharded_as_the_source(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", max_shard_size="60KB")
    quantize_checkpoint(source, tmp_path / "out", Recipe())
    with CheckpointReader(source) as before, CheckpointReader(tmp_path / "out") as after:
        for name, info in after.infos.items():
            assert info.file.name == before.infos[name.removesuffix("_scale")].file.name
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(
        path.name for path in source.glob("*.safetensors")
    )


@pytest.mark.parametrize("clip", ["none", "mse"])
def test_clipping_reports_its_gain(tiny_qwen3: Path, tmp_path: Path, clip: str) -> None:
    result = quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe.model_validate({"clip": clip}))
    gains = [error.clip_gain_db for error in result.errors]
    if clip == "none":
        assert gains == [None] * 14
    else:
        assert all(gain is not None and 0 <= gain < 3 for gain in gains)
        assert any(gain for gain in gains)


@pytest.mark.parametrize("tensors", [0, 1, 2, 7, 34])
def test_a_run_carries_on_after_the_tensors_that_were_finished(
    tiny_qwen3: Path, tmp_path: Path, tensors: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe())
    with caplog.at_level(logging.WARNING):
        interrupt_after(tmp_path / "out", tiny_qwen3, tensors)
    assert "carries on" in caplog.text
    resumed, written = count_streams(lambda: quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe()))
    # Codes are journalled after their scales: of a pair cut in two, the scales are kept and the codes written again.
    assert plain.tensors - written == resumed.resumed == tensors
    assert resumed.digest == plain.digest == payload_digest(tmp_path / "out")
    assert resumed.errors == plain.errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_a_kept_tensor_is_hashed_before_it_is_trusted(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe())
    interrupt_after(tmp_path / "out", tiny_qwen3, 9)
    shard = tmp_path / ".out.partial" / "checkpoint" / "model.safetensors"
    content = bytearray(shard.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    content[8 + header_bytes :] = bytes(len(content) - 8 - header_bytes)
    shard.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        resumed, written = count_streams(lambda: quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe()))
    assert "is not what the interrupted run recorded" in caplog.text
    assert (written, resumed.resumed) == (plain.tensors, 0)
    assert resumed.digest == plain.digest == payload_digest(tmp_path / "out")


def change_recipe(source: Path) -> Recipe:
    return Recipe(arithmetic="compat")


def change_a_weight(source: Path) -> Recipe:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[UP][0, 0] += 1

    edit_tensors(source, edit)
    return Recipe()


def change_a_sidecar(source: Path) -> Recipe:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    return Recipe()


def rewrite_a_shard_with_its_old_times(source: Path) -> Recipe:
    path = source / "model.safetensors"
    content, status = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return Recipe()


@pytest.mark.parametrize(
    "change", [change_recipe, change_a_weight, change_a_sidecar, rewrite_a_shard_with_its_old_times]
)
def test_other_work_starts_anew(tiny_qwen3: Path, tmp_path: Path, change: Callable[[Path], Recipe]) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    interrupt_after(tmp_path / "out", source, 12)
    recipe = change(source)
    resumed, written = count_streams(lambda: quantize_checkpoint(source, tmp_path / "out", recipe))
    assert written == resumed.tensors
    assert resumed.digest == quantize_checkpoint(source, tmp_path / "fresh", recipe).digest
    assert resumed.digest == payload_digest(tmp_path / "out")


def test_ctrl_c_keeps_and_a_refusal_removes(tiny_qwen3: Path, tmp_path: Path) -> None:
    interrupt_after(tmp_path / "out", tiny_qwen3, 5, KeyboardInterrupt)
    assert (tmp_path / ".out.partial").exists()

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[UP][3, 4] = float("nan")

    bad = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "bad"), edit)
    with pytest.raises(NonFiniteWeightError):
        quantize_checkpoint(bad, tmp_path / "out", Recipe())
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_refusal_names_the_first_bad_tensor_however_many_work(
    tiny_qwen3: Path, tmp_path: Path, workers: int
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in (UP, GATE, "lm_head.weight", "model.norm.weight"):
            tensors[name].view(-1)[-1] = float("inf")

    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "source"), edit)
    with CheckpointReader(source) as reader:
        first = next(name for name in reader.infos if name in (UP, GATE, "lm_head.weight", "model.norm.weight"))
    for _ in range(10):
        with pytest.raises(NonFiniteWeightError, match=first):
            quantize_checkpoint(source, tmp_path / "out", Recipe(), workers=workers)


def test_a_source_that_changes_meanwhile_is_refused(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")

    def touch(done: int, total: int) -> None:
        if done == total:
            (source / "model.safetensors").touch()

    with pytest.raises(CheckpointError, match="changed while being read"):
        quantize_checkpoint(source, tmp_path / "out", Recipe(), touch)
    path = source / "model.safetensors"

    def cut(done: int, total: int) -> None:
        os.truncate(path, 5000)

    monkeypatch.setattr(NativeKernel, "block_bytes", 256)
    monkeypatch.setattr(streaming, "PROGRESS_INTERVAL_S", 0.0)
    with pytest.raises(CheckpointError, match="changed while being read"):
        quantize_checkpoint(source, tmp_path / "out", Recipe(), cut, workers=1, kernel=NativeKernel())
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_fills_up_keeps_what_is_finished(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe())
    pwrite, room = os.pwrite, 120_000

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if len(data) > room:
            raise OSError(28, "No space left on device")
        room -= len(data)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match="No space left on device"):
        quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe())
    monkeypatch.undo()
    resumed, written = count_streams(lambda: quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe()))
    assert 0 < written < plain.tensors
    assert resumed.digest == plain.digest


def test_memory_is_bounded_and_too_little_is_refused_before_anything_is_written(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match="expected at least"):
        quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(), memory_bytes=1)
    with pytest.raises(BudgetError, match="expected at least 1"):
        quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(), workers=0)
    assert list(tmp_path.iterdir()) == []


def test_the_output_may_lie_in_the_source_and_the_source_behind_links(tiny_qwen3: Path, tmp_path: Path) -> None:
    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe())
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    assert quantize_checkpoint(source, source / "w8a8", Recipe()).digest == plain.digest
    assert quantize_checkpoint(source, tmp_path / "again", Recipe()).digest == plain.digest
    snapshot = tmp_path / "snapshot"
    (tmp_path / "blobs").mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(tiny_qwen3.iterdir())):
        (tmp_path / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(tmp_path / "blobs" / str(number))
    assert quantize_checkpoint(snapshot, tmp_path / "linked", Recipe()).digest == plain.digest
    assert not any(path.is_symlink() for path in (tmp_path / "linked").iterdir())


def test_kills_at_random_moments_leave_the_digest_as_it_is(tmp_path: Path) -> None:
    """Five of them on a model that takes a moment; `benchmarks/quantize_kill.py` does thirty."""
    source = make_tiny_qwen3(tmp_path / "source", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    (tmp_path / "work").mkdir()
    figures = run_kills(source, tmp_path / "work", 5, seed=1)
    assert figures["problems"] == []
    assert figures["kills"] == 5


def test_two_processes_at_one_target_do_not_mix(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from quantize.recipe import Recipe; "
        "from quantize.rtn import quantize_checkpoint; from quantize.errors import CheckpointError\n"
        "try: print(quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Recipe()).digest)\n"
        "except CheckpointError as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(tiny_qwen3), str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    digest = payload_digest(tmp_path / "out")
    assert answers.count(digest) == 1
    assert all(answer == digest or "another process" in answer or "exists" in answer for answer in answers)


def test_plain_rounding_loads_no_torch(tiny_qwen3: Path, tmp_path: Path) -> None:
    """It would cost more than rounding a gigabyte."""
    script = (
        "import sys; from pathlib import Path; from quantize.recipe import Recipe; "
        "from quantize.rtn import quantize_checkpoint\n"
        "quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Recipe()); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tiny_qwen3), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
