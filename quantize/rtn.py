"""Round-to-nearest W8A8, streamed: one tensor at a time from the source's shards to the new checkpoint.

Data-free: scales come from the weights alone (`numerics.quantize_weight`), activations are quantized at run time.
Peak memory is one tensor's codes and a few megabytes, whatever the size of the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantize.architecture import EMBEDDING, IGNORED_TENSOR, LM_HEAD, layer_of, linear_modules
from quantize.checkpoint import CheckpointReader, without_quantization
from quantize.checkpoint_writer import MAX_SHARD_BYTES, CheckpointWriter, TensorSpec
from quantize.errors import CheckpointError, NonFiniteWeightError
from quantize.numerics import quantize_weight
from quantize.preflight import check_source
from quantize.quantization_config import w8a8_quantization_config
from quantize.recipe import Recipe, ignored_modules
from quantize.torch_dtypes import TORCH_DTYPES

BLOCK_ELEMENTS = 2**17
"""Elements handled at a time: half a megabyte as FP32, so that a block's intermediates stay in a core's cache."""
logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorError:
    """What rounding cost one weight: signal to quantization noise in dB and the noise's RMS relative to the signal's.

    `layer` is None outside the decoder layers; `sqnr_db` is None for a tensor without error (it would be infinite).
    """

    name: str
    layer: int | None
    sqnr_db: float | None
    rel_rms_error: float


@dataclass(frozen=True)
class QuantizeResult:
    """What was written: payload digest, number of tensors and of quantized modules, payload sizes, time, errors."""

    digest: str
    tensors: int
    quantized: int
    bytes_in: int
    bytes_out: int
    seconds: float
    errors: list[TensorError]


def _row_blocks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor into runs of whole rows of about `BLOCK_ELEMENTS`; yields the first row's number and the run."""
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    step = max(1, BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        yield start, rows[start : start + step]


def _check_finite(name: str, first_row: int, block: Tensor) -> None:
    """Refuse NaN and infinity; either makes a sum non-finite, so the element-wise search is rarely needed."""
    if math.isfinite(block.sum(dtype=torch.float32).item()):
        return
    finite = torch.isfinite(block)
    if not bool(finite.all()):
        row, column = (int(index) for index in (~finite).nonzero()[0])
        raise NonFiniteWeightError(
            f"{name}: row {first_row + row}, column {column} holds {block[row, column].item()}; every weight must be "
            "finite: get a sound copy of the checkpoint"
        )


def _energy(rows_fp32: Tensor) -> float:
    """The sum of squares, in FP64 where squares could leave the range of FP32."""
    energy = float(rows_fp32.square().sum(dim=1).sum(dtype=torch.float64))
    return energy if 1e-20 < energy < math.inf else float(rows_fp32.to(torch.float64).square().sum())


def _quantize_tensor(name: str, weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, TensorError]:
    """Quantize one weight `[out, in]` by blocks of rows; returns codes, scales and what was lost."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((weight.shape[0], 1), dtype=weight.dtype)
    signal = noise = 0.0
    vanished_rows = 0
    for start, block in _row_blocks(weight):
        _check_finite(name, start, block)
        stop = start + block.shape[0]
        block_codes, block_scales = quantize_weight(block, recipe.arithmetic)
        codes[start:stop], scales[start:stop] = block_codes, block_scales
        exact = block.to(torch.float32)
        difference = block_codes.to(torch.float32).mul_(block_scales.to(torch.float32)).sub_(exact)
        signal += _energy(exact)
        noise += _energy(difference)
        vanished_rows += int(block[~block_codes.any(dim=1)].any(dim=1).sum())
    if vanished_rows:
        logger.warning(
            "%s: %d rows are too small for %s scales and became zero", name, vanished_rows, str(weight.dtype)
        )
    ratio = noise / signal if signal else 0.0
    sqnr_db = -10 * math.log10(ratio) if ratio else None
    return codes, scales, TensorError(name.removesuffix(".weight"), layer_of(name), sqnr_db, math.sqrt(ratio))


def _plan(reader: CheckpointReader, quantized: set[str]) -> list[TensorSpec]:
    """The output's tensors in the source's order; a tied LM head and old rotary buffers are left out."""
    specs: list[TensorSpec] = []
    for name, info in reader.infos.items():
        if IGNORED_TENSOR.fullmatch(name) or (reader.config.tie_word_embeddings and name == LM_HEAD + ".weight"):
            continue
        dtype = TORCH_DTYPES[info.dtype]
        if name.removesuffix(".weight") in quantized:
            specs.append(TensorSpec(name, torch.int8, info.shape))
            specs.append(TensorSpec(name + "_scale", dtype, (info.shape[0], 1)))
        else:
            specs.append(TensorSpec(name, dtype, info.shape))
    return specs


def _check_tied_head(reader: CheckpointReader) -> None:
    """A tied model may carry its LM head twice; the copy is dropped, so it must be one."""
    if not reader.config.tie_word_embeddings or LM_HEAD + ".weight" not in reader.infos:
        return
    head, embedding = reader.tensor(LM_HEAD + ".weight"), reader.tensor(EMBEDDING + ".weight")
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        raise CheckpointError(
            f"{reader.directory}: config.json ties lm_head to the embedding, but an lm_head.weight is there that "
            "differs from it: set tie_word_embeddings to false, or remove the tensor"
        )


def quantize_checkpoint(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizeResult:
    """Quantize the checkpoint `source` into the new directory `out` (compressed-tensors `int-quantized`).

    `progress(done_bytes, total_bytes)` counts source bytes. Raises CheckpointError for an unusable source (before any
    weight is read) or a non-finite weight, RecipeError for an ignore entry that matches nothing; then `out` does not
    exist. Deterministic: the same source and recipe give the same digest.
    """
    started = time.monotonic()
    with check_source(source) as reader:
        ignored = ignored_modules(recipe.effective_ignore, reader.config)
        quantized = set(linear_modules(reader.config)) - set(ignored)
        if not quantized:
            raise CheckpointError(f"{source}: the recipe ignores every Linear module, nothing would be quantized")
        _check_tied_head(reader)
        config = {
            **without_quantization(reader.raw_config),
            "quantization_config": w8a8_quantization_config(ignored),
        }
        specs = _plan(reader, quantized)
        names = [spec.name for spec in specs if spec.name in reader.infos]
        bytes_in = sum(reader.infos[name].nbytes for name in names)
        errors: list[TensorError] = []
        done_bytes = 0
        with CheckpointWriter(out, specs, config, reader.sidecars, max_shard_bytes) as writer:
            for name in names:
                tensor = reader.tensor(name)
                if name.removesuffix(".weight") in quantized:
                    codes, scales, error = _quantize_tensor(name, tensor, recipe)
                    writer.write(name, codes)
                    writer.write(name + "_scale", scales)
                    errors.append(error)
                else:
                    for start, block in _row_blocks(tensor):
                        _check_finite(name, start, block)
                    writer.write(name, tensor)
                done_bytes += reader.infos[name].nbytes
                if progress is not None:
                    progress(done_bytes, bytes_in)
            digest = writer.commit()
        return QuantizeResult(
            digest=digest,
            tensors=len(specs),
            quantized=len(quantized),
            bytes_in=bytes_in,
            bytes_out=writer.total_bytes,
            seconds=time.monotonic() - started,
            errors=errors,
        )
