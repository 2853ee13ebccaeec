"""Shows that one compiled program takes any batch: every size is compared with its golden, and guarded behind its end.

    python benchmarks/dynamic_batch.py [--programs NAME ...] [--batches 1 2 3 5 8 15 16 17 33] [--json]

For every program and batch: the outputs against the golden, in the interpreter; whether anything was written beyond
the last row (each output has a guard of sixteen rows behind it); the digest of the compiled program, which must not
depend on the batch; and the cost model's time. Shapes are small: hidden size 64, 301 ids.

PyPTO numbers temporaries in one of a few ways from run to run, of the same program. So a digest that is new is looked
for among those that the first batch compiles to when it is compiled again, a few times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernels.calculator import build_calculator
from kernels.goldens import PAGE_TOKENS
from kernels.guard import run_guarded
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, decode_layer
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec
from kernels.programs.embedding import EmbeddingGather, EmbeddingGatherSpec
from kernels.programs.layer_slabs import WeightForm
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.programs.registry import program_to_json
from kernels.programs.sampling import GreedySample, GreedySampleSpec, TopkSelect, TopkSelectSpec
from kernels.runner_process import run_request, runner_folder
from kernels.verdict import read_simulated_us

BATCHES = (1, 2, 3, 5, 8, 15, 16, 17, 33)
VOCAB, PADDED = 301, 512
STEPS = 2
TIMEOUT_S = 600.0
RECOMPILES = 8
"""How often the first batch is compiled again to find a digest."""


def prefill_layer(rows: int) -> PrefillLayer:
    """Half of the rows behind 125 cached tokens, across a page; the rest a prompt of its own."""
    first = -(-rows // 2)
    chunks = ((125, first), (0, rows - first))[: 2 if rows > 1 else 1]
    return PrefillLayer(
        PrefillLayerSpec(64, 96, 2, 1, 16, 1e-6, 1e4, True, True, "int8", window_rows=16, pages=4, chunks=chunks)
    )


def prefill_step(rows: int) -> PrefillStep:
    """The same rows through two layers, and the LM head on each sequence's last."""
    layer = prefill_layer(rows).spec
    head = LmHeadSpec(64, VOCAB, PADDED, 1e-6, len(layer.chunks), 128)
    return PrefillStep(PrefillStepSpec(layer, head, layers=2))


def decode_layer_spec(rows: int, weights: WeightForm = "int8") -> DecodeLayerSpec:
    """Contexts that end within a page, at its end, and in the next."""
    contexts = tuple((1, 130, 128, 5)[row % 4] for row in range(rows))
    pages = 1 + sum(-(-(tokens + STEPS - 1) // PAGE_TOKENS) for tokens in contexts)
    return DecodeLayerSpec(64, 96, 2, 1, 16, 1e-6, 1e4, True, True, weights, rows, pages, contexts, weights=weights)


def decode_step(rows: int) -> DecodeStep:
    """Two steps through two layers."""
    return DecodeStep(DecodeStepSpec(decode_layer_spec(rows), LmHeadSpec(64, VOCAB, PADDED, 1e-6, rows, 128), 2, STEPS))


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "decode_layer": lambda rows: DecodeLayer(decode_layer_spec(rows)),
    "decode_layer_bf16": lambda rows: DecodeLayer(decode_layer_spec(rows, "bf16")),
    "decode_layer_turboquant": lambda rows: decode_layer(replace(decode_layer_spec(rows), kv="turboquant4")),
    "decode_step": decode_step,
    "prefill_layer": prefill_layer,
    "prefill_step": prefill_step,
    "lm_head_greedy": lambda rows: LmHeadGreedy(LmHeadSpec(64, VOCAB, PADDED, 1e-6, rows, 128)),
    "greedy_sample": lambda rows: GreedySample(GreedySampleSpec(PADDED, VOCAB, rows, 128)),
    "topk_select": lambda rows: TopkSelect(TopkSelectSpec(PADDED, VOCAB, rows, 128)),
    "embedding_gather": lambda rows: EmbeddingGather(EmbeddingGatherSpec(64, VOCAB, PADDED, rows)),
}


def compiled(program: Program) -> tuple[str, float]:
    """Digest of the compiled program, and the cost model's time in us."""
    request = {
        "kind": "check",
        "program": program_to_json(program),
        "verify": False,
        "passes": [],
        "seed": 1,
        "library": str(build_calculator()),
    }
    with runner_folder() as folder:
        finished = run_request(folder, request, TIMEOUT_S)
        (path,) = finished.output.glob("*/program.json")
        return hashlib.sha256(path.read_bytes()).hexdigest(), read_simulated_us(finished.stdout, finished.output)


def measure(name: str, batches: list[int]) -> dict[str, Any]:
    """One program over all batches."""
    rows = []
    first: set[str] = set()
    others: set[str] = set()
    for batch in batches:
        program = PROGRAMS[name](batch)
        (run,) = run_guarded([program])
        digest, simulated_us = compiled(program)
        if not rows:
            first.add(digest)
        for _ in range(RECOMPILES):
            if digest in first:
                break
            first.add(compiled(PROGRAMS[name](batches[0]))[0])
        if digest not in first:
            others.add(digest)
        wrong = [f"{c.name} differs by {c.max_abs_diff:.3g}" for c in run.compared() if not c.ok]
        wrong += [f"{output} written beyond its rows" for output in run.overrun]
        rows.append({"batch": batch, "wrong": wrong, "program": digest, "simulated_us": simulated_us})
        print(f"{name} {batch}: {'; '.join(wrong) or 'as the golden'}, {simulated_us} us", file=sys.stderr, flush=True)
    return {
        "program": name,
        "compiled_programs": 1 + len(others),
        "numberings": len(first),
        "ok": not any(row["wrong"] for row in rows),
        "batches": rows,
    }


def main() -> int:
    """Run the sweep; the exit status is 1 when a batch is wrong or compiles to a program of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(name, options.batches) for name in options.programs]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("| program | compiled programs | batches | simulated us, first and last |")
        print("|---|---|---|---|")
        for entry in found:
            times = [row["simulated_us"] for row in entry["batches"]]
            good = [row["batch"] for row in entry["batches"] if not row["wrong"]]
            print(f"| {entry['program']} | {entry['compiled_programs']} | {good} | {times[0]}, {times[-1]} |")
    return 0 if all(entry["ok"] and entry["compiled_programs"] == 1 for entry in found) else 1


if __name__ == "__main__":
    sys.exit(main())
