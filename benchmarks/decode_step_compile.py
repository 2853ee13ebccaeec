"""Shows that compiling `decode_step` takes no longer for more layers: their number is not compiled in.

    python benchmarks/decode_step_compile.py [--layers 2 8 40] [--hidden 256] [--json]

Each layer count is compiled and run by the cost model in a subprocess of its own. CPU seconds (all threads, children
of the compiler included) are taken apart for the two: the cost model runs every layer, so only its time grows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.calculator import build_calculator
from kernels.catalog import builtin_config
from kernels.program_runner import build_kernel, simulation_options
from kernels.programs.base import check_arguments
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.runner_process import SYSTEM_PATH, runner_folder

CONTEXTS = (130, 5)
VOCAB_SIZE = 512


def program_of(layers: int, hidden: int) -> DecodeStep:
    """Qwen3-14B's options at a small width: 4 query heads, 2 key/value heads, two rows."""
    config = replace(
        builtin_config("qwen3-14b"),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
        num_layers=layers,
    )
    return DecodeStep(DecodeStepSpec.of(config, "int8", CONTEXTS))


def cpu_seconds() -> float:
    """User and system time of this process and of the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(layers: int, hidden: int, folder: Path) -> dict[str, Any]:
    """Compile and simulate once in this process, whose output goes to `folder`."""
    for name in ("output", "home"):
        (folder / name).mkdir()
    os.environ |= {
        "PATH": os.pathsep.join((SYSTEM_PATH, os.environ.get("PATH", ""))),
        "TILE_FWK_OUTPUT_DIR": str(folder / "output"),
        "ASCEND_WORK_PATH": str(folder),
        "ASCEND_PROCESS_LOG_PATH": str(folder),
        "PYPTO_HOME": str(folder / "home"),
    }
    # PyPTO binds its folders when it is imported.
    from kernels.shims import install

    install(build_calculator(None))
    program = program_of(layers, hidden)
    tensors = program.shape_inputs()
    kernel = build_kernel(program, simulation_options(verify=False))
    seconds = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = cpu_seconds()
            result = call(*arguments)
            seconds[name] = round(cpu_seconds() - started, 2)
            return result

        return run

    kernel.compile = timed("compile_cpu_s", kernel.compile)
    kernel._run_with_cpu = timed("simulate_cpu_s", kernel._run_with_cpu)
    kernel(*check_arguments(program, tensors))
    compiled = next((folder / "output").glob("*/program.json"))
    return {"layers": layers, **seconds, "program_bytes": compiled.stat().st_size}


def main() -> None:
    """Measure every layer count in a subprocess and print a table or JSON."""
    parser = argparse.ArgumentParser(description="compile time of decode_step by layer count")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 40])
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with runner_folder() as folder:
            found = measure(arguments.layers[0], arguments.hidden, folder)
        print(json.dumps(found))
        return
    records = []
    for layers in arguments.layers:
        command = [sys.executable, __file__, "--one", "--layers", str(layers), "--hidden", str(arguments.hidden)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        records.append(json.loads(printed.splitlines()[-1]))
    if arguments.json:
        print(json.dumps(records, indent=1))
        return
    print("layers  compile CPU s  simulate CPU s  program MB")
    for record in records:
        print(
            f"{record['layers']:6d} {record['compile_cpu_s']:14.2f} {record['simulate_cpu_s']:15.2f} "
            f"{record['program_bytes'] / 1e6:11.2f}"
        )


if __name__ == "__main__":
    main()
