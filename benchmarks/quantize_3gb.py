"""What quantizing a 3 GB checkpoint costs, against moving its bytes alone and against llm-compressor.

    python benchmarks/quantize_3gb.py FOLDER [--venv VENV] [--runs 3]

Makes two random Qwen3 checkpoints in FOLDER (see `random_checkpoint.py`; 8.3 GB of disk with the outputs, kept for the
next time) and runs, each as a fresh process whose whole CPU time (user and system, start and imports included) and peak
resident size are taken from the operating system:

- `floor`: two threads read every byte of the source and write as many bytes as the output has, flushed and renamed;
- `ours` and `ours_compat`: `quantize_checkpoint` with its defaults;
- `model_free_ptq` of llm-compressor, in the environment VENV (made by `compare_llmcompressor.py`), if given.

Medians over the runs, which alternate. The smaller checkpoint gives the slope of an extrapolation to a 14B model.
Prints one JSON object; exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from compare_llmcompressor import MODEL_FREE_IGNORE, compare

LAYERS = {"3gb": 12, "smaller": 3}
MODEL_14B_BYTES = 29.5e9
BARS = {
    "cpu_over_floor": ("at most", 2.0),
    "model_free_over_ours_cpu": ("at least", 5.0),
    "peak_rss_mb": ("at most", 600.0),
    "cores_used": ("at least", 1.5),
}
BLOCK_BYTES = 2**20


def run_floor(source: Path, out: Path) -> dict[str, float]:
    """Move the bytes: half of every byte of a projection, all of the rest."""
    staging = out.with_name(out.name + ".staging")
    staging.mkdir()

    def move(shards: list[Path]) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for shard in shards:
            reading, writing = os.open(shard, os.O_RDONLY), os.open(staging / shard.name, os.O_WRONLY | os.O_CREAT)
            header_bytes = int.from_bytes(os.pread(reading, 8, 0), "little")
            header = json.loads(os.pread(reading, header_bytes, 8))
            spans = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name[:2] != "__")
            for begin, end, name in spans:
                share = 2 if name.endswith("_proj.weight") else 1
                while begin < end:
                    count = os.preadv(reading, [buffer[: end - begin]], 8 + header_bytes + begin)
                    os.write(writing, buffer[: count // share])
                    begin += count
            os.fsync(writing)
            os.close(reading)
            os.close(writing)

    shards = sorted(source.glob("*.safetensors"))
    threads = [threading.Thread(target=move, args=(shards[number::2],)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    staging.rename(out)
    return {}


def run_ours(source: Path, out: Path, arithmetic: str) -> dict[str, float]:
    """Quantize with this package; `cores_used` is CPU time over time while tensors are streamed."""
    from quantize.recipe import Recipe
    from quantize.rtn import quantize_checkpoint

    marks = [(time.perf_counter(), time.process_time())]
    recipe = Recipe.model_validate({"arithmetic": arithmetic})
    result = quantize_checkpoint(
        source, out, recipe, progress=lambda done, total: marks.append((time.perf_counter(), time.process_time()))
    )
    (first_s, first_cpu_s), (last_s, last_cpu_s) = marks[0], marks[-1]
    return {
        "cores_used": (last_cpu_s - first_cpu_s) / (last_s - first_s),
        "streaming_gb_per_s": result.bytes_in / 1e9 / (last_s - first_s),
    }


def run_model_free(source: Path, out: Path) -> dict[str, float]:
    """Quantize with llm-compressor from file to file (in its own environment)."""
    # llm-compressor is installed in the other environment only.
    from llmcompressor import model_free_ptq  # type: ignore[import-not-found]  # in its own environment

    model_free_ptq(str(source), str(out), scheme="W8A8", ignore=MODEL_FREE_IGNORE, device="cpu")
    return {}


CHILDREN = {
    "floor": run_floor,
    "ours": lambda source, out: run_ours(source, out, "fp32"),
    "ours_compat": lambda source, out: run_ours(source, out, "compat"),
    "model_free_ptq": run_model_free,
}


def run_child(python: Path, name: str, source: Path, out: Path) -> dict[str, float]:
    """Run one of CHILDREN in a fresh process; returns its CPU and wall seconds, peak, and what it printed last."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    os.sync()  # what another run has written is no business of this one
    command = [str(python), str(Path(__file__).resolve()), "--child", name, str(source), str(out)]
    started = time.monotonic()
    # In a folder of its own: llm-compressor leaves logs where it runs.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=out.parent, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    printed = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} exited with {process.returncode}")
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "user_seconds": usage.ru_utime,
        "seconds": time.monotonic() - started,
        "peak_rss_mb": usage.ru_maxrss * 1024 / 1e6,
        **json.loads(printed.splitlines()[-1]),
    }


def measure(folder: Path, python: Path | None, runs: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by checkpoint and contender; the outputs of the last runs stay in `folder`."""
    taken: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(runs):
        for size in LAYERS:
            for name in CHILDREN:
                if name == "model_free_ptq" and (python is None or size != "3gb"):
                    continue
                interpreter = python if name == "model_free_ptq" and python else Path(sys.executable)
                found = run_child(interpreter, name, folder / size, folder / f"{size}-{name}" / "out")
                taken.setdefault(size, {}).setdefault(name, []).append(found)
    return {
        size: {
            name: {key: round(statistics.median(run[key] for run in found), 3) for key in found[0]}
            for name, found in by_name.items()
        }
        for size, by_name in taken.items()
    }


def main() -> int:
    """Make the checkpoints, run everything, hold it against the bars."""
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        name, source, out = sys.argv[2:]
        print("\n" + json.dumps(CHILDREN[name](Path(source), Path(out))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--venv", type=Path, help="llm-compressor's environment")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    maker = Path(__file__).resolve().parent / "random_checkpoint.py"
    for size, layers in LAYERS.items():
        if not (folder / size).exists():
            subprocess.run([sys.executable, maker, folder / size, "--layers", str(layers)], check=True, stdout=2)
    python = options.venv.absolute() / "bin" / "python" if options.venv else None
    figures: dict[str, Any] = {"load_average_before": os.getloadavg(), "cores": os.cpu_count()}
    figures["median"] = median = measure(folder, python, options.runs)
    source_bytes = {size: sum(path.stat().st_size for path in (folder / size).glob("*.safetensors")) for size in LAYERS}
    ours, floor = median["3gb"]["ours"], median["3gb"]["floor"]
    results = {
        "cpu_over_floor": ours["cpu_seconds"] / floor["cpu_seconds"],
        "peak_rss_mb": ours["peak_rss_mb"],
        "cores_used": ours["cores_used"],
    }
    same = True
    if python is not None:
        results["model_free_over_ours_cpu"] = median["3gb"]["model_free_ptq"]["cpu_seconds"] / ours["cpu_seconds"]
        tensors = compare(folder / "3gb-ours_compat" / "out", folder / "3gb-model_free_ptq" / "out")
        figures["compat_against_model_free_ptq"] = tensors
        same = not any(tensors[key] for key in ("differing", "only_ours", "only_theirs"))
    figures["source_bytes"] = source_bytes
    figures["bars"] = {
        key: {
            "found": round(value, 3),
            "bar": f"{BARS[key][0]} {BARS[key][1]}",
            "met": value <= BARS[key][1] if BARS[key][0] == "at most" else value >= BARS[key][1],
        }
        for key, value in results.items()
    }
    slope = (ours["cpu_seconds"] - median["smaller"]["ours"]["cpu_seconds"]) / (
        source_bytes["3gb"] - source_bytes["smaller"]
    )
    figures["extrapolated_14b"] = {
        "cpu_seconds": round(ours["cpu_seconds"] + slope * (MODEL_14B_BYTES - source_bytes["3gb"]), 1),
        "from": "a line through the CPU times of the two sizes; not measured",
    }
    print(json.dumps(figures, indent=2))
    return 0 if same and all(bar["met"] for bar in figures["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
