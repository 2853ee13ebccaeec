"""`stage --abi pypto-lib`: every tensor against the checkpoint by another computation, refusals, safety."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.abi_export import export_checkpoint, verify_export
from kernels.errors import ContractError, KernelsError, StagingError
from kernels.slabs import MANIFEST_FILE, SLAB_FILE, load_slabs
from quantize.checkpoint import payload_digest
from quantize.errors import CheckpointError
from quantize.recipe import Recipe
from tests.slab_tools import edit_checkpoint, quantize, read_tensors
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, DIM, VOCAB, PADDED = 512, 256, 2, 4, 4, 128, 320, 512
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
ATTN, MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
SOURCES = {
    "decode_wq": ATTN + "q_proj",
    "decode_wk": ATTN + "k_proj",
    "decode_wv": ATTN + "v_proj",
    "decode_wo": ATTN + "o_proj",
    "decode_w_gate": MLP + "gate_proj",
    "decode_w_up": MLP + "up_proj",
}
NORMS = {
    "decode_input_rms_weight": "model.layers.{}.input_layernorm",
    "decode_post_rms_weight": "model.layers.{}.post_attention_layernorm",
    "decode_q_norm_weight": ATTN + "q_norm",
    "decode_k_norm_weight": ATTN + "k_norm",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("abi") / "source", **SHAPE)


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(source, tmp_path_factory.mktemp("abi") / "w8a8", Recipe(down="bf16"))


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("abi") / "slabs"
    export_checkpoint(checkpoint, out)
    return out


def expected_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The slabs by the text of the interface: numpy, whole model at once, nothing of the staging code."""
    held = read_tensors(checkpoint)
    tensors = {}
    for name, module in SOURCES.items():
        weights = [held[f"{module.format(layer)}.weight"].numpy() for layer in range(LAYERS)]
        tensors[name] = torch.from_numpy(np.concatenate([np.ascontiguousarray(w.T) for w in weights]))
        scales = [held[f"{module.format(layer)}.weight_scale"].float().numpy().reshape(-1) for layer in range(LAYERS)]
        tensors[f"{name}_scale"] = torch.from_numpy(np.stack(scales))
    for name, module in NORMS.items():
        tensors[name] = torch.stack([held[f"{module.format(layer)}.weight"].float() for layer in range(LAYERS)])
    downs = [held[MLP.format(layer) + "down_proj.weight"] for layer in range(LAYERS)]
    tensors["decode_w_down"] = torch.cat([weight.permute(1, 0) for weight in downs])
    tensors["final_norm_weight"] = held["model.norm.weight"].float()[None]
    head, embedding = held["lm_head.weight"], held["model.embed_tokens.weight"]
    tensors["lm_head_weight"] = torch.cat([head, head[0].repeat(PADDED - VOCAB, 1)])
    tensors["embed_weight"] = torch.cat([embedding, torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.bfloat16)])
    return tensors


def test_every_tensor_is_what_the_interface_says(checkpoint: Path, exported: Path) -> None:
    have, want = load_file(exported / SLAB_FILE), expected_tensors(checkpoint)
    assert have.keys() == want.keys() | {"rope_cos", "rope_sin"}
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name
    assert have["decode_wq"].shape == (LAYERS * HIDDEN, HIDDEN)
    assert have["decode_wk_scale"].shape == (LAYERS, KV_HEADS * DIM)
    assert have["decode_w_down"].dtype == torch.bfloat16


def test_rope_tables_are_half_split_over_4096_positions_with_the_models_theta(exported: Path) -> None:
    have = load_file(exported / SLAB_FILE)
    frequencies = 1e6 ** (-np.arange(0, DIM, 2, dtype=np.float64) / DIM)
    angles = np.arange(4096, dtype=np.float64)[:, None] * frequencies
    for name, table in (("rope_cos", np.cos(angles)), ("rope_sin", np.sin(angles))):
        assert have[name].dtype == torch.float32
        assert have[name].shape == (4096, DIM)
        assert np.abs(have[name].numpy() - np.concatenate([table, table], axis=1)).max() < 1e-3


def test_the_manifest_names_contract_source_and_every_tensor(checkpoint: Path, exported: Path) -> None:
    manifest = json.loads((exported / MANIFEST_FILE).read_text())
    assert manifest["contract"]["name"] == "pypto-lib/qwen3/w8a8-down-bf16"
    assert len(manifest["contract"]["fingerprint"]) == 64
    assert manifest["source_digest"] == payload_digest(checkpoint)
    assert manifest["tensors"].keys() == load_file(exported / SLAB_FILE).keys()
    assert manifest["kernel_constants"]["q_head_batch"] == 1
    assert "hidden size 512" in manifest["kernel_constants"]["retune"]
    fed = {slab for stage in manifest["stages"].values() for _, slab in stage if slab}
    assert manifest["tensors"].keys() - fed == {"embed_weight"}
    assert verify_export(exported) == []


def test_a_tied_head_is_the_embedding_with_copies_of_row_0(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", tie_word_embeddings=True, num_hidden_layers=1, **SHAPE)
    checkpoint = quantize(source, tmp_path / "w8a8", Recipe(down="bf16"))
    result = export_checkpoint(checkpoint, tmp_path / "slabs")
    have = load_file(tmp_path / "slabs" / SLAB_FILE)
    embedding = read_tensors(source)["model.embed_tokens.weight"]
    assert torch.equal(have["lm_head_weight"][:VOCAB], embedding)
    assert torch.equal(have["lm_head_weight"][VOCAB:], embedding[:1].expand(PADDED - VOCAB, -1))
    assert not have["embed_weight"][VOCAB:].any()
    assert result.source_digest == payload_digest(checkpoint)


def swap(one: str, other: str, tensors: dict[str, Tensor]) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        (MLP.format(0) + "gate_proj.weight", MLP.format(0) + "up_proj.weight", {"decode_w_gate", "decode_w_up"}),
        (
            ATTN.format(0) + "k_proj.weight_scale",
            ATTN.format(0) + "v_proj.weight_scale",
            {"decode_wk_scale", "decode_wv_scale"},
        ),
        (MLP.format(0) + "down_proj.weight", MLP.format(1) + "down_proj.weight", {"decode_w_down"}),
        ("lm_head.weight", "model.embed_tokens.weight", {"lm_head_weight", "embed_weight"}),
    ],
)
def test_swapping_two_tensors_changes_exactly_their_slabs(
    one: str, other: str, changed: set[str], checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    before = json.loads((exported / MANIFEST_FILE).read_text())
    edited = edit_checkpoint(checkpoint, tmp_path / "edited", lambda tensors: swap(one, other, tensors))
    after = export_checkpoint(edited, tmp_path / "slabs")
    assert {name for name in after.tensors if after.tensors[name] != before["tensors"][name]} == changed
    assert after.source_digest != before["source_digest"]


def refusal(checkpoint: Path, tmp_path: Path, kind: type[Exception] = KernelsError) -> str:
    """Export, expect a refusal that leaves nothing behind, and return its message."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind) as caught:
        export_checkpoint(checkpoint, tmp_path / "slabs")
    assert sorted(tmp_path.iterdir()) == before
    return str(caught.value)


def test_int8_down_is_refused_with_what_to_do(source: Path, tmp_path: Path) -> None:
    message = refusal(quantize(source, tmp_path / "w8a8"), tmp_path, ContractError)
    assert "takes down_proj of family qwen3 in bf16, and this checkpoint has it in int8" in message
    assert "`down: bf16` in the recipe" in message


def test_down_in_one_layer_only_is_refused(source: Path, tmp_path: Path) -> None:
    mixed = quantize(source, tmp_path / "w8a8", Recipe(ignore=("lm_head", "re:.*layers.1.mlp.down_proj$")))
    assert "down_proj is quantized in 1 of 2 layers" in refusal(mixed, tmp_path, ContractError)


def test_shapes_outside_the_rules_are_refused_by_rule_and_number_before_weights_are_read(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", num_key_value_heads=1, num_hidden_layers=1)
    checkpoint = quantize(source, tmp_path / "w8a8", Recipe(down="bf16"))
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    message = refusal(checkpoint, tmp_path, ContractError)
    for words in (
        "head_dim is 32, expected 128 (head-dim",
        "q_size is 128, expected hidden_size 64 (query-width",
        "num_kv_heads is 1, expected a multiple of 2 (kv-pairs",
        "kv_size is 32, expected a multiple of 512 (kv-tile",
        "hidden_size is 64, expected a multiple of 512 (hidden-tile",
        "intermediate_size is 96, expected a multiple of 256 (mlp-tile",
    ):
        assert words in message


def test_another_family_and_an_unquantized_source_are_refused(source: Path, tmp_path: Path) -> None:
    llama = quantize(make_tiny_llama(tmp_path / "llama"), tmp_path / "w8a8")
    assert "ABI pypto-lib has no contract for family llama; it has qwen3" in refusal(llama, tmp_path, ContractError)
    assert "has no quantization_config" in refusal(source, tmp_path, ContractError)


def test_missing_tensors_and_an_existing_target_are_refused(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[ATTN.format(1) + "q_proj.weight_scale"]

    broken = edit_checkpoint(checkpoint, tmp_path / "broken", drop)
    assert "layers.1.self_attn.q_proj.weight_scale is missing" in refusal(broken, tmp_path, StagingError)
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(checkpoint, exported)
    assert verify_export(exported) == []


def test_a_bad_value_leaves_nothing_and_a_killed_run_is_swept(checkpoint: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][3, 5] = float("inf")

    spoiled = edit_checkpoint(checkpoint, tmp_path / "spoiled", spoil)
    assert "lm_head.weight holds NaN or infinity" in refusal(spoiled, tmp_path, StagingError)
    (tmp_path / ".slabs.partial-0123456789ab").mkdir()
    (tmp_path / ".slabs.partial-0123456789ab" / SLAB_FILE).write_bytes(b"half")
    export_checkpoint(checkpoint, tmp_path / "slabs")
    assert not list(tmp_path.glob(".slabs*"))


def test_damage_is_found_and_our_loader_refuses_the_folder(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    with pytest.raises(ContractError, match=r"follows contract pypto-lib/qwen3/w8a8-down-bf16 v1; this version knows"):
        load_slabs(folder)
    tensors = load_file(folder / SLAB_FILE)
    tensors["decode_wq"][7, 11] += 1
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name != "embed_weight"}, folder / SLAB_FILE)
    problems = verify_export(folder)
    assert len(problems) == 2
    assert "embed_weight is recorded but absent" in problems[0]
    assert "decode_wq does not have the recorded sha256" in problems[1]
    (folder / SLAB_FILE).write_bytes(b"\0" * 20)
    assert "damaged or truncated" in verify_export(folder)[0]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("contract.fingerprint", "0" * 64, "fingerprint is '0000"),
        ("contract.version", 2, "version is 2, registered is 1"),
        ("contract.limits", {}, "limits is {}"),
        ("contract.name", "pypto-deploy/qwen3/w8a8", "not registered for exports; those are pypto-lib/qwen3"),
        ("contract", 5, "not registered for exports"),
        ("stages", {}, "stages are not those of contract"),
        ("kernel_constants", {}, "kernel_constants are not those"),
        ("config.num_layers", 3, "recorded tensors are not those of the config"),
        ("config.num_layers", "2", "values of another type: num_layers '2'"),
        ("config.family", "llama", "config cannot be that of an export"),
        ("config", [], "config cannot be that of an export"),
        ("digest", "0" * 64, "digest is not that"),
    ],
)
def test_a_manifest_that_no_export_writes_is_found(
    key: str, value: object, words: str, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    *outer, last = key.split(".")
    (manifest[outer[0]] if outer else manifest)[last] = value
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert any(words in problem for problem in verify_export(folder))


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "{}", "\u0000", '{"tensors": 1, "tensors": 2}'])
def test_a_manifest_that_is_none_is_refused(text: str, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    (folder / MANIFEST_FILE).write_text(text)
    for use in (verify_export, load_slabs):
        with pytest.raises(StagingError, match=MANIFEST_FILE):
            use(folder)
