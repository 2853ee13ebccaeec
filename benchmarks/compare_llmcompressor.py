"""Compares the `compat` arithmetic with llm-compressor's data-free W8A8, tensor by tensor, and time and memory of both.

    python benchmarks/compare_llmcompressor.py CHECKPOINT VENV

llm-compressor needs other versions of our dependencies, so it lives in the virtual environment VENV, which is made (a
few minutes, CPU builds only) when it is not there. It runs twice: `oneshot` loads the model, `model_free_ptq` works on
the files as ours does. Every run is a fresh process; times and peaks exclude imports. Prints one JSON object; exits
with 1 when a tensor differs from what either of the two wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REQUIREMENTS = ["llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers<=5.17"]
TORCH = "torch==2.13.0"
# Without a model's classes, "Linear" means every matrix: the embedding must be left out by name.
MODEL_FREE_IGNORE = ["lm_head", "model.embed_tokens"]


def make_venv(path: Path) -> Path:
    """The interpreter of the comparison's environment, made when absent; torch first, or a CUDA build comes along."""
    python = path / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        for packages in ([TORCH], REQUIREMENTS):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
    return python


def memory_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def run_ours(checkpoint: Path, out: Path) -> None:
    """Quantize with this package, `compat` arithmetic."""
    from quantize.recipe import Recipe
    from quantize.rtn import quantize_checkpoint

    measured(lambda: quantize_checkpoint(checkpoint, out, Recipe(arithmetic="compat")))


def run_oneshot(checkpoint: Path, out: Path) -> None:
    """Quantize with llm-compressor through the model (in its own environment)."""
    # llm-compressor is installed in the other environment only.
    from llmcompressor import oneshot  # type: ignore[import-not-found]  # in its own environment
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]  # as above
    from transformers import AutoModelForCausalLM

    def work() -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]))
        model.save_pretrained(out, save_compressed=True)

    measured(work)


def run_model_free(checkpoint: Path, out: Path) -> None:
    """Quantize with llm-compressor from file to file (in its own environment)."""
    from llmcompressor import model_free_ptq

    measured(lambda: model_free_ptq(str(checkpoint), str(out), scheme="W8A8", ignore=MODEL_FREE_IGNORE, device="cpu"))


def measured(work: Any) -> None:
    """Run `work`; print wall and CPU seconds and the peak resident size above that of the imports."""
    baseline_bytes = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    figures = {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu_started, 2),
        "import_baseline_mb": round(baseline_bytes / 1e6, 1),
        "peak_above_baseline_mb": round((memory_bytes("VmHWM") - baseline_bytes) / 1e6, 1),
    }
    print("\n" + json.dumps(figures))


CHILDREN = {"ours": run_ours, "oneshot": run_oneshot, "model_free_ptq": run_model_free}


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """Names whose dtype, shape or bytes differ between two checkpoints, and how many are equal."""
    from quantize.checkpoint import tensor_digests

    left, right = tensor_digests(ours), tensor_digests(theirs)
    differing = sorted(name for name in left.keys() & right.keys() if left[name] != right[name])
    return {
        "equal": len(left.keys() & right.keys()) - len(differing),
        "differing": len(differing),
        "first_differing": differing[:5],
        "only_ours": sorted(left.keys() - right.keys())[:5],
        "only_theirs": sorted(right.keys() - left.keys())[:5],
    }


def main() -> int:
    """Run the three quantizers on the checkpoint and compare what they wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        CHILDREN[options.child[0]](options.checkpoint, Path(options.child[1]))
        return 0
    python = make_venv(options.venv)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    figures: dict[str, Any] = {}
    same = True
    with tempfile.TemporaryDirectory() as folder:
        for name in CHILDREN:
            interpreter = sys.executable if name == "ours" else str(python)
            command = [interpreter, str(Path(__file__).resolve()), str(options.checkpoint.resolve()), str(options.venv)]
            command += ["--child", name, str(Path(folder) / name)]
            # In a folder of its own: llm-compressor leaves logs where it runs.
            finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=folder)
            figures[name] = json.loads(finished.stdout.splitlines()[-1])
            if name != "ours":
                figures[name]["tensors"] = compare(Path(folder) / "ours", Path(folder) / name)
                same = same and not any(
                    figures[name]["tensors"][key] for key in ("differing", "only_ours", "only_theirs")
                )
    print(json.dumps(figures, indent=2))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
