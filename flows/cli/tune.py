"""The verb `programs tune`: search matmul tiles on the cost model and write what it settles on to a table."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows import console
from flows.cli.output import JSON_OPTION, FailedError, emit_json, emit_line, emit_table
from flows.settings import UsageError

if TYPE_CHECKING:
    from kernels.tuner import TuneResult

DECODE_LAYER, LM_HEAD = "decode_layer", "lm_head_greedy"
TUNABLE = (DECODE_LAYER, LM_HEAD)


def register(group: typer.Typer) -> None:
    """Add the verb to the group of programs."""
    group.command()(tune)


def tune(
    name: str = typer.Argument(..., metavar="NAME", help="Program to tune: decode_layer or lm_head_greedy."),
    model: str = typer.Option("qwen3-14b", "--model", help="A checkpoint directory, or a built-in shape."),
    rows: int = typer.Option(16, help="Rows of a window."),
    budget: float = typer.Option(
        600.0, min=1.0, help="Seconds for the search; a few simulations of the whole program come on top."
    ),
    table: Path | None = typer.Option(
        None, help="Table to write to, read where $PYPTO_DEPLOY_TILES names it [default: the one in effect]."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Search the tiles of a program's matmuls on the cost model (Ascend 910B2), and keep those with which it gains."""
    from flows.cli.programs import model_config
    from flows.reaper import no_orphans
    from kernels.contract import BATCH_WINDOW_ROWS
    from kernels.head_tuner import tune_lm_head
    from kernels.simulate import simulator
    from kernels.tuned_tiles import table_path
    from kernels.tuner import TableNotWrittenError, tune_decode_layer

    if name not in TUNABLE:
        raise UsageError(f"{name}: cannot be tuned; expected one of {', '.join(TUNABLE)}")
    if name != DECODE_LAYER and rows != BATCH_WINDOW_ROWS:
        raise UsageError(f"--rows {rows}: {name} always works in windows of {BATCH_WINDOW_ROWS}; leave it out")
    config, target = model_config(model), table or table_path()
    if not math.isfinite(budget):
        raise UsageError(f"--budget {budget}: expected seconds")
    unwritten: TableNotWrittenError | None = None
    with no_orphans(), console.ReleaseConsole().step("tune") as line:
        try:
            if name == DECODE_LAYER:
                result = tune_decode_layer(config, simulator(), target, rows=rows, budget_s=budget, progress=line.note)
            else:
                result = tune_lm_head(config, simulator(), target, budget_s=budget, progress=line.note)
        except TableNotWrittenError as error:
            unwritten, result = error, error.result
        line.outcome = f"{result.tried} tiles tried, {result.before_us:.1f} to {result.after_us:.1f} us"
    if as_json:
        emit_json({"model": model, "table": str(target), **asdict(result)})
    else:
        _tables(name, model, result)
        if unwritten is None:
            settled = "those found" if result.kept else "no other tile made the whole program faster; those in use"
            emit_line(f"{settled} are written to {target}")
    if unwritten is not None:
        raise FailedError(str(unwritten))


def _tables(name: str, model: str, result: TuneResult) -> None:
    """Print the tiles found, and the time of the whole program."""
    part = "alone" if name == DECODE_LAYER else "whole head"
    columns = ["k", "n", "tile m, k in L0, k left, k right, n", f"{part} before us", f"{part} us", "tried", "outcome"]
    found = [
        [
            entry.k,
            entry.n,
            ", ".join(map(str, asdict(entry.tile).values())),
            entry.before_us,
            entry.simulated_us,
            entry.tried,
            outcome,
        ]
        for outcome, entries in (
            ("new", result.kept),
            ("faster alone only", result.dropped),
            ("stays", result.confirmed),
        )
        for entry in entries
    ]
    emit_table(f"Tiles of {name}, {Path(model).name} (cost model of the Ascend 910B2)", columns, found)
    emit_line(f"{name}: {result.before_us:.1f} us before, {result.after_us:.1f} us after")
