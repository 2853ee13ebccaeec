"""The release's report: the quality report's sections and its own on one page, drawn from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.report import CheckResult, summarize
from kernels.staging import stage_checkpoint
from kernels.timeline import read_timeline
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from tasks.bundle import make_reports
from tasks.quality import FINDINGS_FILE, measure_quality
from tests.kernels.test_timeline import simulator_files

GATES = [
    {"name": "mean_kl", "value": 0.012, "bound": 0.1, "direction": "<=", "passed": True},
    {"name": "max_tpot_ms", "value": 9.0, "bound": 5.0, "direction": "<=", "passed": False},
]
CHECK = CheckResult("simulated", "k", {}, True, simulated_us=10.0, hbm_bytes=16_000_000, artifacts=("timeline.json",))
PROGRAMS = [summarize("decode_layer", "k", [CHECK]).to_json()]


@pytest.fixture(scope="module")
def measured(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    work = tmp_path_factory.mktemp("work")
    result = quantize_checkpoint(tiny_llama, work / "w8a8", Recipe())
    stage_checkpoint(work / "w8a8", work / "slabs")
    record = measure_quality(work, "key", tiny_llama, work / "slabs", 300)
    errors = [{"name": e.name, "layer": e.layer, "sqnr_db": e.sqnr_db} for e in result.errors]
    return record.out / FINDINGS_FILE, record.facts, errors


def test_the_step_finds_figures_with_intervals(measured: tuple[Path, dict[str, Any], list[Any]]) -> None:
    findings_file, facts, _ = measured
    findings = json.loads(findings_file.read_text())
    figures = findings["candidates"][0]["figures"]
    assert facts["positions"] == findings["positions"] == 299
    for name, (low, high) in facts["intervals"].items():
        assert low <= facts[name] <= high
        assert figures[name] == {"value": facts[name], "low": low, "high": high}
    assert len(findings["activations"]) == 8
    assert findings["candidates"][0]["greedy"]["text"]


def test_a_release_has_the_quality_report_and_its_own_sections(
    measured: tuple[Path, dict[str, Any], list[Any]], tmp_path: Path
) -> None:
    findings_file, _, errors = measured
    tpot = {"platform": "cpu", "tpot_ms": 1.5, "ttft_ms": 3.25, "requests": [{"tpot_ms": 1.4}, {"tpot_ms": 1.6}]}
    evidence = {
        "name": "tiny & small", "digest": "d" * 64, "platform": "cpu", "tensor_errors": errors,
        "programs": PROGRAMS, "tpot": tpot, "gates": GATES, "metrics": {"bytes_out": 163226688.0},
    }  # fmt: skip
    timeline = read_timeline(simulator_files(tmp_path / "run"))
    assert timeline is not None
    programs = tmp_path / "programs"
    (programs / "decode_layer").mkdir(parents=True)
    (programs / "decode_layer" / "timeline.json").write_text(json.dumps(timeline.to_trace()))
    make_reports(evidence, tmp_path / "reports", findings_file, programs)
    page = (tmp_path / "reports" / "report.html").read_text()
    for title in ("Gates", "Summary", "Speed", "PyPTO programs", "Weights", "Activations of the source"):
        assert f"<h2>{title}</h2>" in page
    assert "tiny &amp; small" in page
    assert "TPOT 1.5 ms, TTFT 3.25 ms" in page
    assert "163.2 MB" in page
    assert page.count('<span class="fail">FAIL</span>') == 1
    quality = json.loads((tmp_path / "reports" / "quality.json").read_text())
    assert quality["candidates"][0]["weights"] == errors
    names = {path.name for path in (tmp_path / "reports").iterdir()}
    assert {"tpot.png", "layer_error.png", "perplexity.png", "kl.png", "activations.png"} <= names
    written = {path.name for path in (tmp_path / "reports" / "programs" / "decode_layer").iterdir()}
    assert written == {"report.md", "report.json", "timeline.json", "timeline.png"}
    assert '<a href="programs/decode_layer/timeline.json">' in page
    assert "<td>chunks</td>" in page


def test_reports_replace_an_older_set_whole_and_do_without_measured_speed(
    measured: tuple[Path, dict[str, Any], list[Any]], tmp_path: Path
) -> None:
    findings_file, _, errors = measured
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "old.png").write_bytes(b"old")
    evidence = {
        "name": "tiny", "digest": "d" * 64, "platform": "sim", "tensor_errors": errors,
        "programs": PROGRAMS, "tpot": None, "gates": [], "metrics": {},
    }  # fmt: skip
    make_reports(evidence, folder, findings_file)
    names = {path.name for path in folder.iterdir()}
    assert not names & {"old.png", "tpot.png"}
    assert "On sim, median of serial requests: TPOT not measured" in (folder / "report.html").read_text()
