"""The verbs on what programs promise: `programs estimate` and `programs contracts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows import console
from flows.cli.output import JSON_OPTION, emit_json, emit_line, emit_table
from flows.cli.report_folder import report_folder, writing_reports
from flows.cli.weights import Down

if TYPE_CHECKING:
    from kernels.stage_contract import Contract
    from kernels.step_estimate import StepEstimate


def register(group: typer.Typer) -> None:
    """Add the verbs to the group of programs."""
    group.command()(estimate)
    group.command()(contracts)


def estimate(
    model: str = typer.Argument(..., metavar="MODEL", help="A checkpoint directory, or a built-in shape."),
    out: Path | None = typer.Option(None, help="Folder to create, for the table as Markdown, JSON and PNG."),
    down: Down = typer.Option(Down.int8, help="Form of down_proj."),
    batch: list[int] | None = typer.Option(None, help="Rows (repeatable) [default: 1 2 4 8 16 32 64]."),
    context: list[int] | None = typer.Option(
        None, help="Tokens of context a row (repeatable) [default: 128 256 512 1024 2048 4096, up to the model's]."
    ),
    simulated_batch: list[int] | None = typer.Option(
        None, help="Rows that are simulated, the others interpolated [default: 1 4 16]."
    ),
    simulated_context: list[int] | None = typer.Option(
        None, help="Contexts that are simulated, the others interpolated [default: 128 1024 4096, up to the model's]."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Estimate decode steps on the cost model (Ascend 910B2), beside the floor that HBM sets; nothing is measured."""
    from flows.cli.programs import model_config
    from flows.reaper import no_orphans
    from kernels.simulate import simulator
    from kernels.step_estimate import BATCHES, SIMULATED_BATCHES, estimate_steps

    config = model_config(model)
    with report_folder(out):
        with no_orphans(), console.ReleaseConsole().step("estimate") as line:
            result = estimate_steps(
                config,
                simulator(progress=line.note),
                model=Path(model).name,
                down=down.value,
                batches=batch or BATCHES,
                contexts=context or None,
                simulated_batches=simulated_batch or SIMULATED_BATCHES,
                simulated_contexts=simulated_context or None,
            )
            known = sum(cell.origin == "simulated" for cell in result.cells)
            line.outcome = f"{known} of {len(result.cells)} cells simulated, the others interpolated"
        if as_json:
            emit_json(result.to_json())
        else:
            _table(result)
        if out is not None:
            with writing_reports(out):
                _write(result, out)


def _table(result: StepEstimate) -> None:
    """Print the cells."""
    columns = ["batch", "context", "layer us", "LM head us", "step ms", "HBM floor ms", "times floor", "layer time"]
    rows = [
        [
            cell.batch if cell.windows == 1 else f"{cell.batch} ({cell.windows} x {cell.window_rows})",
            cell.context_tokens,
            cell.layer_us,
            cell.head_us,
            cell.step_us / 1000,
            cell.hbm_floor_us / 1000,
            cell.ratio,
            cell.origin,
        ]
        for cell in result.cells
    ]
    emit_table(f"Decode steps of {result.model}, estimated (Ascend 910B2 cost model and 1.6 TB/s)", columns, rows)


def contracts(
    model: str | None = typer.Option(None, "--model", help="Say which contracts this model fits, and why not."),
    show: str | None = typer.Option(None, "--show", metavar="NAME", help="Print the stages of one contract."),
    as_json: bool = JSON_OPTION,
) -> None:
    """List the kernel contracts: whose kernels, which family and quantization, the stages and the fingerprint."""
    from flows.cli.programs import model_config
    from flows.settings import UsageError
    from kernels.contract_registry import CONTRACTS

    if show is not None:
        named = {contract.name: contract for contract in CONTRACTS}
        if show not in named:
            raise UsageError(f"--show {show}: no such contract; there are {', '.join(named)}")
        _show(named[show], as_json)
        return
    config = None if model is None else model_config(model)
    described: list[dict[str, Any]] = []
    for contract in CONTRACTS:
        row: dict[str, Any] = {
            "contract": contract.name,
            "version": contract.version,
            "stages": ", ".join(stage.name for stage in contract.stages),
            "fingerprint": contract.fingerprint(),
        }
        if config is not None:
            row["fits"] = "; ".join(contract.problems(config)) or "yes"
        described.append(row)
    if as_json:
        emit_json({"model": model, "contracts": described})
        return
    rows = [list({**row, "fingerprint": row["fingerprint"][:12]}.values()) for row in described]
    emit_table("Kernel contracts", list(described[0]), rows)


def _show(contract: Contract, as_json: bool) -> None:
    """Every stage of a contract with its arguments in call order."""
    from kernels.extern import unavailable

    if as_json:
        missing = {stage.name: reasons for stage in contract.stages if (reasons := unavailable(stage))}
        described = {"name": contract.name, "fingerprint": contract.fingerprint(), "unavailable_here": missing}
        emit_json({**described, **contract.to_json()})
        return
    for stage in contract.stages:
        rows = [
            [number, each.name, each.dtype, " ".join(each.shape), each.direction, each.slab or None]
            for number, each in enumerate(stage.arguments, 1)
        ]
        title = f"{contract.name}: {stage.name}, by {' or '.join(stage.implementations)}"
        emit_table(title, ["", "argument", "dtype", "shape", "direction", "slab"], rows)
        for line in (stage.note, *unavailable(stage).values()):
            if line:
                emit_line(line)


def _write(result: StepEstimate, out: Path) -> None:
    """Write the table as Markdown, JSON and PNG into the folder `out`."""
    from kernels.estimate_plot import plot_estimate

    text = f"# Decode steps of {result.model}, estimated\n\nMilliseconds a step, the HBM floor in brackets; "
    text += "`~` marks layer times interpolated between simulated ones.\n\n"
    (out / "estimate.md").write_text(f"{text}{result.to_markdown()}\n")
    (out / "estimate.json").write_text(json.dumps(result.to_json(), indent=1))
    (out / "estimate.png").write_bytes(plot_estimate(result))
