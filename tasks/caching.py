"""What all cached steps share as Prefect tasks.

Prefect keeps the step's record (small JSON) under the step's content key and shows a run that found it as `Cached`.
The record says nothing of the files, so the flow checks them first and asks for a refresh when they are gone.
"""

from __future__ import annotations

from typing import Any

from prefect.context import TaskRunContext


def key_of_call(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Prefect's cache key of a step task: the step's name and content key, which its caller computed."""
    return f"{parameters['step']}-{parameters['key']}"


STEP_TASK: dict[str, Any] = {
    "persist_result": True,
    "result_serializer": "json",
    "cache_key_fn": key_of_call,
    "log_prints": False,
}
"""Options of every task that wraps `tasks.steps.run_step`."""
