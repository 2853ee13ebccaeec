"""The output loads in transformers with compressed-tensors, and computes with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize.checkpoint import CheckpointReader
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.files import edit_json, edit_tensors

IDS = torch.arange(3, 43).reshape(2, 20)


def logits(directory: Path, *, integer_activations: bool) -> Tensor:
    """FP32 logits of the checkpoint as transformers runs it; activations optionally left unquantized."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if not integer_activations:
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                module.quantization_enabled = False
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def dequantized(quantized: Path, target: Path) -> Path:
    """The same model as a plain FP32 checkpoint: `code * scale` in place of the codes."""
    target.mkdir()
    for path in quantized.iterdir():
        (target / path.name).write_bytes(path.read_bytes())

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            scale = tensors.pop(name).float()
            tensors[name.removesuffix("_scale")] = tensors[name.removesuffix("_scale")].float() * scale
        for name in tensors:
            tensors[name] = tensors[name].float()

    edit_tensors(target, edit)
    edit_json(target / "config.json", lambda config: config.pop("quantization_config"))
    return target


@pytest.mark.parametrize("arithmetic", ["fp32", "compat"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "llama3", "mistral"])
def test_logits_agree_with_the_dequantized_weights(
    family: str, arithmetic: Literal["fp32", "compat"], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Without activation quantization, to FP32 rounding; with it, within what 8-bit tokens cost."""
    source = request.getfixturevalue(f"tiny_{family}")
    quantize_checkpoint(source, tmp_path / "out", Recipe(arithmetic=arithmetic))
    exact = logits(dequantized(tmp_path / "out", tmp_path / "plain"), integer_activations=False)
    loaded = logits(tmp_path / "out", integer_activations=False)
    assert (loaded - exact).abs().max() <= 1e-5 * exact.abs().max()
    served = logits(tmp_path / "out", integer_activations=True)
    assert (served - loaded).abs().max() > 1e-3 * exact.abs().max()
    original = logits(source, integer_activations=False)
    for candidate in (exact, served):
        relative = float((candidate - original).square().mean().sqrt() / original.square().mean().sqrt())
        assert 1e-4 < relative < 0.05


def test_one_wrong_scale_is_seen(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Sensitivity: one channel's scale off by 10 % is far outside the tolerance above."""
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe())
    exact = logits(dequantized(tmp_path / "out", tmp_path / "plain"), integer_activations=False)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight_scale"][3] *= 1.1

    edit_tensors(tmp_path / "out", edit)
    wrong = logits(tmp_path / "out", integer_activations=False)
    assert (wrong - exact).abs().max() > 1e-3 * exact.abs().max()


def test_the_modules_hold_our_codes_and_the_ignored_ones_our_weights(tiny_qwen3: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(down="bf16"))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = model.state_dict()
    with CheckpointReader(tmp_path / "out") as reader:
        assert set(state) == set(reader.infos)
        for name in reader.infos:
            assert state[name].dtype == reader.tensor(name).dtype, name
            assert torch.equal(state[name], reader.tensor(name)), name


def test_the_tokenizer_comes_along(tiny_qwen3: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe())
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_qwen3, tmp_path / "out"))
    messages = [{"role": "user", "content": "the end"}]
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)
    assert after("the end of it")["input_ids"] == before("the end of it")["input_ids"]
