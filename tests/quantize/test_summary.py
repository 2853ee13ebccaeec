"""What `summarize_checkpoint` says of sound checkpoints, and how far it gets with broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantize.errors import CheckpointError
from quantize.recipe import RECIPE_NAME, Recipe
from quantize.rtn import quantize_checkpoint
from quantize.summary import DtypeTotal, Summary, summarize_checkpoint, summarize_gguf
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors
from tests.tiny_models import make_tiny_qwen3


def summary_of(directory: Path) -> Summary:
    return summarize_checkpoint(directory)[0]


def test_a_source_checkpoint(tiny_llama3: Path) -> None:
    summary = summary_of(tiny_llama3)
    assert (summary.kind, summary.family, summary.architecture) == ("checkpoint", "llama", "LlamaForCausalLM")
    assert summary.shape == {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 320,
    }
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96 + 2 * 64
    assert summary.parameters == 2 * layer + 2 * 320 * 64 + 64
    assert summary.dtypes == {"BF16": DtypeTotal(21, 2 * summary.parameters)}
    assert summary.payload_bytes == 2 * summary.parameters
    assert summary.files == ("model.safetensors",)
    assert summary.quantization is None
    assert (summary.tied, summary.lm_head_stored) == (False, True)
    assert summary.context_tokens == 2048
    assert summary.rope == {
        "type": "llama3",
        "theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_tokens": 256,
    }
    assert (summary.eos_token_ids, summary.bos_token_id) == ((2,), 0)
    assert summary.chat_template
    assert summary.tokenizer_ids == 300
    assert (summary.good_for, summary.problems, summary.recipe) == ("quantize", (), None)


def test_a_quantized_checkpoint_counts_parameters_not_scales(tiny_llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_llama, tmp_path / "out", Recipe(down="bf16"))
    before, after = summary_of(tiny_llama), summary_of(tmp_path / "out")
    assert after.parameters == before.parameters
    assert after.dtypes["I8"].tensors == 12
    assert after.quantization is not None
    assert (after.quantization.int8_modules, after.quantization.linear_modules) == (12, 15)
    assert "model.layers.1.mlp.down_proj" in after.quantization.ignored
    assert after.good_for == "stage"
    assert (after.tied, after.lm_head_stored) == (True, False)


def test_shards_and_the_union_of_stop_ids(tmp_path: Path) -> None:
    directory = make_tiny_qwen3(tmp_path / "m", max_shard_size="100KB")
    edit_json(directory / "generation_config.json", lambda content: content.update(eos_token_id=[5, 2]))
    summary = summary_of(directory)
    assert len(summary.files) > 1
    assert summary.eos_token_ids == (2, 5)


def test_a_stored_recipe_is_told_and_a_hostile_one_noted(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    path = directory / RECIPE_NAME
    path.write_text(Recipe(down="bf16").to_yaml())
    recipe = summary_of(directory).recipe
    assert recipe is not None
    assert recipe["down"] == "bf16"
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(24)
    )
    for content, told in ((bomb, "YAML aliases"), ("unknown: 1", "unknown"), ("[" * 10_000, "cannot be read")):
        path.write_text(content)
        summary = summary_of(directory)
        assert summary.recipe is None
        assert told in summary.notes[0]
        assert summary.good_for == "quantize"


def test_a_broken_checkpoint_is_described_as_far_as_it_goes(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    edit_json(directory / "config.json", lambda config: config.update(architectures=["X\x1b[31m"], rope_scaling=5))
    summary = summary_of(directory)
    assert summary.family is None
    assert summary.dtypes["BF16"].tensors > 20
    assert summary.good_for is None
    assert summary.problems
    assert all("\x1b" not in problem for problem in summary.problems)
    (directory / "config.json").unlink()
    assert summary_of(directory).parameters is not None
    (directory / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="can be described"):
        summarize_checkpoint(directory)


def test_a_config_without_weights_is_described(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_qwen3 / "config.json").read_bytes())
    summary = summary_of(tmp_path)
    assert summary.family == "qwen3"
    assert summary.parameters is None
    assert any("no weights" in problem for problem in summary.problems)
    assert any("no tokenizer" in note for note in summary.notes)


def test_a_tied_heads_copy_is_not_counted(tiny_llama: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_llama, tmp_path / "m")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(directory, edit)
    assert summary_of(directory).parameters == summary_of(tiny_llama).parameters
    assert summary_of(directory).lm_head_stored


def test_a_tokenizer_with_more_ids_than_the_model_is_noted(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")

    def add(content: dict[str, list[dict[str, object]]]) -> None:
        content["added_tokens"].append({"id": 400, "content": "<x>"})

    edit_json(directory / "tokenizer.json", add)
    assert summary_of(directory).notes == ("the tokenizer has 401 ids, the model's vocabulary 320",)


def test_no_directory_cannot_be_described(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        summarize_checkpoint(tmp_path / "absent")
    (tmp_path / "x.gguf").write_bytes(b"GGUX1234")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        summarize_gguf(tmp_path / "x.gguf")
