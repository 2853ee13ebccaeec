import json
import shutil
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import TrackingError
from tasks.track import EXPERIMENT, flush_pending, log_or_keep, log_release, mirror_alias, pending
from tasks.tracking import Tracking

pytestmark = pytest.mark.filterwarnings("default")  # MLflow's own start-up warns; what is tested here is ours


def evidence(digest: str = "d" * 64, recipe_note: str = "") -> dict[str, Any]:
    return {
        "name": "tiny",
        "digest": digest,
        "passed": True,
        "registered": True,
        "gates": [{"name": "mean_kl", "value": 0.01, "bound": 0.1, "direction": "<=", "passed": True}],
        "programs": [{"name": "decode_layer", "status": "READY", "passes": ["tensor_graph"], "simulated_us": 9.5}],
        "recipe": {"arithmetic": "fp32", "note": recipe_note},
        "tpot": {"platform": "cpu", "tpot_ms": 1.5, "requests": [{"tpot_ms": 1.4}, {"tpot_ms": 1.6}]},
        "metrics": {"mean_kl": 0.01, "tpot_ms": 1.5, "absent": None},
        "params": {"source": "x" * 20_000},
        "tags": {
            "bundle_digest": digest,
            "git_commit": None,
            "timeline.decode_layer": "reports/programs/decode_layer/timeline.json",
        },
    }


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "report.html").write_text("<html></html>")
    (folder / "programs" / "decode_layer").mkdir(parents=True)
    (folder / "programs" / "decode_layer" / "timeline.json").write_text("{}")
    return folder


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Tracking.of_store(tmp_path / "store")


def client(tracking: Tracking) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking.uri, tracking.uri)


def test_a_release_is_one_run_and_one_version(tracking: Tracking, reports: Path) -> None:
    tracked = log_release(tracking, evidence(recipe_note="r" * 20_000), reports)
    mlflow = client(tracking)
    run = mlflow.get_run(tracked.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"mean_kl": 0.01, "tpot_ms": 1.5, "tpot_ms_per_request": 1.6}
    assert run.data.tags["bundle_digest"] == "d" * 64
    assert "git_commit" not in run.data.tags
    assert "| mean_kl | 0.01 | <= 0.1 | pass |" in run.data.tags["mlflow.note.content"]
    trace = run.data.tags["timeline.decode_layer"]
    assert [item.path for item in mlflow.list_artifacts(tracked.run_id, str(Path(trace).parent))] == [trace]
    assert f"| decode_layer | READY | 1 passes | 9.5 us | {trace} |" in run.data.tags["mlflow.note.content"]
    assert len(run.data.params["source"]) == 500
    assert {item.path for item in mlflow.list_artifacts(tracked.run_id)} == {"bundle", "recipe.json", "reports"}
    version = mlflow.get_model_version("tiny", tracked.model_version)
    assert version.tags["digest"] == "d" * 64
    assert version.run_id == tracked.run_id


def test_the_same_bundle_again_is_a_new_run_of_the_same_version(tracking: Tracking, reports: Path) -> None:
    first = log_release(tracking, evidence(), reports)
    second = log_release(tracking, evidence(), reports)
    other = log_release(tracking, evidence("e" * 64), reports)
    assert first.run_id != second.run_id
    assert first.model_version == second.model_version
    assert other.model_version != first.model_version


def test_an_alias_mirrors_the_digest(tracking: Tracking, reports: Path) -> None:
    tracked = log_release(tracking, evidence(), reports)
    assert mirror_alias(tracking, "d" * 64, "champion") == tracked.model_version
    assert client(tracking).get_model_version_by_alias("tiny", "champion").version == int(tracked.model_version or 0)
    assert mirror_alias(tracking, "f" * 64, "champion") is None


def test_a_failed_release_is_a_failed_run(tracking: Tracking, reports: Path) -> None:
    tracked = log_release(tracking, {**evidence(), "passed": False, "registered": False}, reports)
    assert client(tracking).get_run(tracked.run_id).info.status == "FAILED"
    assert tracked.model_version is None


def test_an_outage_keeps_the_evidence_and_logs_it_later(tracking: Tracking, reports: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = tracking.model_copy(update={"uri": f"http://127.0.0.1:{unused.getsockname()[1]}"})
        with pytest.raises(TrackingError, match="MLflow at http"):
            log_release(down, evidence(), reports)
        kept = log_or_keep(down, evidence(), reports)
    assert kept.run_id is None
    assert kept.problem is not None
    assert "the evidence waits in" in kept.problem
    (waiting,) = pending(tracking)
    assert json.loads((waiting / "evidence.json").read_text())["digest"] == "d" * 64

    (logged,) = flush_pending(tracking)
    assert pending(tracking) == []
    experiment = client(tracking).get_experiment_by_name(EXPERIMENT)
    runs = client(tracking).search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [logged.run_id]


def test_a_removal_cut_short_does_not_wait_again(
    tracking: Tracking, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = tracking.model_copy(update={"uri": "http://127.0.0.1:9"})
    assert log_or_keep(down, evidence(), reports).run_id is None
    remove = shutil.rmtree

    def cut_short(folder: Path, **options: Any) -> None:
        if Path(folder).parent == Path(tracking.pending):
            (Path(folder) / "evidence.json").unlink()
        else:
            remove(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr("tasks.track.shutil.rmtree", cut_short)
        assert len(flush_pending(tracking)) == 1
    assert pending(tracking) == []
    assert log_or_keep(tracking, evidence(), reports).run_id is not None


def test_a_broken_database_is_an_outage_and_not_a_crash(tracking: Tracking, reports: Path) -> None:
    folder = Path(tracking.artifacts).parent
    folder.mkdir(parents=True)
    (folder / "mlflow.db").write_bytes(b"not a database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(folder / "mlflow.db").execute("select 1 from sqlite_master")
    assert log_or_keep(tracking, evidence(), reports).problem is not None
