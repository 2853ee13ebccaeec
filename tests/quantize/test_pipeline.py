"""One function for every recipe: it takes the path that the algorithm asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantize.checkpoint import payload_digest
from quantize.errors import CalibrationError, CheckpointError
from quantize.pipeline import quantize
from quantize.recipe_file import load_recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.calibrated.support import recipe
from tests.quantize.files import copy_checkpoint, edit_tensors


def test_plain_rounding_streams(tiny_qwen3: Path, tmp_path: Path) -> None:
    result = quantize(tiny_qwen3, tmp_path / "out", recipe("rtn"), workers=1)
    assert result.digest == quantize_checkpoint(tiny_qwen3, tmp_path / "again", recipe("rtn")).digest
    assert (result.layers, result.search) == ([], [])
    assert not (tmp_path / "out" / "calibration.json").exists()


@pytest.mark.parametrize("algorithm", ["smoothquant", "gptq", "smoothquant+gptq", "auto"])
def test_every_other_one_calibrates(algorithm: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    chosen = recipe(algorithm, search={"max_kl_share": 1e-9})
    result = quantize(tiny_qwen3, tmp_path / "out", chosen, max_shard_bytes=50_000)
    assert result.digest == payload_digest(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert bool(result.search) == (algorithm == "auto")
    if algorithm != "auto":
        assert load_recipe(tmp_path / "out" / "recipe.yaml") == chosen
        assert len(result.layers) == 2


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_a_place_inside_the_source_is_refused(algorithm: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    with pytest.raises(CheckpointError, match="lies in the source"):
        quantize(source, source / "out", recipe(algorithm))
    assert not (source / "out").exists()


def test_what_a_rerun_would_refuse_again_leaves_nothing(tiny_qwen3: Path, tmp_path: Path) -> None:
    """A weight so large that squares overflow is found while running, named by its layer, and nothing is kept."""
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source, lambda tensors: tensors.update({name: torch.full_like(tensors[name], 1e30)}))
    with pytest.raises(CalibrationError, match="layer 1"):
        quantize(source, tmp_path / "out", recipe("gptq"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
