"""Releases that are killed, run beside one another, or find their own work damaged: the same bundle every time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from serving.bundle import verify_bundle
from serving.store import BundleStore
from tests.flows.support import assert_no_process_is_left, release_arguments, run_json, start_cli

KILL_AT = ["quantize", "stage", "programs", "quality", "tpot", "mlflow"]


def test_damaged_step_outputs_are_made_again(
    released: tuple[Path, dict[str, Any]], source: Path, recipe: Path, tmp_path: Path
) -> None:
    store, first = released
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for slabs in copy.glob("work/stage/*/out/*.safetensors"):
        with slabs.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x55")
    again = run_json(*release_arguments(source, copy, recipe))
    assert again["digest"] == first["digest"]


def test_two_releases_at_once_on_a_new_store_end_with_the_same_bundle(
    released: tuple[Path, dict[str, Any]], source: Path, recipe: Path, tmp_path: Path
) -> None:
    _, first = released
    store = tmp_path / "store"
    runs = [start_cli(*release_arguments(source, store, recipe), "--json") for _ in range(2)]
    for run in runs:
        stdout, stderr = run.communicate()
        assert run.returncode == 0, stderr
        answer = json.loads(stdout)
        assert answer["digest"] == first["digest"]
        assert answer["mlflow_run_id"] is not None, answer["tracking_problem"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_resumes_to_the_same_digest(
    released: tuple[Path, dict[str, Any]], source: Path, recipe: Path, tmp_path: Path
) -> None:
    _, undisturbed = released
    store = tmp_path / "store"
    for step in KILL_AT:
        run = start_cli(*release_arguments(source, store, recipe))
        pattern = "mlflow/mlflow.db" if step == "mlflow" else f"work/{step}/*.tmp-*"
        while not list(store.glob(pattern)):
            assert run.poll() is None, run.communicate()
            time.sleep(0.002)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert_no_process_is_left()
        for bundle in BundleStore(store).bundles():
            assert verify_bundle(bundle.path) == []
    resumed = run_json(*release_arguments(source, store, recipe))
    assert resumed["digest"] == undisturbed["digest"]
    assert resumed["promoted"] is True
    assert list(store.glob("work/*/*.tmp-*")) == []
