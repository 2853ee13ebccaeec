"""The verbs that know kernel contracts: `stage --abi`, `programs contracts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantize.recipe import Recipe
from tests.flows.support import run_cli, run_json
from tests.kernels.test_abi_export import SHAPE
from tests.slab_tools import quantize
from tests.tiny_models import make_tiny_qwen3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abi")
    source = make_tiny_qwen3(folder / "source", num_hidden_layers=1, **SHAPE)
    quantize(source, folder / "int8")
    return quantize(source, folder / "w8a8", Recipe(down="bf16"))


def test_stage_for_pypto_lib_answers_with_contract_and_tensors(checkpoint: Path, tmp_path: Path) -> None:
    answer = run_json("stage", str(checkpoint), str(tmp_path / "slabs"), "--abi", "pypto-lib")
    assert answer["contract"] == "pypto-lib/qwen3/w8a8-down-bf16"
    assert answer["tensors"]["decode_wq"]["shape"] == [512, 512]
    assert (tmp_path / "slabs" / "slabs.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["CHECKPOINT", "OUT", "--abi", "pypto-lib", "--down", "int8"], "takes down_proj in BF16"),
        (["INT8", "OUT", "--abi", "pypto-lib"], "`down: bf16` in the recipe"),
        (["CHECKPOINT", "OUT", "--abi", "tvm"], "pypto-lib"),
    ],
)
def test_what_pypto_lib_does_not_take_is_refused(
    arguments: list[str], words: str, checkpoint: Path, tmp_path: Path
) -> None:
    places = {"CHECKPOINT": checkpoint, "INT8": checkpoint.parent / "int8", "OUT": tmp_path / "out"}
    stdout, stderr = run_cli("stage", *(str(places.get(word, word)) for word in arguments), code=2)
    assert stdout == ""
    assert words in stderr
    assert not (tmp_path / "out").exists()


def test_contracts_are_listed_with_what_fits_a_model() -> None:
    rows = {
        row["contract"]: row["fits"] for row in run_json("programs", "contracts", "--model", "qwen3-8b")["contracts"]
    }
    assert rows["pypto-lib/qwen3/w8a8-down-bf16"] == rows["pypto-deploy/qwen3/w8a8"] == "yes"
    assert rows["pypto-deploy/llama/w8a8"] == "family is qwen3, expected llama"
    shown = run_json("programs", "contracts", "--show", "pypto-lib/qwen3/w8a8-down-bf16")
    assert [len(stage["arguments"]) for stage in shown["stages"]] == [29, 31, 2, 4]
    ours = run_json("programs", "contracts", "--show", "pypto-deploy/qwen3/w8a8")
    assert "torch_npu is not installed here" in ours["unavailable_here"]["paged_attention"]["cann"]


def test_estimate_simulates_and_writes_table_picture_and_json(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "tiny", num_hidden_layers=3)
    grid = ["--batch", "1", "--context", "128", "--simulated-batch", "1", "--simulated-context", "128"]
    answer = run_json("programs", "estimate", str(source), *grid, "--out", str(tmp_path / "out"))
    (first,) = answer["cells"]
    assert first["origin"] == "simulated"
    assert first["layer_simulated_us"] > 0
    assert first["step_us"] == pytest.approx(3 * first["layer_us"] + first["head_us"], rel=1e-3)
    assert first["hbm_floor_us"] < first["step_us"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"estimate.md", "estimate.json", "estimate.png"}
    _, stderr = run_cli("programs", "estimate", str(source), *grid[2:], "--batch", "2", code=2)
    assert "nothing is extrapolated" in stderr


def test_tune_refuses_what_it_cannot_tune_or_write(tmp_path: Path) -> None:
    _, stderr = run_cli("programs", "tune", "prefill_layer", code=2)
    assert "expected one of decode_layer, lm_head_greedy" in stderr
    _, stderr = run_cli("programs", "tune", "lm_head_greedy", "--rows", "4", code=2)
    assert "windows of 16" in stderr
    _, stderr = run_cli("programs", "tune", "decode_layer", "--table", str(tmp_path / "none" / "t.json"), code=2)
    assert "its folder does not exist" in stderr


def test_small_shapes_of_all_families_are_one_table_and_write_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stdout, _ = run_cli("programs", "verify", "--small", "--program", "embedding_gather", "--out", str(out))
    rows = [line for line in stdout.splitlines() if "embedding_gather" in line]
    assert [row.split()[0] for row in rows] == ["qwen3-14b", "qwen3-14b-down-bf16", "qwen2.5-0.5b", "smollm2-135m"]
    assert all("READY" in row for row in rows)
    assert (out / "smollm2-135m" / "embedding_gather" / "report.md").is_file()
    _, stderr = run_cli("programs", "verify", "--small", "--out", str(out), code=2)
    assert "exists; expected a path to create" in stderr
    report = out / "smollm2-135m" / "embedding_gather" / "report.md"
    _, stderr = run_cli("programs", "verify", "--small", "--out", str(report / "below"), code=2)
    assert "cannot be made (Not a directory)" in stderr
    _, stderr = run_cli("programs", "verify", "--small", "--program", "attention", code=2)
    assert "not known; the programs are decode_layer" in stderr
    _, stderr = run_cli("programs", "simulate", "--workers", "0", code=2)
    assert "--workers" in stderr
