"""What the cost model's run looked like: which core did which task when, by stage, as a trace and in figures.

PyPTO's simulator leaves a list of cores with their tasks (in cycles), a table from task to compiled function, and the
functions' names, which carry the name of the loop they come from: that loop is a *stage*. From these a `Timeline` is
made, for runs of any length, and written as a trace that https://ui.perfetto.dev opens. Simulated, never measured on a
device.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.errors import ToolchainError

__all__ = ["MAX_TRACE_TASKS", "Stage", "Task", "Timeline", "read_timeline", "simulated_cycles"]

CYCLES_PER_US = 1800.0
CORES = {"cube": 24, "vector": 48}
"""Cores of the Ascend 910B2 as the cost model has them."""
MAX_TRACE_TASKS = 40_000
"""Tasks that a trace holds, about 4 MB; of a longer run the longest tasks are kept."""

_KINDS = {"AIC": "cube", "AIV": "vector"}
_FOLDER = "CostModelSimulationOutput"
_CORES_FILE = "_simulate.swim.json"
_STAGE = re.compile(r"TENSOR_(.+?)_Unroll\d+")
_STAGES_PID = 0
_PIDS = {"cube": 1, "vector": 2}


@dataclass(frozen=True)
class Task:
    """One task on one core: `start_us` counts from the start of the run's first task."""

    kind: str
    core: int
    stage: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Stage:
    """A loop of the program: how often it was submitted, the time it added, and its tasks.

    A stage lasts from the end of what came before to the end of its own last task, so that waiting counts; where
    stages overlap, the earlier has the time. `busy` is the share of its time that cores were at work, by kind.
    """

    name: str
    runs: int
    us: float
    cube_tasks: int
    vector_tasks: int
    busy: dict[str, float]


@dataclass(frozen=True)
class Timeline:
    """A simulated run: its length, how busy the cores were, its stages in the order of their start, and its tasks.

    `tasks` are the longest `MAX_TRACE_TASKS` of `total_tasks` where there are more; all figures are over all of them.
    """

    us: float
    busy: dict[str, float]
    stages: tuple[Stage, ...]
    tasks: tuple[Task, ...]
    total_tasks: int

    def to_trace(self) -> dict[str, Any]:
        """The run in the trace event format: a row a core, and the figures beside it."""
        events: list[dict[str, Any]] = [_named("process_name", "stages", _STAGES_PID)]
        for kind, pid in _PIDS.items():
            events.append(_named("process_name", f"{kind} cores", pid))
            cores = sorted({task.core for task in self.tasks if task.kind == kind})
            events += [_named("thread_name", f"{kind} {core}", pid, core) for core in cores]
        for name, start_us, end_us in _spans(self.tasks):
            events.append(_event(name, _STAGES_PID, 0, start_us, end_us))
        events += [_event(task.stage, _PIDS[task.kind], task.core, task.start_us, task.end_us) for task in self.tasks]
        figures = {"us": self.us, "busy": self.busy, "stages": [asdict(stage) for stage in self.stages]}
        about = {
            **figures,
            "total_tasks": self.total_tasks,
            "device": "Ascend 910B2, cost model of PyPTO; nothing is measured",
        }
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}

    @classmethod
    def from_trace(cls, trace: Mapping[str, Any]) -> Timeline:
        """Read back `to_trace`; raises ToolchainError for a trace of another making."""
        try:
            about = trace["otherData"]
            kinds = {pid: kind for kind, pid in _PIDS.items()}
            tasks = tuple(
                Task(kinds[event["pid"]], event["tid"], event["name"], event["ts"], event["ts"] + event["dur"])
                for event in trace["traceEvents"]
                if event["ph"] == "X" and event["pid"] in kinds
            )
            stages = tuple(Stage(**stage) for stage in about["stages"])
            return cls(about["us"], about["busy"], stages, tasks, about["total_tasks"])
        except (KeyError, TypeError) as error:
            raise ToolchainError(f"the trace has no timeline of ours ({error!r}); simulate the program again") from None


def read_timeline(output: Path) -> Timeline | None:
    """The timeline of the run whose files are under `output`; None when the simulator left none.

    Raises ToolchainError for files of another form.
    """
    for path in sorted(output.glob(f"*/{_FOLDER}/{_CORES_FILE}")):
        with _understood(path):
            stage_of = _stages_by_task(path.parent.parent)
            tasks = [
                (kind, number, stage_of.get((seq, task), f"STAGE {seq}"), seq, start, end)
                for kind, number, seq, task, start, end in _tasks(path)
            ]
        if tasks:
            return _timeline(tasks)
    return None


def simulated_cycles(output: Path) -> int | None:
    """Cycles from the start of the first task to the end of the last; None when the simulator left no tasks.

    Raises ToolchainError for files of another form.
    """
    for path in sorted(output.glob(f"*/{_FOLDER}/{_CORES_FILE}")):
        with _understood(path):
            spans = [(start, end) for *_, start, end in _tasks(path)]
        if spans:
            return max(end for _, end in spans) - min(start for start, _ in spans)
    return None


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Name the run whose files are not what PyPTO 0.2.0 writes."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise ToolchainError(
            f"the simulator's files in {path.parent} are not of the form that is known here: {error!r}"
        ) from error


def _tasks(path: Path) -> Iterable[tuple[str, int, int, int, int, int]]:
    """Kind of core, its number among its kind, submission, task, first and last cycle of every task."""
    numbers: dict[str, int] = defaultdict(int)
    for core in json.loads(path.read_text()):
        kind = _KINDS.get(core["coreType"])
        if kind is None:  # the scheduler's bookkeeping
            continue
        number = numbers[kind]
        numbers[kind] += 1
        for task in core["tasks"]:
            yield kind, number, task["seqNo"], task["taskId"], task["execStart"], task["execEnd"]


def _stages_by_task(folder: Path) -> dict[tuple[int, int], str]:
    """The loop that each task (submission, number) comes from, as far as PyPTO's tables say."""
    topology, compiled = folder / "dyn_topo.txt", folder / "program.json"
    if not topology.is_file() or not compiled.is_file():
        return {}
    names = {}
    for function in json.loads(compiled.read_text())["functions"]:
        if match := _STAGE.match(function["func_magicname"]):
            names[str(function["hash"])] = match[1]
    found = {}
    with topology.open(newline="") as stream:
        for row in csv.DictReader(stream):
            if (name := names.get(row["leafHash"])) is not None:
                found[int(row["seqNo"]), int(row["taskId"])] = name
    return found


def _timeline(raw: list[tuple[str, int, str, int, int, int]]) -> Timeline:
    first = min(start for *_, start, _ in raw)
    by_run: dict[tuple[int, str], list[tuple[str, float, float]]] = defaultdict(list)
    tasks = []
    for kind, core, stage, seq, start, end in raw:
        task = Task(kind, core, stage, (start - first) / CYCLES_PER_US, (end - first) / CYCLES_PER_US)
        by_run[seq, stage].append((kind, task.start_us, task.end_us))
        tasks.append(task)
    total_us = max(task.end_us for task in tasks)
    kept = sorted(tasks, key=lambda task: task.start_us - task.end_us)[:MAX_TRACE_TASKS]
    return Timeline(
        us=round(total_us, 2),
        busy=_busy(((task.kind, task.start_us, task.end_us) for task in tasks), total_us),
        stages=_stages(by_run),
        tasks=tuple(sorted((_rounded(task) for task in kept), key=lambda task: (task.start_us, task.kind, task.core))),
        total_tasks=len(tasks),
    )


def _stages(by_run: Mapping[tuple[int, str], list[tuple[str, float, float]]]) -> tuple[Stage, ...]:
    """The stages, each over all its submissions, in the order of their first start."""
    added_us: dict[str, float] = defaultdict(float)
    of: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    runs: dict[str, int] = defaultdict(int)
    before_us = 0.0
    for (_, name), spans in sorted(by_run.items(), key=lambda item: max(end for *_, end in item[1])):
        end_us = max(end for *_, end in spans)
        added_us[name] += end_us - before_us
        before_us = end_us
        of[name] += spans
        runs[name] += 1
    ordered = sorted(of, key=lambda name: min(start for _, start, _ in of[name]))
    return tuple(
        Stage(
            name=name,
            runs=runs[name],
            us=round(added_us[name], 2),
            cube_tasks=sum(kind == "cube" for kind, *_ in of[name]),
            vector_tasks=sum(kind == "vector" for kind, *_ in of[name]),
            busy=_busy(of[name], added_us[name]),
        )
        for name in ordered
    )


def _busy(spans: Iterable[tuple[str, float, float]], total_us: float) -> dict[str, float]:
    """The share of `total_us` that the cores of each kind were at work, over all cores of the device."""
    work = dict.fromkeys(CORES, 0.0)
    for kind, start_us, end_us in spans:
        work[kind] += end_us - start_us
    return {kind: round(work[kind] / (CORES[kind] * total_us), 4) if total_us > 0 else 0.0 for kind in CORES}


def _spans(tasks: Iterable[Task]) -> list[tuple[str, float, float]]:
    """First start and last end of every unbroken stretch of one stage, in time order."""
    spans: list[tuple[str, float, float]] = []
    for task in sorted(tasks, key=lambda task: task.start_us):
        if spans and spans[-1][0] == task.stage:
            name, start_us, end_us = spans[-1]
            spans[-1] = (name, start_us, max(end_us, task.end_us))
        else:
            spans.append((task.stage, task.start_us, task.end_us))
    return spans


def _rounded(task: Task) -> Task:
    return Task(task.kind, task.core, task.stage, round(task.start_us, 3), round(task.end_us, 3))


def _event(name: str, pid: int, tid: int, start_us: float, end_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": round(start_us, 3),
        "dur": round(end_us - start_us, 3),
        "name": name,
    }


def _named(what: str, name: str, pid: int, tid: int | None = None) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "args": {"name": name}, **({} if tid is None else {"tid": tid})}
