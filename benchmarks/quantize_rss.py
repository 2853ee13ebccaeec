"""Peak memory, time and reproducibility of quantizing a checkpoint.

    python benchmarks/quantize_rss.py CHECKPOINT [--arithmetic fp32|compat] [--runs N]

Every run is a fresh process that imports everything first; its peak is then reset, so the figure is what quantizing
adds (mapped pages of the source included, the page cache not). Prints one JSON object; exits with 1 when the runs'
digests differ, or differ from the digest of the tensors as read back from disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def memory_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Make `VmHWM` start again from the present resident size (Linux, proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def run_once(checkpoint: Path, out: Path, arithmetic: str) -> dict[str, Any]:
    """Quantize in this process; returns the figures."""
    from quantize.recipe import Recipe
    from quantize.rtn import quantize_checkpoint

    recipe = Recipe.model_validate({"arithmetic": arithmetic})
    baseline_bytes = memory_bytes("VmRSS")
    reset_peak()
    cpu_started = time.process_time()
    result = quantize_checkpoint(checkpoint, out, recipe)
    return {
        "digest": result.digest,
        "seconds": round(result.seconds, 3),
        "cpu_seconds": round(time.process_time() - cpu_started, 3),
        "import_baseline_mb": round(baseline_bytes / 1e6, 1),
        "peak_above_baseline_mb": round((memory_bytes("VmHWM") - baseline_bytes) / 1e6, 1),
        "bytes_in": result.bytes_in,
        "bytes_out": result.bytes_out,
        "mean_rel_rms_error": sum(error.rel_rms_error for error in result.errors) / len(result.errors),
    }


def main() -> int:
    """Run `--runs` times, print the figures, compare the digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--arithmetic", choices=["fp32", "compat"], default="fp32")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(run_once(options.checkpoint, options.child, options.arithmetic)))
        return 0
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            out = Path(folder) / f"run-{number}"
            command = [sys.executable, __file__, str(options.checkpoint), "--arithmetic", options.arithmetic]
            finished = subprocess.run([*command, "--child", str(out)], check=True, stdout=subprocess.PIPE)
            runs.append(json.loads(finished.stdout))
        from quantize.checkpoint import payload_digest

        digests = {run["digest"] for run in runs} | {payload_digest(Path(folder) / "run-0")}
    print(json.dumps({"arithmetic": options.arithmetic, "digests_equal": len(digests) == 1, "runs": runs}, indent=2))
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
