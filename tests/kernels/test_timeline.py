"""The timeline of a simulated run: its stages and figures from PyPTO's files, the trace, and its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernels.timeline
from kernels.errors import ToolchainError
from kernels.timeline import Timeline, read_timeline, simulated_cycles
from kernels.verdict import read_simulated_us

US = 1800


def simulator_files(folder: Path) -> Path:
    """A run of two stages: NORM on one vector core, then CHUNKS twice on two cube cores; 10 us in all."""
    output = folder / "output_1"
    (output / "CostModelSimulationOutput").mkdir(parents=True)
    functions = [
        {"hash": 11, "func_magicname": "TENSOR_NORM_Unroll1_PATH0_hiddenfunc0_leaf0_5"},
        {"hash": 12, "func_magicname": "TENSOR_CHUNKS_Unroll1_PATH0_hiddenfunc0_leaf3_9"},
        {"hash": 13, "func_magicname": "PROGRAM_ENTRY"},
    ]
    (output / "program.json").write_text(json.dumps({"functions": functions}))
    rows = ["0,7,0,1,2,0,11,0,0,,8", "1,0,0,1,2,0,12,0,0,", "2,0,0,1,2,0,12,0,0,"]
    header = "seqNo,taskId,rootIndex,rootHash,opmagic,leafIndex,leafHash,coreType,psgId,successors"
    (output / "dyn_topo.txt").write_text("\n".join([header, *rows]) + "\n")

    def task(seq: int, number: int, start_us: float, end_us: float) -> dict[str, int]:
        return {"seqNo": seq, "taskId": number, "execStart": int(start_us * US), "execEnd": int(end_us * US)}

    cores = [
        {"coreType": "AIC", "blockIdx": 0, "tasks": [task(1, 0, 9, 12)]},
        {"coreType": "AIC", "blockIdx": 1, "tasks": [task(2, 0, 11, 15)]},
        {"coreType": "AIV", "blockIdx": 24, "tasks": [task(0, 7, 5, 8)]},
        {"coreType": "HUB", "blockIdx": 79, "tasks": [task(0, 0, 0, 30)]},
    ]
    (output / "CostModelSimulationOutput" / "_simulate.swim.json").write_text(json.dumps(cores))
    return folder


def test_stages_have_the_names_of_their_loops_and_the_time_they_add(tmp_path: Path) -> None:
    timeline = read_timeline(simulator_files(tmp_path))
    assert timeline is not None
    assert (timeline.us, timeline.total_tasks) == (10.0, 3)
    norm, chunks = timeline.stages
    assert (norm.name, norm.runs, norm.us, norm.cube_tasks, norm.vector_tasks) == ("NORM", 1, 3.0, 0, 1)
    assert (chunks.name, chunks.runs, chunks.us, chunks.cube_tasks, chunks.vector_tasks) == ("CHUNKS", 2, 7.0, 2, 0)
    assert sum(stage.us for stage in timeline.stages) == timeline.us
    assert timeline.busy == {"cube": round(7 / (24 * 10), 4), "vector": round(3 / (48 * 10), 4)}
    assert chunks.busy["cube"] == round(7 / (24 * 7), 4)


def test_a_long_run_has_the_same_measure_of_time_as_a_short_one(tmp_path: Path) -> None:
    output = simulator_files(tmp_path)
    assert simulated_cycles(output) == 10 * US
    assert read_simulated_us("AICore End-to-End Time: 10.00\n", output) == read_simulated_us("", output) == 10.0


def test_the_trace_has_a_row_a_core_and_reads_back(tmp_path: Path) -> None:
    timeline = read_timeline(simulator_files(tmp_path))
    assert timeline is not None
    trace = json.loads(json.dumps(timeline.to_trace()))
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert rows == {"cube 0", "cube 1", "vector 0"}
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    spans = [(event["name"], event["ts"], event["dur"]) for event in drawn if event["pid"] == 0]
    assert spans == [("NORM", 0.0, 3.0), ("CHUNKS", 4.0, 6.0)]
    assert Timeline.from_trace(trace) == timeline
    with pytest.raises(ToolchainError, match="simulate the program again"):
        Timeline.from_trace({"traceEvents": []})


def test_a_longer_run_keeps_its_longest_tasks_and_all_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = simulator_files(tmp_path)
    whole = read_timeline(output)
    monkeypatch.setattr(kernels.timeline, "MAX_TRACE_TASKS", 1)
    thinned = read_timeline(output)
    assert whole is not None
    assert thinned is not None
    assert [(task.stage, task.end_us - task.start_us) for task in thinned.tasks] == [("CHUNKS", 4.0)]
    assert (thinned.stages, thinned.busy, thinned.total_tasks) == (whole.stages, whole.busy, 3)


def test_stages_without_names_are_numbered_and_no_tasks_are_no_timeline(tmp_path: Path) -> None:
    output = simulator_files(tmp_path)
    (output / "output_1" / "dyn_topo.txt").unlink()
    timeline = read_timeline(output)
    assert timeline is not None
    assert [stage.name for stage in timeline.stages] == ["STAGE 0", "STAGE 1", "STAGE 2"]
    (output / "output_1" / "CostModelSimulationOutput" / "_simulate.swim.json").write_text("[]")
    assert read_timeline(output) is None
    assert simulated_cycles(output) is None


def test_files_of_another_form_are_refused_by_folder(tmp_path: Path) -> None:
    output = simulator_files(tmp_path)
    (output / "output_1" / "CostModelSimulationOutput" / "_simulate.swim.json").write_text('[{"core": 1}]')
    with pytest.raises(ToolchainError, match="not of the form that is known here: KeyError"):
        read_timeline(output)
    with pytest.raises(ToolchainError, match="CostModelSimulationOutput"):
        read_simulated_us("", output)
