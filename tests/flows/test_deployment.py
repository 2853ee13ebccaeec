"""`prefect.yaml` names flows that Prefect can load, with parameters that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.support import environment

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
LOAD = """
import json, sys
from prefect.flows import load_flow_from_entrypoint
flow = load_flow_from_entrypoint(sys.argv[1])
given = json.loads(sys.argv[2])
print(json.dumps(sorted(flow.validate_parameters(given))))
"""


def validate(entrypoint: str, parameters: dict[str, object], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, entrypoint, json.dumps(parameters)],
        cwd=ROOT,
        env=environment(PREFECT_HOME=str(home), DO_NOT_TRACK="1"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_each_deployment_loads_and_its_parameters_fit(deployment: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"source": "models/any", **dict(deployment.get("parameters", {}))}
    done = validate(str(deployment["entrypoint"]), parameters, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "source" in json.loads(done.stdout)


@pytest.mark.parametrize(
    "wrong", [{"platform": "tpu"}, {"promote": "maybe"}, {"quality_tokens": 3}, {"name": "a b"}, {"sourse": "x"}]
)
def test_a_wrong_parameter_is_refused_when_a_run_is_asked_for(wrong: dict[str, object], tmp_path: Path) -> None:
    done = validate("flows/release.py:release", {"source": "x", **wrong}, tmp_path)
    assert done.returncode != 0
    assert next(iter(wrong)) in done.stderr
