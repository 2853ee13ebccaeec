"""Errors of the `tasks` package.

    TasksError            a step of a release cannot go on
    ├── StepError         a step's output is missing, or does not match its record
    ├── ProgramsFailedError   a PyPTO program failed to verify; `reports` has every program's findings
    ├── PlatformError     the asked platform is not on this machine
    └── TrackingError     the tracking server refused or did not answer; the evidence is kept to be logged later

Catch `TasksError` at the edge. `TrackingError` alone does not stop a release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TasksError(Exception):
    """Base of everything the `tasks` package raises."""


class StepError(TasksError):
    """A step's output folder is incomplete, or its content is not what the step recorded."""


class ProgramsFailedError(TasksError):
    """At least one PyPTO program FAILED; the message names each with its reason."""

    def __init__(self, reports: Sequence[Mapping[str, Any]]) -> None:
        self.reports = [dict(report) for report in reports]
        failed = [f"  - {report['name']}: {report['error']}" for report in self.reports if report["status"] != "READY"]
        super().__init__("\n".join(["PyPTO programs failed, so there is nothing to release:", *failed]))


class PlatformError(TasksError):
    """The platform asked for (an NPU, say) cannot be used on this machine."""


class TrackingError(TasksError):
    """MLflow could not be reached or refused the request."""
