"""Log a release to MLflow: one run with its evidence, and a registered model version that mirrors the bundle.

The bundle store is the truth for serving; MLflow is where people review. So a tracking server that is down never
stops a release: the evidence is kept in the store's `pending/` folder and logged by the next release or by
`pypto-deploy status --log-pending`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from pydantic import BaseModel, ConfigDict

from serving.bundle import update_evidence
from serving.files import locked
from tasks.errors import TrackingError
from tasks.steps import write_json
from tasks.tracking import Tracking

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

EXPERIMENT = "pypto-deploy"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Tells MLflow's pages that these runs are of model development, and not of generative-AI traces."""
_PARAM_CHARACTERS = 500
_HTTP_TIMEOUT_S, _HTTP_RETRIES = "15", "1"


class Tracked(BaseModel):
    """What MLflow knows of a release; both are None while the evidence waits to be logged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str | None
    model_version: str | None
    problem: str | None = None


def log_release(tracking: Tracking, evidence: Mapping[str, Any], reports: Path) -> Tracked:
    """Log one run (params, metrics, tags, reports) and register the bundle as a model version.

    Raises `TrackingError` when MLflow cannot be reached or refuses; nothing is promoted by this.
    """
    with _client(tracking) as client:
        run_id = _log_run(client, tracking, evidence, reports)
        version = None
        if evidence["registered"]:
            version = _register(client, evidence["name"], evidence["digest"], run_id)
    return Tracked(run_id=run_id, model_version=version)


def log_or_keep(tracking: Tracking, evidence: Mapping[str, Any], reports: Path) -> Tracked:
    """Log the release after whatever still waits; on an outage keep the evidence and say so in the result."""
    try:
        flush_pending(tracking)
        return log_release(tracking, evidence, reports)
    except TrackingError as error:
        folder = Path(tracking.pending) / f"{evidence['digest'][:12]}-{uuid.uuid4().hex[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}")
        shutil.copytree(reports, temporary / "reports")
        write_json(temporary / "evidence.json", dict(evidence))
        temporary.rename(folder)
        logger.warning("MLflow is not available (%s); the evidence waits in %s", error, folder)
        return Tracked(run_id=None, model_version=None, problem=f"{error}; the evidence waits in {folder}")


def log_failure(tracking: Tracking, evidence: Mapping[str, Any]) -> Tracked:
    """Log a release that stopped before it had a bundle, so that the failed try can be reviewed too."""
    with tempfile.TemporaryDirectory() as reports:
        write_json(Path(reports) / "programs.json", evidence["programs"])
        return log_or_keep(tracking, evidence, Path(reports))


def flush_pending(tracking: Tracking) -> list[Tracked]:
    """Log every release whose evidence waits; each is removed once MLflow has it. Raises `TrackingError`."""
    logged = []
    for folder in pending(tracking):
        evidence = json.loads((folder / "evidence.json").read_text())
        tracked = log_release(tracking, evidence, folder / "reports")
        _record_run(tracking, evidence["digest"], tracked.run_id)
        logged.append(tracked)
        # Out of sight in one move: a removal cut short must not leave a folder that looks as if it still waited.
        done = folder.with_name(f".{folder.name}")
        folder.rename(done)
        shutil.rmtree(done)
    return logged


def _record_run(tracking: Tracking, digest: str, run_id: str | None) -> None:
    """Name the run in the bundle's manifest, if the bundle is still in the store."""
    bundle = Path(tracking.pending).parent / "bundles" / digest
    if bundle.is_dir():
        update_evidence(bundle, mlflow_run_id=run_id)


def pending(tracking: Tracking) -> list[Path]:
    """Folders of evidence that MLflow has not seen yet, oldest first."""
    folder = Path(tracking.pending)
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime
    )


def mirror_alias(tracking: Tracking, digest: str, alias: str) -> str | None:
    """Point the registered model's alias at the version of `digest`; returns the version, None if unknown there."""
    with _client(tracking) as client:
        versions = client.search_model_versions(f"tags.digest = '{digest}'")
        if not versions:
            return None
        newest = max(versions, key=lambda version: int(version.version))
        client.set_registered_model_alias(newest.name, alias, newest.version)
        return str(newest.version)


@contextmanager
def _client(tracking: Tracking) -> Iterator[MlflowClient]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    # The defaults (120 s, 7 retries) would hold a release for a quarter of an hour when the server is down.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _HTTP_TIMEOUT_S)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _HTTP_RETRIES)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    if tracking.is_local:
        Path(tracking.artifacts).mkdir(parents=True, exist_ok=True)
    try:
        # Making a client, or its first call, makes or migrates a local database; two processes at once would break it.
        lock = locked(Path(tracking.artifacts).parent / ".migration.lock") if tracking.is_local else nullcontext()
        with lock:
            client = MlflowClient(tracking_uri=tracking.uri, registry_uri=tracking.uri)
            if tracking.is_local:
                client.search_experiments(max_results=1)
                client.search_registered_models(max_results=1)
        yield client
    except (MlflowException, RequestException, SQLAlchemyError) as error:
        raise TrackingError(f"MLflow at {tracking.uri}: {str(error).splitlines()[0]}") from error


def _log_run(client: MlflowClient, tracking: Tracking, evidence: Mapping[str, Any], reports: Path) -> str:
    from mlflow.entities import Metric, Param, RunTag

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        location = Path(tracking.artifacts).as_uri() if tracking.is_local else None
        experiment_id = client.create_experiment(EXPERIMENT, artifact_location=location, tags=EXPERIMENT_TAGS)
    else:
        experiment_id = experiment.experiment_id
    run = client.create_run(experiment_id, run_name=f"{evidence['name']} {evidence['digest'][:12]}")
    run_id = str(run.info.run_id)
    client.log_batch(
        run_id,
        metrics=[
            Metric(name, value, run.info.start_time, 0)
            for name, value in evidence["metrics"].items()
            if value is not None
        ],
        params=[Param(name, str(value)[:_PARAM_CHARACTERS]) for name, value in evidence["params"].items()],
        tags=[
            RunTag("mlflow.note.content", _description(evidence)),
            RunTag("mlflow.source.name", "pypto-deploy release"),
            *(RunTag(name, str(value)) for name, value in evidence["tags"].items() if value is not None),
        ],
    )
    client.log_dict(run_id, dict(evidence["recipe"]), "recipe.json")
    client.log_dict(run_id, dict(evidence), "bundle/evidence.json")
    client.log_artifacts(run_id, str(reports), "reports")
    for index, request in enumerate((evidence["tpot"] or {}).get("requests", [])):
        client.log_metric(run_id, "tpot_ms_per_request", request["tpot_ms"], step=index)
    client.set_terminated(run_id, "FINISHED" if evidence["passed"] else "FAILED")
    return run_id


def _description(evidence: Mapping[str, Any]) -> str:
    """The run's description in MLflow, Markdown: what a reviewer looks at first, and where the timelines are."""
    gates = [
        f"| {gate['name']} | {gate['value']:.4g} | {gate['direction']} {gate['bound']:g} | {_mark(gate['passed'])} |"
        for gate in evidence["gates"]
        if gate["value"] is not None
    ]
    timelines = {
        program["name"]: evidence["tags"].get("timeline." + program["name"]) for program in evidence["programs"]
    }
    programs = [
        f"| {program['name']} | {program['status']} | {len(program['passes'])} passes | {program['simulated_us']} us | "
        f"{timelines[program['name']] or '-'} |"
        for program in evidence["programs"]
    ]
    return "\n".join(
        [
            f"Bundle `{evidence['digest']}`, gates {'hold' if evidence['passed'] else '**do not hold**'}.",
            "",
            "| gate | measured | bound | |",
            "|---|---|---|---|",
            *gates,
            "",
            "| PyPTO program | status | verified | simulated (cost model) | timeline, among the artifacts |",
            "|---|---|---|---|---|",
            *programs,
        ]
    )


def _mark(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _register(client: MlflowClient, name: str, digest: str, run_id: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = client.search_model_versions(f"name = '{name}' and tags.digest = '{digest}'")
    if known:
        return str(max(known, key=lambda version: int(version.version)).version)
    version = client.create_model_version(name, source=f"runs:/{run_id}/bundle", run_id=run_id, tags={"digest": digest})
    return str(version.version)


@task(name="log to MLflow", persist_result=False)
def track_step(tracking: Tracking, evidence: dict[str, Any], reports: str) -> Tracked:
    """Prefect task over `log_or_keep`."""
    return log_or_keep(tracking, evidence, Path(reports))
