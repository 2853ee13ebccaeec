"""Reading what a PyPTO run left on disk: the verifier's rows, its exceptions, the cost model's time, the error log.

PyPTO's own PASS is not enough. Its verifier forgives a share of wrong elements, a check that raised leaves no row at
all, and a wrong result raises nothing. So a run is accepted only when every expected row is there, each with no element
out of tolerance, and nothing was thrown on the way. This module only reads files; it never imports pypto.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import ToolchainError
from kernels.timeline import CYCLES_PER_US, simulated_cycles

ALL_PASSES = (
    "ExpandFunction",
    "SplitK",
    "L1CopyInReuseMerge",
    "InferDynShape",
    "InferParamIndex",
    "CodegenPreproc",
)
"""The compiler passes whose graphs PyPTO 0.2.0 executes and compares, in order."""
EARLY_PASSES = ALL_PASSES[:3]
"""Those before the split into leaf functions; after it every leaf call writes its whole inputs to disk."""
TENSOR_GRAPH = "tensor_graph"

_ACCEPTED_LOG = re.compile(r"result (PASS|NO_COMPARE)\s*$")
_END_TO_END = re.compile(r"AICore End-to-End Time:\s*([0-9.]+)")
_TOTAL_CYCLES = re.compile(r"Total Cycles[.\s]*:\s*([0-9]+)")
_ERROR_MODULE = re.compile(r"\[ERROR\].*\b(PASS|FUNCTION|INTERPRETER|VERIFY)\b")


@dataclass(frozen=True)
class Verification:
    """What the verifier's files say: passes that hold, comparisons made, and every problem found."""

    passes: tuple[str, ...]
    rows: int
    problems: tuple[str, ...]


def read_verification(output: Path, passes: Sequence[str], goldens: int, units: int) -> Verification:
    """Judge the verifier's files under `output`.

    Expected are `goldens` rows for the tensor graph and, for each of `passes`, rows for all `units` loop bodies; every
    row must be PASS with no element in error, and the exception log must hold nothing else.
    """
    folders = sorted(output.glob("*/verify_*"))
    if len(folders) != 1:
        return Verification((), 0, (f"expected one verification folder, found {len(folders)}",))
    problems: list[str] = []
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    brief = folders[0] / "verify_result_brief.csv"
    if brief.is_file():
        with brief.open(newline="") as stream:
            for row in csv.DictReader(stream):
                rows[re.sub(r"^Pass_\d+_", "", row["passName"])].append(row)
    good = []
    for name in (TENSOR_GRAPH, *passes):
        found = _row_problems(name, rows[name])
        if name == TENSOR_GRAPH and len(rows[name]) != goldens:
            found.append(f"{name}: {len(rows[name])} outputs compared, expected {goldens}")
        bodies = {(row["verifyType"], row["loopInfo"]) for row in rows[name]}
        if name != TENSOR_GRAPH and len(bodies) != units:
            found.append(f"{name}: {len(bodies)} loop bodies compared, expected {units}")
        problems.extend(found)
        if not found:
            good.append(name)
    problems.extend(_log_problems(folders[0] / "verify_exception.log"))
    return Verification(tuple(good), sum(len(found) for found in rows.values()), tuple(problems))


def read_simulated_us(stdout: str, output: Path) -> float:
    """End-to-end time of the cost model, from the start of the first task to the end of the last.

    It stands in the summary of short runs, and follows from the tasks of long ones; without either the count of cycles
    is taken, launch included. Raises ToolchainError when the run left none of them.
    """
    printed = _END_TO_END.findall(stdout)
    if printed and float(printed[-1]) > 0:
        return float(printed[-1])
    if cycles := simulated_cycles(output):
        return round(cycles / CYCLES_PER_US, 2)
    for path in sorted(output.glob("*/CostModelSimulationOutput/*stat.report.txt")):
        match = _TOTAL_CYCLES.search(path.read_text(errors="replace"))
        if match:
            return round(int(match.group(1)) / CYCLES_PER_US, 2)
    raise ToolchainError("the cost model left no time: its report is missing")


def read_error_log(log_folder: Path, limit: int = 3) -> str:
    """The first errors in PyPTO's own log, where the reason of a failed pass stands; empty when there are none."""
    lines: list[str] = []
    for path in sorted(log_folder.rglob("*.log")):
        lines.extend(
            line.strip() for line in path.read_text(errors="replace").splitlines() if _ERROR_MODULE.search(line)
        )
    return " | ".join(line[:400] for line in lines[:limit])


def _row_problems(name: str, rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return [f"{name}: not compared"]
    bad = [row for row in rows if row["verifyResult"] != "PASS" or int(row["errorCount"]) != 0]
    if not bad:
        return []
    worst = max(bad, key=lambda row: int(row["errorCount"]))
    return [
        f"{name}: {len(bad)} of {len(rows)} comparisons failed; {worst['verifyType']} {worst['ioflag']} has "
        f"{worst['errorCount']} elements out of tolerance, largest difference {worst['maxAbsDiff']}"
    ]


def _log_problems(path: Path) -> list[str]:
    if not path.is_file():
        return ["the verifier left no exception log"]
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    bad = [line for line in lines if not _ACCEPTED_LOG.search(line)]
    return [f"the interpreter raised: {' '.join(bad[:3])[:400]}"] if bad else []
