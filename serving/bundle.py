"""Bundles: folders that hold everything a worker needs to serve a model, and the proof of what they hold.

    manifest.json   identity (covered by the digest) and evidence
    checkpoint/     the W8A8 checkpoint: served by others, and our tokenizer files
    slabs/          the same weights in the layout that kernels read
    programs/       compiled programs, one folder each
    reports/        what was measured, for people; not covered by the digest

A bundle appears under its name only when it is complete. Files are hard links to the work folders where the file
system allows, so a bundle costs no second copy of the weights.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.errors import KernelsError
from kernels.slabs import read_manifest as read_slab_manifest
from kernels.slabs import verify_slabs
from quantize.checkpoint import CONFIG_NAME, file_sha256, scan_checkpoint, tensor_digests
from quantize.errors import CheckpointError
from quantize.recipe import Recipe
from serving.errors import BundleError
from serving.files import link_tree, sync_directory, write_text_atomic
from serving.manifest import MANIFEST_FILE, ContractReference, Evidence, Identity, Manifest, TensorEntry, parse_manifest


@dataclass(frozen=True)
class BundleParts:
    """The work folders and decisions that a bundle is made of.

    `programs` maps program names to content keys; `programs_dir` and `reports_dir` are optional folders.
    """

    checkpoint_dir: Path
    slabs_dir: Path
    source_digest: str
    recipe: Recipe
    programs: Mapping[str, str] = field(default_factory=dict)
    programs_dir: Path | None = None
    reports_dir: Path | None = None


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The content digest, sha256 in hex."""
        return self.manifest.digest

    @property
    def name(self) -> str:
        """The name people gave the model; says nothing of the content."""
        return self.manifest.evidence.name

    @property
    def checkpoint_dir(self) -> Path:
        """The W8A8 checkpoint with the tokenizer."""
        return self.path / "checkpoint"

    @property
    def slabs_dir(self) -> Path:
        """The kernel-ready weights."""
        return self.path / "slabs"

    @property
    def programs_dir(self) -> Path:
        """Compiled programs, one folder each; may be empty."""
        return self.path / "programs"

    @property
    def reports_dir(self) -> Path:
        """Reports for people; may be empty."""
        return self.path / "reports"


def _checkpoint_files(directory: Path) -> dict[str, str]:
    files = [directory / CONFIG_NAME, *scan_checkpoint(directory).sidecars]
    return {path.name: file_sha256(path) for path in files}


def identify(parts: BundleParts) -> Identity:
    """Work out the identity that a bundle of `parts` has; reads all checkpoint weights once, writes nothing.

    Slab hashes are those that staging recorded; `verify_bundle` recomputes them.
    """
    try:
        slab_manifest = read_slab_manifest(parts.slabs_dir)
        tensors = tensor_digests(parts.checkpoint_dir)
        files = _checkpoint_files(parts.checkpoint_dir)
    except (KernelsError, CheckpointError) as error:
        raise BundleError(f"the parts cannot be bundled: {error}") from error
    return Identity(
        source_digest=parts.source_digest,
        recipe=parts.recipe.model_dump(mode="json", exclude={"gates"}),
        contract=ContractReference.model_validate(slab_manifest["contract"]),
        checkpoint_tensors={name: TensorEntry.model_validate(entry) for name, entry in tensors.items()},
        checkpoint_files=files,
        slabs={name: TensorEntry.model_validate(entry) for name, entry in slab_manifest["tensors"].items()},
        programs=dict(parts.programs),
    )


def bundle_digest(parts: BundleParts) -> str:
    """The digest that a bundle of `parts` has, without assembling it."""
    return identify(parts).digest()


def assemble_bundle(out: Path, parts: BundleParts, evidence: Evidence, identity: Identity | None = None) -> Bundle:
    """Make the bundle folder `out` from `parts`; `identity` spares hashing again when the caller has it.

    Raises BundleError when `out` exists or a part is unusable. `out` appears complete or not at all.
    """
    if out.exists():
        raise BundleError(f"{out} already exists; bundles are never changed in place, choose another folder")
    identity = identity if identity is not None else identify(parts)
    _require_folders(parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:16]}.", suffix=".partial", dir=out.parent))
    try:
        folder.chmod(0o755)
        link_tree(parts.checkpoint_dir, folder / "checkpoint")
        link_tree(parts.slabs_dir, folder / "slabs")
        for name, source in (("programs", parts.programs_dir), ("reports", parts.reports_dir)):
            if source is None:
                (folder / name).mkdir()
            else:
                link_tree(source, folder / name)
        manifest = Manifest(
            digest=identity.digest(),
            identity=identity,
            program_files=_file_table(folder / "programs"),
            evidence=evidence,
        )
        write_text_atomic(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1))
        folder.rename(out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Bundle(out, manifest)


def _require_folders(parts: BundleParts) -> None:
    folders = {"programs": parts.programs_dir, "reports": parts.reports_dir}
    problems = [f"{name}: {path} is not a folder" for name, path in folders.items() if path and not path.is_dir()]
    if problems:
        raise BundleError("the parts cannot be bundled", problems)


def _file_table(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): file_sha256(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def read_bundle(path: Path) -> Bundle:
    """Read the manifest of the bundle at `path`; BundleError when it is none. No weight is read."""
    file = path / MANIFEST_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not a bundle: {file.name} cannot be read ({error})") from error
    return Bundle(path, parse_manifest(text, str(file)))


def verify_bundle(path: Path) -> list[str]:
    """Hash everything in the bundle again; returns all problems found, none for a sound one."""
    try:
        bundle = read_bundle(path)
    except BundleError as error:
        return [str(error)]
    identity = bundle.manifest.identity
    problems = []
    if identity.digest() != bundle.digest:
        problems.append(f"{MANIFEST_FILE}: digest {bundle.digest} does not belong to the identity it records")
    problems += _checkpoint_problems(bundle, identity)
    problems += _slab_problems(bundle, identity)
    programs = _file_table(bundle.programs_dir) if bundle.programs_dir.is_dir() else {}
    problems += _table_problems("programs/", bundle.manifest.program_files, programs)
    return problems


def _checkpoint_problems(bundle: Bundle, identity: Identity) -> list[str]:
    try:
        tensors = tensor_digests(bundle.checkpoint_dir)
        files = _checkpoint_files(bundle.checkpoint_dir)
    except (CheckpointError, OSError) as error:
        return [f"checkpoint/: {error}"]
    recorded = {name: entry.model_dump(mode="json") for name, entry in identity.checkpoint_tensors.items()}
    return [
        *_table_problems("checkpoint/ tensor ", recorded, tensors),
        *_table_problems("checkpoint/", identity.checkpoint_files, files),
    ]


def _slab_problems(bundle: Bundle, identity: Identity) -> list[str]:
    problems = [f"slabs/: {problem}" for problem in verify_slabs(bundle.slabs_dir)]
    if problems:
        return problems
    found = read_slab_manifest(bundle.slabs_dir)
    recorded = {name: entry.model_dump(mode="json") for name, entry in identity.slabs.items()}
    if found["contract"] != identity.contract.model_dump(mode="json"):
        problems.append(f"slabs/: contract {found['contract']} is not the recorded {identity.contract}")
    return [*problems, *_table_problems("slabs/ slab ", recorded, found["tensors"])]


def _table_problems(what: str, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    missing = [f"{what}{name} is missing" for name in sorted(recorded.keys() - found.keys())]
    extra = [f"{what}{name} is not recorded in the manifest" for name in sorted(found.keys() - recorded.keys())]
    changed = [
        f"{what}{name} has changed: recorded {recorded[name]}, found {found[name]}"
        for name in sorted(recorded.keys() & found.keys())
        if recorded[name] != found[name]
    ]
    return [*missing, *extra, *changed]


def update_evidence(path: Path, **changes: Any) -> Bundle:
    """Complete the evidence of the bundle at `path` (say, `tpot=...`); identity and digest stay as they are."""
    bundle = read_bundle(path)
    evidence = Evidence.model_validate({**bundle.manifest.evidence.model_dump(), **changes})
    manifest = bundle.manifest.model_copy(update={"evidence": evidence})
    write_text_atomic(path / MANIFEST_FILE, manifest.model_dump_json(indent=1))
    return Bundle(path, manifest)
