"""A kernel contract as data: the stages a kernel library offers, and what a model must be to use them.

A stage is one entry that a host calls: an ordered list of tensor arguments. A contract is the stages of one kernel
library (`abi`) for one family and quantization, with the slabs that feed them, its limits and its shape rules. Nothing
here runs: `kernels.contract_registry` lists the contracts, `kernels.staging` and `kernels.abi_export` write slabs.

Symbols of shapes are those of `kernels.contract.symbols`, N query heads, G key/value heads, W the real vocabulary, C4
the bytes of a token's keys or values in TurboQuant codes of four bits, and these, known only at a call: B rows of the
batch, T tokens packed together, S cache rows, M entries of a block table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kernels.contract import ResolvedSlab, SlabSpec, resolve_slabs, symbols, term_size
from kernels.errors import ContractError
from kernels.shape_rules import ShapeRule, shape_problems
from quantize.model_config import ModelConfig

__all__ = ["CALL_SYMBOLS", "Contract", "Limits", "Stage", "StageArgument"]

ArgumentDtype = Literal["INT8", "INT32", "BF16", "FP32"]
ArgumentDirection = Literal["in", "out", "inout", "scratch"]
CALL_SYMBOLS = frozenset("BTSM")
"""Symbols without a value before a call."""


@dataclass(frozen=True)
class StageArgument:
    """One tensor argument; `slab` names the slab that is handed over (whole, or one layer of it), if it is a weight."""

    name: str
    dtype: ArgumentDtype
    shape: tuple[str, ...]
    direction: ArgumentDirection = "in"
    slab: str = ""

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
        """The shape with the model's sizes; None for what only a call knows."""
        return tuple(None if CALL_SYMBOLS & set(term.split("*")) else term_size(term, sizes) for term in self.shape)


@dataclass(frozen=True)
class Stage:
    """One entry of a kernel library: its arguments in call order, and who may implement it.

    `implementations` are names of `kernels.extern`: `program` is a compiled program, others are device operators that
    take the same arguments. `note` says what the argument table cannot.
    """

    name: str
    arguments: tuple[StageArgument, ...]
    implementations: tuple[str, ...] = ("program",)
    note: str = ""

    def argument(self, name: str) -> StageArgument:
        """The argument called `name`; raises ContractError naming those there are."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        names = ", ".join(argument.name for argument in self.arguments)
        raise ContractError(f"stage {self.name} has no argument {name!r}; it takes {names}")


@dataclass(frozen=True)
class Limits:
    """Numbers that hosts and kernels must agree on, in rows and tokens."""

    batch_window_rows: int
    page_tokens: int
    vocab_pad_multiple: int
    max_positions: int


@dataclass(frozen=True)
class Contract:
    """What one kernel library expects of one family in one quantization.

    `kv_layout` is the order of a cache's axes: `page,token,head,dim` or `page,head,token,dim`. `down` is the dtype of
    the MLP's down projection. `execution` names the stages of a phase (prefill, decode) in order. `fixed_sizes` are
    symbols whose value the library fixes instead of the model.
    """

    abi: str
    family: str
    quantization: str
    version: int
    down: Literal["int8", "bf16"]
    kv_layout: str
    limits: Limits
    capabilities: tuple[str, ...]
    rules: tuple[ShapeRule, ...]
    slabs: tuple[SlabSpec, ...]
    stages: tuple[Stage, ...]
    execution: tuple[tuple[str, tuple[str, ...]], ...]
    fixed_sizes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """`abi/family/quantization`, the key of the registry."""
        return f"{self.abi}/{self.family}/{self.quantization}"

    def problems(self, config: ModelConfig) -> list[str]:
        """Why `config` cannot use this contract, each with what was found and expected; empty when it can."""
        if config.family != self.family:
            return [f"family is {config.family}, expected {self.family}"]
        return shape_problems(self.rules, config)

    def check(self, config: ModelConfig) -> None:
        """Raise ContractError, listing every problem, unless `config` fits; looks at sizes only, never at weights."""
        if problems := self.problems(config):
            raise ContractError(f"the model does not fit contract {self.name} v{self.version}: " + "; ".join(problems))

    def sizes(self, config: ModelConfig) -> dict[str, int]:
        """The value of every symbol that is known before a call."""
        own = {"N": config.num_heads, "W": config.vocab_size, "G": config.num_kv_heads, "C4": config.kv_size // 2}
        return {**symbols(config), **own, **dict(self.fixed_sizes)}

    def resolved_slabs(self, config: ModelConfig) -> list[ResolvedSlab]:
        """The slabs of `config` in contract order; raises ContractError when it does not fit."""
        self.check(config)
        return resolve_slabs(self.slabs, self.sizes(config))

    def stage(self, name: str) -> Stage:
        """The stage called `name`; raises ContractError naming those there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ContractError(
            f"contract {self.name} has no stage {name!r}; its stages are {', '.join(s.name for s in self.stages)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything that the fingerprint covers, as a JSON object."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for stage in plain["stages"]:
            del stage["note"]
        for rule in plain["rules"]:
            del rule["why"]
        return plain

    def fingerprint(self) -> str:
        """SHA-256 over `to_json` in canonical form: it changes with any argument, slab, limit or rule."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()
