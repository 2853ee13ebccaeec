import os
import signal
import subprocess
import sys
import time

from flows.reaper import MARK, marked, no_orphans

PROGRAM = """
import os, subprocess, sys, time
from flows.reaper import MARK, no_orphans
with no_orphans():
    deep = "import subprocess, sys, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", deep])
    print(os.environ[MARK], flush=True)
    time.sleep(300 if sys.argv[1] == "wait" else 1.0)
"""


def start(mode: str) -> tuple[subprocess.Popen[str], str]:
    run = subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout as lines:
        mark = lines.readline().strip()
    deadline = time.monotonic() + 20
    while len(marked(mark)) < 3 and time.monotonic() < deadline:  # watcher, child, grandchild
        time.sleep(0.05)
    assert len(marked(mark)) >= 3
    return run, mark


def wait_until_gone(mark: str) -> list[int]:
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return marked(mark)


def test_sigkill_leaves_no_descendant() -> None:
    run, mark = start("wait")
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert wait_until_gone(mark) == []


def test_leaving_the_block_ends_what_is_left() -> None:
    run, mark = start("leave")
    assert run.wait() == 0
    assert wait_until_gone(mark) == []


def test_without_the_guard_a_child_would_stay() -> None:
    child = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK: "kept"})
    try:
        assert child.pid in marked("kept")
        with no_orphans(), no_orphans():
            pass
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
