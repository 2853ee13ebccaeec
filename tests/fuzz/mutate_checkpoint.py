"""Mutate tiny checkpoints and hold preflight, inspect, readers' rules and quantize to their promises.

    python -m tests.fuzz.mutate_checkpoint --count 20000

Each case takes a valid checkpoint (a source in one file, one in shards, or a W8A8 one), mutates it by a generator that
the case's number seeds, and runs everything that reads it. Required: nothing but QuantizeError is raised, with a
message that any terminal may be sent; no step takes longer than the limit or allocates more than the allowance; the
checkpoint and its surroundings stay as they were; a refused quantization leaves nothing, a finished one a checkpoint
that passes. A case is repeated alone by `--start N --count 1`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from quantize.checkpoint import scan_checkpoint
from quantize.errors import QuantizeError, printable
from quantize.preflight import check_quantized, check_source
from quantize.readers import READERS, acceptance
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from quantize.summary import summarize_checkpoint
from tests.fuzz.base_checkpoint import write_source
from tests.fuzz.mutations import mutate

TIME_LIMIT_S = 10
MEMORY_ALLOWANCE_BYTES = 2**30
RECIPE = Recipe()


class HangError(BaseException):
    """A case took longer than the limit; no `except Exception` may swallow it."""


@dataclass
class Outcome:
    """What became of a case: refusals by where they came from, and what is wrong, if anything."""

    refused: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise HangError in the block after `seconds` of wall time."""

    def expire(signum: int, frame: FrameType | None) -> None:
        raise HangError

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def memory_limit(allowance_bytes: int) -> Iterator[None]:
    """Bound the address space to what is in use now and an allowance."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + allowance_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fingerprint(root: Path, leave_out: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and time of change of everything below `root` but `leave_out`; links are not followed."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        if path != leave_out and leave_out not in path.parents:
            status = path.lstat()
            folder = stat.S_ISDIR(status.st_mode)
            found[str(path)] = (status.st_mode, 0 if folder else status.st_size, 0 if folder else status.st_mtime_ns)
    return found


def _accept(checkpoint: Path, reader: str) -> None:
    """Hold a checkpoint against a reader's rules."""
    acceptance(scan_checkpoint(checkpoint), reader)


def _try(outcome: Outcome, where: str, action: Callable[[], object]) -> bool:
    """Run an action; a refusal is recorded, anything else but success is a fault."""
    try:
        with time_limit(TIME_LIMIT_S):
            action()
        return True
    except QuantizeError as error:
        outcome.refused.add(where)
        text = str(error)
        if text != printable(text) or not text.strip():
            outcome.faults.append(f"{where}: the message is not printable: {text!r:.200}")
    except HangError:
        outcome.faults.append(f"{where}: more than {TIME_LIMIT_S} s")
    except Exception:  # noqa: BLE001 - whatever else comes out is what this script looks for
        outcome.faults.append(f"{where}: {traceback.format_exc(limit=-4)}")
    return False


def run_case(number: int, bases: list[Path], sandbox: Path) -> tuple[Outcome, list[str]]:
    """Mutate and read one checkpoint; the sandbox is made anew."""
    rng = random.Random(number)
    checkpoint, out = sandbox / "checkpoint", sandbox / "out"
    shutil.rmtree(sandbox, ignore_errors=True)
    shutil.copytree(rng.choice(bases), checkpoint)
    outside = write_source(sandbox / "outside", seed=1)
    (outside / "secret").write_text("secret\n")
    done = mutate(rng, checkpoint)
    before = fingerprint(sandbox, out)
    outcome = Outcome()
    with memory_limit(MEMORY_ALLOWANCE_BYTES):
        sound = _try(outcome, "check_source", lambda: check_source(checkpoint).close())
        _try(outcome, "check_quantized", lambda: check_quantized(checkpoint).close())
        _try(outcome, "summary", lambda: summarize_checkpoint(checkpoint))
        for reader in READERS:
            _try(outcome, reader, partial(_accept, checkpoint, reader))
        finished = _try(outcome, "quantize", lambda: quantize_checkpoint(checkpoint, out, RECIPE, workers=1))
        if finished and not sound:
            outcome.faults.append("quantize: finished though the preflight refused")
        if finished and not _try(outcome, "output", lambda: check_quantized(out).close()):
            outcome.faults.append("output: does not pass the preflight")
    if finished and any(not stat.S_ISREG(path.lstat().st_mode) for path in out.iterdir()):
        outcome.faults.append("output: holds something else than files")
    if not finished and out.exists():
        outcome.faults.append("quantize: refused and left an output")
    after = fingerprint(sandbox, out)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        outcome.faults.append(f"changed outside the output: {changed[:5]}")
    return outcome, done


def make_bases(folder: Path) -> list[Path]:
    """The checkpoints that cases start from."""
    single = write_source(folder / "single")
    sharded = write_source(folder / "sharded", shards=3)
    quantize_checkpoint(sharded, folder / "w8a8", RECIPE, workers=1)
    return [single, sharded, folder / "w8a8"]


def run_cases(start: int, count: int, progress: bool = False) -> tuple[collections.Counter[str], list[str]]:
    """Run cases `start` to `start + count - 1`; returns how many each part refused, and every fault with its case."""
    tally: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        bases = make_bases(Path(folder) / "bases")
        for number in range(start, start + count):
            outcome, done = run_case(number, bases, Path(folder) / "case")
            tally.update(f"refused by {where}" for where in outcome.refused)
            tally.update(["quantized"] if "quantize" not in outcome.refused else [])
            faults += [f"case {number} ({'; '.join(done)}): {fault}" for fault in outcome.faults]
            if progress and (number - start + 1) % 1000 == 0:
                sys.stderr.write(f"{number - start + 1} cases, {len(faults)} faults\n")
    return tally, faults


def main() -> int:
    """Run the cases that the arguments ask for; exit code 1 when any has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    arguments = parser.parse_args()
    started = time.monotonic()
    tally, faults = run_cases(arguments.start, arguments.count, progress=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    lines = [ascii(fault)[1:-1].replace("\\n", "\n") for fault in faults]
    lines += [f"{name}: {number}" for name, number in sorted(tally.items())]
    seconds = time.monotonic() - started
    lines.append(f"{arguments.count} cases, {len(faults)} faults, {seconds:.0f} s, peak RSS {peak} MiB")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
