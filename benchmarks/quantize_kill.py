"""Kills a quantizing process at random moments, many times, and checks what the next run makes of what is left.

    python benchmarks/quantize_kill.py CHECKPOINT [--kills 30] [--seed 0]

One undisturbed run states the digest and how long it takes. Then runs to one and the same target are ended by SIGKILL
after a random time, from the first import to the final rename; a run that ends before its kill is checked, removed, and
does not count. The last run is left alone. Prints one JSON object, where -1 stands for a kill after the rename; exits
with 1 when a finished run's digest, or the digest of its files as read back, is not that of the undisturbed run, or
when anything is left beside the output.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import sys
from pathlib import Path
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
print(quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Recipe()).digest)
"""


def start(checkpoint: Path, out: Path) -> subprocess.Popen[str]:
    """A process that quantizes the checkpoint and prints the digest."""
    command = [sys.executable, "-c", CHILD, str(checkpoint), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def kept_tensors(out: Path) -> int:
    """Finished tensors in the journal beside `out`."""
    journal = out.parent / f".{out.name}.partial" / "journal.jsonl"
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def run_kills(checkpoint: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` runs, let one finish; returns the figures, `problems` empty when all is as it must be."""
    from quantize.checkpoint import payload_digest

    started = time.monotonic()
    expected = start(checkpoint, folder / "undisturbed").communicate()[0].strip()
    run_s = time.monotonic() - started
    shutil.rmtree(folder / "undisturbed")
    generator = random.Random(seed)
    out = folder / "out"
    problems: list[str] = []
    kept: list[int] = []
    ended_before = 0

    def check(exit_code: int, printed: str) -> None:
        if exit_code or printed != expected:
            problems.append(f"a run exited with {exit_code} and digest {printed!r}")
        elif payload_digest(out) != expected:
            problems.append("the files do not have the digest that was printed")
        if [path.name for path in folder.iterdir()] != ["out"]:
            problems.append(f"left beside the output: {sorted(path.name for path in folder.iterdir())}")

    while len(kept) < kills and not problems:
        process = start(checkpoint, out)
        try:
            process.wait(timeout=generator.uniform(0.0, 1.1 * run_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].strip()
        if process.returncode == -signal.SIGKILL and not out.exists():
            kept.append(kept_tensors(out))
            continue
        if process.returncode == 0:
            ended_before += 1
            check(0, printed)
        else:  # killed after the rename, before it could clear up: the output is whole
            kept.append(-1)
            if payload_digest(out) != expected:
                problems.append("a run killed after its rename left an output of another digest")
        shutil.rmtree(out)
    last = start(checkpoint, out)
    printed = last.communicate()[0].strip()
    check(last.returncode, printed)
    return {
        "checkpoint": str(checkpoint),
        "digest": expected,
        "run_seconds": round(run_s, 2),
        "kills": len(kept),
        "finished_tensors_at_each_kill": kept,
        "runs_that_ended_before_their_kill": ended_before,
        "problems": problems,
    }


def main() -> int:
    """Run the kills and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.checkpoint.resolve().parent) as folder:
        figures = run_kills(options.checkpoint, Path(folder), options.kills, options.seed)
    print(json.dumps(figures, indent=2))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
