"""The reports of a release: the quality report, and more sections on gates, speed and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.html_report import Cell, Plot, Section, Table, Text, number, page, verdict
from quantize.plots import plot_tpot, quality_plots
from quantize.quality_report import quality_sections
from tasks.steps import write_json


def write_reports(out: Path, evidence: Mapping[str, Any], findings: Mapping[str, Any]) -> list[Path]:
    """Write the reports of `evidence` to the new folder `out`; returns the files.

    `evidence` has `digest`, `name`, `platform`, `metrics`, `tensor_errors` (name, layer, sqnr_db), `programs`, `tpot`
    (with `requests`, or None when it was not measured) and `gates`. `findings` are those of the quality step, with one
    candidate; the weights' errors join them, and `quality.json` holds the whole.
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
    sections = [_gates(evidence["gates"]), summary, _speed(evidence, plots), _programs(evidence["programs"]), *details]
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


def _programs(programs: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[list[Cell]] = [
        [program["name"], program["status"], len(program["passes"]), program["simulated_us"]] for program in programs
    ]
    return Section("PyPTO programs", [Table(["program", "status", "compiler passes", "simulated, us"], rows)])


def _milliseconds(value: float | None) -> str:
    return number(value) if value is None else f"{number(value)} ms"
