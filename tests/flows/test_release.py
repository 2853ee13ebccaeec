"""Whole releases of a tiny model: reuse, change, gates, and a worker that follows the champion."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.bundle import verify_bundle
from serving.launch import launched_worker
from serving.store import BundleStore
from tests.flows.support import assert_no_process_is_left, release_arguments, run_cli, run_json

pytestmark = pytest.mark.slow

STEPS = ["quantize", "stage", "programs", "quality", "tpot"]


def change_one_weight(source: Path, copy: Path) -> Path:
    shutil.copytree(source, copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def test_a_release_ends_with_a_champion_and_its_evidence(released: tuple[Path, dict[str, Any]]) -> None:
    store, answer = released
    assert answer["promoted"] is True
    assert all(gate["passed"] for gate in answer["gates"])
    assert [program["status"] for program in answer["programs"]] == ["READY", "READY"]
    assert answer["tpot_ms"] > 0
    assert answer["ttft_ms"] > 0
    assert answer["quality"]["positions"] > 500

    bundles = BundleStore(store)
    assert bundles.aliases() == {"candidate": answer["digest"], "champion": answer["digest"]}
    bundle = bundles.resolve("champion")
    assert verify_bundle(bundle.path) == []
    evidence = bundle.manifest.evidence
    assert evidence.mlflow_run_id == answer["mlflow_run_id"]
    assert evidence.prefect_flow_run_id == answer["prefect_run_id"]
    assert {path.name for path in bundle.reports_dir.iterdir()} == {
        "activations.png",
        "kl.png",
        "layer_error.png",
        "perplexity.png",
        "programs",
        "programs.json",
        "quality.json",
        "report.html",
        "tensor_errors.json",
        "tpot.json",
        "tpot.png",
    }
    assert {path.name for path in (bundle.programs_dir / "decode_layer").iterdir()} >= {"report.json"}


@pytest.mark.filterwarnings("default")  # MLflow's own start-up warns
def test_mlflow_joins_source_bundle_and_flow_run(released: tuple[Path, dict[str, Any]]) -> None:
    from mlflow.tracking import MlflowClient

    _, answer = released
    client = MlflowClient(answer["mlflow_uri"], answer["mlflow_uri"])
    run = client.get_run(answer["mlflow_run_id"])
    assert run.data.tags["bundle_digest"] == answer["digest"]
    assert run.data.tags["prefect_run_id"] == answer["prefect_run_id"]
    trace = run.data.tags["timeline.decode_layer"]
    assert trace in {item.path for item in client.list_artifacts(run.info.run_id, "reports/programs/decode_layer")}
    assert run.data.metrics["tpot_ms"] == pytest.approx(answer["tpot_ms"])
    assert len(client.get_metric_history(answer["mlflow_run_id"], "tpot_ms_per_request")) == 5
    assert client.get_model_version_by_alias("tiny", "champion").tags["digest"] == answer["digest"]
    assert client.get_model_version_by_alias("tiny", "candidate").tags["digest"] == answer["digest"]


def test_the_same_source_again_reuses_every_step(
    released: tuple[Path, dict[str, Any]], source: Path, recipe: Path
) -> None:
    store, first = released
    stdout, stderr = run_cli(*release_arguments(source, store, recipe))
    for step in [*STEPS, "bundle"]:
        (line,) = [line for line in stderr.splitlines() if line.startswith(f"+ {step} ")]
        assert "reused" in line
    assert first["digest"] in stdout
    assert [bundle.digest for bundle in BundleStore(store).bundles()] == [first["digest"]]
    assert_no_process_is_left()


def test_a_changed_weight_is_another_bundle_and_reuses_the_programs(
    released: tuple[Path, dict[str, Any]], source: Path, recipe: Path, tmp_path: Path
) -> None:
    store, first = released
    changed = change_one_weight(source, tmp_path / "changed")
    with launched_worker(store, "champion") as worker:
        _, stderr = run_cli(*release_arguments(changed, store, recipe))
        health = httpx.get(f"{worker.url}/health").json()
    bundles = BundleStore(store)
    second = bundles.alias("champion")
    assert second not in {None, first["digest"]}
    assert health["digest"] == second
    outcomes = {line.split()[1]: line for line in stderr.splitlines() if line.startswith("+ ")}
    assert "done" in outcomes["quantize"]
    assert "reused" in outcomes["programs"]
    assert "taken up by" in outcomes["promote"]

    moved = run_json("rollback", "--store", str(store))
    assert moved["digest"] == first["digest"]
    assert bundles.alias("champion") == first["digest"]
    _, stderr = run_cli("rollback", "--store", str(store), code=2)
    assert "nothing to roll back to" in stderr


def test_failed_gates_store_the_bundle_and_keep_the_champion(
    released: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path
) -> None:
    store, first = released
    strict = tmp_path / "strict.yaml"
    strict.write_text("arithmetic: compat\ngates:\n  max_mean_kl: 0.000000001\n")
    stdout, stderr = run_cli(*release_arguments(source, store, strict), "--json", code=1)
    assert '"promoted": false' in stdout
    assert "gates failed: mean_kl" in stderr
    bundles = BundleStore(store)
    assert bundles.alias("champion") == first["digest"]
    (other,) = [b.digest for b in bundles.bundles() if any(not gate["passed"] for gate in b.manifest.evidence.gates)]
    _, stderr = run_cli("promote", other, "--store", str(store), code=2)
    assert "failed its gates" in stderr
    assert run_json("promote", other, "--force", "--store", str(store))["promoted"] is True


@pytest.mark.parametrize("damage", ["no tokenizer", "empty tokenizer", "broken template"])
def test_a_source_that_no_worker_could_serve_is_refused_first(
    damage: str, source: Path, recipe: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    if damage == "no tokenizer":
        (copy / "tokenizer.json").unlink()
    elif damage == "empty tokenizer":
        (copy / "tokenizer.json").write_text("{}")
    else:
        (copy / "chat_template.jinja").write_text("{% for %}")
    _, stderr = run_cli(*release_arguments(copy, tmp_path / "store", recipe), code=2)
    assert "token" in stderr or "template" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "store").exists()


def test_weights_of_the_bundle_are_those_of_the_source(source: Path, released: tuple[Path, dict[str, Any]]) -> None:
    _, answer = released
    original = load_file(source / "model.safetensors")
    bundled = load_file(Path(answer["path"]) / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    restored = bundled[name].to(torch.float32) * bundled[f"{name}_scale"].to(torch.float32)
    error = (restored - original[name].to(torch.float32)).abs()
    assert torch.all(error <= 0.51 * bundled[f"{name}_scale"].to(torch.float32) + 1e-6)
