"""The slab table: order, shapes, limits, and a fingerprint that notices every change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kernels import contract
from kernels.contract import fingerprint, padded_vocab, slab_specs
from kernels.errors import ContractError
from quantize.model_config import ModelConfig

QWEN3_14B = ModelConfig(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=40,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_tokens=40960,
    tie_word_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    dtype="bfloat16",
    eos_token_ids=(151645,),
    bos_token_id=None,
)


def test_qwen3_14b_slabs_are_those_of_the_kernel_abi() -> None:
    slabs = {slab.name: (slab.dtype, slab.shape) for slab in slab_specs(QWEN3_14B, "bf16")}
    assert slabs["wq"] == ("INT8", (40 * 5120, 5120))
    assert slabs["wk"] == slabs["wv"] == ("INT8", (40 * 5120, 1024))
    assert slabs["wq_scale"] == ("FP32", (40, 5120))
    assert slabs["w_gate"] == slabs["w_up"] == ("INT8", (40 * 5120, 17408))
    assert slabs["w_down"] == ("BF16", (40 * 17408, 5120))
    assert "w_down_scale" not in slabs
    assert slabs["lm_head_weight"] == slabs["embed_weight"] == ("BF16", (152064, 5120))
    assert slabs["rope_cos"] == ("FP32", (4096, 128))
    assert slabs["final_norm_weight"] == ("FP32", (1, 5120))


def test_down_int8_adds_its_scale() -> None:
    slabs = {slab.name: (slab.dtype, slab.shape) for slab in slab_specs(QWEN3_14B, "int8")}
    assert slabs["w_down"] == ("INT8", (40 * 17408, 5120))
    assert slabs["w_down_scale"] == ("FP32", (40, 5120))


def test_families_differ_in_norms_and_biases_only() -> None:
    qwen3 = {slab.name for slab in slab_specs(QWEN3_14B)}
    llama = {slab.name for slab in slab_specs(dataclasses.replace(QWEN3_14B, qk_norm=False))}
    qwen2 = {slab.name for slab in slab_specs(dataclasses.replace(QWEN3_14B, qk_norm=False, qkv_bias=True))}
    assert qwen3 - llama == {"q_norm_weight", "k_norm_weight"}
    assert qwen2 - llama == {"q_bias", "k_bias", "v_bias"}


@pytest.mark.parametrize(("vocab", "padded"), [(1, 512), (512, 512), (513, 1024), (151936, 152064), (49152, 49152)])
def test_vocab_is_padded_to_a_multiple_of_512(vocab: int, padded: int) -> None:
    assert padded_vocab(vocab) == padded


def test_fingerprint_is_stable_and_differs_by_variant() -> None:
    assert fingerprint("int8") == "7db05e1d381e25a70b8cb13d79f9fb05b121e110a55a1e7b7f2ddc59ecb7a9d7"
    assert fingerprint("bf16") == "458edfb2adca7cbb6f8811cf8e7501e928ed75641ba7281d1fb33e29dce9725b"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "BF16"},
        {"shape": ("L*H", "KV")},
        {"source": "model.layers.{layer}.self_attn.k_proj.weight"},
        {"name": "w_q"},
    ],
)
def test_fingerprint_changes_with_any_column(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    table = list(contract.SLABS)
    index = [spec.name for spec in table].index("wq")
    table[index] = dataclasses.replace(table[index], **change)
    monkeypatch.setattr(contract, "SLABS", tuple(table))
    assert fingerprint() != before


def test_fingerprint_changes_with_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    monkeypatch.setattr(contract, "SLABS", contract.SLABS[::-1])
    assert fingerprint() != before


def test_a_model_outside_the_limits_is_refused_naming_all_of_them() -> None:
    config = dataclasses.replace(QWEN3_14B, num_kv_heads=7, head_dim=127, intermediate_size=70000)
    with pytest.raises(ContractError, match=r"num_heads is 40, expected a multiple of num_kv_heads 7 \(gqa") as error:
        slab_specs(config)
    assert "head_dim is 127, expected a multiple of 2" in str(error.value)
    assert "intermediate_size is 70000, expected at most 65536" in str(error.value)


def test_an_unknown_down_variant_is_refused() -> None:
    with pytest.raises(ContractError, match="'int4'; expected 'int8' or 'bf16'"):
        slab_specs(QWEN3_14B, "int4")  # type: ignore[arg-type]
