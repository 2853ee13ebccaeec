import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.errors import StepError
from tasks.steps import code_digest, find_record, folder_digest, run_step, step_key


def build_text(text: str, calls: list[str]):
    def build(out: Path) -> dict[str, str]:
        calls.append(text)
        out.mkdir()
        (out / "a.txt").write_text(text)
        return {"text": text}

    return build


def test_a_finished_step_is_reused(tmp_path: Path) -> None:
    calls: list[str] = []
    first = run_step(tmp_path, "demo", "k", build_text("one", calls))
    again = run_step(tmp_path, "demo", "k", build_text("two", calls))
    assert calls == ["one"]
    assert again == first
    assert first.out.joinpath("a.txt").read_text() == "one"
    assert first.digest == folder_digest(first.out)


@pytest.mark.parametrize("damage", ["change", "remove", "extra", "record"])
def test_a_damaged_output_is_built_again(tmp_path: Path, damage: str) -> None:
    calls: list[str] = []
    record = run_step(tmp_path, "demo", "k", build_text("one", calls))
    if damage == "change":
        (record.out / "a.txt").write_text("oNe")
    elif damage == "remove":
        (record.out / "a.txt").unlink()
    elif damage == "extra":
        (record.out / "b.txt").write_text("")
    else:
        (record.out.parent / "record.json").write_text('{"step": "demo"')
    assert find_record(tmp_path, "demo", "k") is None
    again = run_step(tmp_path, "demo", "k", build_text("one", calls))
    assert calls == ["one", "one"]
    assert again.digest == record.digest


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(out: Path) -> dict[str, str]:
        out.mkdir()
        (out / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_step(tmp_path, "demo", "k", build)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["k.lock"]


def test_a_build_without_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="built no folder"):
        run_step(tmp_path, "demo", "k", lambda out: {})


def test_a_killed_build_is_cleaned_up_and_built_again(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tasks.steps import run_step
def build(out):
    out.mkdir()
    (out / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
run_step(Path({str(tmp_path)!r}), "demo", "k", build)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert find_record(tmp_path, "demo", "k") is None
    record = run_step(tmp_path, "demo", "k", build_text("one", []))
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["k", "k.lock"]
    assert [path.name for path in record.out.iterdir()] == ["a.txt"]


def test_two_processes_build_a_key_once(tmp_path: Path) -> None:
    program = f"""
import json, time
from pathlib import Path
from tasks.steps import run_step
def build(out):
    out.mkdir()
    time.sleep(0.3)
    Path({str(tmp_path)!r}, "calls").open("a").write("x")
    return {{}}
print(run_step(Path({str(tmp_path)!r}), "demo", "k", build).digest)
"""
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    digests = {run.communicate()[0] for run in runs}
    assert len(digests) == 1
    assert (tmp_path / "calls").read_text() == "x"


def test_a_moved_store_is_still_found(tmp_path: Path) -> None:
    run_step(tmp_path / "a", "demo", "k", build_text("one", []))
    (tmp_path / "a").rename(tmp_path / "b")
    record = find_record(tmp_path / "b", "demo", "k")
    assert record is not None
    assert record.out == tmp_path / "b" / "demo" / "k" / "out"


def test_keys_depend_on_each_input_and_on_the_code() -> None:
    base = step_key("demo", ("tasks",), a=1, b="x")
    assert base == step_key("demo", ("tasks",), b="x", a=1)
    others = {
        step_key("other", ("tasks",), a=1, b="x"),
        step_key("demo", ("tasks",), a=2, b="x"),
        step_key("demo", ("tasks",), a=1, b="y"),
        step_key("demo", ("flows",), a=1, b="x"),
    }
    assert base not in others
    assert len(others) == 4
    assert code_digest("tasks") != code_digest("flows")


def test_folder_digest_sees_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(1))
    first = folder_digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert folder_digest(tmp_path) != first
