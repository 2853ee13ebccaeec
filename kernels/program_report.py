"""Reports on checked programs as files: a folder a program, with Markdown, JSON, the timeline and its picture.

The figures come from the checks (`kernels.report`) and from the trace that a simulated check kept
(`kernels.timeline`). Every time in them is the cost model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.report import TIMELINE_FILE, ProgramReport
from kernels.timeline import MAX_TRACE_TASKS, Timeline
from kernels.timeline_plot import plot_timeline

__all__ = ["TRACE_READER", "read_trace", "write_program_report", "write_program_reports"]

TRACE_READER = "https://ui.perfetto.dev"


def write_program_reports(out: Path, model: str, reports: Sequence[ProgramReport]) -> None:
    """Write one folder a program of `model` below `out`, which is made where it is missing, and an index."""
    out.mkdir(parents=True, exist_ok=True)
    for report in reports:
        write_program_report(out / report.name, model, report)
    lines = [
        f"# PyPTO programs of {model}",
        "",
        "Times are the cost model's (Ascend 910B2); nothing is measured on a device.",
        "",
        "| program | status | simulated us | HBM bound us |",
        "|---|---|---|---|",
        *(
            f"| [{report.name}]({report.name}/report.md) | {report.status} | {_us(report.simulated_us)} | "
            f"{report.hbm_bound_us or '-'} |"
            for report in reports
        ),
    ]
    (out / "index.md").write_text("\n".join(lines) + "\n")


def write_program_report(folder: Path, model: str, report: ProgramReport) -> None:
    """Write a report to the new `folder`: Markdown, JSON and, with a simulated check, the timeline as JSON and PNG."""
    folder.mkdir(parents=True)
    source = next((Path(path) for path in report.artifacts if Path(path).name == TIMELINE_FILE), None)
    timeline = None if source is None else read_trace(source)
    if source is not None and timeline is not None:
        shutil.copyfile(source, folder / TIMELINE_FILE)
        (folder / "timeline.png").write_bytes(plot_timeline(timeline, f"{report.name}, {model}"))
    described = {**report.to_json(), "artifacts": [TIMELINE_FILE] if timeline else [], "timeline": _figures(timeline)}
    (folder / "report.json").write_text(json.dumps(described, indent=1))
    (folder / "report.md").write_text(_markdown(model, report, timeline))


def read_trace(path: Path) -> Timeline:
    """The timeline in a kept trace; raises ToolchainError when it is of another making."""
    return Timeline.from_trace(json.loads(path.read_text()))


def _figures(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    about: dict[str, Any] = timeline.to_trace()["otherData"]
    return about


def _markdown(model: str, report: ProgramReport, timeline: Timeline | None) -> str:
    lines = [f"# {report.name} of {model}: {report.status}", ""]
    if report.error:
        lines += [f"Failed: {report.error}", ""]
    lines += [
        "| check | verified | comparisons | largest difference | took s | peak MB |",
        "|---|---|---|---|---|---|",
        *(_check_row(check) for check in report.checks),
        "",
    ]
    lines += [f"- {check['kind']}: {check['note']}" for check in report.checks if check["note"]]
    if report.simulated_us is not None:
        lines += [
            "",
            f"Simulated {report.simulated_us} us on the cost model of the Ascend 910B2, which has no bandwidth limit; "
            f"{report.hbm_bytes} bytes at 1.6 TB/s take {report.hbm_bound_us} us. Estimate, the larger of the two: "
            f"{report.estimate_us} us. Not measured on a device.",
        ]
    if timeline is not None:
        lines += ["", *_stage_rows(timeline), "", "![timeline](timeline.png)", "", _trace_note(timeline)]
    return "\n".join(lines) + "\n"


def _check_row(check: Mapping[str, Any]) -> str:
    passes = f"{len(check['passes'])} graphs, to {check['passes'][-1]}" if check["passes"] else "-"
    worst = max(check["outputs"].items(), key=lambda item: item[1], default=None)
    difference = "-" if worst is None else f"{worst[0]} {worst[1]:.3g} ({check['tolerances'].get(worst[0], 'exact')})"
    outcome = check["kind"] if check["ok"] else f"{check['kind']}: FAILED"
    peak_mb = round(check["peak_rss_bytes"] / 1e6)
    return f"| {outcome} | {passes} | {check['rows']} | {difference} | {check['seconds']} | {peak_mb} |"


def _stage_rows(timeline: Timeline) -> list[str]:
    return [
        "| stage | runs | us | cube tasks | vector tasks | cube busy | vector busy |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {stage.name.lower()} | {stage.runs} | {stage.us} | {stage.cube_tasks} | {stage.vector_tasks} | "
            f"{stage.busy['cube']:.1%} | {stage.busy['vector']:.1%} |"
            for stage in timeline.stages
        ),
        f"| all | | {timeline.us} | | | {timeline.busy['cube']:.1%} | {timeline.busy['vector']:.1%} |",
    ]


def _trace_note(timeline: Timeline) -> str:
    thinned = len(timeline.tasks) < timeline.total_tasks
    kept = f" It holds the longest {MAX_TRACE_TASKS} of {timeline.total_tasks} tasks." if thinned else ""
    return f"`{TIMELINE_FILE}` opens in {TRACE_READER}.{kept}"


def _us(value: float | None) -> str:
    return "-" if value is None else str(value)
