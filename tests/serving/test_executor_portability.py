"""The native step outside Python: other architectures by emulation, sanitizers, and one checksum everywhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from serving.executor.native_build import COMMON_FLAGS, INSTRUCTION_SETS, SOURCE_DIR, available_instruction_sets

PROBE = Path(__file__).parent / "native_probe.cpp"
CHECKSUM = "1b2be989adb1cd8a"
"""Over the bits of 200 x 320 logits of the probe's model. It changes when, and only when, the arithmetic changes."""
FLAGS = [flag for flag in COMMON_FLAGS if flag not in ("-fPIC", "-shared")]


def build(compiler: str, out: Path, *flags: str) -> Path:
    command = [compiler, *FLAGS, *flags, f"-I{SOURCE_DIR}", str(PROBE), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("name", available_instruction_sets())
def test_the_arithmetic_is_pinned(name: str, tmp_path: Path) -> None:
    flags = next(each.flags for each in INSTRUCTION_SETS if each.name == name)
    assert run(str(build("g++", tmp_path / "probe", *flags))) == [name, "0", CHECKSUM]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
@pytest.mark.parametrize("name", ["neon", "portable"])
def test_arm_gives_the_same_bits_under_emulation(name: str, tmp_path: Path) -> None:
    flags = next(each.flags for each in INSTRUCTION_SETS if each.name == name)
    probe = build("aarch64-linux-gnu-g++", tmp_path / "probe", "-static", *flags)
    assert run("qemu-aarch64", "-cpu", "max", str(probe)) == [name, "0", CHECKSUM]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1")
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    empty = subprocess.run(["g++", *flags, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")], check=False)
    if empty.returncode or subprocess.run([str(tmp_path / "empty")], capture_output=True, check=False).returncode:
        pytest.skip(f"the {sanitizer} sanitizer does not work on this machine")
    probe = build("g++", tmp_path / "probe", *flags)
    assert run(str(probe)) == ["portable", "0", CHECKSUM]
