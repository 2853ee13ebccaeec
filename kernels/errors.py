"""Errors of the `kernels` package.

    KernelsError            anything this package refuses to do
    ├── ContractError       slabs do not fit the kernel contract (unknown version, changed table, wrong shape or dtype)
    ├── StagingError        a checkpoint cannot be staged into slabs
    └── ProgramError        a program cannot be built for this shape, or was handed arguments that do not fit it
        └── ToolchainError  PyPTO, its calculator or a subprocess of theirs failed, is missing or ran out of time

Catch `KernelsError` at the edge (the command line exits with 2); catch `ToolchainError` to tell a broken installation
from a bad argument.
"""

from __future__ import annotations


class KernelsError(Exception):
    """Base of everything the `kernels` package raises on bad input."""


class ContractError(KernelsError):
    """Slabs and kernel contract disagree; the message names what was found and what was expected."""


class StagingError(KernelsError):
    """A checkpoint cannot be staged; the message names the modules or tensors at fault."""


class ProgramError(KernelsError):
    """A program does not exist for this shape, or an argument has the wrong name, dtype, shape or layout."""


class ToolchainError(ProgramError):
    """PyPTO is missing or failed: a build, a compile pass, the interpreter, or a timeout."""
