"""Cases 7, 10 and 11, and the whole quantizer: what it writes, leaves alone, refuses, and never leaves half done."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quantize.checkpoint import CheckpointReader, payload_digest, tensor_digests
from quantize.errors import CheckpointError, NonFiniteWeightError, RecipeError
from quantize.numerics import quantize_weight
from quantize.preflight import check_quantized
from quantize.recipe import Recipe
from quantize.recipe_file import load_recipe, parse_recipe
from quantize.row_kernel import NativeKernel, TorchKernel
from quantize.rtn import quantize_checkpoint
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

Tensors = dict[str, Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
DOWN_MODULES = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def tensors_of(directory: Path) -> Tensors:
    with CheckpointReader(directory) as reader:
        return {name: reader.tensor(name) for name in reader.infos}


def ignored_in(directory: Path) -> list[str]:
    ignored: list[str] = json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]
    return ignored


@pytest.mark.parametrize("arithmetic", ["fp32", "compat"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_every_projection_is_quantized_and_nothing_else(
    family: str, arithmetic: Literal["fp32", "compat"], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(f"tiny_{family}")
    result = quantize_checkpoint(source, tmp_path / "out", Recipe(arithmetic=arithmetic))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    projections = {name for name in before if name.endswith("_proj.weight")}
    assert set(after) == set(before) | {name + "_scale" for name in projections}
    for name, weight in before.items():
        if name in projections:
            codes, scale = quantize_weight(weight, arithmetic)
            assert torch.equal(after[name], codes)
            assert torch.equal(after[name + "_scale"], scale)
        else:
            assert torch.equal(after[name], weight)
    check_quantized(tmp_path / "out").close()
    assert (result.quantized, result.tensors) == (14, len(after))
    assert result.bytes_in == sum(weight.nbytes for weight in before.values())
    assert result.bytes_out == sum(weight.nbytes for weight in after.values())
    assert result.digest == payload_digest(tmp_path / "out")


def test_config_and_sidecars_come_along(tiny_qwen3: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny_qwen3, tmp_path / "out"))
    section = after.pop("quantization_config")
    assert after == before
    assert (section["quant_method"], section["format"], section["ignore"]) == (
        "compressed-tensors",
        "int-quantized",
        ["lm_head"],
    )
    names = {path.name for path in tiny_qwen3.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"recipe.yaml"}
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == Recipe()
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (tiny_qwen3 / name).read_bytes()


def test_the_same_input_gives_the_same_digest_however_it_is_sharded(tmp_path: Path) -> None:
    one = make_tiny_qwen3(tmp_path / "one")
    many = make_tiny_qwen3(tmp_path / "many", max_shard_size="60KB")
    assert (many / "model.safetensors.index.json").exists()
    first = quantize_checkpoint(one, tmp_path / "first", Recipe())
    second = quantize_checkpoint(one, tmp_path / "second", Recipe())
    from_shards = quantize_checkpoint(many, tmp_path / "third", Recipe())
    to_shards = quantize_checkpoint(one, tmp_path / "fourth", Recipe(), max_shard_bytes=40_000)
    assert first.digest == second.digest == from_shards.digest == to_shards.digest
    assert len(list((tmp_path / "fourth").glob("model-*.safetensors"))) > 3
    check_quantized(tmp_path / "fourth").close()


def test_the_digest_sees_one_weight_the_arithmetic_and_the_ignore_list(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[UP][3, 5] = 8.0

    changed = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "changed"), edit)
    recipes: list[tuple[Path, dict[str, Any]]] = [
        (tiny_qwen3, {}),
        (changed, {}),
        (tiny_qwen3, {"arithmetic": "compat"}),
        (tiny_qwen3, {"ignore": []}),
        (tiny_qwen3, {"down": "bf16"}),
    ]
    digests = [
        quantize_checkpoint(source, tmp_path / str(number), parse_recipe(recipe, "x")).digest
        for number, (source, recipe) in enumerate(recipes)
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "recipe",
    [{"ignore": ["lm_head", "re:.*down_proj$"]}, {"down": "bf16"}, {"ignore": ["lm_head", *DOWN_MODULES]}],
)
def test_ignored_modules_stay_bit_identical(tiny_qwen3: Path, tmp_path: Path, recipe: dict[str, Any]) -> None:
    result = quantize_checkpoint(tiny_qwen3, tmp_path / "out", parse_recipe(recipe, "x"))
    before, after = tensor_digests(tiny_qwen3), tensor_digests(tmp_path / "out")
    for module in [*DOWN_MODULES, "lm_head"]:
        assert after[module + ".weight"] == before[module + ".weight"]
        assert module + ".weight_scale" not in after
    assert result.quantized == 12
    # Exact names are written, so that every reader takes the same modules.
    assert sorted(ignored_in(tmp_path / "out")) == ["lm_head", *DOWN_MODULES]
    check_quantized(tmp_path / "out").close()


def test_a_mixed_attention_group_is_written_as_asked(tiny_qwen3: Path, tmp_path: Path) -> None:
    recipe = parse_recipe({"ignore": ["lm_head", "model.layers.0.self_attn.q_proj"]}, "x")
    quantize_checkpoint(tiny_qwen3, tmp_path / "out", recipe)
    with check_quantized(tmp_path / "out") as reader:
        assert reader.infos["model.layers.0.self_attn.q_proj.weight"].dtype == "BF16"
        assert reader.infos["model.layers.0.self_attn.k_proj.weight"].dtype == "I8"
        assert reader.infos["model.layers.1.self_attn.q_proj.weight"].dtype == "I8"


def test_an_lm_head_is_quantized_when_asked_and_a_tied_one_never(
    tiny_qwen3: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny_qwen3, tmp_path / "untied", Recipe(ignore=()))
    with check_quantized(tmp_path / "untied") as reader:
        assert reader.infos["lm_head.weight"].dtype == "I8"
    quantize_checkpoint(tiny_llama, tmp_path / "tied", Recipe(ignore=()))
    with check_quantized(tmp_path / "tied") as reader:
        assert "lm_head.weight" not in reader.infos
        assert reader.infos["model.embed_tokens.weight"].dtype == "BF16"
    assert ignored_in(tmp_path / "tied") == ["lm_head"]


def test_a_tied_heads_copy_is_dropped_and_a_different_one_refused(tiny_llama: Path, tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors: Tensors) -> None:
        copy(tensors)
        tensors["lm_head.weight"][0, 0] += 1

    plain = quantize_checkpoint(tiny_llama, tmp_path / "plain", Recipe())
    copied = edit_tensors(copy_checkpoint(tiny_llama, tmp_path / "copied"), copy)
    assert quantize_checkpoint(copied, tmp_path / "out", Recipe()).digest == plain.digest
    differing = edit_tensors(copy_checkpoint(tiny_llama, tmp_path / "differing"), differ)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        quantize_checkpoint(differing, tmp_path / "none", Recipe())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "row"), [(UP, 95), ("model.embed_tokens.weight", 7), ("lm_head.weight", 319), ("model.norm.weight", 0)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_is_refused_by_tensor_and_row(
    tiny_qwen3: Path, tmp_path: Path, name: str, row: int, value: float
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1, 64)[row, 9] = value

    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "source"), edit)
    with pytest.raises(NonFiniteWeightError) as caught:
        quantize_checkpoint(source, tmp_path / "out", Recipe())
    assert f"{name}: row {row}, column 9 holds {value}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("block_bytes", [1, 200, 3000])
@pytest.mark.parametrize("kernel", [NativeKernel, TorchKernel])
def test_blocks_of_rows_do_not_show(
    tiny_qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    kernel: type[NativeKernel] | type[TorchKernel],
) -> None:
    whole = quantize_checkpoint(tiny_qwen3, tmp_path / "whole", Recipe(), kernel=kernel())
    monkeypatch.setattr(kernel, "block_bytes", block_bytes)
    cut = quantize_checkpoint(tiny_qwen3, tmp_path / "cut", Recipe(), kernel=kernel())
    assert cut.digest == whole.digest
    for before, after in zip(whole.errors, cut.errors, strict=True):
        assert after.sqnr_db == pytest.approx(before.sqnr_db, rel=1e-6)

    def edit(tensors: Tensors) -> None:
        tensors[UP][95, 9] = float("nan")

    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "source"), edit)
    with pytest.raises(NonFiniteWeightError, match="row 95, column 9"):
        quantize_checkpoint(source, tmp_path / "out", Recipe(), kernel=kernel())


def test_infinities_that_cancel_and_sums_that_overflow_are_told_apart(tiny_qwen3: Path, tmp_path: Path) -> None:
    def cancel(tensors: Tensors) -> None:
        tensors[UP][0, 0], tensors[UP][1, 0] = float("inf"), float("-inf")

    def overflow(tensors: Tensors) -> None:
        tensors[UP][0, :] = 3e38

    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "cancel"), cancel)
    with pytest.raises(NonFiniteWeightError):
        quantize_checkpoint(source, tmp_path / "out", Recipe())
    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "overflow"), overflow)
    result = quantize_checkpoint(source, tmp_path / "out", Recipe())
    error = next(error for error in result.errors if error.name + ".weight" == UP)
    assert error.sqnr_db is not None
    assert 40 < error.sqnr_db < 80


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_rows_of_zeros_and_of_next_to_nothing(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[UP][0], tensors[UP][1], tensors[UP][2] = 0, 1e-9, 6e-8

    source = edit_tensors(make_tiny_llama(tmp_path / "source", dtype=dtype), edit)
    with caplog.at_level(logging.WARNING):
        quantize_checkpoint(source, tmp_path / "out", Recipe())
    after = tensors_of(tmp_path / "out")
    scale = after[UP + "_scale"].float()
    assert after[UP + "_scale"].dtype == dtype
    assert bool((scale > 0).all() and scale.isfinite().all())
    assert not after[UP][0].any()
    back = after[UP].double() * scale.double()
    assert bool((back[2] - 6e-8).abs().max() < 1e-9)
    if dtype == torch.float16:  # 1e-9 is zero in FP16 already
        assert not after[UP][1].any()
    else:
        assert bool((back[1] - 1e-9).abs().max() < 1e-11)
    assert caplog.records == []


def test_rows_that_vanish_are_not_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """compat on FP16: amax/127.5 of 6e-8 underflows, as in compressed-tensors; it must be said."""

    def edit(tensors: Tensors) -> None:
        tensors[UP][4], tensors[UP][7] = 6e-8, 6e-8

    source = edit_tensors(make_tiny_llama(tmp_path / "source", dtype=torch.float16), edit)
    with caplog.at_level(logging.WARNING):
        quantize_checkpoint(source, tmp_path / "out", Recipe(arithmetic="compat"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{UP}: 2 rows are too small for F16 scales and became zero"
    ]


def test_errors_are_those_recomputed_in_fp64_and_json_able(tiny_qwen3: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[UP] = torch.full_like(tensors[UP], 0.0)
        tensors[UP][:, 0] = 127.0

    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "source"), edit)
    result = quantize_checkpoint(source, tmp_path / "out", Recipe())
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert len(result.errors) == 14
    for error in result.errors:
        name = error.name + ".weight"
        exact = before[name].double()
        noise = exact - after[name].double() * after[name + "_scale"].double()
        ratio = float(noise.square().sum() / exact.square().sum())
        assert error.layer == int(name.split(".")[2])
        assert error.rel_rms_error == pytest.approx(ratio**0.5, rel=1e-5)
        if name == UP:
            assert (error.sqnr_db, error.rel_rms_error) == (None, 0.0)
        else:
            assert error.sqnr_db is not None
            assert 10 ** (-error.sqnr_db / 10) == pytest.approx(ratio, rel=1e-5)
            assert error.sqnr_db > 40
    json.dumps(dataclasses.asdict(result), allow_nan=False)


def test_a_damaged_scale_shows_in_the_error(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Sensitivity: an outlier in one row costs that weight decibels; the others keep theirs."""

    def edit(tensors: Tensors) -> None:
        tensors[UP][:, 0] = 50.0

    plain = quantize_checkpoint(tiny_qwen3, tmp_path / "plain", Recipe()).errors
    source = edit_tensors(copy_checkpoint(tiny_qwen3, tmp_path / "source"), edit)
    for before, after in zip(plain, quantize_checkpoint(source, tmp_path / "out", Recipe()).errors, strict=True):
        if before.name + ".weight" == UP:
            assert after != before
        else:
            assert after == before


def test_progress_counts_source_bytes(tiny_qwen3: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (result.bytes_in, result.bytes_in)


def add_a_typo(source: Path) -> Recipe:
    return Recipe(ignore=("lm_head", "typo_proj"))


def ignore_everything(source: Path) -> Recipe:
    return Recipe(ignore=("re:.*",))


def break_the_config(source: Path) -> Recipe:
    edit_json(source / "config.json", lambda config: config.update(rope_scaling={"type": "yarn"}))
    return Recipe()


def cut_the_shard(source: Path) -> Recipe:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return Recipe()


@pytest.mark.parametrize("prepare", [add_a_typo, ignore_everything, break_the_config, cut_the_shard])
def test_a_refusal_leaves_nothing_behind(tiny_qwen3: Path, tmp_path: Path, prepare: Callable[[Path], Recipe]) -> None:
    recipe = prepare(copy_checkpoint(tiny_qwen3, tmp_path / "source"))
    with pytest.raises((CheckpointError, RecipeError)):
        quantize_checkpoint(tmp_path / "source", tmp_path / "deep" / "out", recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_target_is_refused_and_kept(tiny_qwen3: Path, tmp_path: Path) -> None:
    first = quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe())
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(tiny_qwen3, tmp_path / "out", Recipe(arithmetic="compat"))
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(tiny_qwen3, tiny_qwen3, Recipe())
    assert payload_digest(tmp_path / "out") == first.digest


def test_a_killed_run_leaves_no_output_and_the_next_one_cleans_up(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
def die(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Recipe(), die)
"""
    out = tmp_path / "out"
    finished = subprocess.run(
        [sys.executable, "-c", script, tiny_qwen3, out], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.iterdir())) == 1
    result = quantize_checkpoint(tiny_qwen3, out, Recipe())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert result.digest == payload_digest(out)
