"""Cases 2, 5, 13 and 14: what a checkpoint lacks or has too much is one message, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError
from quantize.preflight import check_quantized, check_source
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors
from tests.tiny_models import make_tiny_qwen3

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def quantized(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "qwen3"
    quantize_checkpoint(tiny_qwen3, out, Recipe())
    return out


def refusal(check: Callable[[Path], CheckpointReader], directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(directory)
    assert caught.value.problems
    return str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "llama3", "mistral"])
def test_sound_checkpoints_of_every_family_pass(family: str, request: pytest.FixtureRequest) -> None:
    check_source(request.getfixturevalue(f"tiny_{family}")).close()


def test_missing_and_unexpected_names_are_listed_per_layer(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.q_norm.weight"]
        del tensors["model.layers.1.self_attn.k_norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128, dtype=torch.bfloat16)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.bfloat16)
        tensors["visual.patch.weight"] = torch.zeros(1, dtype=torch.bfloat16)

    text = refusal(check_source, edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "m"), edit))
    for line in (
        "missing, model.norm.weight",
        "missing, layer 0: self_attn.q_norm.weight",
        "missing, layer 1: mlp.up_proj.weight, self_attn.k_norm.weight",
        "unexpected, visual.patch.weight",
        "unexpected, layer 0: self_attn.q_proj.bias",
        "unexpected, layer 2: mlp.up_proj.weight",
        "family qwen3 with 2 layers",
    ):
        assert line in text


def test_qwen2_without_its_biases_is_refused(tiny_qwen2: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("v_proj.bias")]:
            del tensors[name]

    text = refusal(check_source, edit_tensors(copy_checkpoint(tiny_qwen2, tmp_path / "m"), edit))
    assert "missing, layer 0: self_attn.v_proj.bias" in text
    assert "family qwen2" in text


def test_another_familys_names_are_explained(tiny_qwen3: Path, tmp_path: Path) -> None:
    """A Qwen3 checkpoint whose config says Llama: its QK norms are unexpected."""
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    edit_json(directory / "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"], model_type="llama"))
    text = refusal(check_source, directory)
    assert "unexpected, layer 1: self_attn.k_norm.weight, self_attn.q_norm.weight" in text
    assert "family llama" in text


def test_head_dim_is_checked_against_the_tensors(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    edit_json(directory / "config.json", lambda config: config.update(head_dim=16))
    text = refusal(check_source, directory)
    assert "model.layers.0.self_attn.q_proj.weight has shape [128, 64], config.json asks for [64, 64]" in text
    edit_json(directory / "config.json", lambda config: config.pop("head_dim"))
    assert "asks for [512, 64]" in refusal(check_source, directory)


def test_a_transposed_tensor_is_recognised(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t()

    assert "(transposed?)" in refusal(check_source, edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "m"), edit))


def test_old_rotary_buffers_and_a_tied_heads_copy_are_harmless(tiny_llama: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    check_source(edit_tensors(copy_checkpoint(tiny_llama, tmp_path / "m"), edit)).close()


def test_config_shards_and_names_are_reported_together(tiny_qwen3: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    edit_json(directory / "config.json", lambda config: config.update(rope_scaling={"type": "yarn"}, head_dim=None))
    (directory / "model.safetensors").write_bytes(b"")
    text = refusal(check_source, directory)
    assert "yarn" in text
    assert "head_dim" in text
    assert "empty" in text


def test_integer_and_fp8_weights_are_no_source(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.float8_e4m3fn)

    text = refusal(check_source, edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "m"), edit))
    assert "model.layers.0.mlp.up_proj.weight is I8, expected one of BF16, F16, F32" in text
    assert "model.layers.1.mlp.up_proj.weight is F8_E4M3" in text


def test_our_own_output_is_not_quantized_again(quantized: Path, tmp_path: Path) -> None:
    assert "already quantized: config.json states quant_method 'compressed-tensors'" in refusal(check_source, quantized)
    stripped = copy_checkpoint(quantized, tmp_path / "m")
    edit_json(stripped / "config.json", lambda config: config.pop("quantization_config"))
    assert "already quantized: 14 tensors such as" in refusal(check_source, stripped)


@pytest.mark.parametrize("section", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"}, {"weird": 1}])
def test_other_quantized_models_are_refused_whatever_the_method(tiny_qwen3: Path, tmp_path: Path, section: Any) -> None:
    directory = copy_checkpoint(tiny_qwen3, tmp_path / "m")
    edit_json(directory / "config.json", lambda config: config.update(quantization_config=section))
    assert "already quantized" in refusal(check_source, directory)
    assert "quant_method" in refusal(check_quantized, directory)


def test_gptq_tensors_without_a_section_are_recognised(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.up_proj"
        tensors[name + ".qweight"] = torch.zeros(8, 96, dtype=torch.int32)
        del tensors[name + ".weight"]

    assert "already quantized" in refusal(check_source, edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "m"), edit))


def test_our_output_is_a_usable_checkpoint_and_the_source_is_not(quantized: Path, tiny_qwen3: Path) -> None:
    check_quantized(quantized).close()
    assert "no quantization_config" in refusal(check_quantized, tiny_qwen3)


def test_a_flat_scale_is_accepted_and_a_wrong_one_refused(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"

    def flatten(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:, 0]

    def halve(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:48]

    flat = edit_tensors(copy_checkpoint(quantized, tmp_path / "flat"), flatten)
    with check_quantized(flat) as reader, CheckpointReader(quantized) as original:
        assert torch.equal(reader.weight_scale(name[:-13]), original.weight_scale(name[:-13]))
    half = edit_tensors(copy_checkpoint(quantized, tmp_path / "half"), halve)
    assert f"{name} has shape [48, 1]" in refusal(check_quantized, half)


def test_a_missing_scale_is_refused_by_name_with_and_without_an_index(
    tiny_qwen3: Path, quantized: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight_scale"

    def edit(tensors: Tensors) -> None:
        del tensors[name]

    without = edit_tensors(copy_checkpoint(quantized, tmp_path / "single"), edit)
    assert "missing, layer 1: self_attn.k_proj.weight_scale" in refusal(check_quantized, without)
    edit_json_index(without, quantized)
    text = refusal(check_quantized, without)
    assert f"{name} is listed in model.safetensors.index.json" in text


def edit_json_index(directory: Path, complete: Path) -> None:
    """Give `directory` an index that lists every tensor of `complete`."""
    with CheckpointReader(complete) as reader:
        names = ", ".join(f'"{name}": "model.safetensors"' for name in reader.infos)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {' + names + "}}")


def test_codes_and_ignored_modules_have_the_dtypes_the_section_says(quantized: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(quantized, tmp_path / "m")
    ignore = ["lm_head", "model.layers.0.mlp.up_proj"]
    edit_json(directory / "config.json", lambda config: config["quantization_config"].update(ignore=ignore))
    text = refusal(check_quantized, directory)
    assert "unexpected, layer 0: mlp.up_proj.weight_scale" in text
    assert "model.layers.0.mlp.up_proj.weight is I8, expected BF16 or F16 or F32" in text
    edit_json(directory / "config.json", lambda config: config["quantization_config"].update(ignore=[]))
    text = refusal(check_quantized, directory)
    assert "missing, lm_head.weight_scale" in text
    assert "lm_head.weight is BF16, expected I8" in text


def test_a_target_without_a_module_is_refused(quantized: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(quantized, tmp_path / "m")

    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["targets"].append("re:.*experts")

    edit_json(directory / "config.json", edit)
    assert "target 're:.*experts' matches no Linear module" in refusal(check_quantized, directory)


def test_nothing_is_read_before_all_is_checked(tmp_path: Path) -> None:
    """Names, shapes and dtypes are checked on a checkpoint whose payload is not there: a hole in the file."""
    directory = make_tiny_qwen3(tmp_path / "m")
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    header_end = 8 + int.from_bytes(raw[:8], "little")
    with path.open("wb") as file:
        file.write(raw[:header_end])
        file.truncate(len(raw))
    check_source(directory).close()
