"""Compile, verify and simulate a model's programs: each check in its own subprocess, kept by content.

`validate` is the one call: it decides with `kernels.catalog` what to check, finds in `kernels.check_cache` what is
known, runs the rest with `kernels.runner_process` and judges it with `kernels.verdict`. A program is READY when every
output agreed with its golden, every pass was seen to agree for every loop body, and nothing was thrown on the way.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from kernels.calculator import build_calculator, default_cache_dir, pypto_version
from kernels.catalog import Check, programs_for
from kernels.check_cache import CheckCache
from kernels.contract import DownDtype
from kernels.errors import ProgramError, ToolchainError
from kernels.programs.registry import program_to_json
from kernels.report import CheckResult, ProgramReport, summarize
from kernels.runner_process import Finished, run_request, runner_folder
from kernels.source_closure import closure_digest
from kernels.tuned_tiles import table_digest
from kernels.verdict import read_simulated_us, read_verification
from quantize.model_config import ModelConfig

__all__ = ["DEFAULT_TIMEOUT_S", "check_key", "run_check", "validate"]

DEFAULT_TIMEOUT_S = 900.0
SEED = 20
RUNNER_MODULE = "kernels.program_runner"
VERDICT_MODULE = "kernels.verdict"

Progress = Callable[[str], None]
logger = logging.getLogger(__name__)


def validate(
    config: ModelConfig,
    *,
    down: DownDtype = "int8",
    names: Sequence[str] | None = None,
    verify: bool = True,
    simulate: bool = True,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
) -> list[ProgramReport]:
    """Check the programs of `config` (all, or those in `names`) and return one report each.

    `verify` runs the small and the own-width check, `simulate` the cost model at the serving shape. Results are kept
    under `cache_dir` (the user's cache by default); `timeout_s` bounds each check. A failing program is a FAILED
    report, not an exception; ProgramError is raised for unknown names, ContractError for a model that no program
    covers, ToolchainError when PyPTO itself is missing.
    """
    cases = programs_for(config, down)
    known = [case.name for case in cases]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ProgramError(f"no program is called {', '.join(unknown)}; the programs are {', '.join(known)}")
    pypto_version()
    root = cache_dir or default_cache_dir()
    cache = CheckCache(root / "programs")
    reports = []
    for case in cases:
        if names and case.name not in names:
            continue
        wanted = [check for check in case.checks if (simulate if check.passes is None else verify)]
        results = []
        for check in wanted:
            if progress is not None:
                progress(f"{case.name}: {check.kind}")
            results.append(run_check(check, cache, root, timeout_s))
            if not results[-1].ok:
                logger.error("%s, %s check failed: %s", case.name, check.kind, results[-1].error)
        key = hashlib.sha256("\n".join(result.key for result in results).encode()).hexdigest()
        reports.append(summarize(case.name, key, results))
    return reports


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


def run_check(check: Check, cache: CheckCache, calculator_root: Path, timeout_s: float) -> CheckResult:
    """The result of `check`, from `cache` or by running it; only a passed check is kept.

    A tile that breaks a rule is a failed check at once, before anything is built.
    """
    key = check_key(check)
    try:
        check.program.check_tiles()
    except ProgramError as error:
        shape = check.program.spec.to_json()
        return CheckResult(kind=check.kind, key=key, shape=shape, ok=False, error=str(error), note=check.note)
    known = cache.get(key)
    if known is not None:
        return known
    with cache.locked(key):
        known = cache.get(key)
        if known is not None:
            return known
        library = build_calculator(calculator_root)
        started = time.monotonic()
        with runner_folder() as folder:
            result = _run(check, key, folder, library, timeout_s)
            result = replace(result, seconds=round(time.monotonic() - started, 2))
            return cache.put(result) if result.ok else result


def _run(check: Check, key: str, folder: Path, library: Path, timeout_s: float) -> CheckResult:
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
        finished = run_request(folder, request, timeout_s)
        result = replace(
            result,
            simulated_us=read_simulated_us(finished.stdout, finished.output),
            hbm_bytes=program.hbm_bytes(program.shape_inputs()),
            peak_rss_bytes=finished.result["peak_rss_bytes"],
        )
    except ProgramError as error:
        return replace(result, error=str(error))
    if check.passes is None:
        return replace(result, ok=True, artifacts=_artifacts(folder, finished.output))
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
    """The compiled program and its simulated timeline, under names that say what they are."""
    kept = []
    for path in sorted(output.glob("*/program.json")):
        target = folder / "program.json.gz"
        with path.open("rb") as source, gzip.open(target, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(source, packed)
        kept.append(str(target))
    for path in sorted(output.glob("*/CostModelSimulationOutput/merged_swimlane.json")):
        target = folder / "timeline.json"
        shutil.copyfile(path, target)
        kept.append(str(target))
    if len(kept) > 2:
        raise ToolchainError(f"one program left several outputs: {kept}")
    return tuple(kept)
