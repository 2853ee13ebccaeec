"""Layer errors, activation statistics and weight errors: against definitions, by hand, on tiny models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantize.activation_statistics import activation_statistics
from quantize.errors import QuantizeError
from quantize.layer_errors import layer_errors, residual_rotation
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from quantize.transformers_model import TransformersModel
from quantize.weight_errors import weight_errors
from tests.quantize.files import copy_checkpoint, edit_tensors
from tests.tiny_models import make_tiny_llama

WINDOWS = [torch.arange(40), torch.arange(90, 120)]


def rotated_copy(source: Path, out: Path) -> Path:
    """The same function with its residual stream turned: norms folded into what reads them, saved as FP32."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    hidden = model.config.hidden_size
    turn = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(5)))[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ turn)
        pairs = [(model.model.norm, [model.lm_head])]
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            pairs.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
            pairs.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight.copy_(turn.T @ writer.weight)
        for norm, readers in pairs:
            for reader in readers:
                reader.weight.copy_((reader.weight * norm.weight) @ turn)
            norm.weight.fill_(1.0)
    model.save_pretrained(out)
    return out


def test_a_model_has_no_error_against_itself(tiny_qwen3: Path) -> None:
    model = TransformersModel(tiny_qwen3, torch.float32)
    errors = layer_errors(model, model, WINDOWS)
    assert [(error.layer, error.own_sqnr_db, error.carried_sqnr_db) for error in errors] == [
        (0, None, None),
        (1, None, None),
    ]


def test_own_error_blames_the_layer_that_was_changed_and_carried_error_all_after_it(
    tiny_llama: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5

    source = make_tiny_llama(tmp_path / "source", num_hidden_layers=3)
    changed = edit_tensors(copy_checkpoint(source, tmp_path / "changed"), change)
    reference, candidate = (TransformersModel(path, torch.float32) for path in (source, changed))
    errors = layer_errors(reference, candidate, WINDOWS)
    assert errors[0].own_sqnr_db is None
    assert errors[0].carried_sqnr_db is None
    assert errors[1].own_sqnr_db is not None
    assert errors[2].own_sqnr_db is None
    assert errors[2].carried_sqnr_db is not None


def test_both_errors_are_mean_noise_to_signal_ratios_of_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_llama, tmp_path / "w8a8", Recipe())
    reference, candidate = (TransformersModel(path, torch.float32) for path in (tiny_llama, tmp_path / "w8a8"))
    window = WINDOWS[0]

    def hidden(model: TransformersModel) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            states = model.module.model(input_ids=window[None], output_hidden_states=True, use_cache=False)
        return states.hidden_states[0][0].double(), states.hidden_states[1][0].double()

    (_, expected), (arrived, found) = hidden(reference), hidden(candidate)
    noise = (found - expected).square().sum(-1)
    carried = -10 * math.log10(float((noise / expected.square().sum(-1)).mean()))
    own = -10 * math.log10(float((noise / (expected - arrived).square().sum(-1)).mean()))
    first = layer_errors(reference, candidate, [window])[0]
    assert first.carried_sqnr_db == pytest.approx(carried, abs=1e-3)
    assert first.own_sqnr_db == pytest.approx(own, abs=1e-3)
    assert 20 < own < 60


def test_a_rotated_residual_stream_is_turned_back(tmp_path: Path) -> None:
    source = make_tiny_llama(tmp_path / "source", tie_word_embeddings=False)
    reference = TransformersModel(source, torch.float32)
    candidate = TransformersModel(rotated_copy(source, tmp_path / "rotated"), torch.float32)
    assert residual_rotation(reference.embedding, reference.embedding) is None
    for error in layer_errors(reference, candidate, WINDOWS):
        assert error.own_sqnr_db is not None
        assert error.own_sqnr_db > 90
        assert error.carried_sqnr_db is not None
        assert error.carried_sqnr_db > 90


def test_models_that_do_not_belong_together_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    reference = TransformersModel(tiny_llama, torch.float32)
    deeper = TransformersModel(make_tiny_llama(tmp_path / "deeper", num_hidden_layers=3), torch.float32)
    with pytest.raises(QuantizeError, match="found 3 layers"):
        layer_errors(reference, deeper, WINDOWS)
    other = TransformersModel(make_tiny_llama(tmp_path / "other", seed=1), torch.float32)
    with pytest.raises(QuantizeError, match="after the best rotation"):
        layer_errors(reference, other, WINDOWS)


def test_activation_statistics_are_those_of_the_modules_inputs(tiny_qwen3: Path) -> None:
    model = TransformersModel(tiny_qwen3, torch.float32)
    seen: list[Tensor] = []
    down = model.layers[1].get_submodule("mlp.down_proj")
    hook = down.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].double()))
    for window in WINDOWS:
        model.logits(window)
    hook.remove()
    statistics = activation_statistics(model, WINDOWS)
    assert [(entry.layer, entry.input) for entry in statistics] == [
        (layer, name) for layer in (0, 1) for name in ("qkv", "o", "gate_up", "down")
    ]
    values, found = torch.cat(seen), statistics[-1]
    rms = values.square().mean(-1).sqrt()
    ratio = values.abs().amax(-1) / rms
    assert found.modules == ("mlp.down_proj",)
    assert found.amax == pytest.approx(float(values.abs().max()))
    assert found.rms == pytest.approx(float(values.square().mean().sqrt()))
    assert found.amax_to_rms_mean == pytest.approx(float(ratio.mean()))
    assert found.amax_to_rms_max == pytest.approx(float(ratio.max()))
    assert found.kurtosis == pytest.approx(float((values.pow(4).mean(-1) / rms.pow(4)).mean()))
    channels = values.abs().amax(0)
    assert [channel for channel, _ in found.top_channels] == channels.topk(5).indices.tolist()
    assert found.top_channels[0][1] == pytest.approx(float(channels.max() / channels.median()))
    # One scale for a token: uniform rounding noise of a twelfth of a step squared, and a little from BF16.
    step = values.abs().amax(-1) / 127
    assert found.sqnr_db == pytest.approx(-10 * math.log10(float((step.square() / 12 / rms.square()).mean())), abs=0.5)


def test_weight_errors_are_those_that_quantizing_reported(tiny_qwen3: Path, tmp_path: Path) -> None:
    result = quantize_checkpoint(tiny_qwen3, tmp_path / "w8a8", Recipe())
    reported = {error.name: error.sqnr_db for error in result.errors}
    found = weight_errors(tiny_qwen3, tmp_path / "w8a8")
    assert {error.name: error.sqnr_db for error in found} == pytest.approx(reported, abs=1e-3)
    assert not any(error.folded for error in found)
    assert {error.layer for error in found} == {0, 1}


def test_a_folded_scale_is_not_taken_for_an_error(tiny_qwen3: Path, tmp_path: Path) -> None:
    def smooth(tensors: dict[str, Tensor]) -> None:
        scales = torch.linspace(0.5, 2.0, 64, dtype=torch.bfloat16)
        tensors["model.layers.0.input_layernorm.weight"] /= scales
        tensors["model.layers.0.self_attn.q_proj.weight"] *= scales

    smoothed = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "smoothed"), smooth)
    quantize_checkpoint(smoothed, tmp_path / "w8a8", Recipe())
    found = {error.name: error for error in weight_errors(tiny_qwen3, tmp_path / "w8a8")}
    assert [name for name, error in found.items() if error.folded] == ["model.layers.0.self_attn.q_proj"]
    assert found["model.layers.0.self_attn.q_proj"].sqnr_db is None
