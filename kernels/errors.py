"""Errors of the `kernels` package.

    KernelsError            anything this package refuses to do
    ├── ContractError       a model does not fit the kernel contract, or slabs were made for another contract
    ├── StagingError        a checkpoint cannot be staged, or staged slabs are damaged; `problems` lists every finding
    └── ProgramError        a PyPTO program failed to compile, verify, simulate or run
        └── ToolchainError  the toolchain itself is missing, broken or timed out

Catch `KernelsError` at the edge (the command line exits with 2); catch `ProgramError` to report a failed program as a
failed validation (exit 1).
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelsError(Exception):
    """Base of everything the `kernels` package raises on bad input or failure."""


class ContractError(KernelsError):
    """The model's shape is outside the contract's limits, or slabs follow a contract this version does not know."""


class StagingError(KernelsError):
    """A checkpoint cannot become slabs, or slabs cannot be read; the message names every problem found."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class ProgramError(KernelsError):
    """A PyPTO program failed to build, verify, simulate or run."""


class ToolchainError(ProgramError):
    """The PyPTO toolchain is missing or broken, or ran out of time."""
