"""Stages that a device operator implements: the same arguments and the same golden as the compiled program.

`check_implementation` says whether a choice can run here, before anything is compiled or moved: an operator exists only
where its library does, and only for the shapes it takes. `fused_attention` is the one operator there is: CANN's fused
attention through torch_npu, on `paged_attention`'s arguments. Pages are token-major, as our caches are, so nothing is
copied: `[pages * 128, kv_heads * dim]` is viewed as `[pages, 128, kv_heads * dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kernels.contract import PAGE_TOKENS
from kernels.errors import ContractError
from kernels.shape_rules import ShapeRule, shape_problems
from kernels.stage_contract import Stage
from quantize.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CANN", "PROGRAM", "Operator", "check_implementation", "find_operator", "fused_attention", "unavailable"]

PROGRAM = "program"
"""The implementation by a compiled PyPTO program; every stage has it."""


@dataclass(frozen=True)
class Operator:
    """A device operator: `function` of the Python package `module`, for shapes that obey `rules`."""

    name: str
    module: str
    function: str
    rules: tuple[ShapeRule, ...]


CANN = Operator(
    name="cann",
    module="torch_npu",
    function="npu_fused_infer_attention_score",
    rules=(
        ShapeRule("operator-head", "head_dim", "a multiple of", "16", "the operator takes heads of whole fractals"),
        ShapeRule("operator-head", "head_dim", "at most", "512", "longest head the operator takes"),
        ShapeRule("operator-page", "kv_size", "at most", "65535", "widest page row the operator takes"),
        ShapeRule("operator-group", "q_per_kv", "at most", "64", "most query heads per key/value head"),
    ),
)
OPERATORS = {CANN.name: CANN}


def find_operator(operator: Operator) -> Callable[..., Any]:
    """The operator's function; raises ContractError when its library is absent or does not have it."""
    if find_spec(operator.module) is None:
        raise ContractError(
            f"implementation {operator.name!r} is {operator.module}.{operator.function}, and {operator.module} is not "
            f"installed here: use implementation {PROGRAM!r}, or run on a machine with CANN and {operator.module}"
        )
    function = getattr(import_module(operator.module), operator.function, None)
    if function is None:
        raise ContractError(
            f"implementation {operator.name!r} is {operator.module}.{operator.function}, which the installed "
            f"{operator.module} does not have: use implementation {PROGRAM!r}, or a newer {operator.module}"
        )
    found: Callable[..., Any] = function
    return found


def check_implementation(stage: Stage, choice: str, config: ModelConfig) -> None:
    """Raise ContractError unless `choice` implements `stage` for `config` on this machine."""
    if choice not in stage.implementations:
        raise ContractError(
            f"stage {stage.name} has no implementation {choice!r}; it has {', '.join(stage.implementations)}"
        )
    if choice == PROGRAM:
        return
    operator = OPERATORS[choice]
    if problems := shape_problems(operator.rules, config):
        raise ContractError(f"implementation {choice!r} of stage {stage.name} cannot serve: {'; '.join(problems)}")
    find_operator(operator)


def unavailable(stage: Stage) -> dict[str, str]:
    """The implementations of `stage` that cannot run on this machine, each with the reason."""
    reasons = {}
    for name in stage.implementations:
        if name != PROGRAM:
            try:
                find_operator(OPERATORS[name])
            except ContractError as error:
                reasons[name] = str(error)
    return reasons


def fused_attention(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Run stage `paged_attention` with CANN's operator: fills `context_rows` from the other arguments.

    One query token a row, so no mask: a row sees exactly the `context_tokens` first tokens of its pages. The operator
    keeps the softmax in higher precision than ours narrows it to, so its result is near the golden and not equal to it.
    """
    operator = find_operator(CANN)
    rows = tensors["context_tokens"].shape[0]
    pages = {name: tensors[name].view(-1, PAGE_TOKENS, config.kv_size) for name in ("k_cache", "v_cache")}
    context, _ = operator(
        tensors["q_rows"].view(rows, 1, config.q_size),
        pages["k_cache"],
        pages["v_cache"],
        actual_seq_lengths_kv=tensors["context_tokens"].tolist(),
        block_table=tensors["block_table"],
        block_size=PAGE_TOKENS,
        num_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        scale=config.head_dim**-0.5,
        input_layout="BSH",
    )
    tensors["context_rows"].copy_(context.view(rows * config.num_heads, config.head_dim))
