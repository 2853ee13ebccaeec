"""Calibrated quantization of whole checkpoints: what comes out, again and again, after kills and beside trouble."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantize.calibrated import layer_step, run
from quantize.calibrated.decoder import Layer
from quantize.calibrated.run import quantize_calibrated
from quantize.calibration import calibration_windows
from quantize.checkpoint import CheckpointReader, payload_digest, scan_checkpoint
from quantize.errors import CalibrationError, CheckpointError, NonFiniteWeightError, RecipeError, WriteError
from quantize.model_config import load_model_config
from quantize.readers import acceptance
from quantize.recipe_file import load_recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.calibrated.support import (
    FAMILIES,
    IDS,
    distance,
    family_source,
    large_channels,
    make_small_llama,
    recipe,
    run_kills,
    source_logits,
)
from tests.quantize.calibrated.test_decoder import transformers_logits
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors
from tests.tiny_models import make_tiny_qwen3

ROTATED = {"smoothing": {"rotate": True}}
PROJ = "model.layers.1.mlp.up_proj"


class StoppedError(Exception):
    """Stands for whatever ends a run from outside."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_loads_and_computes_what_was_simulated(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Smoothed, rotated and rounded; in transformers with compressed-tensors."""
    source = family_source(family, tmp_path, request)
    result = quantize_calibrated(source, tmp_path / "out", recipe("smoothquant+gptq", **ROTATED))
    assert result.digest == payload_digest(tmp_path / "out")
    assert result.quantized == 14
    assert [error.name for error in result.errors[:2]] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    with CheckpointReader(tmp_path / "out") as reader:
        served = transformers_logits(tmp_path / "out", IDS, integers=False)
        assert distance(source_logits(reader, IDS), served) < 1e-4
        codes = torch.cat([reader.tensor(f"{name}.weight").reshape(-1) for name in quantized_names(reader)])
    assert int(codes.min()) >= -127
    plain = transformers_logits(source, IDS)
    assert float((transformers_logits(tmp_path / "out", IDS) - plain).std() / plain.std()) < 0.04


def quantized_names(reader: CheckpointReader) -> list[str]:
    return [name.removesuffix("_scale").removesuffix(".weight") for name in reader.infos if name.endswith("_scale")]


@pytest.mark.parametrize("algorithm", ["smoothquant", "gptq", "smoothquant+gptq"])
def test_it_beats_plain_rounding_where_channels_are_large(algorithm: str, tiny_llama3: Path, tmp_path: Path) -> None:
    """On text of the same kind that was held out."""
    source = large_channels(copy_checkpoint(tiny_llama3, tmp_path / "source"))
    chosen = recipe(algorithm, calibration={"tokens": 2048, "held_out_tokens": 512})
    quantize_checkpoint(source, tmp_path / "rtn", recipe("rtn"))
    quantize_calibrated(source, tmp_path / "out", chosen)
    unseen = calibration_windows(source, chosen.calibration)[1]
    plain = transformers_logits(source, unseen)
    noise = [float((transformers_logits(tmp_path / name, unseen) - plain).square().mean()) for name in ("out", "rtn")]
    assert noise[0] < (0.95 if algorithm == "gptq" else 0.6) * noise[1]


def test_the_same_again_and_from_the_recipe_in_the_output(tiny_qwen3: Path, tmp_path: Path) -> None:
    first = quantize_calibrated(tiny_qwen3, tmp_path / "a", recipe("smoothquant+gptq"))
    stored = load_recipe(tmp_path / "a" / "recipe.yaml")
    assert stored == recipe("smoothquant+gptq")
    assert quantize_calibrated(tiny_qwen3, tmp_path / "b", stored).digest == first.digest
    other = recipe("smoothquant+gptq", calibration={"seed": 1})
    assert quantize_calibrated(tiny_qwen3, tmp_path / "c", other).digest != first.digest
    facts = json.loads((tmp_path / "a" / "calibration.json").read_text())["layers"]
    assert facts == first.layers
    assert [layer["layer"] for layer in facts] == [0, 1]
    assert [site["site"] for site in facts[0]["sites"]] == ["qkv", "o", "gate_up", "down"]
    assert all(site["sqnr_after_db"] >= site["sqnr_before_db"] for layer in facts for site in layer["sites"])
    assert {linear["name"]: linear["damping"] for linear in facts[1]["linears"]}["mlp.down_proj"] == 0.1
    assert all(20 < layer["carried_sqnr_db"] < 60 for layer in facts)


def test_ignored_modules_stay_as_they_are_with_their_mapping(tiny_qwen3: Path, tmp_path: Path) -> None:
    """v in BF16 forbids a scale between v and o, and any on the norm before q, k and v."""
    schemes = [{"targets": ["re:.*v_proj", "re:.*layers.0.*down_proj"], "scheme": "bf16"}]
    result = quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("smoothquant+gptq", schemes=schemes))
    assert [[site["site"] for site in layer["sites"]] for layer in result.layers] == [["gate_up"], ["gate_up", "down"]]
    same = ["0.self_attn.v_proj", "1.self_attn.v_proj", "0.mlp.down_proj", "0.input_layernorm", "1.self_attn.k_norm"]
    with CheckpointReader(tiny_qwen3) as source, CheckpointReader(tmp_path / "out") as out:
        for name in same:
            assert torch.equal(source.tensor(f"model.layers.{name}.weight"), out.tensor(f"model.layers.{name}.weight"))
        norm = "model.layers.0.post_attention_layernorm.weight"
        assert not torch.equal(source.tensor(norm), out.tensor(norm))


def test_rotation_unties_the_head(tiny_llama: Path, tmp_path: Path) -> None:
    plain = quantize_calibrated(tiny_llama, tmp_path / "tied", recipe("gptq"))
    turned = quantize_calibrated(tiny_llama, tmp_path / "untied", recipe("gptq", **ROTATED))
    assert turned.tensors == plain.tensors + 1
    assert load_model_config(tmp_path / "tied").tie_word_embeddings
    assert not load_model_config(tmp_path / "untied").tie_word_embeddings
    with CheckpointReader(tmp_path / "untied") as reader:
        assert reader.tensor("lm_head.weight").dtype == torch.bfloat16
        assert torch.equal(reader.tensor("model.norm.weight"), torch.ones(64, dtype=torch.bfloat16))


@pytest.mark.parametrize("reader", ["vllm", "vllm-ascend", "pypto-serving"])
@pytest.mark.parametrize("rotate", [False, True])
def test_readers_take_it(reader: str, rotate: bool, tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "source", tie_word_embeddings=True, head_dim=16)
    chosen = recipe("smoothquant", reader=reader, smoothing={"rotate": rotate})
    quantize_calibrated(source, tmp_path / "out", chosen)
    assert acceptance(scan_checkpoint(tmp_path / "out"), reader).problems == ()
    with CheckpointReader(tmp_path / "out") as out:
        assert ("lm_head.weight" in out.infos) == (rotate or reader == "pypto-serving")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sources_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    source = large_channels(make_small_llama(tmp_path / "source", dtype=dtype))

    def silence(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"][3] *= 1e-7
        tensors["model.layers.0.mlp.up_proj.weight"][5] = 0

    edit_tensors(source, silence)
    quantize_calibrated(source, tmp_path / "out", recipe("smoothquant"))
    plain = transformers_logits(source, IDS)
    assert float((transformers_logits(tmp_path / "out", IDS) - plain).std() / plain.std()) < 0.2
    with CheckpointReader(tmp_path / "out") as out:
        scales = [out.tensor(f"{name}.weight_scale") for name in quantized_names(out)]
    assert all(scale.dtype == dtype and bool((scale > 0).all()) for scale in scales)


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, living = run.load_layer, []

    def watched(reader: CheckpointReader, layer: int) -> Layer:
        assert [found() for found in living] == [None] * layer
        loaded = load(reader, layer)
        living.append(weakref.ref(loaded))
        return loaded

    monkeypatch.setattr(run, "load_layer", watched)
    quantize_calibrated(
        make_small_llama(tmp_path / "source", num_hidden_layers=4), tmp_path / "out", recipe("smoothquant+gptq")
    )
    assert len(living) == 4


def test_kills_leave_the_digest_as_it_is(tmp_path: Path) -> None:
    """In the first tensors, inside layers, between them, at the last rename; each run goes on from the one before."""
    source = make_small_llama(tmp_path / "source", num_hidden_layers=3)
    work = tmp_path / "work"
    work.mkdir()
    moments = [2, 4, 9, 1, 7, 16, 21, 3, 30]
    answer = run_kills(source, work, recipe("smoothquant+gptq", **ROTATED), moments)
    assert answer["ends"][:6] == [-9] * 6
    assert answer["ends"][-1] == 0
    assert answer["out"] == answer["whole"]
    assert answer["left"] == ["out", "whole"]


def interrupt(source: Path, out: Path, calls: int) -> int:
    """Stop a run when so many layers' passes have begun; returns the layers finished."""
    step, begun = layer_step.run_layer, 0

    def counted(*arguments: Any, **keywords: Any) -> Tensor:
        nonlocal begun
        begun += 1
        if begun == calls:
            raise StoppedError
        return step(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_step, "run_layer", counted)
        with pytest.raises(StoppedError):
            quantize_calibrated(source, out, recipe("gptq"))
    state = json.loads((out.parent / f".{out.name}.partial" / "scratch" / "state.json").read_text())
    return int(state["next_layer"])


def count_layers(action: Callable[[], Any]) -> tuple[Any, int]:
    """Run, and count the layers that were loaded."""
    load, loaded = run.load_layer, []

    def counted(reader: CheckpointReader, layer: int) -> Layer:
        loaded.append(layer)
        return load(reader, layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_layer", counted)
        return action(), len(loaded)


def lose_a_layer(partial: Path) -> None:
    """What a machine that lost power may have on its disk: a journal that is ahead of the data."""
    shard = partial / "checkpoint" / "model.safetensors"
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(len(content) - start)
    shard.write_bytes(content)


def lose_the_streams(partial: Path) -> None:
    for path in (partial / "scratch").glob("*.f32"):
        path.unlink()


def spoil_the_state(partial: Path) -> None:
    (partial / "scratch" / "state.json").write_text('{"next_layer": [1]}')


@pytest.mark.parametrize("harm", [None, lose_a_layer, lose_the_streams, spoil_the_state])
def test_an_interrupted_run_goes_on_and_trusts_nothing(
    harm: Callable[[Path], None] | None, tiny_qwen3: Path, tmp_path: Path
) -> None:
    whole = quantize_calibrated(tiny_qwen3, tmp_path / "whole", recipe("gptq"))
    assert interrupt(tiny_qwen3, tmp_path / "out", 5) == 1
    if harm is not None:
        harm(tmp_path / ".out.partial")
    again, layers = count_layers(lambda: quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("gptq")))
    assert again.digest == whole.digest == payload_digest(tmp_path / "out")
    assert again.layers == whole.layers
    assert layers == (1 if harm is None else 2)
    assert (again.resumed > 0) == (harm is not lose_a_layer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("change", ["recipe", "text", "config", "weights"])
def test_other_work_starts_anew(change: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    interrupt(source, tmp_path / "out", 5)
    chosen = recipe("gptq")
    if change == "recipe":
        chosen = recipe("gptq", gptq={"damping": 0.02})
    elif change == "text":
        path = tmp_path / "text.txt"
        path.write_text("the end of the way and on the other hand a thing in it. " * 40)
        chosen = recipe("gptq", calibration={"data": str(path)})
    elif change == "config":
        edit_json(source / "config.json", lambda content: content.update(rms_norm_eps=1e-5))
    else:
        edit_tensors(source, lambda tensors: tensors[PROJ + ".weight"][0].mul_(2))
    again, layers = count_layers(lambda: quantize_calibrated(source, tmp_path / "out", chosen))
    assert layers == 2
    assert again.digest == quantize_calibrated(source, tmp_path / "fresh", chosen).digest


def test_text_that_changes_under_its_path_starts_anew(tiny_qwen3: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the end of the way and on the other hand a thing in it. " * 40)
    chosen = recipe("gptq", calibration={"data": str(path)})
    first = quantize_calibrated(tiny_qwen3, tmp_path / "a", chosen)
    path.write_text("another thing is seen and heard in the morning of that day. " * 40)
    assert quantize_calibrated(tiny_qwen3, tmp_path / "b", chosen).digest != first.digest


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_keeps_what_is_finished(
    call: str, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize_calibrated(tiny_qwen3, tmp_path / "whole", recipe("gptq"))
    really, room = getattr(os, call), 100_000 if call == "pwrite" else 4 * 2**17

    def full(descriptor: int, *arguments: Any) -> Any:
        nonlocal room
        room -= len(arguments[0]) if call == "pwrite" else arguments[1]
        if room < 0:
            raise OSError(28, "No space left on device")
        return really(descriptor, *arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(WriteError, match="No space left on device"):
        quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("gptq"))
    monkeypatch.undo()
    again = quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("gptq"))
    assert again.digest == whole.digest
    assert again.resumed > 0


def test_a_source_that_changes_meanwhile_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")

    def touch(done: int, total: int) -> None:
        if done == total:
            (source / "model.safetensors").touch()

    with pytest.raises(CheckpointError, match="changed while being read"):
        quantize_calibrated(source, tmp_path / "out", recipe("smoothquant"), touch)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"ignore": []}, CalibrationError, "leaves the LM head as it is"),
        ({"ignore": ["re:.*"]}, CheckpointError, "nothing would be quantized"),
        ({"ignore": ["lm_head", "typo"]}, RecipeError, "'typo' match no module"),
        ({"calibration": {"window_tokens": 4096, "tokens": 4096}}, CalibrationError, "context has 2048 tokens"),
        ({"calibration": {"data": "absent.txt"}}, CalibrationError, "no such file"),
    ],
)
def test_refusals_leave_nothing(
    keys: dict[str, Any], error: type[Exception], words: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("gptq", **keys))
    assert list(tmp_path.iterdir()) == []


def test_weights_and_activations_that_are_not_finite_are_refused_by_name(tiny_qwen3: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    edit_tensors(source, lambda tensors: tensors[PROJ + ".weight"][3, 1:2].fill_(float("nan")))
    with pytest.raises(NonFiniteWeightError, match=f"{PROJ}.weight: row 3, column 1 holds nan"):
        # Before the first layer is done, though the weight is in the last one.
        quantize_calibrated(source, tmp_path / "out", recipe("smoothquant"), progress=lambda *_: pytest.fail("late"))
    edit_tensors(source, lambda tensors: tensors[PROJ + ".weight"].fill_(3e38))
    for algorithm in ("smoothquant", "gptq"):
        with pytest.raises(CalibrationError, match=r"layer 1: what the source computes .* is not finite"):
            quantize_calibrated(source, tmp_path / "out", recipe(algorithm))
    edit_tensors(source, lambda tensors: tensors[PROJ + ".weight"].zero_())
    with pytest.raises(CalibrationError, match="layer 1, down: the calibration activations are all zero"):
        quantize_calibrated(source, tmp_path / "out", recipe("gptq"))
    result = quantize_calibrated(source, tmp_path / "out", recipe("smoothquant"))
    assert "NaN" not in (tmp_path / "out" / "calibration.json").read_text()
    assert result.errors[-2].sqnr_db is None


def test_too_few_windows_to_judge_are_told_of(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = {"tokens": 128, "window_tokens": 32}
    result = quantize_calibrated(tiny_qwen3, tmp_path / "out", recipe("gptq", calibration=few))
    assert "4 calibration windows of 32 tokens: weights do not make up" in caplog.text
    assert {linear["compensated"] for layer in result.layers for linear in layer["linears"]} == {None}
