"""Where a decode layer's time goes on PyPTO's cost model (Ascend 910B2): its five stages, from the simulated timeline.

    python benchmarks/decode_layer_stages.py [--model qwen3-14b] [--rows 16] [--context 256] [--weights int8] [--json]

A stage lasts from the end of the one before it to the end of its own last task, so that waiting counts. The MLP is
taken from the first task that makes its norm (the last ones of the stage before, which also finish the output
projection) to the end of the layer. Simulated, not measured on a device.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from kernels.calculator import build_calculator
from kernels.catalog import BUILTIN_NAMES, builtin_config
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.layer_slabs import WeightForm
from kernels.programs.registry import program_to_json
from kernels.runner_process import run_request, runner_folder
from kernels.verdict import CYCLES_PER_US, read_simulated_us

STAGES = ("prologue", "attention", "output projection, MLP norm", "gate, up, SwiGLU", "down, residual")
OUTPUT_STAGE = 2
KINDS = {"AIC": "cube", "AIV": "vector"}
TIMEOUT_S = 900.0


def simulate(program: DecodeLayer) -> dict[str, Any]:
    """Simulate `program` and return its time and those of its stages, in us."""
    request = {
        "kind": "check",
        "program": program_to_json(program),
        "verify": False,
        "passes": (),
        "seed": 0,
        "library": str(build_calculator(None)),
    }
    with runner_folder() as folder:
        finished = run_request(folder, request, TIMEOUT_S)
        total_us = read_simulated_us(finished.stdout, finished.output)
        timeline = next(finished.output.glob("*/CostModelSimulationOutput/_simulate.swim.json"))
        return {"simulated_us": total_us, **breakdown(timeline)}


def breakdown(timeline: Path) -> dict[str, Any]:
    """Times of the stages in `timeline`, the simulator's list of cores with their tasks."""
    tasks = defaultdict(list)
    for core in json.loads(timeline.read_text()):
        kind = KINDS.get(core["coreType"])
        if kind is None:  # a scheduler
            continue
        for task in core["tasks"]:
            start_us, end_us = (task[name] / CYCLES_PER_US for name in ("execStart", "execEnd"))
            tasks[task["seqNo"]].append((kind, start_us, end_us))
    stages, before_us = [], 0.0
    for number, name in enumerate(STAGES):
        end_us = max(end for _, _, end in tasks[number])
        kinds = [kind for kind, _, _ in tasks[number]]
        stages.append(
            {
                "stage": name,
                "us": round(end_us - before_us, 1),
                "cube_tasks": kinds.count("cube"),
                "vector_tasks": kinds.count("vector"),
            }
        )
        before_us = end_us
    projected_us = max(end for kind, _, end in tasks[OUTPUT_STAGE] if kind == "cube")
    norm_us = min(start for kind, start, _ in tasks[OUTPUT_STAGE] if kind == "vector" and start >= projected_us)
    return {"stages": stages, "mlp_us": round(before_us - norm_us, 1)}


def main() -> None:
    """Simulate one shape and print a table or JSON."""
    parser = argparse.ArgumentParser(description="stages of the decode layer on the cost model")
    parser.add_argument("--model", choices=BUILTIN_NAMES, default="qwen3-14b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens of context of every row")
    parser.add_argument("--weights", choices=("int8", "bf16"), default="int8", help="form of all weights")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    contexts = (arguments.context,) * arguments.rows
    form: WeightForm = arguments.weights
    spec = DecodeLayerSpec.of(builtin_config(arguments.model), form, contexts, weights=form)
    found = simulate(DecodeLayer(spec))
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{arguments.model}, {arguments.rows} rows, {arguments.context} tokens: {found['simulated_us']} us simulated")
    for stage in found["stages"]:
        tasks = f"{stage['cube_tasks']:4d} cube {stage['vector_tasks']:4d} vector tasks"
        print(f"  {stage['stage']:32s} {stage['us']:6.1f} us  {tasks}")
    print(f"  {'of which the MLP, with its norm':32s} {found['mlp_us']:6.1f} us")


if __name__ == "__main__":
    main()
