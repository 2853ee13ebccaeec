"""The subprocess that compiles and runs PyPTO programs: `python -m kernels.program_runner FOLDER`.

It reads `request.json` in FOLDER, and writes `result.json` there (and `outputs.safetensors` for a run). A compile error
leaves PyPTO unusable in its process and some of its reports are written at exit, so every request has a process of its
own, and the parent judges what is on disk afterwards (`kernels.verdict`).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.programs.base import Program, check_arguments, compare_outputs, make_outputs
from kernels.programs.registry import program_from_json
from kernels.shims import install

PR_SET_PDEATHSIG = 1
LOOP_BODIES_AT_ONCE = 128


def main() -> int:
    """Entry point; the exit status is 0 when the request was carried out, whatever the verdict."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    _die_with_parent()
    checked = request["kind"] == "check"
    install(Path(request["library"]), simulate_interpreted=checked)
    result = _check(request) if checked else _run(request, folder)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def build_kernel(program: Program, options: Mapping[str, Any]) -> Any:
    """Build the kernel of `program`, whose parameters are its arguments; refuses tiles that break a rule."""
    program.check_tiles()
    return import_module(program.kernel_module).build(program, dict(options))


def runtime_options(run_mode: Any) -> dict[str, Any]:
    """Options of PyPTO's runtime for any program in `run_mode`.

    The bodies of loops are submitted in bundles, and a bundle waits for the one before it. Unset, bundles are smaller
    than 128 bodies: attention over many pages then takes longer. Above 128 the simulator was seen to crash.
    """
    return {"run_mode": run_mode, "stitch_function_max_num": LOOP_BODIES_AT_ONCE}


def simulation_options(verify: bool, passes: Sequence[str] = ()) -> dict[str, Any]:
    """Options of `pypto.frontend.jit` on the host; `passes` are verified after the tensor graph."""
    import pypto

    options: dict[str, Any] = {
        "runtime_options": runtime_options(pypto.RunMode.SIM),
        "debug_options": {"runtime_debug_mode": 1},
    }
    if verify:
        options["verify_options"] = {
            "enable_pass_verify": True,
            "pass_verify_save_tensor": False,
            "pass_verify_pass_filter": list(passes),
        }
    return options


def _check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one program on sample inputs; with `verify`, against its golden."""
    import pypto

    program = program_from_json(request["program"])
    verify = bool(request["verify"])
    tensors = program.sample_inputs(request["seed"]) if verify else program.shape_inputs()
    arguments = check_arguments(program, tensors)
    kernel = build_kernel(program, simulation_options(verify, request["passes"]))
    golden: dict[str, Tensor] = {}
    if verify:
        golden = program.golden(tensors)
        pypto.set_verify_golden_data(goldens=[golden.get(argument.name) for argument in program.arguments()])
    inputs = {a.name: tensors[a.name].clone() for a in program.arguments() if a.direction == "in"} if verify else {}
    kernel(*arguments)
    comparisons = compare_outputs(program, tensors, golden)
    changed = [name for name, before in inputs.items() if not torch.equal(before, tensors[name])]
    return {
        "outputs": {c.name: c.max_abs_diff for c in comparisons},
        "tolerances": {c.name: c.tolerance for c in comparisons},
        "mismatches": [c.name for c in comparisons if not c.ok] + [f"{name} (an input)" for name in changed],
    }


def _run(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Interpret the request's calls in turn on the tensors of `inputs.safetensors`."""
    tensors = load_file(folder / "inputs.safetensors")
    tensors |= {key: tensors[source][:rows] for key, (source, rows) in request["views"].items()}
    for call in request["calls"]:
        program = program_from_json(call["program"])
        bound = {name: tensors[key] for name, key in call["bindings"].items()}
        bound |= make_outputs(program, bound)
        arguments = check_arguments(program, bound)
        build_kernel(program, simulation_options(verify=True))(*arguments)
        tensors.update({key: bound[name] for name, key in call["results"].items()})
    save_file({key: tensors[key].clone() for key in request["wanted"]}, folder / "outputs.safetensors")
    return {"calls": len(request["calls"])}


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed caller leaves nothing behind."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
