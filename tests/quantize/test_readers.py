"""Acceptance rules of other readers: our output passes or is told why not, and each rule fails on what it is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantize.checkpoint import scan_checkpoint
from quantize.readers import READERS, Acceptance, acceptance
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tests.quantize.files import copy_checkpoint, edit_json, edit_tensors
from tests.tiny_models import make_tiny_qwen3

Tensors = dict[str, Tensor]
Config = dict[str, Any]
LAYER0 = "model.layers.0."


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with head_dim = hidden / heads and an LM head of its own: what pypto-serving's loader can describe."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("square") / "source", head_dim=16)


@pytest.fixture(scope="module")
def w8a8(square: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("square") / "w8a8"
    quantize_checkpoint(square, out, Recipe())
    return out


def verdict(directory: Path, reader: str) -> Acceptance:
    return acceptance(scan_checkpoint(directory), reader)


@pytest.mark.parametrize("reader", READERS)
def test_our_output_is_accepted(reader: str, w8a8: Path) -> None:
    assert verdict(w8a8, reader).problems == ()
    assert verdict(w8a8, reader).accepted


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "llama3", "mistral"])
@pytest.mark.parametrize("reader", ["vllm", "vllm-ascend"])
def test_vllm_accepts_every_family(reader: str, family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    quantize_checkpoint(request.getfixturevalue(f"tiny_{family}"), tmp_path / "out", Recipe())
    assert verdict(tmp_path / "out", reader).problems == ()


@pytest.mark.parametrize("reader", READERS)
def test_a_source_checkpoint_is_not_accepted(reader: str, square: Path) -> None:
    assert "found an unquantized checkpoint" in verdict(square, reader).problems[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_directory_without_a_checkpoint_is_told_its_own_problems(reader: str, tmp_path: Path) -> None:
    assert any("config.json" in problem for problem in verdict(tmp_path, reader).problems)


def edited(
    w8a8: Path,
    target: Path,
    tensors: Callable[[Tensors], None] | None = None,
    section: Callable[[Config], None] | None = None,
    config: Callable[[Config], None] | None = None,
) -> Path:
    directory = copy_checkpoint(w8a8, target)
    if tensors is not None:
        edit_tensors(directory, tensors)
    if section is not None:
        edit_json(directory / "config.json", lambda content: section(content["quantization_config"]))
    if config is not None:
        edit_json(directory / "config.json", config)
    return directory


def dequantize(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            scale = tensors.pop(f"{name}.weight_scale")
            tensors[f"{name}.weight"] = (tensors[f"{name}.weight"].float() * scale.float()).to(torch.bfloat16)

    return edit


Q, K, V = (f"{LAYER0}self_attn.{name}_proj" for name in "qkv")
GROUP = "group_0"

VLLM_CASES: dict[str, tuple[Any, Any, str]] = {
    "q alone is BF16": (dequantize(Q), lambda s: s["ignore"].append(Q), "layer 0: self_attn.qkv_proj joins"),
    "BF16 and nobody says so": (dequantize(f"{LAYER0}mlp.down_proj"), None, "layer 0: mlp.down_proj: found neither"),
    "INT8 but ignored": (
        None,
        lambda s: s["ignore"].append("re:.*o_proj$"),
        "ignore names layer 0: self_attn.o_proj; layer 1: self_attn.o_proj, whose weights are INT8",
    ),
    "left out of the targets instead of ignored": (
        dequantize(*(f"model.layers.{n}.mlp.down_proj" for n in range(2))),
        lambda s: s.update(
            ignore=["lm_head"],
            config_groups={
                GROUP: {**s["config_groups"][GROUP], "targets": ["re:.*self_attn.*", "re:.*gate_proj", "re:.*up_proj"]}
            },
        ),
        "layer 0: mlp.down_proj; layer 1: mlp.down_proj: found neither",
    ),
    "targets leave a fused member out": (
        None,
        lambda s: s["config_groups"][GROUP].update(targets=["re:.*(q|k|o|gate|up|down)_proj$"]),
        "layer 0: self_attn.k_proj, self_attn.q_proj, self_attn.v_proj;",
    ),
    "flat scale": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, 0]}),
        None,
        f"{Q}.weight_scale has shape [64], expected [64, 1]",
    ),
    "no scale": (lambda t: t.pop(f"{Q}.weight_scale"), None, f"{Q}.weight_scale is missing"),
    "zero points": (
        lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8)}),
        None,
        "self_attn.q_proj.weight_zero_point",
    ),
    "no method": (None, lambda s: s.pop("quant_method"), "quant_method: found None"),
    "no format": (None, lambda s: s.pop("format"), "format: found 'None'"),
    "preset": (None, lambda s: s.update(config_groups={"W8A8": ["Linear"]}), "W8A8: found a preset"),
    "per token static": (
        None,
        lambda s: s["config_groups"][GROUP]["input_activations"].update(dynamic=False),
        "input_activations.dynamic: found false",
    ),
    "per tensor": (
        None,
        lambda s: s["config_groups"][GROUP]["weights"].update(strategy="tensor"),
        'weights.strategy: found "tensor", expected "channel"',
    ),
    "asymmetric": (
        None,
        lambda s: s["config_groups"][GROUP]["weights"].update(symmetric=False),
        "weights.symmetric: found false",
    ),
}


@pytest.mark.parametrize("case", VLLM_CASES)
def test_vllm_rules(case: str, w8a8: Path, tmp_path: Path) -> None:
    tensors, section, told = VLLM_CASES[case]
    directory = edited(w8a8, tmp_path / "m", tensors, section)
    problems = verdict(directory, "vllm").problems
    assert verdict(directory, "vllm-ascend").problems == problems
    assert problems
    assert any(told in problem for problem in problems), problems


def test_a_group_left_out_as_a_whole_by_its_names_is_accepted(w8a8: Path, tmp_path: Path) -> None:
    for index, entries in enumerate(
        ([Q, K, V], ["re:.*layers.0.self_attn.[qkv]_proj$"], [f"{LAYER0}self_attn.qkv_proj"])
    ):
        directory = edited(w8a8, tmp_path / str(index), dequantize(Q, K, V), lambda s, e=entries: s["ignore"].extend(e))
        assert verdict(directory, "vllm").problems == (), entries


def test_targets_by_name_work_as_by_class(w8a8: Path, tmp_path: Path) -> None:
    for index, targets in enumerate((["Linear"], ["re:.*_proj$"], ["re:.*(q|k|v|o|gate|up|down)_proj$"])):
        directory = edited(
            w8a8, tmp_path / str(index), section=lambda s, t=targets: s["config_groups"][GROUP].update(targets=t)
        )
        assert verdict(directory, "vllm").problems == (), targets


def int8_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.ones(320, 64, dtype=torch.int8)
    tensors["lm_head.weight_scale"] = torch.ones(320, 1, dtype=torch.bfloat16)


@pytest.mark.parametrize("reader", READERS)
def test_a_quantized_lm_head_is_refused(reader: str, w8a8: Path, tmp_path: Path) -> None:
    directory = edited(w8a8, tmp_path / "m", int8_head, lambda s: s.update(ignore=[]))
    assert verdict(directory, reader).problems == (
        "lm_head.weight is I8, expected a floating-point LM head; quantize again with lm_head in ignore",
    )


def fp16_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


PYPTO_CASES: dict[str, tuple[Any, Any, Any, str]] = {
    "no head": (lambda t: t.pop("lm_head.weight"), None, None, "lm_head.weight is missing, expected a copy"),
    "fp16": (fp16_norm, None, None, "1 tensors are F16, such as model.norm.weight, expected I8, F32 or BF16"),
    "bf16 down": (
        dequantize(f"{LAYER0}mlp.down_proj"),
        lambda s: s["ignore"].append(f"{LAYER0}mlp.down_proj"),
        None,
        "not INT8: layer 0: mlp.down_proj; expected all seven projections",
    ),
    "no scale": (lambda t: t.pop(f"{Q}.weight_scale"), None, None, f"{Q}.weight_scale is missing"),
    "theta nobody finds": (
        None,
        None,
        lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "rope_theta at the top level is 10000.0, which is all that is read, expected 1000000.0",
    ),
    "scaled rope": (
        None,
        None,
        lambda c: c.update(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        ),
        "found rope scaling (llama3), expected none",
    ),
}


@pytest.mark.parametrize("case", PYPTO_CASES)
def test_pypto_serving_rules(case: str, w8a8: Path, tmp_path: Path) -> None:
    tensors, section, config, told = PYPTO_CASES[case]
    problems = verdict(edited(w8a8, tmp_path / "m", tensors, section, config), "pypto-serving").problems
    assert any(told in problem for problem in problems), problems


def test_pypto_serving_takes_a_flat_scale_and_fp32_scales(w8a8: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"][:, 0]
        tensors[f"{K}.weight_scale"] = tensors[f"{K}.weight_scale"].float()

    assert verdict(edited(w8a8, tmp_path / "m", edit), "pypto-serving").problems == ()


def test_pypto_serving_reads_neither_head_dim_nor_other_families(
    tiny_qwen3: Path, tiny_mistral: Path, tmp_path: Path
) -> None:
    for name, source, told in (
        ("wide", tiny_qwen3, "head_dim is 32, expected hidden_size / heads = 16"),
        ("mistral", tiny_mistral, "the family is mistral, expected qwen3"),
    ):
        quantize_checkpoint(source, tmp_path / name, Recipe())
        assert any(told in problem for problem in verdict(tmp_path / name, "pypto-serving").problems)


def test_pypto_serving_notes_what_it_leaves_out(w8a8: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(w8a8, tmp_path / "m")
    edit_json(directory / "generation_config.json", lambda content: content.update(eos_token_id=[2, 5]))
    notes = verdict(directory, "pypto-serving").notes
    assert "hidden_size 64 (expected 5120)" in notes[0]
    assert "stop ids [5] would be missed" in notes[1]
