"""The files of a report on checked programs: what they say of verification, of time, of failure."""

from __future__ import annotations

import json
from pathlib import Path

from kernels.program_report import write_program_reports
from kernels.report import CheckResult, summarize
from kernels.timeline import read_timeline
from tests.kernels.test_timeline import simulator_files


def test_a_report_has_checks_stages_trace_and_picture(tmp_path: Path) -> None:
    timeline = read_timeline(simulator_files(tmp_path / "run"))
    assert timeline is not None
    trace = tmp_path / "timeline.json"
    trace.write_text(json.dumps(timeline.to_trace()))
    small = CheckResult(
        "small", "a", {}, True, passes=("tensor_graph", "SplitK"), rows=9, outputs={"out": 0.25, "ids": 0.0},
        tolerances={"out": "1 BF16 ulp", "ids": "exact"}, seconds=2.5, peak_rss_bytes=500_000_000,
    )  # fmt: skip
    simulated = CheckResult(
        "simulated", "b", {}, True, note="2 of 40 layers", simulated_us=10.0, hbm_bytes=32_000_000,
        artifacts=(str(trace),),
    )  # fmt: skip
    failed = CheckResult("small", "c", {}, False, error="ids differs from its golden by 3")
    reports = [summarize("lm_head_greedy", "k", [small, simulated]), summarize("topk_select", "k", [failed])]
    write_program_reports(tmp_path / "out", "qwen3-14b", reports)
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    ours = {f"lm_head_greedy/{name}" for name in ("report.md", "report.json", "timeline.json", "timeline.png")}
    assert files == {"index.md", *ours, "topk_select/report.md", "topk_select/report.json"}
    text = (tmp_path / "out" / "lm_head_greedy" / "report.md").read_text()
    assert "| small | 2 graphs, to SplitK | 9 | out 0.25 (1 BF16 ulp) | 2.5 | 500 |" in text
    assert "- simulated: 2 of 40 layers" in text
    assert "Simulated 10.0 us" in text
    assert "take 20.0 us. Estimate, the larger of the two: 20.0 us. Not measured on a device." in text
    assert "| chunks | 2 | 7.0 | 2 | 0 | 4.2% | 0.0% |" in text
    written = json.loads((tmp_path / "out" / "lm_head_greedy" / "report.json").read_text())
    assert written["artifacts"] == ["timeline.json"]
    assert [stage["name"] for stage in written["timeline"]["stages"]] == ["NORM", "CHUNKS"]
    assert (tmp_path / "out" / "lm_head_greedy" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "ids differs from its golden by 3" in (tmp_path / "out" / "topk_select" / "report.md").read_text()
    assert "| [topk_select](topk_select/report.md) | FAILED | - | - |" in (tmp_path / "out" / "index.md").read_text()
