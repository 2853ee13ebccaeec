"""One program's time on the cost model, from the cache of checks or by running it: no verification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernels.calculator import default_cache_dir, pypto_version
from kernels.catalog import Check
from kernels.check_cache import CheckCache
from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.toolchain import DEFAULT_TIMEOUT_S, run_check

__all__ = ["simulator"]


def simulator(
    *,
    cache_dir: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Callable[[str], None] | None = None,
) -> Callable[[Program], float]:
    """A function that gives a program's simulated time in us (Ascend 910B2, PyPTO's cost model).

    Results are kept by content under `cache_dir` (the user's cache by default). The function raises ProgramError,
    naming the program, when it does not compile or has no time; ToolchainError is raised here when PyPTO is missing.
    """
    pypto_version()
    root = cache_dir or default_cache_dir()
    cache = CheckCache(root / "programs")

    def simulate(program: Program) -> float:
        if progress is not None:
            progress(program.name)
        result = run_check(Check("simulated", program, None), cache, root, timeout_s)
        if not result.ok or result.simulated_us is None:
            raise ProgramError(f"{program.name} cannot be simulated: {result.error or 'the cost model gave no time'}")
        return result.simulated_us

    return simulate
