"""Tiny models of every family, ids, calibration settings and logits for the tests of calibrated quantization."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.architecture import EMBEDDING, FINAL_NORM, LM_HEAD
from quantize.calibrated.decoder import Layer, rms_norm_fp32, run_layer
from quantize.calibrated.weights import load_layer
from quantize.checkpoint import CheckpointReader
from quantize.numerics import rope_tables
from quantize.recipe import Recipe
from quantize.recipe_file import parse_recipe
from tests.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3

FAMILIES = ("qwen3", "qwen2", "llama", "llama3", "mistral", "qwen3_tied", "qwen2_tied")
"""The session's tiny models, and further ones that `family_source` makes."""
IDS = torch.randint(0, VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(9))
TEXT = Path(__file__).parents[3] / "LICENSE"
"""English that is always there, and short: most of a tiny run is tokenizing its text."""
CALIBRATION: dict[str, Any] = {"data": str(TEXT), "tokens": 512, "window_tokens": 32, "held_out_tokens": 128}


def recipe(algorithm: str, **keys: Any) -> Recipe:
    """A validated recipe that calibrates on a few hundred tokens."""
    calibration = {**CALIBRATION, **keys.pop("calibration", {})}
    return parse_recipe({"algorithm": algorithm, "calibration": calibration, **keys}, "test")


def family_source(family: str, folder: Path, request: Any) -> Path:
    """The tiny checkpoint of a name in `FAMILIES`."""
    if family == "qwen3_tied":
        return make_tiny_qwen3(folder / family, tie_word_embeddings=True)
    if family == "qwen2_tied":
        # Grouped queries and biases together; four query heads to a head of v.
        return make_tiny_qwen2(folder / family, tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=1)
    source: Path = request.getfixturevalue(f"tiny_{family}")
    return source


def large_channels(source: Path) -> Path:
    """Make a few channels of the norms large in a single-file checkpoint, as real models have them."""
    from tests.quantize.files import edit_tensors

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
                tensor[::16] *= 30

    return edit_tensors(source, edit)


def source_logits(
    reader: CheckpointReader,
    ids: Tensor,
    change: Callable[[int, Layer], None] = lambda number, layer: None,
    *,
    embedding: Callable[[Tensor], Tensor] = lambda rows: rows,
    head: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """FP32 logits of a source whose layers go through `change`; `embedding` and `head` change those rows.

    `head(rows, norm)` gets the final norm's weight, which is ones afterwards.
    """
    config = reader.config
    rope = rope_tables(config.head_dim, config.rope_theta, ids.shape[1], config.rope_scaling)
    stream = embedding(reader.tensor(EMBEDDING + ".weight").float())[ids]
    for number in range(config.num_layers):
        layer = load_layer(reader, number)
        change(number, layer)
        stream = run_layer(layer, stream, config, rope)
    norm = reader.tensor(FINAL_NORM + ".weight").float()
    rows = reader.tensor((EMBEDDING if config.tie_word_embeddings else LM_HEAD) + ".weight").float()
    if head is not None:
        rows, norm = head(rows, norm), torch.ones_like(norm)
    return rms_norm_fp32(stream, norm, config.rms_norm_eps) @ rows.T


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def make_small_llama(folder: Path, **overrides: Any) -> Path:
    """A tiny untied Llama of one's own, to be changed."""
    return make_tiny_llama(folder, **{"tie_word_embeddings": False, **overrides})


def run_kills(source: Path, work: Path, chosen: Recipe, moments: list[int]) -> dict[str, Any]:
    """What `tests.quantize.calibrated.kills` prints."""
    arguments = [str(source), str(work), json.dumps(chosen.model_dump(mode="json")), json.dumps(moments)]
    command = [sys.executable, "-m", "tests.quantize.calibrated.kills", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer
