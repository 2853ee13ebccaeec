"""SIGTERM and SIGHUP run the clean-up, and the exit status says which it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, sys, tempfile
from flows.cli.signals import interrupted_by_signals
with interrupted_by_signals(), tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    print(folder, flush=True)
    sys.stdin.read()
print("went on", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_after_its_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout, stderr) == (128 + number, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored_and_forks_do_not_clean_up(tmp_path: Path) -> None:
    program = """
import os, signal
from flows.cli.signals import interrupted_by_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with interrupted_by_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n", "")
