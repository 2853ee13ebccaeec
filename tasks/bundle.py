"""The bundle step: put what the steps built into the store, and complete its evidence later."""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import BaseModel, ConfigDict

from quantize.model_config import load_model_config
from quantize.recipe import Recipe
from serving.bundle import BundleParts, update_evidence
from serving.manifest import Evidence
from serving.store import BundleStore
from tasks.evidence import tool_versions
from tasks.reports import write_reports
from tasks.steps import StepRecord


class StoredBundle(BaseModel):
    """Where a bundle is, its digest, and whether it was there already."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    path: str
    existed: bool
    layers: int


def store_bundle(
    store: Path,
    name: str,
    source_digest: str,
    recipe: Recipe,
    checkpoint: StepRecord,
    slabs: StepRecord,
    programs: StepRecord,
) -> StoredBundle:
    """Assemble the bundle in the store, or find the equal one that is there; nothing partial is ever visible."""
    bundles = BundleStore(store)
    bundles.reconcile()
    before = {path.name for path in bundles.bundles_dir.iterdir()}
    config = load_model_config(checkpoint.out)
    bundle = bundles.put(
        BundleParts(
            checkpoint_dir=checkpoint.out,
            slabs_dir=slabs.out,
            source_digest=source_digest,
            recipe=recipe,
            programs={program["name"]: program["key"] for program in programs.facts["programs"]},
            programs_dir=programs.out,
        ),
        Evidence(
            name=name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=asdict(config),
            recipe=recipe.model_dump(mode="json"),
            validation=programs.facts["programs"],
            tool_versions=tool_versions(),
        ),
    )
    return StoredBundle(
        digest=bundle.digest, path=str(bundle.path), existed=bundle.digest in before, layers=config.num_layers
    )


def make_reports(evidence: Mapping[str, Any], folder: Path, findings_file: Path, programs: Path | None = None) -> None:
    """Write the reports of a release to `folder`, replacing an older set whole.

    `findings_file` is what the quality step found, as JSON; `programs` the folder that the programs step left.
    """
    findings = json.loads(findings_file.read_text())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".reports-", dir=folder.parent) as scratch:
        write_reports(Path(scratch) / "new", evidence, findings, programs)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        (Path(scratch) / "new").rename(folder)


def complete_bundle(path: Path, evidence: Mapping[str, Any], mlflow_run_id: str | None) -> None:
    """Record in the bundle's manifest what was measured and decided; its digest and first name stay.

    The name is what a worker serves it under, so a later release of the same weights must not change it.
    """
    update_evidence(
        path,
        platform=evidence["platform"],
        recipe=dict(evidence["recipe"]),
        quality=dict(evidence["quality"]),
        tpot=evidence["tpot"],
        gates=list(evidence["gates"]),
        validation=list(evidence["programs"]),
        tool_versions=dict(evidence["tools"]),
        prefect_flow_run_id=evidence["tags"]["prefect_run_id"],
        mlflow_run_id=mlflow_run_id,
    )


def remove_work(work: Path) -> int:
    """Remove all cached step outputs; bundles keep their files, which are hard links. Returns the folders removed."""
    if not work.is_dir():
        return 0
    folders = [entry for step in work.iterdir() if step.is_dir() for entry in step.iterdir() if entry.is_dir()]
    shutil.rmtree(work)
    return len(folders)


@task(name="assemble bundle", persist_result=False)
def bundle_step(
    store: str,
    name: str,
    source_digest: str,
    recipe: dict[str, Any],
    checkpoint: StepRecord,
    slabs: StepRecord,
    programs: StepRecord,
) -> StoredBundle:
    """Prefect task over `store_bundle`."""
    return store_bundle(Path(store), name, source_digest, Recipe.model_validate(recipe), checkpoint, slabs, programs)


@task(name="complete evidence", persist_result=False)
def evidence_step(path: str, evidence: dict[str, Any], mlflow_run_id: str | None) -> None:
    """Prefect task over `complete_bundle`."""
    complete_bundle(Path(path), evidence, mlflow_run_id)
