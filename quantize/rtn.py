"""Round-to-nearest W8A8: what becomes of each tensor of a checkpoint, streamed into a new one.

Data-free: scales come from the weights alone (`numerics.quantize_weight`, or with clipping `clipping`), activations are
quantized at run time. How the bytes flow is in `streaming`; this module loads without torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantize.adapt import adapt, check_plan
from quantize.architecture import EMBEDDING, IGNORED_TENSOR, LM_HEAD, layer_of, linear_modules
from quantize.budget import plan_work, resident_bytes, usable_cores
from quantize.checkpoint import CheckpointReader, without_quantization
from quantize.checkpoint_writer import CheckpointWriter
from quantize.errors import CheckpointError
from quantize.identity import check_unchanged, source_state, work_identity
from quantize.preflight import check_source
from quantize.quantization_config import w8a8_quantization_config
from quantize.recipe import RECIPE_NAME, Recipe, recipe_ignored_modules
from quantize.row_kernel import Buffer, Rounding, RowKernel, RowSums, open_kernel
from quantize.shard_layout import TensorSpec
from quantize.streaming import Progress, TensorJob, read_block, stream_tensors

COMPARE_BLOCK_BYTES = 2**20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorError:
    """What rounding cost one weight: signal to quantization noise in dB and the noise's RMS relative to the signal's.

    `layer` is None outside the decoder layers; `sqnr_db` is None for a tensor without error (it would be infinite).
    `clip_gain_db` is what clipping took off the noise; None without clipping.
    """

    name: str
    layer: int | None
    sqnr_db: float | None
    rel_rms_error: float
    clip_gain_db: float | None = None


@dataclass(frozen=True)
class QuantizeResult:
    """What was written: payload digest, number of tensors and of quantized modules, payload sizes, time, errors.

    `resumed` tensors were finished by an interrupted run before this one. `layers` are the facts of calibrated layers,
    `search` the rows of what `auto` tried; both JSON values, empty where there are none.
    """

    digest: str
    tensors: int
    quantized: int
    bytes_in: int
    bytes_out: int
    seconds: float
    errors: list[TensorError]
    resumed: int = 0
    layers: list[dict[str, Any]] = field(default_factory=list)
    search: list[dict[str, Any]] = field(default_factory=list)


def recipe_file(recipe: Recipe) -> dict[str, str]:
    """The file, by name, that tells how a checkpoint was made."""
    return {RECIPE_NAME: recipe.to_yaml()}


def _tensor_error(name: str, sums: RowSums, clip: str) -> TensorError:
    ratio = sums.noise / sums.signal if sums.signal else 0.0
    sqnr_db = -10 * math.log10(ratio) if ratio else None
    gain_db = None
    if clip == "mse":
        gain_db = 10 * math.log10(sums.unclipped_noise / sums.noise) if sums.noise else 0.0
    return TensorError(name.removesuffix(".weight"), layer_of(name), sqnr_db, math.sqrt(ratio), gain_db)


def _plan(
    reader: CheckpointReader, quantized: set[str], copies: Mapping[str, str]
) -> tuple[list[TensorJob], list[TensorSpec]]:
    """What to do, and the output's tensors in the source's order; a tied LM head and rotary buffers are left out.

    `copies` are tensors to add, by name, each with the name of the source's tensor that it repeats.
    """
    jobs: list[TensorJob] = []
    specs: list[TensorSpec] = []
    added = [replace(reader.infos[original], name=name) for name, original in copies.items()]
    for info in (*(info for info in reader.infos.values() if info.name not in copies), *added):
        name = info.name
        tied_head = reader.config.tie_word_embeddings and name == LM_HEAD + ".weight"
        if IGNORED_TENSOR.fullmatch(name) or (tied_head and name not in copies):
            continue
        shard = info.file.name
        job = TensorJob(info, name.removesuffix(".weight") in quantized)
        jobs.append(job)
        if job.quantized:
            specs.append(TensorSpec(name, "I8", info.shape, shard))
            specs.append(TensorSpec(name + "_scale", info.dtype, (info.shape[0], 1), shard))
        else:
            specs.append(TensorSpec(name, info.dtype, info.shape, shard))
    return jobs, specs


def check_tied_head(reader: CheckpointReader) -> None:
    """A tied model may carry its LM head twice; the copy is dropped, so it must be one, byte for byte."""
    head, embedding = reader.infos.get(LM_HEAD + ".weight"), reader.infos[EMBEDDING + ".weight"]
    if not reader.config.tie_word_embeddings or head is None:
        return
    same = head.dtype == embedding.dtype
    left, right = Buffer(COMPARE_BLOCK_BYTES), Buffer(COMPARE_BLOCK_BYTES)
    with head.file.open("rb") as head_file, embedding.file.open("rb") as embedding_file:
        for start in range(0, head.nbytes if same else 0, COMPARE_BLOCK_BYTES):
            count = min(COMPARE_BLOCK_BYTES, head.nbytes - start)
            read_block(head_file.fileno(), left.view[:count], head.offset + start, head.file)
            read_block(embedding_file.fileno(), right.view[:count], embedding.offset + start, embedding.file)
            same = same and left.view[:count] == right.view[:count]
    if not same:
        raise CheckpointError(
            f"{reader.directory}: config.json ties lm_head to the embedding, but an lm_head.weight is there that "
            "differs from it: set tie_word_embeddings to false, or remove the tensor"
        )


def quantize_checkpoint(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    *,
    memory_bytes: int | None = None,
    workers: int | None = None,
    kernel: RowKernel | None = None,
) -> QuantizeResult:
    """Quantize the checkpoint `source` into the new directory `out` (compressed-tensors `int-quantized`).

    `progress(done_bytes, total_bytes)` counts source bytes. `max_shard_bytes` cuts the output's shards by size; None
    follows the source's. `memory_bytes` bounds the resident memory of this process, `workers` is the number of threads
    (None: the cores it may use), `kernel` what computes (None: the best that there is).

    Raises CheckpointError for an unusable source (before any weight is read) or a non-finite weight, RecipeError for an
    ignore entry that matches nothing or a plan that the recipe's reader would not load, BudgetError when `memory_bytes`
    or `workers` are too few; then `out` does not exist. A run that is killed, interrupted or out of disk leaves what is
    finished beside `out`, and the same call carries on after it. Deterministic: the same source and recipe give the
    same digest, however it is run.
    """
    started = time.monotonic()
    with check_source(source) as reader:
        raw_config = without_quantization(reader.raw_config)
        adapted = adapt(recipe.reader, reader.config, raw_config, recipe_ignored_modules(recipe, reader.config))
        quantized = set(linear_modules(reader.config)) - set(adapted.ignored)
        if not quantized:
            raise CheckpointError(f"{source}: the recipe ignores every Linear module, nothing would be quantized")
        state = source_state(reader)
        jobs, specs = _plan(reader, quantized, adapted.copies)
        config = {**adapted.config, "quantization_config": w8a8_quantization_config(adapted.ignored)}
        check_plan(recipe.reader, reader.config, config, {spec.name: (spec.dtype_name, spec.shape) for spec in specs})
        kernel = open_kernel() if kernel is None else kernel
        plan = plan_work(
            memory_bytes,
            usable_cores() if workers is None else workers,
            kernel.block_bytes,
            kernel.bytes_per_block_byte,
            max(job.least_block_bytes for job in jobs),
            resident_bytes(),
        )
        check_tied_head(reader)
        key = work_identity(state, recipe.digest())
        with CheckpointWriter(
            out, specs, config, reader.sidecars, max_shard_bytes, resume_key=key, texts=recipe_file(recipe)
        ) as writer:
            sums = stream_tensors(jobs, writer, kernel, Rounding(recipe.arithmetic, recipe.clip), plan, progress)
            check_unchanged(reader, state)
            digest = writer.commit()
        for job in jobs:
            if job.quantized and sums[job.info.name].vanished_rows:
                logger.warning(
                    "%s: %d rows are too small for %s scales and became zero",
                    job.info.name,
                    sums[job.info.name].vanished_rows,
                    job.info.dtype,
                )
        return QuantizeResult(
            digest=digest,
            tensors=len(specs),
            quantized=len(quantized),
            bytes_in=sum(job.info.nbytes for job in jobs),
            bytes_out=writer.total_bytes,
            seconds=time.monotonic() - started,
            errors=[_tensor_error(job.info.name, sums[job.info.name], recipe.clip) for job in jobs if job.quantized],
            resumed=writer.resumed_tensors,
        )
