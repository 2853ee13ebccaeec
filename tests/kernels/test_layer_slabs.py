"""Which slabs are placeholders, where a slab of the model is as narrow as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.catalog import builtin_config
from kernels.contract import DownDtype
from kernels.errors import ProgramError
from kernels.programs.base import Program, check_arguments
from kernels.programs.decode_layer import DecodeLayer
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.layer_slabs import STACKED_SLABS, WeightForm, stacked_rows
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from quantize.model_config import ModelConfig

LAYERS = 2


def narrow(*, qk_norm: bool = False, qkv_bias: bool = False) -> ModelConfig:
    """One key/value head of 16: its slabs are as wide as a placeholder."""
    return replace(
        builtin_config("qwen3-14b"),
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=300,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def steps_of(config: ModelConfig) -> list[Program]:
    """Both programs over several layers."""
    return [
        DecodeStep(DecodeStepSpec.of(config, "int8", (3,), layers=LAYERS, chunk_tokens=128)),
        PrefillStep(PrefillStepSpec.of(config, "int8", ((0, 3),), layers=LAYERS, window_rows=16, chunk_tokens=128)),
    ]


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "k_bias", "v_bias", "wk", "wv", "wk_scale", "wv_scale"])
def test_a_slab_as_narrow_as_a_placeholder_needs_the_rows_of_every_layer(name: str) -> None:
    for program in steps_of(narrow(qk_norm=True, qkv_bias=True)):
        tensors = program.sample_inputs(0)
        check_arguments(program, tensors)
        short = tensors[name][: tensors[name].shape[0] // LAYERS].clone()
        with pytest.raises(ProgramError, match=rf"`{name}` has {short.shape[0]} rows"):
            check_arguments(program, {**tensors, name: short})


def test_sizes_and_samples_that_make_no_layer_are_refused() -> None:
    spec = DecodeStepSpec.of(narrow(), "int8", (3, 130), layers=LAYERS).layer
    for name in ("hidden_size", "num_kv_heads"):
        with pytest.raises(ProgramError, match=f"{name} 0 is not at least 1"):
            replace(spec, **{name: 0})
    with pytest.raises(ProgramError, match="2 pages are too few for a sample"):
        DecodeLayer(replace(spec, pages=2)).sample_inputs(0)


def test_a_placeholder_may_have_one_row_for_all_layers() -> None:
    for program in steps_of(narrow()):
        tensors = program.sample_inputs(0)
        short = {name: tensors[name][:1].clone() for name in ("q_norm", "k_norm", "q_bias", "k_bias", "v_bias")}
        check_arguments(program, {**tensors, **short})


@pytest.mark.parametrize(
    ("down", "weights", "absent"),
    [
        ("int8", "int8", set()),
        ("bf16", "int8", {"w_down_scale"}),
        ("bf16", "bf16", {name for name in STACKED_SLABS if name.endswith("_scale")}),
    ],
)
def test_the_form_of_the_weights_decides_which_scales_are_placeholders(
    down: DownDtype, weights: WeightForm, absent: set[str]
) -> None:
    spec = DecodeStepSpec.of(narrow(qk_norm=True, qkv_bias=True), down, (3,), layers=LAYERS, weights=weights)
    assert set(STACKED_SLABS) - set(stacked_rows(spec.layer, LAYERS)) == absent
