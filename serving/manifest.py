"""The manifest of a bundle: what it is (identity, covered by the digest) and what is known of it (evidence, not).

The digest is over payloads and decisions only: tensor tables, file hashes, contract, recipe, source and program keys.
Times, run ids and measurements are evidence: a bundle made twice from the same source has the same digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"


class TensorEntry(BaseModel):
    """Dtype (as safetensors or the contract spells it), shape in elements, and sha256 of the payload bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class ContractReference(BaseModel):
    """Which kernel contract the slabs follow; `fingerprint` is that of its slab table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    version: int
    fingerprint: str
    down: Literal["int8", "bf16"]


class Identity(BaseModel):
    """Everything that makes a bundle what it is.

    `recipe` holds the settings that affect weights (no gates); `checkpoint_files` maps config and sidecar names to
    their sha256; `programs` maps program names to their content keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source_digest: str
    recipe: dict[str, Any]
    contract: ContractReference
    checkpoint_tensors: dict[str, TensorEntry]
    checkpoint_files: dict[str, str]
    slabs: dict[str, TensorEntry]
    programs: dict[str, str]

    def digest(self) -> str:
        """sha256 (hex) of the identity in canonical JSON, schema version included."""
        content = {"schema_version": SCHEMA_VERSION, **self.model_dump(mode="json")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Evidence(BaseModel):
    """What is known of a bundle beside its identity; may be completed after it was assembled.

    `created` is an ISO 8601 time; `model` the model's shape; `recipe` the whole recipe with its gates; `quality`,
    `tpot`, `gates` and `validation` hold reports as JSON values; `tool_versions` maps distributions to versions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    created: str
    model: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    platform: str | None = None
    quality: dict[str, Any] | None = None
    tpot: dict[str, Any] | None = None
    gates: list[dict[str, Any]] = Field(default_factory=list)
    validation: list[dict[str, Any]] = Field(default_factory=list)
    tool_versions: dict[str, str] = Field(default_factory=dict)
    prefect_flow_run_id: str | None = None
    mlflow_run_id: str | None = None


class Manifest(BaseModel):
    """Content of `manifest.json`; `program_files` maps paths below `programs/` to their sha256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    digest: str
    identity: Identity
    program_files: dict[str, str]
    evidence: Evidence


def parse_manifest(text: str, where: str) -> Manifest:
    """Read a manifest; BundleError tells an unknown schema version from damage. `where` names the file in messages."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BundleError(f"{where} is not valid JSON ({error}); the bundle is damaged, assemble it again") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{where} has schema version {version!r}; this version reads {SCHEMA_VERSION} only: use the release of "
            "pypto-deploy that wrote the bundle, or assemble it again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise BundleError(f"{where} is not a bundle manifest", problems) from error
