"""Compares a decode step with llama.cpp on the same model and machine, alternating, one thread each.

    python benchmarks/compare_llamacpp.py MODEL.gguf SLABS [--threads N] [--rounds N]

Needs the `bench` extra (xllamacpp). The GGUF's matrices are requantized to Q8_0, llama.cpp's 8-bit format, in a
temporary file, with all metadata kept; SLABS are those staged from the same GGUF. llama.cpp runs in-process through its
server and reports its own timings; ours are timed around the executor call and picking the token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from gguf.quants import dequantize, quantize

from kernels.slabs import load_slabs
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.cpu import CpuExecutor

PROMPT_TOKENS = 128
NEW_TOKENS = 48
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def requantize_q8_0(source: Path, target: Path) -> None:
    """Copy a GGUF with every matrix in Q8_0 (via FP32) and everything else as it is."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    skipped = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION}
    for name, field in reader.fields.items():
        if name in skipped or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 2:
            writer.add_tensor(tensor.name, quantize(values.astype(np.float32), Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_llamacpp(model: Path, threads: int) -> xllamacpp.Server:
    """An in-process llama.cpp server with one slot on `threads` threads, no GPU."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.warmup = True
    params.verbosity = 0
    return xllamacpp.Server(params)


def run_llamacpp(server: xllamacpp.Server, prompt: list[int]) -> dict[str, float]:
    """Milliseconds a generated token and to read the prompt, as llama.cpp reports them."""
    request = {
        "prompt": prompt,
        "n_predict": NEW_TOKENS,
        "temperature": 0.0,
        "cache_prompt": False,
        "ignore_eos": True,
        "stream": False,
    }
    answer: Any = server.handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    timings = answer["timings"]
    return {"tpot_ms": timings["predicted_per_token_ms"], "prefill_ms": timings["prompt_ms"]}


def run_ours(executor: CpuExecutor, prompt: list[int]) -> dict[str, float]:
    """The same request on our executor: mean time of a decode step, and the prefill's."""
    pages = list(range(-(-(len(prompt) + NEW_TOKENS) // PAGE_TOKENS)))
    started = time.perf_counter()
    token = int(executor.forward([Chunk(prompt, 0, pages)])[0].argmax())
    first = time.perf_counter()
    for step in range(NEW_TOKENS - 1):
        token = int(executor.forward([Chunk([token], len(prompt) + step, pages)])[0].argmax())
    seconds = time.perf_counter() - first
    return {"tpot_ms": seconds * 1e3 / (NEW_TOKENS - 1), "prefill_ms": (first - started) * 1e3}


def main() -> None:
    """Parse arguments, alternate both engines, print medians."""
    parser = argparse.ArgumentParser(description="compare a decode step with llama.cpp Q8_0")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("slabs", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    slabs = load_slabs(arguments.slabs)
    prompt = [(7 * i + 3) % slabs.real_vocab for i in range(PROMPT_TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model-q8_0.gguf"
        requantize_q8_0(arguments.gguf, model)
        server = open_llamacpp(model, arguments.threads)
        executor = CpuExecutor(slabs, 8, arguments.threads)
        rounds: dict[str, list[dict[str, float]]] = {"llama.cpp Q8_0": [], "pypto-deploy W8A8": []}
        run_llamacpp(server, prompt), run_ours(executor, prompt)
        for _ in range(arguments.rounds):
            rounds["llama.cpp Q8_0"].append(run_llamacpp(server, prompt))
            rounds["pypto-deploy W8A8"].append(run_ours(executor, prompt))
        backend = f"{executor.backend} {executor.instruction_set}"
        executor.close()
    print(xllamacpp.get_system_info())
    print(f"{arguments.threads} thread(s), prompt {PROMPT_TOKENS}, {NEW_TOKENS} new tokens; ours: {backend}")
    for name, results in rounds.items():
        tpot = statistics.median(each["tpot_ms"] for each in results)
        prefill = statistics.median(each["prefill_ms"] for each in results)
        print(f"  {name:18s} TPOT {tpot:7.2f} ms   prefill of {PROMPT_TOKENS} {prefill:8.1f} ms")


if __name__ == "__main__":
    main()
