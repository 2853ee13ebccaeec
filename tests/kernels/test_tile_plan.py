"""A program's tiles are checked before it is compiled: site and rule named, no subprocess started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kernels.catalog import BUILTIN_NAMES, Check, builtin_config
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.program_runner import build_kernel
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.runner_process import FOLDER_PREFIX
from kernels.toolchain import run_check

QWEN3_14B = builtin_config("qwen3-14b")


def layer(rows: int = 16, **sizes: int) -> DecodeLayer:
    return DecodeLayer(DecodeLayerSpec.of(dataclasses.replace(QWEN3_14B, **sizes), "int8", (1,) * rows))


def prefill(**sizes: int) -> PrefillLayer:
    return PrefillLayer(PrefillLayerSpec.of(dataclasses.replace(QWEN3_14B, **sizes), "int8", ((0, 1),)))


def head(window_rows: int, hidden_size: int = 5120) -> LmHeadGreedy:
    config = dataclasses.replace(QWEN3_14B, hidden_size=hidden_size)
    return LmHeadGreedy(LmHeadSpec.of(config, 1, window_rows=window_rows))


@pytest.mark.parametrize("model", BUILTIN_NAMES)
@pytest.mark.parametrize("down", ["int8", "bf16"])
def test_every_built_in_model_has_tiles_that_fit(model: str, down: str) -> None:
    config = builtin_config(model)
    DecodeLayer(DecodeLayerSpec.of(config, down, (1,) * 16)).check_tiles()  # type: ignore[arg-type]
    PrefillLayer(PrefillLayerSpec.of(config, down, ((0, 1),))).check_tiles()  # type: ignore[arg-type]
    LmHeadGreedy(LmHeadSpec.of(config, 1)).check_tiles()


@pytest.mark.parametrize("model", BUILTIN_NAMES)
def test_every_built_in_model_has_tiles_that_fit_in_bf16(model: str) -> None:
    config = builtin_config(model)
    DecodeLayer(DecodeLayerSpec.of(config, "bf16", (1,) * 16, weights="bf16")).check_tiles()
    PrefillLayer(PrefillLayerSpec.of(config, "bf16", ((0, 1),), weights="bf16")).check_tiles()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (layer(num_heads=200), r"wq, wk, wv: vector tile \[1, 25600\] does not fit: vector-ub: "),
        (prefill(hidden_size=24608), r"norm of hidden_size: vector tile \[1, 24608\] does not fit: vector-ub: "),
        (layer(hidden_size=24608), r"norm of hidden_size: vector tile \[1, 24608\] does not fit: vector-ub: "),
        (head(window_rows=128), r"lm_head_weight: vector tile \[128, 256\] does not fit: vector-ub: "),
        (head(window_rows=16, hidden_size=32768), "norm of hidden_size: .* vector-ub: "),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_with_site_and_rule_before_compiling(
    program: Program, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProgramError, match=words):
        program.check_tiles()
    with pytest.raises(ProgramError, match=words):
        build_kernel(program, {})
    monkeypatch.setenv("PATH", "")
    result = run_check(Check("simulated", program, None), CheckCache(tmp_path), tmp_path, timeout_s=0.001)
    assert not result.ok
    assert "vector-ub" in result.error
    assert not list(tmp_path.glob(f"**/{FOLDER_PREFIX}*"))
