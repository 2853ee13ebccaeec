"""Compile, verify and simulate models' programs: each check in its own subprocess, kept by content.

`validate` (one model) and `validate_all` decide with `kernels.catalog` what to check, find in `kernels.check_cache`
what is known, run the rest with `kernels.runner_process`, side by side as `kernels.check_pool` allows, and judge it
with `kernels.verdict`. A program is READY when every
output agreed with its golden, every pass was seen to agree for every loop body, and nothing was thrown on the way.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kernels.calculator import build_calculator, default_cache_dir, pypto_version
from kernels.catalog import CHECK_KINDS, Check, CheckKind, programs_for
from kernels.check_cache import CheckCache
from kernels.check_pool import CheckPool, checked_workers, total_bytes
from kernels.contract import DownDtype
from kernels.errors import ProgramError, ToolchainError
from kernels.programs.base import Program
from kernels.programs.registry import program_to_json
from kernels.report import TIMELINE_FILE, CheckResult, ProgramReport, summarize
from kernels.runner_process import Finished, check_timeout, run_request, runner_folder
from kernels.source_closure import closure_digest
from kernels.timeline import read_timeline
from kernels.tuned_tiles import read_table, table_digest, table_path
from kernels.verdict import read_simulated_us, read_verification
from quantize.budget import usable_cores
from quantize.model_config import ModelConfig

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Selection",
    "argument_bytes",
    "check_key",
    "check_memory",
    "expected_peak_bytes",
    "run_check",
    "validate",
    "validate_all",
]

DEFAULT_TIMEOUT_S = 900.0
SEED = 20
RUNNER_MODULE = "kernels.program_runner"
VERDICT_MODULE = "kernels.verdict"
PROGRAM_FILE = "program.json.gz"
BASE_BYTES = 600 * 10**6
SIMULATED_COPIES = 4
VERIFIED_COPIES = 30
LEAST_COPIES = 2
"""How often every check holds its arguments at least: three times and eleven times were seen."""
BACKED_ELEMENTS = 1 << 20
"""Zeros of more elements are only reckoned with, not allocated, where sizes alone are asked for."""

Progress = Callable[[str], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """Programs of one model to check: all, or those in `names`; the checks of `kinds`."""

    config: ModelConfig
    down: DownDtype = "int8"
    names: tuple[str, ...] | None = None
    kinds: tuple[CheckKind, ...] = CHECK_KINDS


def validate(
    config: ModelConfig,
    *,
    down: DownDtype = "int8",
    names: Sequence[str] | None = None,
    kinds: Sequence[CheckKind] = CHECK_KINDS,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[ProgramReport]:
    """Check the programs of `config` (all, or those in `names`) and return one report each; see `validate_all`."""
    selection = Selection(config, down, None if names is None else tuple(names), tuple(kinds))
    (reports,) = validate_all([selection], cache_dir=cache_dir, timeout_s=timeout_s, workers=workers, progress=progress)
    return reports


def validate_all(
    selections: Sequence[Selection],
    *,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[list[ProgramReport]]:
    """Check what `selections` name and return the reports of each, in their order and that of the catalog.

    "small" and "own width" checks are verified against the golden, "simulated" ones run the cost model at the serving
    shape. Up to `workers` checks run at once (as many as there are cores by default), fewer where memory is short;
    their number does not change a report. Results are kept under `cache_dir` (the user's cache by default);
    `timeout_s` bounds each check. A failing program is a FAILED report, not an exception; ProgramError is raised for
    unknown names and a table of tiles that cannot be used, ContractError for a model that no program covers,
    ToolchainError when PyPTO itself is missing.
    """
    check_timeout(timeout_s)
    chosen = [_chosen_cases(selection) for selection in selections]
    pypto_version()
    read_table(table_path())  # one that cannot be used is no failure of the programs
    root = cache_dir or default_cache_dir()
    cache, pool = CheckCache(root / "programs"), CheckPool(checked_workers(workers, usable_cores()))

    def job(name: str, check: Check) -> Callable[[], CheckResult]:
        def run() -> CheckResult:
            if progress is not None:
                progress(f"{name}: {check.kind}")
            result = run_check(check, cache, root, timeout_s, pool)
            if not result.ok:
                logger.error("%s, %s check failed: %s", name, check.kind, result.error)
            return result

        return run

    jobs = [job(name, check) for cases in chosen for name, checks in cases for check in checks]
    results = iter(pool.run(jobs))
    return [[_report(name, [next(results) for _ in checks]) for name, checks in cases] for cases in chosen]


def _chosen_cases(selection: Selection) -> list[tuple[str, list[Check]]]:
    """The chosen programs of a model with their chosen checks; those without any are left out."""
    if selection.names == ():
        raise ProgramError("no program is named; expected at least one, or None for all")
    if not selection.kinds or not set(selection.kinds) <= set(CHECK_KINDS):
        found = ", ".join(map(str, selection.kinds)) or "none"
        raise ProgramError(f"kinds of checks: found {found}, expected some of {', '.join(CHECK_KINDS)}")
    cases = programs_for(selection.config, selection.down)
    known = [case.name for case in cases]
    if unknown := sorted(set(selection.names or ()) - set(known)):
        raise ProgramError(f"no program is called {', '.join(unknown)}; the programs are {', '.join(known)}")
    chosen = [
        (case.name, [check for check in case.checks if check.kind in selection.kinds])
        for case in cases
        if not selection.names or case.name in selection.names
    ]
    return [(name, checks) for name, checks in chosen if checks]


def _report(name: str, results: list[CheckResult]) -> ProgramReport:
    key = hashlib.sha256("\n".join(result.key for result in results).encode()).hexdigest()
    return summarize(name, key, results)


def check_key(check: Check) -> str:
    """Content key of a check: program text and all it imports, tuned tiles, shape, passes, seed, PyPTO and torch."""
    program = check.program
    content = {
        "text": closure_digest(type(program).__module__, program.kernel_module, RUNNER_MODULE, VERDICT_MODULE),
        "kind": check.kind,
        "program": program_to_json(program),
        "passes": check.passes,
        "seed": SEED,
        "tiles": table_digest(),
        "pypto": pypto_version(),
        "torch": metadata.version("torch"),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def expected_peak_bytes(check: Check) -> int:
    """About what a check's subprocess will hold: PyPTO itself, and its arguments a number of times.

    The factors are from checks that were run (4.3 GB for the layer of Qwen3-14B at its own width, 5.6 GB for the
    simulation of its LM head). Verification holds an argument once a loop that reads it, which is reckoned generously.
    """
    copies = SIMULATED_COPIES if check.passes is None else VERIFIED_COPIES
    return BASE_BYTES + copies * argument_bytes(check.program)


def argument_bytes(program: Program) -> int:
    """Bytes of all arguments at the program's shape, without allocating the large ones."""
    with _UnbackedZeros():
        return sum(tensor.nbytes for tensor in program.shape_inputs().values())


def check_memory(check: Check) -> None:
    """Raise ToolchainError, naming both numbers, when the arguments of `check` cannot be held on this machine."""
    needed, total = LEAST_COPIES * argument_bytes(check.program), total_bytes()
    if needed > total:
        raise ToolchainError(
            f"the check needs {needed / 1e9:.1f} GB for its arguments alone, and this machine has {total / 1e9:.1f} GB "
            "of memory in all; check it on a larger one"
        )


class _UnbackedZeros(TorchFunctionMode):
    """Makes `torch.zeros` of large sizes return one zero, expanded: the same shape, dtype and `nbytes`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros:
            size = tuple(args) if args and isinstance(args[0], int) else tuple(args[0])
            if math.prod(size) > BACKED_ELEMENTS:
                return torch.zeros((), **kwargs).expand(size)
        return func(*args, **kwargs)


def run_check(
    check: Check, cache: CheckCache, calculator_root: Path, timeout_s: float, pool: CheckPool | None = None
) -> CheckResult:
    """The result of `check`, from `cache` or by running it; only a passed check is kept.

    `pool` is the one that this check runs in, if any: it waits there for its memory, and ends when the pool stops. A
    tile that breaks a rule, and a check that this machine cannot hold, fail at once, before anything is built.
    """
    key = check_key(check)
    try:
        check.program.check_tiles()
        known = cache.get(key)
        if known is not None:
            return known
        check_memory(check)
    except ProgramError as error:
        shape = check.program.spec.to_json()
        return CheckResult(kind=check.kind, key=key, shape=shape, ok=False, error=str(error), note=check.note)
    stopped = None if pool is None else pool.stopped
    # Memory first: who holds a key's lock must be able to go on.
    with nullcontext() if pool is None else pool.holding(expected_peak_bytes(check)), cache.locked(key):
        known = cache.get(key)
        if known is not None:
            return known
        library = build_calculator(calculator_root)
        started = time.monotonic()
        with runner_folder() as folder:
            result = _run(check, key, folder, library, timeout_s, stopped)
            result = replace(result, seconds=round(time.monotonic() - started, 2))
            return cache.put(result) if result.ok else result


def _run(
    check: Check, key: str, folder: Path, library: Path, timeout_s: float, stopped: threading.Event | None
) -> CheckResult:
    """Run a check in `folder` and judge it; every failure becomes a result that says why."""
    program = check.program
    result = CheckResult(kind=check.kind, key=key, shape=program.spec.to_json(), ok=False, note=check.note)
    request = {
        "kind": "check",
        "program": program_to_json(program),
        "verify": check.passes is not None,
        "passes": check.passes or (),
        "seed": SEED,
        "library": str(library),
    }
    try:
        finished = run_request(folder, request, timeout_s, stopped)
        result = replace(
            result,
            simulated_us=read_simulated_us(finished.stdout, finished.output),
            hbm_bytes=program.hbm_bytes(program.shape_inputs()),
            peak_rss_bytes=finished.result["peak_rss_bytes"],
        )
        if check.passes is None:
            return replace(result, ok=True, artifacts=_artifacts(folder, finished.output))
    except ProgramError as error:
        return replace(result, error=str(error))
    return _judge(check, result, finished)


def _judge(check: Check, result: CheckResult, finished: Finished) -> CheckResult:
    """Add what was compared, by us in torch and by the verifier, and decide."""
    outputs = finished.result["outputs"]
    verification = read_verification(finished.output, check.passes or (), len(outputs), check.program.units())
    mismatches = [
        f"{name} differs from its golden by {outputs.get(name, float('nan')):.3g}"
        for name in finished.result["mismatches"]
    ]
    problems = (*mismatches, *verification.problems)
    return replace(
        result,
        ok=not problems,
        error="; ".join(problems),
        passes=verification.passes,
        rows=verification.rows,
        outputs=outputs,
        tolerances=finished.result["tolerances"],
    )


def _artifacts(folder: Path, output: Path) -> tuple[str, ...]:
    """The compiled program and the timeline of its simulation, under names that say what they are."""
    compiled = sorted(output.glob("*/program.json"))
    if len(compiled) > 1:
        raise ToolchainError(f"one program left several outputs: {', '.join(map(str, compiled))}")
    kept = []
    for path in compiled:
        target = folder / PROGRAM_FILE
        with path.open("rb") as source, gzip.open(target, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(source, packed)
        kept.append(str(target))
    timeline = read_timeline(output)
    if timeline is not None:
        target = folder / TIMELINE_FILE
        target.write_text(json.dumps(timeline.to_trace(), separators=(",", ":")))
        kept.append(str(target))
    return tuple(kept)
