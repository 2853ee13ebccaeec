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
