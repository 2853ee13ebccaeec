"""Run the command line as people do: a process of its own, a store of its own, real Prefect and MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "flows.cli"]
LOOSE_GATES = "gates:\n  max_perplexity_ratio: 5\n  max_mean_kl: 5\n  min_top1_agreement: 0\n"
HOUSE_VARIABLES = ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "PYPTO_DEPLOY_STORE", "PYPTO_DEPLOY_RUN")

FAMILY = f"PYPTO_DEPLOY_TEST={uuid.uuid4().hex}"
"""Stands in the environment of every command line started here, and so in that of all its descendants."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would lead to a server or store of the user's."""
    kept = {name: value for name, value in os.environ.items() if name not in HOUSE_VARIABLES}
    return {**kept, "COLUMNS": "200", **dict([FAMILY.split("=")]), **extra}


def start_cli(*arguments: str, **extra: str) -> subprocess.Popen[str]:
    """Start the command line; stdout and stderr are pipes."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def run_cli(*arguments: str, code: int = 0, **extra: str) -> tuple[str, str]:
    """Run the command line to its end; the exit code must be `code`. Returns stdout and stderr."""
    process = start_cli(*arguments, **extra)
    stdout, stderr = process.communicate()
    assert process.returncode == code, f"exit code {process.returncode}\n{stdout}\n{stderr}"
    return stdout, stderr


def run_json(*arguments: str, code: int = 0, **extra: str) -> dict[str, Any]:
    """Run with `--json`; stdout must be exactly one object."""
    stdout, _ = run_cli(*arguments, "--json", code=code, **extra)
    answer = json.loads(stdout)
    assert isinstance(answer, dict)
    return answer


def release_arguments(source: Path, store: Path, recipe: Path) -> list[str]:
    """The arguments of a release of `source` under the name `tiny`."""
    return ["release", str(source), "--store", str(store), "--name", "tiny", "--recipe", str(recipe)]


def descendants() -> list[str]:
    """Command lines of all processes that were started by the command line under test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and FAMILY.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def assert_no_process_is_left() -> None:
    """Wait a while for the processes of ended command lines to end too; fail when one does not."""
    deadline = time.monotonic() + 20
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descendants() == []
