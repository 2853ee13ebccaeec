"""Calibrated quantization of a checkpoint, one decoder layer in memory at a time.

Embedding, layers, head, in the order of computation; the activations between layers lie on disk, so that a run which
is killed goes on at the layer it was at. The bytes written depend on source, recipe and calibration text, and on the
machine's matrix products in their last bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.adapt import adapt, check_plan
from quantize.architecture import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    expected_tensors,
    layer_of,
    layer_prefix,
    linear_modules,
)
from quantize.calibrated.activations import Activations
from quantize.calibrated.compensation import JUDGES_SHARE, LEAST_JUDGES_TOKENS, judging_windows
from quantize.calibrated.decoder import Layer
from quantize.calibrated.layer_step import LayerOutcome, LayerPlan, quantize_layer
from quantize.calibrated.rotation import Rotation, make_rotation, rotate_embedding, rotate_head, rotate_layer
from quantize.calibrated.weights import finite_fp32, load_layer
from quantize.calibration import calibration_windows, check_windows
from quantize.checkpoint import CheckpointReader, without_quantization
from quantize.checkpoint_writer import CheckpointWriter
from quantize.errors import CalibrationError, CheckpointError
from quantize.identity import check_unchanged, source_state, work_identity
from quantize.model_config import ModelConfig, parse_model_config
from quantize.numerics import rope_tables
from quantize.preflight import check_source
from quantize.quantization_config import w8a8_quantization_config
from quantize.recipe import Recipe, recipe_ignored_modules
from quantize.row_kernel import open_kernel
from quantize.rtn import QuantizeResult, TensorError, check_tied_head, recipe_file
from quantize.shard_layout import TensorSpec
from quantize.streaming import Progress, check_finite
from quantize.torch_dtypes import TORCH_DTYPES

BLOCK_ROWS = 8192
logger = logging.getLogger(__name__)
EMBEDDING_WEIGHT, HEAD_WEIGHT, FINAL_NORM_WEIGHT = EMBEDDING + ".weight", LM_HEAD + ".weight", FINAL_NORM + ".weight"


@dataclass(frozen=True)
class _Output:
    """What is to be written: the model's shape afterwards, `config.json`, the tensors, and what is quantized."""

    config: ModelConfig
    raw_config: dict[str, Any]
    specs: list[TensorSpec]
    quantized: frozenset[str]
    copies: Mapping[str, str]


def quantize_calibrated(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
) -> QuantizeResult:
    """Quantize `source` into the new directory `out` by a recipe that calibrates.

    Raises what `rtn.quantize_checkpoint` raises, and CalibrationError for unusable calibration text or activations;
    then `out` does not exist. A run that is killed leaves what is finished beside `out`, and the same call carries on.
    Deterministic on one machine with the same number of threads.
    """
    started = time.monotonic()
    with check_source(source) as reader, torch.no_grad():
        check_tied_head(reader)
        output = _plan(reader, recipe)
        windows, _ = calibration_windows(source, recipe.calibration)
        check_windows(windows, source, reader.config)
        # A bad weight of the last layer must not be met after hours.
        check_finite(reader.infos.values(), open_kernel())
        if recipe.compensates and not judging_windows(*windows.shape).any():
            logger.warning(
                "%d calibration windows of %d tokens: weights do not make up for rounded inputs (gptq.compensate); "
                "it takes %d windows at least, and %d tokens in one of %d",
                *windows.shape,
                JUDGES_SHARE,
                LEAST_JUDGES_TOKENS,
                JUDGES_SHARE,
            )
        state = source_state(reader)
        text_digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        key = work_identity(state, f"{recipe.digest()} {text_digest} {torch.get_num_threads()}")
        rotation = make_rotation(reader.config, recipe.calibration.seed) if recipe.smoothing.rotate else None
        with CheckpointWriter(
            out,
            output.specs,
            output.raw_config,
            reader.sidecars,
            max_shard_bytes,
            resume_key=key,
            texts=recipe_file(recipe),
        ) as writer:
            shape = (*windows.shape, reader.config.hidden_size)
            activations = Activations(writer.scratch, key, (shape[0], shape[1], shape[2]))
            run = _Run(reader, writer, output, recipe, rotation, activations, progress)
            run.check_kept()
            run.write_outside_layers(windows)
            run.write_layers()
            check_unchanged(reader, state)
            writer.add_text("calibration.json", json.dumps({"layers": activations.facts}, indent=1) + "\n")
            digest = writer.commit()
        return QuantizeResult(
            digest=digest,
            tensors=len(output.specs),
            quantized=len(output.quantized),
            bytes_in=sum(info.nbytes for info in reader.infos.values()),
            bytes_out=writer.total_bytes,
            seconds=time.monotonic() - started,
            errors=[_tensor_error(facts, linear) for facts in activations.facts for linear in facts["linears"]],
            resumed=writer.resumed_tensors,
            layers=activations.facts,
        )


def check_head_ignored(recipe: Recipe, config: ModelConfig) -> None:
    """Raise CalibrationError for a recipe that quantizes the LM head, which no layer's calibration reaches."""
    if LM_HEAD not in recipe_ignored_modules(recipe, config):
        raise CalibrationError(
            f"algorithm {recipe.algorithm} leaves the LM head as it is, but the recipe quantizes it; add lm_head to "
            "ignore, or use algorithm rtn"
        )


def _plan(reader: CheckpointReader, recipe: Recipe) -> _Output:
    """The output's config and tensors; raises CheckpointError or RecipeError for what cannot be made."""
    raw_config, config = without_quantization(reader.raw_config), reader.config
    check_head_ignored(recipe, config)
    ignored = recipe_ignored_modules(recipe, config)
    if recipe.smoothing.rotate and config.tie_word_embeddings:
        # The final norm's weights go into the head alone, so the two matrices are no longer one.
        raw_config["tie_word_embeddings"] = False
        config = parse_model_config(raw_config)
    adapted = adapt(recipe.reader, config, raw_config, ignored)
    quantized = frozenset(set(linear_modules(config)) - set(adapted.ignored))
    if not quantized:
        raise CheckpointError(f"{reader.directory}: the recipe ignores every Linear module, nothing would be quantized")
    specs = []
    for name, shape in expected_tensors(config).items():
        info = reader.infos.get(name, reader.infos[EMBEDDING_WEIGHT])
        if name.removesuffix(".weight") in quantized:
            specs.append(TensorSpec(name, "I8", shape, info.file.name))
            specs.append(TensorSpec(name + "_scale", info.dtype, (shape[0], 1), info.file.name))
        else:
            specs.append(TensorSpec(name, info.dtype, shape, info.file.name))
    for name, original in adapted.copies.items():
        info = reader.infos[original]
        specs.append(TensorSpec(name, info.dtype, info.shape, info.file.name))
    whole = {**adapted.config, "quantization_config": w8a8_quantization_config(adapted.ignored)}
    check_plan(recipe.reader, config, whole, {spec.name: (spec.dtype_name, spec.shape) for spec in specs})
    return _Output(config, whole, specs, quantized, adapted.copies)


class _Run:
    """One pass over the model; every method skips what an interrupted run had finished."""

    def __init__(
        self,
        reader: CheckpointReader,
        writer: CheckpointWriter,
        output: _Output,
        recipe: Recipe,
        rotation: Rotation | None,
        activations: Activations,
        progress: Progress | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._output = output
        self._recipe = recipe
        self._rotation = rotation
        self._activations = activations
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(info.nbytes for info in reader.infos.values())

    def _advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

    def write_outside_layers(self, windows: Tensor) -> None:
        """Embedding, final norm and LM head, turned when there is a rotation; and the stream before the first layer."""
        reader, rotation = self._reader, self._rotation
        norm = finite_fp32(reader, FINAL_NORM_WEIGHT)
        self._write(FINAL_NORM_WEIGHT, norm if rotation is None else torch.ones_like(norm))
        rows = {EMBEDDING_WEIGHT: EMBEDDING_WEIGHT, **self._output.copies}
        if not self._output.config.tie_word_embeddings:
            rows[HEAD_WEIGHT] = HEAD_WEIGHT if not reader.config.tie_word_embeddings else EMBEDDING_WEIGHT
        for name, original in rows.items():
            self._write_rows(name, self._turned(name, original, norm), reader.infos[original].dtype)
            self._advance(reader.infos[original].nbytes)
        if self._activations.next_layer < 0:
            exact, quantized = self._activations.outputs(-1)
            embedding, stored = reader.tensor(EMBEDDING_WEIGHT), TORCH_DTYPES[reader.infos[EMBEDDING_WEIGHT].dtype]
            for window, ids in enumerate(windows):
                embedded = embedding[ids].to(torch.float32)
                exact[window] = embedded if rotation is None else rotate_embedding(embedded, rotation)
                # Readers of the output see the turned rows as they are stored.
                quantized[window] = exact[window].to(stored)
            self._activations.finish(-1)

    def _turned(self, name: str, original: str, norm: Tensor) -> Iterator[Tensor]:
        """Rows of a vocabulary matrix as they are to be stored, FP32 block by block; refused when not finite."""
        matrix = self._reader.tensor(original)
        for start in range(0, len(matrix), BLOCK_ROWS):
            block = matrix[start : start + BLOCK_ROWS].to(torch.float32)
            finite = torch.isfinite(block).all(dim=1)
            if not bool(finite.all()):
                finite_fp32(self._reader, original)
            if self._rotation is None:
                yield block
            elif name == HEAD_WEIGHT:
                yield rotate_head(block, norm, self._rotation)
            else:
                yield rotate_embedding(block, self._rotation)

    def _write_rows(self, name: str, blocks: Iterator[Tensor], dtype: str) -> None:
        if self._writer.finished(name):
            return
        stream = self._writer.stream(name)
        for block in blocks:
            stream.append(block.to(TORCH_DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.finish()

    def _write(self, name: str, values: Tensor) -> None:
        """Write a tensor in the dtype that the plan has for it."""
        if not self._writer.finished(name):
            self._writer.write(name, values.to(TORCH_DTYPES[self._writer.planned(name).dtype_name]))

    def write_layers(self) -> None:
        """Every decoder layer that is not done: calibrate, quantize, store, record."""
        for layer in range(self._reader.config.num_layers):
            if layer >= self._activations.next_layer:
                self._activations.finish(layer, {"layer": layer, **self._write_layer(layer)})
            self._advance(sum(info.nbytes for name, info in self._reader.infos.items() if layer_of(name) == layer))

        self._advance(self._total_bytes)

    def _write_layer(self, layer: int) -> dict[str, Any]:
        """Quantize and store one layer; returns its facts. Nothing of the layer is in memory afterwards."""
        config, streams = self._reader.config, self._activations.inputs(layer)
        rope = rope_tables(config.head_dim, config.rope_theta, streams[0].shape[1], config.rope_scaling)
        outcome = quantize_layer(
            self._layer(layer),
            self._layer_plan(layer),
            config,
            self._recipe,
            rope,
            streams,
            self._activations.outputs(layer),
        )
        self._store(layer, outcome)
        return outcome.facts

    def _layer(self, layer: int) -> Layer:
        loaded = load_layer(self._reader, layer)
        if self._rotation is not None:
            rotate_layer(loaded, self._reader.config, self._rotation)
        return loaded

    def _layer_plan(self, layer: int) -> LayerPlan:
        prefix = layer_prefix(layer)
        stored = {}
        for name, info in self._reader.infos.items():
            if name.startswith(prefix):
                stored[name.removeprefix(prefix).removesuffix(".weight")] = TORCH_DTYPES[info.dtype]
        within = {name.removeprefix(prefix) for name in self._output.quantized if name.startswith(prefix)}
        return LayerPlan(f"layer {layer}", frozenset(within), stored)

    def _store(self, layer: int, outcome: LayerOutcome) -> None:
        prefix = layer_prefix(layer)
        for name, weight in outcome.layer.weights.items():
            if name in outcome.codes:
                codes, scale = outcome.codes[name]
                self._write(f"{prefix}{name}.weight", codes)
                self._write(f"{prefix}{name}.weight_scale", scale)
            else:
                self._write(f"{prefix}{name}.weight", weight)
        for name, bias in outcome.layer.biases.items():
            self._write(f"{prefix}{name}.bias", bias)
        for name, norm in outcome.layer.norms.items():
            self._write(f"{prefix}{name}.weight", norm)

    def check_kept(self) -> None:
        """Go back to the start unless every finished layer's tensors are what was recorded.

        Activations are kept for the latest layer alone, so that no other one can be made again by itself. What is sound
        is not written twice.
        """
        for spec in self._output.specs:
            layer = layer_of(spec.name)
            if layer is not None and layer < self._activations.next_layer and not self._writer.finished(spec.name):
                self._activations.restart()
                return


def _tensor_error(facts: Mapping[str, Any], linear: Mapping[str, Any]) -> TensorError:
    rms = linear["rel_rms_error"]
    name = layer_prefix(facts["layer"]) + linear["name"]
    return TensorError(name, facts["layer"], -20 * math.log10(rms) if rms else None, rms)
