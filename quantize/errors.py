"""Errors of the `quantize` package.

    QuantizeError                 anything this package refuses to do
    ├── CheckpointError           the source or target checkpoint is unusable; `problems` lists every finding
    │   └── NonFiniteWeightError  a weight holds NaN or infinity (found while streaming)
    └── RecipeError               the recipe cannot be read, or names something that is not there

Catch `QuantizeError` at the edge (the command line exits with 2); catch `CheckpointError` to show its `problems`
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence


class QuantizeError(Exception):
    """Base of everything the `quantize` package raises on bad input."""


class CheckpointError(QuantizeError):
    """A checkpoint cannot be used; the message names every problem found, not only the first."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class NonFiniteWeightError(CheckpointError):
    """A weight holds NaN or infinity; the message names tensor and row."""


class RecipeError(QuantizeError):
    """A recipe has an unknown key, a value out of range, or an entry that matches nothing."""
