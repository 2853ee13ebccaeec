"""The registered contracts: the tables against the programs and the published interface, fingerprints, the match."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kernels.abi_pypto_lib import PYPTO_LIB_QWEN3_A8W8, kernel_constants
from kernels.catalog import builtin_config
from kernels.contract import slab_specs
from kernels.contract_registry import CONTRACTS, find_contract, match_checkpoint
from kernels.errors import ContractError
from kernels.kv_format import KvFormat
from kernels.programs.base import Argument, Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, decode_layer
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.embedding import EmbeddingGather, EmbeddingGatherSpec
from kernels.programs.layer_parts import PARTS
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.programs.registry import PROGRAM_NAMES
from kernels.programs.sampling import GreedySample, GreedySampleSpec, TopkSelect, TopkSelectSpec
from kernels.programs.turboquant_attention import TurboQuantAttention, TurboQuantAttentionSpec
from kernels.programs.turboquant_encode import TurboQuantEncode, TurboQuantEncodeSpec
from kernels.stage_contract import Contract, Stage
from quantize.families import FAMILIES
from quantize.model_config import ModelConfig
from quantize.recipe import Recipe
from tests.slab_tools import quantize

DTYPES = {"INT8": torch.int8, "INT32": torch.int32, "BF16": torch.bfloat16, "FP32": torch.float32}
QWEN3_14B = builtin_config("qwen3-14b")


def of_family(name: str) -> ModelConfig:
    family = FAMILIES[name]
    return dataclasses.replace(QWEN3_14B, family=name, qk_norm=family.qk_norm, qkv_bias=family.qkv_bias)


def fits(size: int | None, argument_size: int | None, batch_rows: int, heads: int) -> bool:
    """A size of a stage against the program's: what only a call knows is dynamic there, or the batch of the spec."""
    return argument_size in (size, None) or (size is None and argument_size in (batch_rows, batch_rows * heads))


def assert_program_takes(stage: Stage, program: Program, contract: Contract, config: ModelConfig, rows: int) -> None:
    wanted: list[Argument] = [a for a in program.arguments() if a.direction != "scratch"]
    assert [a.name for a in stage.arguments] == [a.name for a in wanted]
    sizes = contract.sizes(config)
    for argument, held in zip(stage.arguments, wanted, strict=True):
        assert DTYPES[argument.dtype] == held.dtype, held.name
        assert argument.direction == held.direction, held.name
        shape = argument.resolve(sizes)
        assert len(shape) == len(held.shape), held.name
        assert all(fits(*pair, rows, config.num_heads) for pair in zip(shape, held.shape, strict=True)), (
            held.name,
            shape,
            held.shape,
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("down", ["int8", "bf16"])
def test_our_stages_are_what_the_programs_take(family: str, down: str) -> None:
    config = of_family(family)
    contract = find_contract("pypto-deploy", family, down)  # type: ignore[arg-type]
    contract.check(config)
    programs: list[Program] = [
        EmbeddingGather(EmbeddingGatherSpec.of(config, 7)),
        PrefillLayer(PrefillLayerSpec.of(config, down, ((0, 7),))),  # type: ignore[arg-type]
        PrefillStep(PrefillStepSpec.of(config, down, ((0, 7),))),  # type: ignore[arg-type]
        DecodeLayer(DecodeLayerSpec.of(config, down, (1,) * 7)),  # type: ignore[arg-type]
        DecodeStep(DecodeStepSpec.of(config, down, (1,) * 7)),  # type: ignore[arg-type]
        LmHeadGreedy(LmHeadSpec.of(config, batch_rows=7)),
        GreedySample(GreedySampleSpec.of(config, 7)),
        TopkSelect(TopkSelectSpec.of(config, 7)),
        PagedAttention(PagedAttentionSpec.of(config, (1,) * 7)),
        decode_layer(DecodeLayerSpec.of(config, down, (1,) * 7, kv="turboquant4")),  # type: ignore[arg-type]
        TurboQuantEncode(TurboQuantEncodeSpec.of(config, KvFormat(4, sketch=False), 7)),
        TurboQuantAttention(TurboQuantAttentionSpec.over(config, KvFormat(4, sketch=False), (1,) * 7)),
    ]
    assert [stage.name for stage in contract.stages] == [program.name for program in programs]
    # Blocks that are no stages.
    others = {"linear_w8a8"} | {part.name for part in PARTS}
    assert {program.name for program in programs} == set(PROGRAM_NAMES) - others
    for stage, program in zip(contract.stages, programs, strict=True):
        assert_program_takes(stage, program, contract, config, 7)
    assert contract.resolved_slabs(config) == slab_specs(config, down)  # type: ignore[arg-type]


def test_pypto_libs_decode_takes_29_arguments_in_its_order() -> None:
    decode = PYPTO_LIB_QWEN3_A8W8.stage("decode")
    assert " ".join(a.name for a in decode.arguments) == (
        "hidden_states input_rms_weight wq wk wv wq_scale wk_scale wv_scale q_norm_weight k_norm_weight seq_lens "
        "active_batch block_table slot_mapping rope_cos rope_sin k_cache v_cache wo wo_scale w_gate w_up w_gate_scale "
        "w_up_scale w_down post_rms_weight final_norm_weight lm_head_weight out"
    )
    sizes = PYPTO_LIB_QWEN3_A8W8.sizes(QWEN3_14B)
    shapes = {a.name: (a.dtype, a.resolve(sizes)) for a in decode.arguments}
    assert shapes["hidden_states"] == ("BF16", (16, 5120))
    assert shapes["wk"] == ("INT8", (40 * 5120, 1024))
    assert shapes["w_gate_scale"] == ("FP32", (40, 17408))
    assert shapes["w_down"] == ("BF16", (40 * 17408, 5120))
    assert shapes["rope_cos"] == ("FP32", (4096, 128))
    assert shapes["k_cache"] == ("BF16", (None, 128))
    assert shapes["lm_head_weight"] == ("BF16", (152064, 5120))
    assert shapes["out"] == ("FP32", (None, 152064))
    assert [a.name for a in decode.arguments if a.direction == "inout"] == ["k_cache", "v_cache"]


def test_pypto_libs_prefill_takes_31_arguments_in_its_order() -> None:
    prefill = PYPTO_LIB_QWEN3_A8W8.stage("prefill")
    assert " ".join(a.name for a in prefill.arguments) == (
        "hidden_states seq_lens chunk_lens chunk_offsets input_rms_weight wq wk wv wq_scale wk_scale wv_scale "
        "q_norm_weight k_norm_weight rope_cos rope_sin block_table slot_mapping k_cache v_cache wo wo_scale "
        "post_rms_weight w_gate w_up w_gate_scale w_up_scale w_down final_norm_weight lm_head_weight out hidden_out"
    )
    assert [a.name for a in prefill.arguments if a.direction == "out"] == ["out", "hidden_out"]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_weight_argument_is_a_slab_of_the_same_dtype(contract: Contract) -> None:
    slabs = {spec.name: spec for spec in contract.slabs}
    assert len(slabs) == len(contract.slabs)
    for stage in contract.stages:
        assert len({a.name for a in stage.arguments}) == len(stage.arguments)
        assert "program" in stage.implementations
        for argument in stage.arguments:
            if argument.slab:
                assert argument.dtype == slabs[argument.slab].dtype


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_phase_is_made_of_stages_that_exist(contract: Contract) -> None:
    assert [phase for phase, _ in contract.execution] == ["prefill", "decode"]
    for _, names in contract.execution:
        for name in names:
            contract.stage(name)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen3-1.7b", None),
        ("qwen3-8b", None),
        ("qwen3-14b", None),
        ("qwen3-0.6b", "q_size is 2048, expected hidden_size 1024"),
        ("qwen3-4b", "q_size is 4096, expected hidden_size 2560"),
        ("qwen3-32b", "q_size is 8192, expected hidden_size 5120"),
    ],
)
def test_which_qwen3_pypto_libs_rules_allow(model: str, words: str | None) -> None:
    problems = PYPTO_LIB_QWEN3_A8W8.problems(builtin_config(model))
    assert (problems == []) if words is None else (words in problems[0])


def test_only_14b_needs_no_other_cut_of_the_output_projection() -> None:
    assert "retune" not in kernel_constants(QWEN3_14B)
    assert "hidden size 4096" in str(kernel_constants(builtin_config("qwen3-8b"))["retune"])


def test_the_fingerprint_changes_with_every_part_of_a_contract_and_not_with_notes() -> None:
    contract, seen = PYPTO_LIB_QWEN3_A8W8, set()
    decode, *others = contract.stages
    renamed = dataclasses.replace(decode.arguments[2], name="w_q")
    retyped = dataclasses.replace(decode.arguments[2], dtype="BF16")
    turned = dataclasses.replace(decode.arguments[2], shape=("H", "L*H"))
    changes = [
        {},
        {"version": 2},
        {"kv_layout": "page,token,head,dim"},
        {"limits": dataclasses.replace(contract.limits, page_tokens=64)},
        {"capabilities": contract.capabilities[1:]},
        {"rules": contract.rules[1:]},
        {"slabs": contract.slabs[::-1]},
        {"fixed_sizes": (("P", 8192),)},
        {"execution": contract.execution[1:]},
        *(
            {"stages": (dataclasses.replace(decode, arguments=arguments), *others)}
            for arguments in (
                (*decode.arguments[:2], renamed, *decode.arguments[3:]),
                (*decode.arguments[:2], retyped, *decode.arguments[3:]),
                (*decode.arguments[:2], turned, *decode.arguments[3:]),
                decode.arguments[::-1],
            )
        ),
    ]
    for change in changes:
        seen.add(dataclasses.replace(contract, **change).fingerprint())  # type: ignore[arg-type]
    assert len(seen) == len(changes)
    noted = dataclasses.replace(contract, stages=(dataclasses.replace(decode, note="reworded"), *others))
    assert noted.fingerprint() == contract.fingerprint()
    assert len({contract.fingerprint() for contract in CONTRACTS}) == len(CONTRACTS)


def test_a_lookup_that_fails_says_what_there_is() -> None:
    with pytest.raises(ContractError, match=r"ABI 'vllm'; registered are pypto-deploy, pypto-lib"):
        find_contract("vllm", "qwen3", "int8")
    with pytest.raises(ContractError, match=r"no contract for family llama; it has qwen3"):
        find_contract("pypto-lib", "llama", "bf16")
    with pytest.raises(ContractError, match=r"no stage 'embed'; its stages are decode, prefill"):
        PYPTO_LIB_QWEN3_A8W8.stage("embed")
    with pytest.raises(ContractError, match=r"no argument 'w_q'; it takes hidden_states"):
        PYPTO_LIB_QWEN3_A8W8.stage("decode").argument("w_q")


def test_a_checkpoint_is_matched_by_its_config_alone(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_qwen3, tmp_path / "w8a8", Recipe(down="bf16"))
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    contract, config = match_checkpoint(checkpoint, "pypto-deploy")
    assert (contract.name, config.hidden_size) == ("pypto-deploy/qwen3/w8a8-down-bf16", 64)
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "intermediate_size": 100, "head_dim": 24}))
    with pytest.raises(ContractError) as caught:
        match_checkpoint(checkpoint, "pypto-deploy")
    assert "head_dim is 24, expected a multiple of 16 (head-tile" in str(caught.value)
    assert "intermediate_size is 100, expected a multiple of 32 (mlp-fractal" in str(caught.value)
