"""The verb `doctor`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from flows.cli.output import JSON_OPTION, STORE_OPTION, FailedError, emit_json, emit_table
from flows.settings import configure_environment, resolve_store


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(doctor)


def doctor(store: str | None = STORE_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Say what this machine can do, and what to install for the rest."""
    folder = resolve_store(store)
    configure_environment(folder)
    from flows.doctor import examine

    checks = examine(folder)
    if as_json:
        emit_json({"checks": [asdict(check) for check in checks]})
    else:
        rows = [[check.name, check.status, check.found, check.advice] for check in checks]
        emit_table("This machine", ["what", "status", "found", "do"], rows)
    if missing := [check.name for check in checks if check.status == "missing"]:
        raise FailedError(f"missing: {', '.join(missing)}")
