"""The rollback flow: an alias goes back to the bundle before, with the workers and MLflow following."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.settings import check_environment, resolve_store


@flow(name="rollback", persist_result=False, validate_parameters=True)
def rollback(alias: str = "champion", reason: str = "asked for", store: str | None = None) -> dict[str, Any]:
    """Move `alias` one bundle back; a second rollback goes one further. Returns the move as JSON values."""
    from tasks.promote import rollback_alias
    from tasks.tracking import Tracking

    check_environment()
    folder = resolve_store(store)
    return rollback_alias(folder.root, alias, reason, Tracking.of_store(folder.root)).model_dump()
