"""Checkpoints for one reader: what changes, what does not, and what is refused before a weight is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantize.adapt import adapt, close_fused
from quantize.architecture import linear_modules
from quantize.checkpoint import CheckpointReader, scan_checkpoint
from quantize.errors import RecipeError
from quantize.model_config import load_model_config
from quantize.preflight import check_quantized
from quantize.readers import acceptance
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.files import edit_tensors
from tests.tiny_models import make_tiny_qwen3

LAYER0 = "model.layers.0."
IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that pypto-serving could describe, but with a tied LM head and its theta in the new spelling only."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    directory = tmp_path_factory.mktemp("tied") / "qwen3"
    return make_tiny_qwen3(
        directory, head_dim=16, tie_word_embeddings=True, rope_parameters=rope, max_shard_size="60KB"
    )


def logits(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def raw_config(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def test_any_changes_nothing(tied: Path) -> None:
    raw = raw_config(tied)
    adapted = adapt("any", load_model_config(tied), raw, ["lm_head"])
    assert (adapted.config, adapted.ignored, adapted.copies) == (raw, ["lm_head"], {})


def test_pypto_serving_gets_a_head_and_its_theta_and_the_same_codes(tied: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tied, tmp_path / "any", Recipe())
    problems = acceptance(scan_checkpoint(tmp_path / "any"), "pypto-serving").problems
    assert any("lm_head.weight is missing" in problem for problem in problems)
    assert any("rope_theta at the top level" in problem for problem in problems)
    quantize_checkpoint(tied, tmp_path / "out", Recipe(reader="pypto-serving"))
    assert acceptance(scan_checkpoint(tmp_path / "out"), "pypto-serving").problems == ()
    with CheckpointReader(tmp_path / "any") as common, check_quantized(tmp_path / "out") as ours:
        assert set(ours.infos) == {*common.infos, "lm_head.weight"}
        for name in common.infos:
            assert torch.equal(ours.tensor(name), common.tensor(name)), name
        assert torch.equal(ours.tensor("lm_head.weight"), ours.tensor("model.embed_tokens.weight"))
    config = raw_config(tmp_path / "out")
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (1e6, 1e6)
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "any"))


def test_a_tied_head_that_the_source_stores_is_not_written_twice(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", head_dim=16, tie_word_embeddings=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    quantize_checkpoint(source, tmp_path / "out", Recipe(reader="pypto-serving"))
    assert acceptance(scan_checkpoint(tmp_path / "out"), "pypto-serving").problems == ()


@pytest.mark.parametrize("reader", ["vllm", "vllm-ascend"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "llama3", "mistral"])
def test_vllm_gets_both_spellings_that_transformers_reads_as_one(
    family: str, reader: Literal["vllm", "vllm-ascend"], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(f"tiny_{family}")
    quantize_checkpoint(source, tmp_path / "out", Recipe(reader=reader))
    config = raw_config(tmp_path / "out")
    assert config["rope_theta"] == 10000.0
    assert ("rope_scaling" in config) == (family == "llama3")
    theirs, before = AutoConfig.from_pretrained(tmp_path / "out"), AutoConfig.from_pretrained(source)
    assert theirs.rope_parameters == before.rope_parameters
    assert load_model_config(tmp_path / "out") == load_model_config(source)
    assert acceptance(scan_checkpoint(tmp_path / "out"), reader).problems == ()


def test_one_ignored_member_takes_its_fused_mates_along(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ignore = ("lm_head", LAYER0 + "self_attn.v_proj", "re:.*layers.1.mlp.up_proj")
    quantize_checkpoint(tiny_qwen3, tmp_path / "any", Recipe(ignore=ignore))
    assert acceptance(scan_checkpoint(tmp_path / "any"), "vllm").problems
    with caplog.at_level(logging.WARNING):
        quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(ignore=ignore, reader="vllm"))
    assert "model.layers.1.mlp.gate_proj stay unquantized too" in caplog.text
    assert acceptance(scan_checkpoint(tmp_path / "out"), "vllm").problems == ()
    with CheckpointReader(tmp_path / "out") as reader:
        kept = [name for name in linear_modules(reader.config) if reader.infos[name + ".weight"].dtype != "I8"]
    qkv = [f"{LAYER0}self_attn.{name}_proj" for name in "qkv"]
    assert kept == [*qkv, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    assert logits(tmp_path / "out").isfinite().all()


def test_groups_are_closed_in_model_order(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    assert close_fused(["lm_head", LAYER0 + "mlp.down_proj"], config) == [LAYER0 + "mlp.down_proj", "lm_head"]
    assert close_fused([], config) == []


@pytest.mark.parametrize(
    ("family", "recipe", "told"),
    [
        ("qwen3", Recipe(reader="pypto-serving"), "head_dim is 32"),
        ("mistral", Recipe(reader="pypto-serving"), "the family is mistral, expected qwen3"),
        ("llama3", Recipe(reader="pypto-serving"), "found rope scaling (llama3)"),
        ("qwen3", Recipe(reader="pypto-serving", down="bf16"), "not INT8: layer 0: mlp.down_proj; layer 1"),
        ("qwen3", Recipe(reader="vllm", ignore=()), "lm_head.weight is I8"),
        ("qwen3", Recipe(reader="vllm-ascend", ignore=()), "lm_head.weight is I8"),
    ],
)
def test_what_a_reader_cannot_take_is_refused_before_the_work(
    family: str, recipe: Recipe, told: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"would not suit {recipe.reader}") as caught:
        quantize_checkpoint(request.getfixturevalue(f"tiny_{family}"), tmp_path / "out", recipe)
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_fp16_sources_are_refused_for_pypto_serving(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", head_dim=16, dtype=torch.float16)
    with pytest.raises(RecipeError, match="are F16, such as"):
        quantize_checkpoint(source, tmp_path / "out", Recipe(reader="pypto-serving"))


def test_the_reader_is_part_of_the_digest(tied: Path, tmp_path: Path) -> None:
    digests = {
        quantize_checkpoint(tied, tmp_path / reader, Recipe(reader=reader)).digest
        for reader in ("any", "vllm", "pypto-serving")
    }
    assert len(digests) == 3
