"""Run programs whose outputs stand in larger tensors, to see that nothing beyond an output's rows is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.interpreter import Call, interpret
from kernels.programs.base import Comparison, Program, compare_outputs, make_outputs

__all__ = ["GUARD_ROWS", "GuardedRun", "run_guarded"]

GUARD_ROWS = 16
"""Rows kept behind every output: a whole window."""
CANARY = 77
"""What these rows hold."""


@dataclass(frozen=True)
class GuardedRun:
    """What one program left: its inputs as they were, its outputs, and the names of outputs that it wrote beyond."""

    program: Program
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    overrun: tuple[str, ...]

    def compared(self) -> tuple[Comparison, ...]:
        """The outputs against the program's golden, which may say something of scratch too."""
        return compare_outputs(self.program, self.outputs, self.program.golden(self.inputs))


def run_guarded(programs: Sequence[Program], seed: int = 1, cache_dir: Path | None = None) -> list[GuardedRun]:
    """Interpret `programs` on their sample inputs, in one subprocess, with a guard behind everything they write.

    Raises what `kernels.interpreter.interpret` raises.
    """
    calls, tensors, wanted, all_inputs = [], {}, [], []
    views: dict[str, tuple[str, int]] = {}
    for index, program in enumerate(programs):
        given = program.sample_inputs(seed)
        made = make_outputs(program, given)
        inputs = {a.name: {**given, **made}[a.name] for a in program.arguments()}
        all_inputs.append(inputs)
        bindings = {}
        for argument in program.arguments():
            key, value = f"{argument.name}.{index}", inputs[argument.name]
            bindings[argument.name] = key
            if argument.direction in ("out", "inout"):
                guard = torch.full((GUARD_ROWS, *value.shape[1:]), CANARY).to(value.dtype)
                tensors[f"{key}.guarded"] = torch.cat([value, guard])
                views[key] = (f"{key}.guarded", value.shape[0])
                wanted.append(f"{key}.guarded")
            else:
                tensors[key] = value
        calls.append(Call(program, bindings))
    done = interpret(calls, tensors, wanted, views=views, cache_dir=cache_dir)
    runs = []
    for index, (program, inputs) in enumerate(zip(programs, all_inputs, strict=True)):
        outputs, overrun = {}, []
        for argument in program.arguments():
            if argument.direction in ("out", "inout"):
                whole = done[f"{argument.name}.{index}.guarded"]
                rows = inputs[argument.name].shape[0]
                outputs[argument.name] = whole[:rows].clone()
                if not bool((whole[rows:] == torch.tensor(CANARY).to(whole.dtype)).all()):
                    overrun.append(argument.name)
        runs.append(GuardedRun(program, inputs, outputs, tuple(overrun)))
    return runs
