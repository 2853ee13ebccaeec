"""Staged slabs on disk and in memory: the manifest, the mapped tensors, and what a layer's kernels read.

A folder of slabs holds `slabs.safetensors` (every slab, aligned, in dtype order) and `slabs.json` (the contract it
follows, the model's config, dtype, shape and sha256 of every slab). Loading maps the file privately: nothing is copied
until it is read, and nothing that a caller does to the tensors reaches the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract import (
    CONTRACT_NAME,
    CONTRACT_VERSION,
    DownDtype,
    ResolvedSlab,
    SlabDtype,
    fingerprint,
    slab_specs,
)
from kernels.errors import ContractError, KernelsError, StagingError
from kernels.goldens import LayerShape, LayerWeights
from kernels.layout import TORCH_DTYPES
from quantize.checkpoint import tensor_sha256
from quantize.json_files import parse_json
from quantize.model_config import ModelConfig
from quantize.rope import RopeScaling

SLAB_FILE = "slabs.safetensors"
MANIFEST_FILE = "slabs.json"
SAFETENSORS_NAMES: dict[SlabDtype, str] = {"INT8": "I8", "BF16": "BF16", "FP32": "F32"}
FILE_DTYPE_ORDER: tuple[SlabDtype, ...] = ("FP32", "BF16", "INT8")
"""Wider elements first: every slab is aligned to its element without gaps, which safetensors does not allow."""
HEADER_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slabs:
    """A model's slabs, mapped from disk: `tensors` in contract order, `digest` over contract, config and payloads."""

    directory: Path
    config: ModelConfig
    down: DownDtype
    digest: str
    tensors: dict[str, Tensor]

    @property
    def real_vocab(self) -> int:
        """Vocabulary rows of the checkpoint; rows from here to the padded size are padding and never returned."""
        return self.config.vocab_size

    @property
    def layer_shape(self) -> LayerShape:
        """What the golden layer needs beside its tensors."""
        config = self.config
        return LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)

    def layer(self, index: int) -> LayerWeights:
        """Views of layer `index` (no copies). Raises KernelsError when there is no such layer."""
        if not 0 <= index < self.config.num_layers:
            raise KernelsError(f"layer {index} does not exist; the model has {self.config.num_layers}")

        def matrix(name: str) -> Tensor:
            rows = self.tensors[name].shape[0] // self.config.num_layers
            return self.tensors[name][index * rows : (index + 1) * rows]

        def row(name: str) -> Tensor:
            return self.tensors[name][index]

        def optional_row(name: str) -> Tensor | None:
            return row(name) if name in self.tensors else None

        return LayerWeights(
            input_rms=row("input_rms_weight"),
            wq=matrix("wq"),
            wk=matrix("wk"),
            wv=matrix("wv"),
            wq_scale=row("wq_scale"),
            wk_scale=row("wk_scale"),
            wv_scale=row("wv_scale"),
            wo=matrix("wo"),
            wo_scale=row("wo_scale"),
            post_rms=row("post_rms_weight"),
            w_gate=matrix("w_gate"),
            w_up=matrix("w_up"),
            w_gate_scale=row("w_gate_scale"),
            w_up_scale=row("w_up_scale"),
            w_down=matrix("w_down"),
            w_down_scale=optional_row("w_down_scale"),
            q_norm=optional_row("q_norm_weight"),
            k_norm=optional_row("k_norm_weight"),
            q_bias=optional_row("q_bias"),
            k_bias=optional_row("k_bias"),
            v_bias=optional_row("v_bias"),
        )


def slab_offsets(slabs: Sequence[ResolvedSlab]) -> dict[str, int]:
    """Byte offset of every slab inside the payload: by dtype width, then in contract order."""
    offsets, position = {}, 0
    for dtype in FILE_DTYPE_ORDER:
        for slab in slabs:
            if slab.dtype == dtype:
                offsets[slab.name] = position
                position += slab.nbytes
    return offsets


def slab_header(slabs: Sequence[ResolvedSlab]) -> bytes:
    """The safetensors header (length prefix included) of a slab file: a pure function of contract and config."""
    offsets = slab_offsets(slabs)
    by_name = {slab.name: slab for slab in slabs}
    table = {
        name: {
            "dtype": SAFETENSORS_NAMES[by_name[name].dtype],
            "shape": list(by_name[name].shape),
            "data_offsets": [start, start + by_name[name].nbytes],
        }
        for name, start in offsets.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def slabs_digest(config: ModelConfig, down: DownDtype, tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 over contract fingerprint, config and every slab's dtype, shape and payload digest, in canonical JSON."""
    payload = {"fingerprint": fingerprint(down), "config": config_to_json(config), "tensors": tensors}
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The config as plain JSON values; plain rotary embedding has no `rope_scaling` key, as before there was any."""
    values = {**dataclasses.asdict(config), "eos_token_ids": list(config.eos_token_ids)}
    if config.rope_scaling is None:
        del values["rope_scaling"]
    return values


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}
"""Types of a config's values in JSON, by annotation."""


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_json`; raises StagingError naming missing, unknown and wrong fields."""
    if not isinstance(values, Mapping):
        raise StagingError(f"the slab manifest's config is a {type(values).__name__}, expected an object; stage again")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if set(values) | {"rope_scaling"} != known:
        missing, unknown = sorted(known - set(values)), sorted(set(values) - known)
        raise StagingError(f"the slab manifest's config lacks {missing} and has unknown {unknown}; stage again")
    wrong = [
        f"{field.name} {values[field.name]!r}"
        for field in dataclasses.fields(ModelConfig)
        if (kinds := _JSON_TYPES.get(str(field.type))) is not None
        and (not isinstance(values[field.name], kinds) or isinstance(values[field.name], bool) != (kinds is bool))
    ]
    if not isinstance(values["eos_token_ids"], list):
        wrong.append(f"eos_token_ids {values['eos_token_ids']!r}")
    if wrong:
        raise StagingError(f"the slab manifest's config has values of another type: {', '.join(wrong)}; stage again")
    scaling = values.get("rope_scaling")
    try:
        rope_scaling = None if scaling is None else RopeScaling(**scaling)
    except TypeError as error:
        raise StagingError(f"the slab manifest's rope_scaling cannot be read ({error}); stage again") from None
    return ModelConfig(**{**values, "eos_token_ids": tuple(values["eos_token_ids"]), "rope_scaling": rope_scaling})


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check `slabs.json`: contract name, version and table. Raises ContractError or StagingError."""
    path = directory / MANIFEST_FILE
    try:
        manifest = parse_json(path.read_bytes())
    except OSError as error:
        raise StagingError(f"{path} cannot be read ({error}); expected a folder written by staging") from error
    except ValueError as error:
        raise StagingError(f"{path} is not valid JSON ({error}); stage the checkpoint again") from error
    if not isinstance(manifest, dict) or not {"contract", "config", "tensors", "digest"} <= set(manifest):
        raise StagingError(f"{path} is not a slab manifest; stage the checkpoint again")
    contract = manifest["contract"]
    if not isinstance(contract, dict):
        raise StagingError(f"{path} has contract {contract!r}, expected an object; stage the checkpoint again")
    found = (contract.get("name"), contract.get("version"))
    if found != (CONTRACT_NAME, CONTRACT_VERSION):
        raise ContractError(
            f"{path} follows contract {found[0]} v{found[1]}; "
            f"this version knows {CONTRACT_NAME} v{CONTRACT_VERSION} only: stage the checkpoint again"
        )
    down = contract.get("down")
    if down not in ("int8", "bf16"):
        raise ContractError(f"{path} has down={down!r}; expected 'int8' or 'bf16'")
    if contract.get("fingerprint") != fingerprint(down):
        raise ContractError(
            f"{path} was written for another slab table (fingerprint {contract.get('fingerprint')}, "
            f"expected {fingerprint(down)}): stage the checkpoint again"
        )
    return manifest


def load_slabs(directory: Path) -> Slabs:
    """Map the slabs of `directory`; payloads are read only when used (see `verify_slabs` for their digests).

    Raises ContractError for an unknown contract or a changed table, StagingError for a damaged or truncated file.
    """
    manifest = read_manifest(directory)
    config = config_from_json(manifest["config"])
    down: DownDtype = manifest["contract"]["down"]
    slabs = slab_specs(config, down)
    expected = {slab.name: {"dtype": slab.dtype, "shape": list(slab.shape)} for slab in slabs}
    found = {name: {"dtype": info["dtype"], "shape": info["shape"]} for name, info in manifest["tensors"].items()}
    if found != expected:
        changed = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ContractError(f"{directory / MANIFEST_FILE} disagrees with the contract about {changed}; stage again")
    path, header = directory / SLAB_FILE, slab_header(slabs)
    total_bytes = len(header) + sum(slab.nbytes for slab in slabs)
    try:
        with path.open("rb") as file:
            if (size := path.stat().st_size) != total_bytes:
                raise StagingError(
                    f"{path} has {size} bytes; expected {total_bytes}: truncated or damaged, stage again"
                )
            if file.read(len(header)) != header:
                raise StagingError(f"{path} has an unexpected header: it was not written by this staging, stage again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise StagingError(f"{path} cannot be read: {error}") from error
    offsets = slab_offsets(slabs)
    tensors = {
        slab.name: torch.frombuffer(
            mapped,
            dtype=TORCH_DTYPES[slab.dtype],
            count=slab.nbytes // TORCH_DTYPES[slab.dtype].itemsize,
            offset=len(header) + offsets[slab.name],
        ).view(slab.shape)
        for slab in slabs
    }
    return Slabs(directory, config, down, manifest["digest"], tensors)


def verify_slabs(directory: Path) -> list[str]:
    """Read every payload and compare its sha256 with the manifest; returns the problems found, empty when sound."""
    try:
        slabs = load_slabs(directory)
    except KernelsError as error:
        return [str(error)]
    recorded = read_manifest(directory)["tensors"]
    problems = [
        f"slab {name} of {directory} does not have the recorded sha256 {recorded[name]['sha256']}"
        for name, tensor in slabs.tensors.items()
        if tensor_sha256(tensor) != recorded[name]["sha256"]
    ]
    if slabs_digest(slabs.config, slabs.down, recorded) != slabs.digest:
        problems.append(f"{directory / MANIFEST_FILE}: the digest does not belong to its contents")
    return problems


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
