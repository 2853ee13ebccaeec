"""The compile-and-validate step: PyPTO programs for the model's shape, verified and simulated."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task

from kernels.catalog import SERVED_NAMES
from kernels.contract import DownDtype
from kernels.report import ProgramReport
from kernels.toolchain import validate
from quantize.model_config import ModelConfig, load_model_config
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.errors import ProgramsFailedError
from tasks.steps import StepRecord, run_step, step_key, write_json


def programs_key(config: ModelConfig, down: DownDtype) -> str:
    """Content key of the step: the model's shape and the text of everything the programs are made from."""
    return step_key("programs", ("quantize", "kernels"), config=asdict(config), down=down)


def key_of_checkpoint(checkpoint: Path, down: DownDtype) -> str:
    """`programs_key` of the model in a checkpoint folder."""
    return programs_key(load_model_config(checkpoint), down)


def validate_programs(work: Path, key: str, checkpoint: Path, down: DownDtype) -> StepRecord:
    """Compile, verify and simulate the programs that serve the model: one folder each, with report and artifacts.

    Raises `ProgramsFailedError` with every report when a program FAILED, so that a failure is never cached.
    """

    def build(out: Path) -> dict[str, Any]:
        out.mkdir()
        reports = validate(load_model_config(checkpoint), down=down, names=SERVED_NAMES, progress=progress.note)
        for report in reports:
            folder = out / report.name
            folder.mkdir()
            write_json(folder / "report.json", _portable(report))
            for artifact in report.artifacts:
                shutil.copyfile(artifact, folder / Path(artifact).name)
        failed = [report for report in reports if report.status != "READY"]
        if failed:
            raise ProgramsFailedError([_portable(report) for report in reports])
        return {"programs": [_portable(report) for report in reports]}

    return run_step(work, "programs", key, build)


def _portable(report: ProgramReport) -> dict[str, Any]:
    """The report with artifacts named as they are in the program's folder, not by this machine's paths."""
    return {**report.to_json(), "artifacts": [Path(artifact).name for artifact in report.artifacts]}


@task(name="compile and validate", **STEP_TASK)
def programs_step(step: str, key: str, work: str, checkpoint: str, down: DownDtype) -> StepRecord:
    """Prefect task over `validate_programs`, cached under `key`."""
    return validate_programs(Path(work), key, Path(checkpoint), down)
