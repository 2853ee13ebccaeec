"""The verb `quality` from outside: its answer, its files, a previous bundle, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flows.support import run_cli, run_json
from tests.tiny_models import make_tiny_llama

FEW = ("--tokens", "200", "--window", "100")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w8a8") / "plain"
    run_json("quantize", str(source), str(out))
    return out


def test_candidates_and_a_previous_checkpoint_are_compared_and_reported(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "checkpoint").symlink_to(checkpoint)
    out = tmp_path / "report"
    answer = run_json(
        "quality", str(source), str(checkpoint), "--previous", str(bundle), "--out", str(out), "--executor", "cpu", *FEW
    )
    assert [candidate["name"] for candidate in answer["candidates"]] == ["plain", "previous (bundle)"]
    assert answer["positions"] == 198
    for candidate in answer["candidates"]:
        assert candidate["ran_as"] == "pypto-deploy's CPU executor"
        assert 0 < candidate["figures"]["mean_kl"]["value"] < 0.1
    assert json.loads((out / "quality.json").read_text()) == answer
    assert (out / "quality.html").stat().st_size > 50_000


def test_a_text_of_ones_own_and_a_table(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("All work and no play makes a dull boy. " * 20)
    stdout, _ = run_cli("quality", str(source), str(checkpoint), "--text", str(text), *FEW)
    assert "198 positions of mine.txt" in stdout
    assert "plain" in stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["SOURCE", "CHECKPOINT", "--text", "absent.txt"], "absent.txt: found no such file"),
        (["SOURCE", "CHECKPOINT", "--out", "SOURCE"], "exists"),
        (["SOURCE", "CHECKPOINT", "--out", "FILE/below"], "cannot be made (Not a directory)"),
        (["SOURCE", "CHECKPOINT", "--previous", "champion", "--store", "nowhere"], "neither a checkpoint"),
    ],
)
def test_bad_input_is_named(source: Path, checkpoint: Path, arguments: list[str], words: str) -> None:
    below = str(source / "config.json" / "below")
    places = {"SOURCE": str(source), "CHECKPOINT": str(checkpoint), "FILE/below": below}
    _, stderr = run_cli("quality", *(places.get(argument, argument) for argument in arguments), code=2)
    assert words in stderr
    assert "Traceback" not in stderr
