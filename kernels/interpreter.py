"""Run programs for their results, on the host: PyPTO's interpreter as a slow but exact device.

With verification on, PyPTO executes a program's tensor graph and leaves the results in the tensors it was called with.
A list of calls runs in one subprocess, each call working on what the ones before left; compile time dominates, about a
second a call. This module knows nothing of models; `serving.executor.pypto` decides the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.calculator import build_calculator
from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.registry import program_to_json
from kernels.runner_process import run_request, runner_folder

__all__ = ["Call", "interpret", "run_program"]

DEFAULT_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Call:
    """One program call on named tensors.

    `bindings` gives the tensor of each argument by key; "out" and "scratch" arguments may be left out and are made.
    `results` gives the key under which an argument's tensor is found afterwards ("inout" arguments keep their key).
    """

    program: Program
    bindings: Mapping[str, str]
    results: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The call as the subprocess reads it."""
        return {
            "program": program_to_json(self.program),
            "bindings": dict(self.bindings),
            "results": dict(self.results),
        }


def interpret(
    calls: Sequence[Call],
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    *,
    views: Mapping[str, tuple[str, int]] | None = None,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Tensor]:
    """Run `calls` in turn in one subprocess, on copies of `tensors`; returns the tensors in `wanted` as they are then.

    `views` adds tensors that share memory with given ones: by key, the source's key and how many of its first rows.

    Raises ProgramError when an argument does not fit its program (before anything runs in that call) or a call fails,
    and ToolchainError when the subprocess overruns `timeout_s` or PyPTO is missing.
    """
    views = dict(views or {})
    known = set(tensors).union(views, *(call.results.values() for call in calls))
    for call in calls:
        missing = sorted(set(call.bindings.values()) - known)
        if missing:
            raise ProgramError(f"{call.program.name} is bound to tensors that do not exist: {', '.join(missing)}")
    if lost := sorted(set(wanted) - known):
        raise ProgramError(f"no call leaves the tensors {', '.join(lost)}")
    with runner_folder() as folder:
        # Tensors that share memory (tied weights, views of one slab) are refused by the format: each gets its own.
        save_file({key: tensor.detach().clone() for key, tensor in tensors.items()}, folder / "inputs.safetensors")
        request = {
            "kind": "run",
            "library": str(build_calculator(cache_dir)),
            "calls": [call.to_json() for call in calls],
            "views": views,
            "wanted": list(wanted),
        }
        run_request(folder, request, timeout_s)
        outputs: dict[str, Tensor] = load_file(folder / "outputs.safetensors")
        return outputs


def run_program(
    program: Program,
    tensors: Mapping[str, Tensor],
    *,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Tensor]:
    """Interpret one program on `tensors`, given by argument name; returns its "out" and "inout" arguments."""
    wanted = [argument.name for argument in program.arguments() if argument.direction in ("out", "inout")]
    call = Call(program, {name: name for name in tensors}, {name: name for name in wanted})
    return interpret([call], tensors, wanted, cache_dir=cache_dir, timeout_s=timeout_s)
