"""The verbs on PyPTO programs: `programs list|verify|simulate`; `flows.cli.estimates` adds what they promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows import console
from flows.cli import estimates, tune
from flows.cli.output import JSON_OPTION, FailedError, emit_json, emit_table
from flows.cli.report_folder import report_folder, writing_reports
from flows.settings import UsageError

if TYPE_CHECKING:
    from kernels.catalog import CheckKind
    from kernels.contract import DownDtype
    from kernels.report import ProgramReport
    from kernels.toolchain import Selection
    from quantize.model_config import ModelConfig

DEFAULT_MODEL = "qwen3-14b"
MODEL_OPTION = typer.Option(DEFAULT_MODEL, "--model", help="A checkpoint directory, or a built-in shape.")
PROGRAM_OPTION = typer.Option(None, "--program", help="Only this program (repeatable).")
WORKERS_OPTION = typer.Option(
    None, min=1, help="Checks that run at once, fewer where memory is short [default: one a core]."
)
OUT_OPTION = typer.Option(None, help="Folder to create, for a report on each program: Markdown, JSON, timeline, PNG.")


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


def verify(
    model: str | None = typer.Option(
        None, "--model", help="A checkpoint directory, or a built-in shape [default: qwen3-14b]."
    ),
    program: list[str] | None = PROGRAM_OPTION,
    small: bool = typer.Option(
        False, "--small", help="Small shapes only; without --model those of one model of every family."
    ),
    workers: int | None = WORKERS_OPTION,
    out: Path | None = OUT_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Compile, verify through the passes against the golden, and simulate at the real shape."""
    from kernels.builtin_models import SMALL_SUITE
    from kernels.catalog import CHECK_KINDS

    models: Sequence[tuple[str, DownDtype]] = [(model or DEFAULT_MODEL, "int8")]
    _run(
        SMALL_SUITE if small and model is None else models,
        program,
        ("small",) if small else CHECK_KINDS,
        workers,
        out,
        as_json,
    )


def simulate(
    model: str = MODEL_OPTION,
    program: list[str] | None = PROGRAM_OPTION,
    workers: int | None = WORKERS_OPTION,
    out: Path | None = OUT_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Simulate at the real shape on PyPTO's cost model (Ascend 910B2), without verification."""
    _run([(model, "int8")], program, ("simulated",), workers, out, as_json)


def model_config(model: str) -> ModelConfig:
    """The shape of a checkpoint directory or of a built-in name; refuses anything else by name."""
    from kernels.catalog import BUILTIN_NAMES, builtin_config
    from quantize.model_config import load_model_config

    if model in BUILTIN_NAMES:
        return builtin_config(model)
    if Path(model).is_dir():
        return load_model_config(Path(model))
    raise UsageError(f"--model {model!r}: found neither a directory nor one of {', '.join(BUILTIN_NAMES)}")


def _run(
    models: Sequence[tuple[str, DownDtype]],
    names: list[str] | None,
    kinds: Sequence[CheckKind],
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Check the programs of `models` (name and form of down_proj), answer, and write reports to `out`."""
    from kernels.catalog import programs_for
    from kernels.program_report import write_program_reports
    from kernels.toolchain import Selection

    chosen = tuple(names) if names else None
    selections = [Selection(model_config(model), down, chosen, tuple(kinds)) for model, down in models]
    known = [case.name for case in programs_for(selections[0].config, selections[0].down)]
    if unknown := sorted(set(chosen or ()) - set(known)):
        raise UsageError(f"--program {', '.join(unknown)}: not known; the programs are {', '.join(known)}")
    with report_folder(out):
        found = _validated(selections, workers, "simulate" if kinds == ("simulated",) else "verify")
        titles = [Path(model).name + ("" if down == "int8" else "-down-bf16") for model, down in models]
        answers: list[dict[str, Any]] = [
            {"model": model, "down": down, "programs": [report.to_json() for report in reports]}
            for (model, down), reports in zip(models, found, strict=True)
        ]
        if as_json:
            emit_json(answers[0] if len(answers) == 1 else {"models": answers})
        else:
            emit_table(*_suite_table(titles, answers) if len(answers) > 1 else programs_table(answers[0]["programs"]))
        if out is not None:
            with writing_reports(out):
                for title, reports in zip(titles, found, strict=True):
                    write_program_reports(out if len(models) == 1 else out / title, title, reports)
    failed = [
        f"{title}, {report.name}: {report.error}"
        for title, reports in zip(titles, found, strict=True)
        for report in reports
        if report.status != "READY"
    ]
    if failed:
        raise FailedError("; ".join(failed))


def _validated(selections: Sequence[Selection], workers: int | None, verb: str) -> list[list[ProgramReport]]:
    """Check the programs that `selections` name, with a line of progress."""
    from flows.reaper import no_orphans
    from kernels.toolchain import validate_all

    with no_orphans(), console.ReleaseConsole().step(verb) as line:
        found = validate_all(selections, workers=workers, progress=line.note)
        ready = sum(report.status == "READY" for reports in found for report in reports)
        line.outcome = f"{ready} of {sum(map(len, found))} READY"
    return found


def programs_table(reports: list[dict[str, Any]]) -> tuple[str, list[str], list[list[object]]]:
    """Title, columns and rows of the programs table; times are the cost model's, not measured on a device."""
    rows: list[list[object]] = [
        [
            report["name"],
            report["status"],
            _verified(report, "small"),
            _verified(report, "own width"),
            report["simulated_us"],
            None if report["simulated_us"] is None else report["hbm_bound_us"],
            _took(report),
        ]
        for report in reports
    ]
    columns = ["program", "status", "verified, small", "verified, own width", "simulated us", "HBM bound us", "took"]
    return "PyPTO programs (times: cost model of the Ascend 910B2)", columns, rows


def _suite_table(
    titles: Sequence[str], answers: Sequence[Mapping[str, Any]]
) -> tuple[str, list[str], list[list[object]]]:
    """Title, columns and rows of the table over several models' small shapes."""
    rows: list[list[object]] = [
        [title, report["name"], report["status"], _verified(report, "small"), _took(report)]
        for title, answer in zip(titles, answers, strict=True)
        for report in answer["programs"]
    ]
    return "PyPTO programs at small shapes", ["model", "program", "status", "verified", "took"], rows


def _took(report: Mapping[str, Any]) -> str:
    return "cached" if report["cached"] else f"{report['seconds']:.1f} s"


def _verified(report: dict[str, Any], kind: str) -> str:
    """Through which passes a check went, and the largest difference of any output from the golden."""
    check = next((check for check in report["checks"] if check["kind"] == kind), None)
    if check is None:
        return "not verified"
    passes = check["passes"]
    difference = max(check["outputs"].values(), default=0.0)
    return f"{len(passes)} to {passes[-1]}, off by {difference:.1g}" if passes else "none"
