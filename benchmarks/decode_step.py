"""Times the CPU executor's steps on staged slabs: decode at batch 1, 8 and 16, and a prefill of 128 tokens.

    python benchmarks/decode_step.py SLABS [--threads N] [--backend native|torch|both] [--isa NAME] [--context N]

Each figure is the median (and the best) of several steps after a warm-up. GB/s is the weight bytes that a step must
read (INT8 layers, BF16 LM head) over its median time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kernels.slabs import Slabs, load_slabs
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.cpu import CpuExecutor

PREFILL_TOKENS = 128
DECODE_BATCHES = (1, 8, 16)


def weight_bytes(slabs: Slabs) -> int:
    """Bytes of weights that one step reads whatever its batch: the layers' codes and the LM head's real rows."""
    names = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    layers = sum(slabs.tensors[name].nbytes for name in names)
    return layers + slabs.real_vocab * slabs.config.hidden_size * 2


def timed(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and best time of `step` in milliseconds, after one warm-up call."""
    step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), min(times)


def measure(slabs: Slabs, backend: str, threads: int | None, isa: str | None, context: int) -> dict[str, Any]:
    """Run all cases on one backend; returns a JSON-able record."""
    pages_each = -(-(context + 1) // PAGE_TOKENS)
    started = time.perf_counter()
    executor = CpuExecutor(slabs, pages_each * max(DECODE_BATCHES), threads, backend, isa)  # type: ignore[arg-type]  # argparse has checked both names
    load_s = time.perf_counter() - started
    repeats = 20 if executor.backend == "native" else 3
    prompt = [(7 * i + 3) % slabs.real_vocab for i in range(PREFILL_TOKENS)]
    pages = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(max(DECODE_BATCHES))]
    total = weight_bytes(slabs)
    cases = {}
    # A context is filled once by prefill; its content does not matter for the time.
    for each in pages:
        for start in range(0, context, PREFILL_TOKENS):
            tokens = prompt[: min(PREFILL_TOKENS, context - start)]
            executor.forward([Chunk(tokens, start, each, "none")])
    for batch in DECODE_BATCHES:
        chunks = [Chunk([5 + i], context, pages[i]) for i in range(batch)]
        median_ms, best_ms = timed(partial(executor.forward, chunks), repeats)
        cases[f"decode batch {batch}"] = {
            "median_ms": median_ms,
            "best_ms": best_ms,
            "gb_per_s": total / median_ms / 1e6,
            "tokens_per_s": batch / median_ms * 1e3,
        }
    median_ms, best_ms = timed(lambda: executor.forward([Chunk(prompt, 0, pages[0])]), max(3, repeats // 4))
    cases[f"prefill {PREFILL_TOKENS}"] = {
        "median_ms": median_ms,
        "best_ms": best_ms,
        "gb_per_s": total / median_ms / 1e6,
        "tokens_per_s": PREFILL_TOKENS / median_ms * 1e3,
    }
    record = {
        "backend": executor.backend,
        "instruction_set": executor.instruction_set,
        "threads": executor.threads,
        "context_tokens": context,
        "load_s": load_s,
        "weight_mb": total / 1e6,
        "cases": cases,
    }
    executor.close()
    return record


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description="time the CPU executor's steps")
    parser.add_argument("slabs", type=Path)
    parser.add_argument("--threads", type=int, default=None, help="default: the cores that are free now")
    parser.add_argument("--backend", choices=("native", "torch", "both"), default="both")
    parser.add_argument("--isa", default=None, help="instruction set of the native step; default: the best")
    parser.add_argument("--context", type=int, default=PREFILL_TOKENS, help="tokens already cached when decoding")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    slabs = load_slabs(arguments.slabs)
    backends = ("native", "torch") if arguments.backend == "both" else (arguments.backend,)
    records = [measure(slabs, each, arguments.threads, arguments.isa, arguments.context) for each in backends]
    if arguments.json:
        print(json.dumps(records, indent=1))
        return
    for record in records:
        print(
            f"{record['backend']} {record['instruction_set']}, {record['threads']} threads, "
            f"context {record['context_tokens']}, weights {record['weight_mb']:.1f} MB, "
            f"loaded in {record['load_s']:.1f} s"
        )
        for name, case in record["cases"].items():
            print(
                f"  {name:16s} {case['median_ms']:9.2f} ms median {case['best_ms']:9.2f} best "
                f"{case['gb_per_s']:7.1f} GB/s {case['tokens_per_s']:8.1f} tokens/s"
            )


if __name__ == "__main__":
    main()
