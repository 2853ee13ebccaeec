"""Put the facts of a release together: what MLflow logs, what the manifest carries, what the reports draw."""

from __future__ import annotations

import importlib.metadata
import os
import platform as platform_module
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kernels.report import TIMELINE_FILE
from quantize.recipe import Recipe
from tasks.gate import GateResult
from tasks.reports import timeline_path
from tasks.source import Source

TOOLS = ("pypto-deploy", "torch", "pypto", "transformers", "compressed-tensors", "prefect", "mlflow")
QUALITY_METRICS = (
    "perplexity_reference",
    "perplexity_candidate",
    "perplexity_ratio",
    "mean_kl",
    "p50_kl",
    "p99_kl",
    "top1_agreement",
    "positions",
)


class Findings(BaseModel):
    """What the steps of one release found, as JSON values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    digest: str
    platform: str
    source: Source
    recipe: Recipe
    quantize: dict[str, Any]
    slab_bytes: int
    programs: list[dict[str, Any]]
    quality: dict[str, Any]
    tpot: dict[str, Any] | None
    gates: list[GateResult]
    prefect_run_id: str | None

    @property
    def passed(self) -> bool:
        """Whether every program is READY and every gate holds."""
        ready = bool(self.programs) and all(program["status"] == "READY" for program in self.programs)
        return ready and all(gate.passed for gate in self.gates)


def collect(findings: Findings) -> dict[str, Any]:
    """The evidence of a release as one JSON object: params, metrics and tags for MLflow beside the full findings."""
    tpot = findings.tpot or {}
    quality = findings.quality
    metrics = {
        **{name: quality.get(name) for name in QUALITY_METRICS},
        **{
            f"{name}_{side}": limit
            for name, limits in quality.get("intervals", {}).items()
            for side, limit in zip(("low", "high"), limits, strict=True)
        },
        "tpot_ms": tpot.get("tpot_ms"),
        "ttft_ms": tpot.get("ttft_ms"),
        "quantize_seconds": findings.quantize.get("seconds"),
        "bytes_in": findings.quantize.get("bytes_in"),
        "bytes_out": findings.quantize.get("bytes_out"),
        "slab_bytes": findings.slab_bytes,
        "min_sqnr_db": min(
            (error["sqnr_db"] for error in findings.quantize["errors"] if error["sqnr_db"] is not None), default=None
        ),
        **{f"simulated_us.{program['name']}": program["simulated_us"] for program in findings.programs},
    }
    return {
        "name": findings.name,
        "digest": findings.digest,
        "platform": findings.platform,
        "passed": findings.passed,
        "registered": True,
        "recipe": findings.recipe.model_dump(mode="json"),
        "quality": quality,
        "tensor_errors": findings.quantize["errors"],
        "programs": findings.programs,
        "tpot": findings.tpot,
        "gates": [gate.model_dump() for gate in findings.gates],
        "metrics": {name: None if value is None else float(value) for name, value in metrics.items()},
        "params": {
            "source": findings.source.origin,
            "platform": findings.platform,
            "arithmetic": findings.recipe.arithmetic,
            "algorithm": findings.recipe.algorithm,
            "down": findings.recipe.down,
            "ignore": ",".join(findings.recipe.ignore),
            "recipe_digest": findings.recipe.digest(),
        },
        "tags": {
            "source_digest": findings.source.digest,
            "bundle_digest": findings.digest,
            "prefect_run_id": findings.prefect_run_id,
            "git_commit": git_commit(Path(__file__).resolve().parent),
            "tpot_platform": tpot.get("platform"),
            **{
                f"timeline.{program['name']}": f"reports/{timeline_path(program['name'])}"
                for program in findings.programs
                if TIMELINE_FILE in program["artifacts"]
            },
        },
        "tools": tool_versions(),
    }


def tool_versions() -> dict[str, str]:
    """Versions of what a bundle's bytes and figures depend on, and the machine's kind."""
    versions = {"python": platform_module.python_version(), "machine": platform_module.machine()}
    return versions | {name: importlib.metadata.version(name) for name in TOOLS}


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with `-dirty` when it has changes; None outside of one."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, env=environment, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain") else commit


def failed_programs(name: str, source: Source, recipe: Recipe, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The evidence of a release that stopped at its programs: no bundle, so the source's digest names it."""
    return {
        "name": name,
        "digest": source.digest,
        "platform": "none",
        "passed": False,
        "registered": False,
        "recipe": recipe.model_dump(mode="json"),
        "quality": {},
        "tensor_errors": [],
        "programs": [dict(report) for report in reports],
        "tpot": None,
        "gates": [],
        "metrics": {},
        "params": {"source": source.origin},
        "tags": {"source_digest": source.digest, "stopped_at": "programs"},
        "tools": tool_versions(),
    }
