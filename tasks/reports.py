"""The reports of a release: the quality report, and more sections on gates, speed and programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.program_report import TRACE_READER, write_program_report
from kernels.report import TIMELINE_FILE, ProgramReport
from quantize.html_report import Block, Cell, Html, Plot, Section, Table, Text, number, page, verdict
from quantize.plots import plot_tpot, quality_plots
from quantize.quality_report import quality_sections
from tasks.steps import write_json

PROGRAMS_FOLDER = "programs"


def timeline_path(program: str) -> str:
    """Where a program's simulated timeline stands below the folder of reports."""
    return f"{PROGRAMS_FOLDER}/{program}/{TIMELINE_FILE}"


def write_reports(
    out: Path, evidence: Mapping[str, Any], findings: Mapping[str, Any], programs: Path | None = None
) -> list[Path]:
    """Write the reports of `evidence` to the new folder `out`; returns the files.

    `evidence` has `digest`, `name`, `platform`, `metrics`, `tensor_errors` (name, layer, sqnr_db), `programs`, `tpot`
    (with `requests`, or None when it was not measured) and `gates`. `findings` are those of the quality step, with one
    candidate; the weights' errors join them, and `quality.json` holds the whole. `programs` is the folder of the
    programs step, whose artifacts (the timelines) the programs' own reports are made from; without it there are none.
    """
    out.mkdir(parents=True)
    findings = _completed(findings, evidence)
    for name, content in (
        ("quality", findings),
        ("tensor_errors", evidence["tensor_errors"]),
        ("programs", evidence["programs"]),
        ("tpot", evidence["tpot"]),
    ):
        write_json(out / f"{name}.json", content)
    plots = quality_plots(findings)
    requests = (evidence["tpot"] or {}).get("requests")
    if requests:
        plots["tpot"] = plot_tpot(requests)
    for stem, png in plots.items():
        (out / f"{stem}.png").write_bytes(png)
    summary, *details = quality_sections(findings, plots)
    if programs is not None:
        _write_programs(out / PROGRAMS_FOLDER, evidence, programs)
    own = [_gates(evidence["gates"]), summary, _speed(evidence, plots), _programs(evidence["programs"], out)]
    sections = [*own, *details]
    (out / "report.html").write_text(page(evidence["name"], f"bundle {evidence['digest']}", sections))
    return sorted(out.iterdir())


def _completed(findings: Mapping[str, Any], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The findings with what other steps know of the candidate: its weights' errors and its size."""
    (candidate,) = findings["candidates"]
    size_bytes = evidence["metrics"].get("bytes_out")
    size = None if size_bytes is None else int(size_bytes)
    return {**findings, "candidates": [{**candidate, "weights": list(evidence["tensor_errors"]), "bytes": size}]}


def _gates(gates: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[list[Cell]] = [
        [gate["name"], gate["value"], f"{gate['direction']} {gate['bound']}", verdict(gate["passed"])] for gate in gates
    ]
    return Section("Gates", [Table(["gate", "measured", "bound", ""], rows)])


def _speed(evidence: Mapping[str, Any], plots: Mapping[str, bytes]) -> Section:
    tpot = evidence["tpot"] or {}
    blocks: list[Text | Plot] = [
        Text(
            f"On {tpot.get('platform', evidence['platform'])}, median of serial requests: "
            f"TPOT {_milliseconds(tpot.get('tpot_ms'))}, TTFT {_milliseconds(tpot.get('ttft_ms'))}."
        )
    ]
    if "tpot" in plots:
        blocks.append(Plot(plots["tpot"], "Time per output token of every request"))
    return Section("Speed", blocks)


def _write_programs(out: Path, evidence: Mapping[str, Any], programs: Path) -> None:
    """A report on each program, with its timeline, below `out`; `programs` holds the artifacts by program."""
    for values in evidence["programs"]:
        artifacts = [str(programs / values["name"] / name) for name in values["artifacts"]]
        report = ProgramReport.from_json({**values, "artifacts": artifacts})
        write_program_report(out / report.name, evidence["name"], report)


def _programs(programs: Sequence[Mapping[str, Any]], out: Path) -> Section:
    rows: list[list[Cell]] = [
        [program["name"], program["status"], len(program["passes"]), program["simulated_us"], program["hbm_bound_us"]]
        for program in programs
    ]
    columns = ["program", "status", "compiler passes", "simulated, us", "bytes at 1.6 TB/s, us"]
    blocks: list[Block] = [Table(columns, rows)]
    for program in programs:
        folder = out / PROGRAMS_FOLDER / program["name"]
        if (folder / TIMELINE_FILE).is_file():
            blocks += _timeline(program["name"], folder)
    return Section("PyPTO programs", blocks)


def _timeline(name: str, folder: Path) -> list[Block]:
    """The simulated run of one program: picture, stages, and where its trace is."""
    timeline = json.loads((folder / "report.json").read_text())["timeline"]
    kinds = list(timeline["busy"])
    stages: list[list[Cell]] = [
        [stage["name"].lower(), stage["us"], *(100 * stage["busy"][kind] for kind in kinds)]
        for stage in (*timeline["stages"], {"name": "all", "us": timeline["us"], "busy": timeline["busy"]})
    ]
    link = f'<a href="{timeline_path(name)}">{timeline_path(name)}</a> opens in {TRACE_READER}'
    return [
        Plot((folder / "timeline.png").read_bytes(), f"Simulated timeline of {name}: tasks of every core by stage"),
        Table(["stage", "us added", *(f"{kind} cores busy, %" for kind in kinds)], stages, folded=f"Stages of {name}"),
        Text(Html(f"Trace of the cost model (not measured on a device): {link}."), quiet=True),
    ]


def _milliseconds(value: float | None) -> str:
    return number(value) if value is None else f"{number(value)} ms"
