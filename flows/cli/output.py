"""How the command line answers: one JSON object or tables on stdout, everything else on stderr, and exit codes.

Exit codes: 0 done; 1 a gate or a validation failed; 2 bad input or usage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

EXIT_FAILED = 1
EXIT_USAGE = 2


class FailedError(Exception):
    """A gate or a validation failed after the answer was printed; exit code 1."""


def emit_json(value: Mapping[str, Any]) -> None:
    """Write the one machine-readable object to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str, allow_nan=False) + "\n")
    sys.stdout.flush()


def emit_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout."""
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(show(cell) for cell in row))
    console().print(table)
    console().print()


def emit_line(text: str) -> None:
    """Print one line to stdout."""
    console().print(text)


def console() -> Console:
    """A console on stdout; wide when stdout is not a terminal, so that lines can be cut by other tools."""
    return Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def complain(message: str) -> None:
    """Print an error to stderr."""
    sys.stderr.write(f"error: {message}\n")


def show(value: object) -> str:
    """A cell: floats with four significant digits, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


JSON_OPTION = typer.Option(False, "--json", help="Print one JSON object on stdout and nothing else there.")
STORE_OPTION = typer.Option(
    None, "--store", help="Folder of bundles and step outputs [default: $PYPTO_DEPLOY_STORE or .pypto-deploy]."
)
