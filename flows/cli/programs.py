"""The verbs on PyPTO programs: `programs list|verify|simulate`; `flows.cli.estimates` adds what they promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows import console
from flows.cli import estimates, tune
from flows.cli.output import JSON_OPTION, FailedError, emit_json, emit_table
from flows.settings import UsageError

if TYPE_CHECKING:
    from quantize.model_config import ModelConfig

MODEL_OPTION = typer.Option("qwen3-14b", "--model", help="A checkpoint directory, or a built-in shape.")
PROGRAM_OPTION = typer.Option(None, "--program", help="Only this program (repeatable).")


def register(app: typer.Typer) -> None:
    """Add the group to `app`."""
    group = typer.Typer(
        help="PyPTO programs of a model: list, verify, simulate, estimate, tune; kernel contracts.",
        no_args_is_help=True,
    )
    group.command("list")(list_programs)
    group.command()(verify)
    group.command()(simulate)
    estimates.register(group)
    tune.register(group)
    app.add_typer(group, name="programs")


def list_programs(model: str = MODEL_OPTION, as_json: bool = JSON_OPTION) -> None:
    """List the programs of a model and the shapes they are checked at."""
    from kernels.catalog import programs_for

    cases = [case.describe() for case in programs_for(model_config(model))]
    if as_json:
        emit_json({"model": model, "programs": cases})
    else:
        columns = ["name", "small", "own width", "simulated"]
        emit_table(f"Programs of {model}", columns, [[case.get(column, "-") for column in columns] for case in cases])


def verify(model: str = MODEL_OPTION, program: list[str] | None = PROGRAM_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Compile, verify through the passes against the golden, and simulate at the real shape."""
    _run(model, program, as_json, check=True)


def simulate(
    model: str = MODEL_OPTION, program: list[str] | None = PROGRAM_OPTION, as_json: bool = JSON_OPTION
) -> None:
    """Simulate at the real shape on PyPTO's cost model (Ascend 910B2), without verification."""
    _run(model, program, as_json, check=False)


def model_config(model: str) -> ModelConfig:
    """The shape of a checkpoint directory or of a built-in name; refuses anything else by name."""
    from kernels.catalog import BUILTIN_NAMES, builtin_config
    from quantize.model_config import load_model_config

    if model in BUILTIN_NAMES:
        return builtin_config(model)
    if Path(model).is_dir():
        return load_model_config(Path(model))
    raise UsageError(f"--model {model!r}: found neither a directory nor one of {', '.join(BUILTIN_NAMES)}")


def _run(model: str, names: list[str] | None, as_json: bool, *, check: bool) -> None:
    from flows.reaper import no_orphans
    from kernels.catalog import CHECK_KINDS, programs_for
    from kernels.toolchain import validate

    config = model_config(model)
    known = [case.name for case in programs_for(config)]
    if unknown := sorted(set(names or ()) - set(known)):
        raise UsageError(f"--program {', '.join(unknown)}: not known; the programs are {', '.join(known)}")
    with no_orphans(), console.ReleaseConsole().step("verify" if check else "simulate") as line:
        reports = validate(
            config, names=names or None, kinds=CHECK_KINDS if check else ("simulated",), progress=line.note
        )
        line.outcome = ", ".join(f"{report.name} {report.status}" for report in reports)
    if as_json:
        emit_json({"model": model, "programs": [report.to_json() for report in reports]})
    else:
        emit_table(*programs_table([report.to_json() for report in reports]))
    if failed := [report for report in reports if report.status != "READY"]:
        raise FailedError("; ".join(f"{report.name}: {report.error}" for report in failed))


def programs_table(reports: list[dict[str, Any]]) -> tuple[str, list[str], list[list[object]]]:
    """Title, columns and rows of the programs table; times are the cost model's, not measured on a device."""
    rows: list[list[object]] = [
        [
            report["name"],
            report["status"],
            _verified(report, "small"),
            _verified(report, "own width"),
            report["simulated_us"],
            report["hbm_bound_us"],
            "cached" if report["cached"] else f"{report['seconds']:.1f} s",
        ]
        for report in reports
    ]
    columns = ["program", "status", "verified, small", "verified, own width", "simulated us", "HBM bound us", "took"]
    return "PyPTO programs (times: cost model of the Ascend 910B2)", columns, rows


def _verified(report: dict[str, Any], kind: str) -> str:
    """Through which passes a check went, and the largest difference of any output from the golden."""
    check = next((check for check in report["checks"] if check["kind"] == kind), None)
    if check is None:
        return "not verified"
    passes = check["passes"]
    difference = max(check["outputs"].values(), default=0.0)
    return f"{len(passes)} to {passes[-1]}, off by {difference:.1g}" if passes else "none"
