"""Errors of the `quantize` package.

    QuantizeError                 anything this package refuses to do
    ├── CheckpointError           the source or target checkpoint is unusable; `problems` lists every finding
    │   ├── NonFiniteWeightError  a weight holds NaN or infinity (found while streaming)
    │   └── WriteError            the disk does not take the output; what is finished is kept for the next run
    ├── BudgetError               the memory or workers asked for are not enough to work with
    ├── NativeBuildError          a native library cannot be built or trusted here; callers have a slower way
    ├── CalibrationError          calibration text is unusable, or what it gave cannot be computed with
    └── RecipeError               the recipe cannot be read, or names something that is not there

Catch `QuantizeError` at the edge (the command line exits with 2); catch `CheckpointError` to show its `problems`
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROBLEMS_SHOWN = 200


def printable(text: str) -> str:
    """Text that any terminal may be sent: control characters and lone surrogates become escapes, line breaks stay.

    Names in messages come from files that may be hostile.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


class QuantizeError(Exception):
    """Base of everything the `quantize` package raises on bad input."""


class CheckpointError(QuantizeError):
    """A checkpoint cannot be used; the message names every problem found, not only the first."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.summary = printable(summary)
        self.problems = tuple(printable(problem).replace("\n", "\\n") for problem in problems)
        lines = [f"  - {problem}" for problem in self.problems[:MAX_PROBLEMS_SHOWN]]
        if len(self.problems) > MAX_PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(self.problems) - MAX_PROBLEMS_SHOWN} more")
        super().__init__("\n".join([self.summary, *lines]))


class NonFiniteWeightError(CheckpointError):
    """A weight holds NaN or infinity; the message names tensor and row."""


class WriteError(CheckpointError):
    """The disk does not take the output: full, read-only, or failing. Finished tensors are kept when they can be."""


class BudgetError(QuantizeError):
    """The memory or the number of workers asked for cannot be read, or is too small; the message states the least."""


class NativeBuildError(QuantizeError):
    """A native library cannot be built, loaded or trusted on this machine; the message says why."""


class RecipeError(QuantizeError):
    """A recipe has an unknown key, a value out of range, or an entry that matches nothing."""


class CalibrationError(QuantizeError):
    """Calibration text cannot be read or is too short, or its activations cannot be computed with."""
