"""The verb `inspect`: what it prints, what it answers in JSON, and its exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.flows.support import run_cli, run_json
from tests.tiny_models import make_tiny_qwen3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("source") / "tiny", head_dim=16)


def test_a_sound_checkpoint_exits_with_0(source: Path) -> None:
    stdout, _ = run_cli("inspect", str(source))
    for words in ("qwen3 (Qwen3ForCausalLM)", "num_layers 2", "BF16", "2,048 tokens", "quantize"):
        assert words in stdout
    answer = run_json("inspect", str(source))
    assert (answer["family"], answer["good_for"], answer["problems"]) == ("qwen3", "quantize", [])


def test_readers_that_would_not_load_it_exit_with_1(source: Path) -> None:
    answer = run_json("inspect", str(source), "--for", "vllm", "--for", "pypto-serving", code=1)
    assert [reader["reader"] for reader in answer["readers"]] == ["vllm", "pypto-serving"]
    assert not any(reader["accepted"] for reader in answer["readers"])


def test_problems_are_listed_and_exit_with_1(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    stdout, stderr = run_cli("inspect", str(tmp_path / "m"), code=1)
    assert "git lfs pull" in stdout
    assert "1 problem(s)" in stderr


def test_what_cannot_be_read_exits_with_2(tmp_path: Path) -> None:
    _, stderr = run_cli("inspect", str(tmp_path), code=2)
    assert "not a checkpoint that can be described" in stderr


def test_a_bundle_is_its_checkpoint(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "bundle" / "checkpoint")
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    answer = run_json("inspect", str(tmp_path / "bundle"))
    assert answer["path"] == str(tmp_path / "bundle" / "checkpoint")


def test_quantize_for_a_reader_suits_it_or_says_why_not(source: Path, tmp_path: Path) -> None:
    answer = run_json("quantize", str(source), str(tmp_path / "out"), "--for", "pypto-serving")
    assert answer["reader"] == "pypto-serving"
    verdicts = run_json("inspect", str(tmp_path / "out"), "--for", "pypto-serving", "--for", "vllm")["readers"]
    assert all(verdict["accepted"] for verdict in verdicts)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("down: bf16\n")
    arguments = ("quantize", str(source), str(tmp_path / "no"), "--recipe", str(recipe), "--for", "pypto-serving")
    _, stderr = run_cli(*arguments, code=2)
    assert "would not suit pypto-serving" in stderr
    assert "mlp.down_proj" in stderr
    assert not (tmp_path / "no").exists()
