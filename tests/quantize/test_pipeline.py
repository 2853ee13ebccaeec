"""One function for every recipe: it takes the path that the algorithm asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantize.checkpoint import payload_digest
from quantize.pipeline import quantize
from quantize.recipe import load_recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.calibrated.support import recipe


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
