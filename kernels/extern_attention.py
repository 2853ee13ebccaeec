"""Stage `paged_attention` behind one call, whoever implements it: the compiled program or CANN's fused attention.

Both take the same arguments, are checked in the same way before the call, and have the same golden. The program's
result is within one BF16 step of it. The operator narrows nothing on the way, so that its result differs by the
rounding of the softmax weights: within two BF16 steps of the row's largest value.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
from torch import Tensor

from kernels.contract import PAGE_TOKENS
from kernels.contract_decoder import PAGED_ATTENTION
from kernels.extern import PROGRAM, check_implementation, fused_attention
from kernels.interpreter import run_program
from kernels.program_runner import build_kernel, runtime_options
from kernels.programs.base import check_arguments
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from quantize.model_config import ModelConfig

__all__ = ["run_paged_attention"]


def run_paged_attention(
    tensors: Mapping[str, Tensor], config: ModelConfig, implementation: str = PROGRAM, device: str = "cpu"
) -> Tensor:
    """Attend the query rows to their cached tokens; returns `context_rows` BF16 `[rows * heads, head_dim]`.

    `tensors` are the stage's arguments but the output: `q_rows` BF16 `[rows * heads, dim]`, `k_cache` and `v_cache`
    BF16 `[slots, kv_heads * dim]`, `context_tokens` INT32 `[rows]`, `block_table` INT32 `[rows, pages]`. The program
    runs in the host's interpreter on `cpu`, compiled on an NPU `device`; the operator wherever torch_npu is. Raises
    ContractError when `implementation` cannot run here, ProgramError when the arguments do not fit, both before the
    call.
    """
    check_implementation(PAGED_ATTENTION, implementation, config)
    contexts = tuple(tensors["context_tokens"].tolist())
    program = PagedAttention(PagedAttentionSpec.of(config, contexts, tensors["k_cache"].shape[0] // PAGE_TOKENS))
    out = torch.empty_like(tensors["q_rows"])
    bound = {**tensors, "context_rows": out}
    arguments = check_arguments(program, bound)
    if implementation != PROGRAM:
        fused_attention(bound, config)
    elif device == "cpu":
        out = run_program(program, tensors)["context_rows"]
    else:
        pypto = import_module("pypto")
        build_kernel(program, {"runtime_options": runtime_options(pypto.RunMode.NPU)})(*arguments)
    return out
