"""Staging: rules, padding, refusals, digests, memory, and loading."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kernels.contract import CONTRACT_VERSION
from kernels.errors import ContractError, KernelsError, StagingError
from kernels.slabs import MANIFEST_FILE, SLAB_FILE
from kernels.staging import load_slabs, stage_checkpoint, verify_slabs
from quantize.errors import CheckpointError
from quantize.numerics import rope_tables
from quantize.recipe import Recipe
from quantize.rope import RopeScaling
from tests.slab_tools import edit_checkpoint, quantize, read_tensors
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

ATTN = "model.layers.{}.self_attn."


@pytest.fixture(scope="module")
def qwen3(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_qwen3, tmp_path_factory.mktemp("staging") / "qwen3")


@pytest.fixture(scope="module")
def llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_llama, tmp_path_factory.mktemp("staging") / "llama")


@pytest.fixture(scope="module")
def qwen2(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_qwen2, tmp_path_factory.mktemp("staging") / "qwen2")


def test_projections_are_transposed_and_stacked_by_layer(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    slabs, source = load_slabs(tmp_path / "slabs"), read_tensors(qwen3)
    for layer in range(slabs.config.num_layers):
        weights = slabs.layer(layer)
        prefix = f"model.layers.{layer}."
        for ours, theirs in (
            (weights.wq, "self_attn.q_proj"),
            (weights.wk, "self_attn.k_proj"),
            (weights.wv, "self_attn.v_proj"),
            (weights.wo, "self_attn.o_proj"),
            (weights.w_gate, "mlp.gate_proj"),
            (weights.w_up, "mlp.up_proj"),
            (weights.w_down, "mlp.down_proj"),
        ):
            assert torch.equal(ours, source[f"{prefix}{theirs}.weight"].t()), theirs
        assert torch.equal(weights.wk_scale, source[prefix + "self_attn.k_proj.weight_scale"].float().view(-1))
        assert torch.equal(weights.input_rms, source[prefix + "input_layernorm.weight"].float())
        assert torch.equal(weights.post_rms, source[prefix + "post_attention_layernorm.weight"].float())
        assert weights.q_norm is not None
        assert torch.equal(weights.q_norm, source[prefix + "self_attn.q_norm.weight"].float())


def test_embedding_is_padded_with_zeros_and_lm_head_with_row_0(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    tensors, source = load_slabs(tmp_path / "slabs").tensors, read_tensors(qwen3)
    embed, head = tensors["embed_weight"], tensors["lm_head_weight"]
    assert embed.shape == head.shape == (512, 64)
    assert torch.equal(embed[:320], source["model.embed_tokens.weight"])
    assert not embed[320:].any()
    assert torch.equal(head[:320], source["lm_head.weight"])
    assert torch.equal(head[320:], source["lm_head.weight"][:1].expand(192, -1))


def test_a_tied_lm_head_is_the_embedding(llama: Path, tmp_path: Path) -> None:
    stage_checkpoint(llama, tmp_path / "slabs")
    slabs = load_slabs(tmp_path / "slabs")
    assert "lm_head.weight" not in read_tensors(llama)
    assert torch.equal(slabs.tensors["lm_head_weight"][:320], slabs.tensors["embed_weight"][:320])
    assert slabs.layer(0).q_norm is None
    assert slabs.real_vocab == 320


def test_qwen2_biases_are_staged(qwen2: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen2, tmp_path / "slabs")
    weights, source = load_slabs(tmp_path / "slabs").layer(1), read_tensors(qwen2)
    for ours, theirs in ((weights.q_bias, "q"), (weights.k_bias, "k"), (weights.v_bias, "v")):
        assert ours is not None
        assert torch.equal(ours, source[ATTN.format(1) + theirs + "_proj.bias"].float())


def test_rope_tables_follow_theta_and_are_capped(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    slabs = load_slabs(tmp_path / "slabs")
    cos, sin = rope_tables(32, slabs.config.rope_theta, 2048)
    assert torch.equal(slabs.tensors["rope_cos"], cos)
    assert torch.equal(slabs.tensors["rope_sin"], sin)


def test_scaled_rope_reaches_the_slabs_and_comes_back_from_the_manifest(tiny_llama3: Path, tmp_path: Path) -> None:
    stage_checkpoint(quantize(tiny_llama3, tmp_path / "w8a8"), tmp_path / "slabs")
    slabs = load_slabs(tmp_path / "slabs")
    scaling = RopeScaling(8.0, 1.0, 4.0, 256)
    assert slabs.config.rope_scaling == scaling
    scaled, plain = rope_tables(32, 10000.0, 2048, scaling), rope_tables(32, 10000.0, 2048)
    for name, table, other in zip(("rope_cos", "rope_sin"), scaled, plain, strict=True):
        assert torch.equal(slabs.tensors[name], table)
        assert not torch.equal(table, other)


def test_a_manifest_with_an_unknown_rope_scaling_is_refused(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    path = tmp_path / "slabs" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    assert "rope_scaling" not in manifest["config"]
    manifest["config"]["rope_scaling"] = {"beta": 1}
    path.write_text(json.dumps(manifest))
    with pytest.raises(StagingError, match="rope_scaling cannot be read"):
        load_slabs(tmp_path / "slabs")


def test_a_head_written_for_another_reader_changes_no_slab(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", head_dim=16, tie_word_embeddings=True)
    digests = []
    for reader in ("any", "pypto-serving"):
        stage_checkpoint(quantize(source, tmp_path / reader, Recipe(reader=reader)), tmp_path / f"{reader}-slabs")
        digests.append(load_slabs(tmp_path / f"{reader}-slabs").digest)
    assert digests[0] == digests[1]


def test_unquantized_and_unexpected_tensors_are_listed_by_layer(llama: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj.weight_scale" in name and "down" not in name]:
            scale = tensors.pop(name)
            weight = name.removesuffix("_scale")
            tensors[weight] = (tensors[weight].float() * scale.float()).to(torch.bfloat16)
            tensors[name.replace("weight_scale", "bias")] = scale

    checkpoint = edit_checkpoint(llama, tmp_path / "edited", edit)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*(q|k|v|o|gate|up)_proj$"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(StagingError) as caught:
        stage_checkpoint(checkpoint, tmp_path / "slabs")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 1 + 2
    assert (
        "12 module(s) not quantized, but the contract has them in INT8: layer 0: mlp.gate_proj, mlp.up_proj" in lines[1]
    )
    assert "; layer 1: mlp.gate_proj" in lines[1]
    assert "unexpected for family llama with 2 layers, layer 0: mlp.gate_proj.bias" in lines[2]


def test_bf16_down_keeps_the_source_weights(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_qwen3, tmp_path / "w8a8", Recipe(down="bf16"))
    stage_checkpoint(checkpoint, tmp_path / "slabs", "bf16")
    slabs = load_slabs(tmp_path / "slabs")
    assert slabs.down == "bf16"
    assert slabs.layer(0).w_down_scale is None
    assert torch.equal(slabs.layer(1).w_down, read_tensors(tiny_qwen3)["model.layers.1.mlp.down_proj.weight"].t())


def test_two_runs_give_one_digest_and_any_file_layout_does(qwen3: Path, tmp_path: Path) -> None:
    first = stage_checkpoint(qwen3, tmp_path / "a")
    second = stage_checkpoint(edit_checkpoint(qwen3, tmp_path / "copy", lambda tensors: None), tmp_path / "b")
    assert first.digest == second.digest
    assert first.tensors == second.tensors
    assert verify_slabs(tmp_path / "a") == []
    assert load_slabs(tmp_path / "a").digest == first.digest
    assert first.bytes + 8 < (tmp_path / "a" / SLAB_FILE).stat().st_size < first.bytes + 8192


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        (ATTN.format(0) + "q_proj.weight", ATTN.format(1) + "q_proj.weight", {"wq"}),
        (ATTN.format(0) + "k_proj.weight_scale", ATTN.format(0) + "v_proj.weight_scale", {"wk_scale", "wv_scale"}),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", {"w_gate", "w_up"}),
        (ATTN.format(0) + "q_norm.weight", ATTN.format(0) + "k_norm.weight", {"q_norm_weight", "k_norm_weight"}),
        ("model.layers.1.input_layernorm.weight", "model.norm.weight", {"input_rms_weight", "final_norm_weight"}),
    ],
)
def test_swapping_two_tensors_changes_exactly_their_slabs(
    one: str, other: str, changed: set[str], qwen3: Path, tmp_path: Path
) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    before = stage_checkpoint(qwen3, tmp_path / "a")
    after = stage_checkpoint(edit_checkpoint(qwen3, tmp_path / "swapped", swap), tmp_path / "b")
    assert before.digest != after.digest
    assert {name for name in before.tensors if before.tensors[name] != after.tensors[name]} == changed


def test_a_scale_stored_without_the_second_axis_works(qwen3: Path, tmp_path: Path) -> None:
    def flatten(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].reshape(-1)

    flat = stage_checkpoint(edit_checkpoint(qwen3, tmp_path / "flat", flatten), tmp_path / "b")
    assert flat.digest == stage_checkpoint(qwen3, tmp_path / "a").digest


def test_minus_128_is_accepted(qwen3: Path, tmp_path: Path) -> None:
    def lower(tensors: dict[str, Tensor]) -> None:
        tensors[ATTN.format(0) + "q_proj.weight"][3, 5] = -128

    stage_checkpoint(edit_checkpoint(qwen3, tmp_path / "edited", lower), tmp_path / "slabs")
    assert load_slabs(tmp_path / "slabs").layer(0).wq[5, 3] == -128


def refusal(checkpoint: Path, tmp_path: Path, down: str = "int8") -> str:
    """Stage, expect a refusal that leaves nothing behind, and return its message."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KernelsError) as error:
        stage_checkpoint(checkpoint, tmp_path / "slabs", down)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before
    return str(error.value)


def test_missing_and_unexpected_tensors_are_all_named(qwen3: Path, tmp_path: Path) -> None:
    def break_it(tensors: dict[str, Tensor]) -> None:
        del tensors[ATTN.format(0) + "q_norm.weight"]
        del tensors[ATTN.format(1) + "o_proj.weight_scale"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:32]

    message = refusal(edit_checkpoint(qwen3, tmp_path / "broken", break_it), tmp_path)
    assert "4 problem(s)" in message
    assert "model.layers.0.self_attn.q_norm.weight is missing" in message
    assert "model.layers.1.self_attn.o_proj.weight_scale is missing" in message
    assert "unexpected for family qwen3 with 2 layers, layer 1: self_attn.q_proj.bias" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [32, 64]; slab w_up expects [96, 64]" in message


def test_a_module_left_unquantized_is_refused_by_name(tiny_qwen3: Path, tmp_path: Path) -> None:
    ignore = ("lm_head", "re:.*layers.1.self_attn.q_proj$")
    message = refusal(quantize(tiny_qwen3, tmp_path / "mixed", Recipe(ignore=ignore)), tmp_path)
    assert "1 module(s) not quantized, but the contract has them in INT8: layer 1: self_attn.q_proj;" in message


def test_down_left_unquantized_everywhere_asks_for_bf16(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_qwen3, tmp_path / "mixed", Recipe(ignore=("lm_head", "re:.*down_proj$")))
    assert "stage it with down=bf16" in refusal(checkpoint, tmp_path)
    assert len(stage_checkpoint(checkpoint, tmp_path / "slabs", "bf16").tensors) == 22


def test_down_left_unquantized_in_one_layer_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_qwen3, tmp_path / "mixed", Recipe(ignore=("lm_head", "re:.*layers.1.mlp.down_proj$")))
    message = refusal(checkpoint, tmp_path)
    assert "in some layers and not in others (layer 1: mlp.down_proj, which is not)" in message


def test_bf16_down_is_refused_when_it_is_int8(qwen3: Path, tmp_path: Path) -> None:
    assert "2 of 2 down_proj are INT8 but down=bf16 was asked for" in refusal(qwen3, tmp_path, "bf16")


def test_an_unquantized_checkpoint_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    message = refusal(tiny_qwen3, tmp_path)
    assert "12 module(s) not quantized, but the contract has them in INT8: layer 0: mlp.gate_proj" in message


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_scale_is_refused_and_nothing_is_left(bad: float, qwen3: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[ATTN.format(1) + "v_proj.weight_scale"][2] = bad

    message = refusal(edit_checkpoint(qwen3, tmp_path / "spoiled", spoil), tmp_path)
    assert "model.layers.1.self_attn.v_proj.weight_scale holds" in message


def test_an_existing_target_is_refused(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "slabs").mkdir()
    (tmp_path / "slabs" / "keep").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        stage_checkpoint(qwen3, tmp_path / "slabs")
    assert (tmp_path / "slabs" / "keep").read_text() == "mine"


def test_progress_reaches_the_total(qwen3: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = stage_checkpoint(qwen3, tmp_path / "slabs", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (result.bytes, result.bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_slab_file_is_plain_safetensors(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    slabs = load_slabs(tmp_path / "slabs")
    with safe_open(tmp_path / "slabs" / SLAB_FILE, framework="pt") as file:
        assert set(file.keys()) == set(slabs.tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in slabs.tensors.items())


def test_loaded_tensors_are_aligned_and_private(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    slabs = load_slabs(tmp_path / "slabs")
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in slabs.tensors.values())
    slabs.tensors["wq"].zero_()
    assert verify_slabs(tmp_path / "slabs") == []


def test_an_unknown_contract_version_is_refused(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    path = tmp_path / "slabs" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["contract"]["version"] = CONTRACT_VERSION + 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        ContractError, match=rf"follows contract decoder-w8a8 v{CONTRACT_VERSION + 1}; this version knows"
    ):
        load_slabs(tmp_path / "slabs")


def test_a_changed_table_is_refused(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    path = tmp_path / "slabs" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    changed = {**manifest, "contract": {**manifest["contract"], "fingerprint": "0" * 64}}
    path.write_text(json.dumps(changed))
    with pytest.raises(ContractError, match="written for another slab table"):
        load_slabs(tmp_path / "slabs")
    manifest["tensors"]["wq"]["shape"] = [64, 256]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ContractError, match=re.escape("disagrees with the contract about ['wq']")):
        load_slabs(tmp_path / "slabs")


def test_damage_is_found(qwen3: Path, tmp_path: Path) -> None:
    stage_checkpoint(qwen3, tmp_path / "slabs")
    path = tmp_path / "slabs" / SLAB_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert len(verify_slabs(tmp_path / "slabs")) == 1
    path.write_bytes(content[:-1])
    with pytest.raises(StagingError, match="truncated or damaged"):
        load_slabs(tmp_path / "slabs")
    shutil.rmtree(tmp_path / "slabs")
    with pytest.raises(StagingError, match="expected a folder written by staging"):
        load_slabs(tmp_path / "slabs")


def test_peak_memory_is_about_one_layer(tmp_path: Path) -> None:
    """24 layers of 3.1 MB and an embedding of 0.3 MB: a reader or writer that held the model would add 75 MB."""
    source = make_tiny_llama(
        tmp_path / "wide",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    checkpoint = quantize(source, tmp_path / "w8a8")
    # The peak that the kernel keeps for the process's own memory; rusage would carry the test runner's over.
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kernels.staging import stage_checkpoint\n"
        "def peak_bytes():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))\n"
        "small, large, out = map(Path, sys.argv[1:])\n"
        "stage_checkpoint(small, out / 'small-slabs')\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "before = peak_bytes()\n"
        "result = stage_checkpoint(large, out / 'large-slabs')\n"
        "print(peak_bytes() - before, result.bytes)\n"
    )
    small = quantize(make_tiny_llama(tmp_path / "small"), tmp_path / "small-w8a8")
    command = [sys.executable, "-c", script, str(small), str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    added_bytes, slab_bytes = map(int, done.stdout.split())
    assert slab_bytes > 70e6
    assert added_bytes < 10e6
