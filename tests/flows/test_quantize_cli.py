"""`quantize` with algorithms that calibrate, and a release by one: answers, refusals, and the GGUF way in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flows.support import run_cli, run_json
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrates on little, judges on less."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(
        "calibration: {tokens: 512, window_tokens: 32, held_out_tokens: 128}\nsearch: {max_kl_share: 1.0e-9}\n"
    )
    return path


def test_a_preset_calibrates_on_the_text_given(source: Path, recipe: Path, tmp_path: Path) -> None:
    options = ("--recipe", str(recipe), "--calibration", str(ROOT / "LICENSE"))
    answer = run_json("quantize", str(source), str(tmp_path / "out"), "--preset", "smoothquant+gptq", *options)
    assert answer["algorithm"] == "smoothquant+gptq"
    assert [layer["layer"] for layer in answer["layers"]] == [0, 1]
    assert json.loads((tmp_path / "out" / "calibration.json").read_text())["layers"] == answer["layers"]
    again = run_json("quantize", str(source), str(tmp_path / "b"), "--recipe", str(tmp_path / "out" / "recipe.yaml"))
    assert again["digest"] == answer["digest"]


def test_auto_shows_what_it_tried(source: Path, recipe: Path, tmp_path: Path) -> None:
    options = ("--preset", "auto", "--recipe", str(recipe), "--calibration", str(ROOT / "LICENSE"))
    stdout, stderr = run_cli("quantize", str(source), str(tmp_path / "out"), *options)
    for title in ("rtn, clipped", "smoothquant+gptq, rotated"):
        assert title in stdout
    assert "no recipe left at most" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "awq"], ["awq", "smoothquant+gptq"]),
        (["--preset", "gptq", "--arithmetic", "compat"], ["compat", "use arithmetic fp32"]),
        (["--calibration", "absent.txt"], ["algorithm rtn reads no text", "--preset auto"]),
        (["--preset", "gptq", "--calibration", "absent.txt"], ["absent.txt", "no such file or folder"]),
        (["--preset", "gptq", "--memory", "2G"], ["--memory", "leave them out"]),
        (["--preset", "auto", "--workers", "2"], ["--workers", "OMP_NUM_THREADS"]),
    ],
)
def test_refusals_say_what_to_do(source: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    _, stderr = run_cli("quantize", str(source), str(tmp_path / "out"), *options, code=2)
    for word in words:
        assert word in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_of_an_existing_target_sweeps_beside_it(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "journal.jsonl").write_text("{}\n")
    run_cli("quantize", str(source), str(tmp_path / "out"), code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
