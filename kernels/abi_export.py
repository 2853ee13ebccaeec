"""Slabs for another kernel library: a W8A8 checkpoint becomes the tensors that the library's contract names.

The same writer and the same safety as our own staging: about one tensor in memory, a folder that appears whole or not
at all, leftovers of a killed run removed by the next. The manifest beside the tensors says which contract they follow,
which checkpoint they came from, and which sha256 every tensor has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels import abi_pypto_lib
from kernels.contract_registry import CONTRACTS, match_checkpoint
from kernels.errors import ContractError, KernelsError, StagingError
from kernels.slab_writer import check_space, write_slabs
from kernels.slabs import MANIFEST_FILE, SLAB_FILE, config_from_json, config_to_json
from kernels.stage_contract import Contract
from kernels.staging import check_sources
from quantize.checkpoint import CONFIG_NAME, CheckpointReader, combine_digests, file_sha256, tensor_sha256
from quantize.json_files import parse_json
from quantize.model_config import ModelConfig
from quantize.staging_folder import StagingFolder

__all__ = ["ABIS", "ExportResult", "export_checkpoint", "verify_export"]

logger = logging.getLogger(__name__)

ABIS = (abi_pypto_lib.ABI,)
MANIFEST_KEYS = {"contract", "config", "source_digest", "kernel_constants", "stages", "tensors", "digest"}


@dataclass(frozen=True)
class ExportResult:
    """What was written: the contract and its fingerprint, the source's digest, every tensor's dtype, shape, sha256.

    `digest` is over fingerprint, config and tensors: two exports of equal checkpoints have equal ones.
    """

    digest: str
    contract: str
    fingerprint: str
    source_digest: str
    tensors: dict[str, dict[str, Any]]
    kernel_constants: dict[str, Any]
    bytes: int
    seconds: float


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    abi: str = abi_pypto_lib.ABI,
    progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write the W8A8 `checkpoint` to the new folder `out` as the slabs of `abi`; `progress(done_bytes, total_bytes)`.

    Every source tensor is read once (a tied embedding twice), and hashed on the way: `source_digest` is the
    checkpoint's `payload_digest`. Raises ContractError when no contract of `abi` fits, from `config.json` alone;
    StagingError listing every problem of the tensors; quantize's CheckpointError when the checkpoint cannot be read or
    `out` exists. Nothing is left at `out` or beside it then.
    """
    started = time.monotonic()
    if abi not in ABIS:
        raise ContractError(f"no export for ABI {abi!r}; there is one for {', '.join(ABIS)}")
    contract, config = match_checkpoint(checkpoint, abi)
    with CheckpointReader(checkpoint) as reader:
        slabs = contract.resolved_slabs(config)
        check_sources(reader, slabs, contract.down)
        total_bytes = sum(slab.nbytes for slab in slabs)
        sources = _SourceDigest(reader)
        folder = StagingFolder(out)
        try:
            check_space(folder.path, total_bytes)
            tensors = write_slabs(reader, slabs, folder.path / SLAB_FILE, progress, sources.add)
            constants = abi_pypto_lib.kernel_constants(config)
            manifest = {
                "contract": _contract_entry(contract),
                "config": config_to_json(config),
                "source_digest": sources.finish(),
                "kernel_constants": constants,
                "stages": _stages(contract),
                "tensors": tensors,
                "digest": _digest(contract, config, tensors),
            }
            with (folder.path / MANIFEST_FILE).open("w") as file:
                json.dump(manifest, file, indent=1)
            folder.commit()
        except BaseException:
            folder.discard()
            raise
    seconds = time.monotonic() - started
    logger.info("staged %d tensors for %s, %.1f MB, in %.1f s to %s", len(slabs), abi, total_bytes / 1e6, seconds, out)
    return ExportResult(
        digest=str(manifest["digest"]),
        contract=contract.name,
        fingerprint=contract.fingerprint(),
        source_digest=str(manifest["source_digest"]),
        tensors=tensors,
        kernel_constants=constants,
        bytes=total_bytes,
        seconds=round(seconds, 3),
    )


def verify_export(directory: Path) -> list[str]:
    """Compare an exported folder's tensors with its manifest, and that with the registered contract; empty when sound.

    Every tensor is read. The manifest must say what an export of its config would: contract and fingerprint, stages,
    constants, shapes and digest.

    Raises StagingError when `directory` holds no manifest of an export.
    """
    path = directory / MANIFEST_FILE
    try:
        manifest = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StagingError(f"{path} cannot be read ({error}); expected a folder written by `stage --abi`") from error
    if not isinstance(manifest, dict) or not set(manifest) >= MANIFEST_KEYS:
        raise StagingError(f"{path} is no manifest of an export; expected a folder written by `stage --abi`")
    recorded = manifest["tensors"]
    if not isinstance(recorded, dict) or not all(_is_record(entry) for entry in recorded.values()):
        raise StagingError(f"{path}: its `tensors` are not dtype, shape and sha256 of each by name; stage again")
    problems = _manifest_problems(manifest)
    try:
        opened = safe_open(directory / SLAB_FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        return [f"{directory / SLAB_FILE} cannot be read ({error}): damaged or truncated, stage again", *problems]
    with opened as file:
        found = set(file.keys())
        problems += [f"{name} is recorded but absent" for name in sorted(recorded.keys() - found)]
        problems += [f"{name} is not recorded" for name in sorted(found - recorded.keys())]
        for name in sorted(found & recorded.keys()):
            tensor = file.get_tensor(name)
            if list(tensor.shape) != recorded[name]["shape"]:
                problems.append(f"{name} has shape {list(tensor.shape)}, recorded is {recorded[name]['shape']}")
            elif tensor_sha256(tensor) != recorded[name]["sha256"]:
                problems.append(f"{name} does not have the recorded sha256 {recorded[name]['sha256']}")
    return problems


def _is_record(entry: object) -> bool:
    return isinstance(entry, dict) and set(entry) == {"dtype", "shape", "sha256"}


def _manifest_problems(manifest: dict[str, Any]) -> list[str]:
    """Where the manifest differs from what an export of its config by the registered contract would say."""
    found, tensors = manifest["contract"], manifest["tensors"]
    name = found.get("name") if isinstance(found, dict) else found
    contract = next((each for each in CONTRACTS if each.name == name and each.abi in ABIS), None)
    if contract is None:
        exported = ", ".join(each.name for each in CONTRACTS if each.abi in ABIS)
        return [f"contract {name!r} is not registered for exports; those are {exported}"]
    expected = _contract_entry(contract)
    problems = [
        f"contract {name}: {key} is {found.get(key)!r}, registered is {expected.get(key)!r}; stage again"
        for key in sorted(expected.keys() | found.keys())
        if found.get(key) != expected.get(key)
    ]
    if manifest["stages"] != _stages(contract):
        problems.append(f"stages are not those of contract {name}; stage again")
    try:
        config = config_from_json(manifest["config"])
        slabs = contract.resolved_slabs(config)
    except KernelsError as error:
        return [*problems, f"config cannot be that of an export: {error}"]
    if manifest["kernel_constants"] != abi_pypto_lib.kernel_constants(config):
        problems.append(f"kernel_constants are not those of the config under contract {name}; stage again")
    shapes = {slab.name: (slab.dtype, list(slab.shape)) for slab in slabs}
    if {each: (entry["dtype"], entry["shape"]) for each, entry in tensors.items()} != shapes:
        problems.append(f"recorded tensors are not those of the config under contract {name}; stage again")
    if manifest["digest"] != _digest(contract, config, tensors):
        problems.append("digest is not that of fingerprint, config and tensors; stage again")
    return problems


def _contract_entry(contract: Contract) -> dict[str, Any]:
    """What a manifest says of its contract."""
    return {
        "name": contract.name,
        "version": contract.version,
        "fingerprint": contract.fingerprint(),
        "limits": asdict(contract.limits),
        "kv_layout": contract.kv_layout,
    }


def _digest(contract: Contract, config: ModelConfig, tensors: dict[str, dict[str, Any]]) -> str:
    payload = {"fingerprint": contract.fingerprint(), "config": config_to_json(config), "tensors": tensors}
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _stages(contract: Contract) -> dict[str, list[list[str]]]:
    """Per stage its arguments in call order, each with the tensor that feeds it or an empty string."""
    return {stage.name: [[a.name, a.slab] for a in stage.arguments] for stage in contract.stages}


class _SourceDigest:
    """The checkpoint's `payload_digest`, gathered while its tensors are read for something else."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._tensors: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor; a second time is ignored."""
        if name not in self._tensors:
            info = self._reader.infos[name]
            self._tensors[name] = {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "sha256": tensor_sha256(tensor),
            }

    def finish(self) -> str:
        """The digest, after reading what no slab was made from."""
        for name in self._reader.infos.keys() - self._tensors.keys():
            self.add(name, self._reader.tensor(name))
        files = [self._reader.directory / CONFIG_NAME, *self._reader.sidecars]
        return combine_digests(self._tensors, {path.name: file_sha256(path) for path in files})
