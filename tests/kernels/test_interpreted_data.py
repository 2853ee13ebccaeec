"""The interpreter's results, taken from PyPTO before its cost model runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.calculator import build_calculator
from kernels.runner_process import SYSTEM_PATH

ARGUMENTS = 64
"""More than the programs take. At 44 the cost model ran beyond its table of arguments and the process died."""

SCRIPT = f"""
import sys
from pathlib import Path

import pypto
import torch

from kernels.errors import ToolchainError
from kernels.interpreted_data import take_results
from kernels.program_runner import simulation_options
from kernels.shims import install

install(Path(sys.argv[1]))
rows = [pypto.Tensor([1, 64], pypto.DT_FP32) for _ in range({ARGUMENTS + 1})]


@pypto.frontend.jit(**simulation_options(verify=True))
def add_first_and_last({", ".join(f"a{at}: rows[{at}]" for at in range(ARGUMENTS))}, out: rows[-1]):
    for _ in pypto.loop(1, name="ADD", idx_name="add"):
        pypto.set_vec_tile_shapes(1, 64)
        out[:] = pypto.add(a0, a{ARGUMENTS - 1})


tensors = [torch.full((1, 64), float(at)) for at in range({ARGUMENTS})]
out = torch.zeros(1, 64)
pypto.set_verify_golden_data(goldens=[None] * {ARGUMENTS} + [tensors[0] + tensors[-1]])
add_first_and_last(*tensors, out)
print("out", out.unique().tolist(), "inputs kept", all(bool((t == at).all()) for at, t in enumerate(tensors)))
try:
    take_results(tensors[:3])
except ToolchainError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script printed, and the folder with PyPTO's logs."""
    folder = tmp_path_factory.mktemp("many_arguments")
    script = folder / "many_arguments.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    dropped = ("ASCEND_HOME_PATH", "PYTHONHOME", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
        "PATH": os.pathsep.join((SYSTEM_PATH, os.environ.get("PATH", ""))),
        "PYTHONPATH": root,
        **dict.fromkeys(("TILE_FWK_OUTPUT_DIR", "ASCEND_WORK_PATH", "ASCEND_PROCESS_LOG_PATH"), str(folder)),
        "PYPTO_HOME": str(folder / "home"),
    }
    command = [sys.executable, str(script), str(build_calculator(None))]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, folder


def test_a_program_of_many_arguments_is_interpreted_and_simulated(ran: tuple[str, Path]) -> None:
    printed, folder = ran
    assert f"out [{ARGUMENTS - 1}.0] inputs kept True" in printed
    assert "AICore End-to-End Time" in printed
    logs = [path.read_text(errors="replace") for path in folder.rglob("*.log")]
    assert not any("Index out of bounds" in log for log in logs)


def test_other_arguments_than_the_interpreter_holds_are_refused(ran: tuple[str, Path]) -> None:
    printed, _ = ran
    assert f"the interpreter holds {ARGUMENTS + 1} arguments, expected 3" in printed
