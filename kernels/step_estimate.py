"""What one decode step of a model should take on an Ascend 910B2: per batch and context, from the cost model and bytes.

A step is every layer's `decode_layer` and one `lm_head_greedy`; a program is reckoned at the larger of its simulated
time and its bytes at 1.6 TB/s, for the cost model has no bandwidth limit. More than 16 rows run as windows of 16, each
reading the weights again, as the executor does. Beside it stands the floor: every weight once and each row's keys and
values, at 1.6 TB/s.

Some cells are simulated, the others interpolated between those and marked so; nothing is extrapolated. None of it is
measured on a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS, MAX_ROPE_POSITIONS, PAGE_TOKENS, DownDtype, check_limits, slab_specs
from kernels.errors import ProgramError
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.report import HBM_BYTES_PER_US
from quantize.model_config import ModelConfig

__all__ = [
    "BATCHES",
    "CONTEXTS",
    "SIMULATED_BATCHES",
    "SIMULATED_CONTEXTS",
    "StepCell",
    "StepEstimate",
    "estimate_steps",
]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
SIMULATED_BATCHES = (1, 4, 16)
SIMULATED_CONTEXTS = (128, 1024, 4096)
MAX_BATCH = 1 << 16
"""Most rows that are reckoned with: 4096 windows, more than any cache holds the keys of."""

Simulate = Callable[[Program], float]
"""Simulated time of a program in us."""
Origin = Literal["simulated", "interpolated"]


@dataclass(frozen=True)
class StepCell:
    """One batch at one context length (tokens a row, the new one included); times in us.

    `windows` calls of `window_rows` rows make the step. `layer_us` and `head_us` are one call's estimate, of which
    `layer_simulated_us` and `head_simulated_us` are the cost model's part. `origin` says whether the layer's time was
    simulated at this shape or interpolated.
    """

    batch: int
    context_tokens: int
    windows: int
    window_rows: int
    origin: Origin
    layer_simulated_us: float
    layer_us: float
    head_simulated_us: float
    head_us: float
    step_us: float
    hbm_floor_us: float

    @property
    def ratio(self) -> float:
        """How many times the floor the estimate is."""
        return self.step_us / self.hbm_floor_us


@dataclass(frozen=True)
class StepEstimate:
    """The cells of one model, batch by batch, and what they were reckoned from."""

    model: str
    down: DownDtype
    layers: int
    cells: tuple[StepCell, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, with what the figures are."""
        return {
            "model": self.model,
            "down": self.down,
            "layers": self.layers,
            "device": "Ascend 910B2, cost model of PyPTO and 1.6 TB/s of HBM; nothing is measured",
            "cells": [{**asdict(cell), "ratio": round(cell.ratio, 4)} for cell in self.cells],
        }

    def to_markdown(self) -> str:
        """A table of milliseconds a step, the floor in brackets, `~` before what is interpolated."""
        contexts = sorted({cell.context_tokens for cell in self.cells})
        at = {(cell.batch, cell.context_tokens): cell for cell in self.cells}
        lines = [
            f"| batch \\ context | {' | '.join(map(str, contexts))} |",
            "|" + "---|" * (len(contexts) + 1),
        ]
        for batch in sorted({cell.batch for cell in self.cells}):
            texts = [_cell_text(at[batch, context]) for context in contexts]
            lines.append(f"| {batch} | {' | '.join(texts)} |")
        return "\n".join(lines)


def estimate_steps(
    config: ModelConfig,
    simulate: Simulate,
    *,
    model: str,
    down: DownDtype = "int8",
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] | None = None,
    simulated_batches: Sequence[int] = SIMULATED_BATCHES,
    simulated_contexts: Sequence[int] | None = None,
) -> StepEstimate:
    """Estimate every batch of `batches` at every context of `contexts` (tokens); one that is given twice, once.

    Contexts that are not given are `CONTEXTS` and `SIMULATED_CONTEXTS` as far as the model's positions go, its longest
    one among them.

    `simulate` is called for the layer at each pair of simulated batch (at most 16) and context, and for the LM head at
    each window size. Raises ProgramError for sizes out of range, or that lie outside the simulated ones.
    """
    check_limits(config, down)
    longest = _longest(config)
    contexts = _cut(CONTEXTS, longest) if contexts is None else contexts
    simulated_contexts = _cut(SIMULATED_CONTEXTS, longest) if simulated_contexts is None else simulated_contexts
    _check_grid(longest, batches, contexts, simulated_batches, simulated_contexts)
    anchors = {
        (rows, tokens): simulate(_layer(config, down, rows, tokens))
        for rows in sorted(set(simulated_batches))
        for tokens in sorted(set(simulated_contexts))
    }
    heads = {rows: simulate(_head(config, rows)) for rows in sorted({_window_rows(batch) for batch in batches})}
    cells = [
        _cell(config, down, batch, tokens, anchors, heads)
        for batch in sorted(set(batches))
        for tokens in sorted(set(contexts))
    ]
    return StepEstimate(model, down, config.num_layers, tuple(cells))


def _cell(
    config: ModelConfig,
    down: DownDtype,
    batch: int,
    tokens: int,
    anchors: Mapping[tuple[int, int], float],
    heads: Mapping[int, float],
) -> StepCell:
    rows = _window_rows(batch)
    windows = -(-batch // rows)
    simulated = (rows, tokens) in anchors
    layer_simulated_us = anchors[rows, tokens] if simulated else _interpolate(anchors, rows, tokens)
    layer_us = max(layer_simulated_us, _layer_bytes(config, down, rows, tokens) / HBM_BYTES_PER_US)
    head_us = max(heads[rows], _head_bytes(config, rows) / HBM_BYTES_PER_US)
    return StepCell(
        batch=batch,
        context_tokens=tokens,
        windows=windows,
        window_rows=rows,
        origin="simulated" if simulated else "interpolated",
        layer_simulated_us=round(layer_simulated_us, 2),
        layer_us=round(layer_us, 2),
        head_simulated_us=round(heads[rows], 2),
        head_us=round(head_us, 2),
        step_us=round(windows * (config.num_layers * layer_us + head_us), 1),
        hbm_floor_us=round(_floor_bytes(config, down, batch, tokens) / HBM_BYTES_PER_US, 1),
    )


def _floor_bytes(config: ModelConfig, down: DownDtype, batch: int, tokens: int) -> int:
    """What one step cannot do without: every weight once, the rows' keys and values read and written, logits out."""
    rows_only = {"embed_weight", "rope_cos", "rope_sin"}
    weights = sum(slab.nbytes for slab in slab_specs(config, down) if slab.name not in rows_only)
    cached = config.num_layers * 2 * batch * (tokens + 1) * config.kv_size * 2
    return weights + cached + batch * (config.hidden_size * 2 + config.vocab_size * 4)


def _interpolate(anchors: Mapping[tuple[int, int], float], rows: int, tokens: int) -> float:
    """Bilinear between the four simulated shapes around this one."""
    row_pair = _around(sorted({each for each, _ in anchors}), rows)
    token_pair = _around(sorted({each for _, each in anchors}), tokens)
    at_rows = [
        _line(token_pair, [anchors[each, token_pair[0]], anchors[each, token_pair[1]]], tokens) for each in row_pair
    ]
    return _line(row_pair, at_rows, rows)


def _around(known: Sequence[int], value: int) -> tuple[int, int]:
    at = bisect_left(known, value)
    return (known[at], known[at]) if known[at] == value else (known[at - 1], known[at])


def _line(ends: tuple[int, int], values: Sequence[float], at: int) -> float:
    if ends[0] == ends[1]:
        return values[0]
    share = (at - ends[0]) / (ends[1] - ends[0])
    return values[0] + share * (values[1] - values[0])


def _window_rows(batch: int) -> int:
    return min(batch, BATCH_WINDOW_ROWS)


def _layer(config: ModelConfig, down: DownDtype, rows: int, tokens: int) -> DecodeLayer:
    return DecodeLayer(DecodeLayerSpec.of(config, down, (tokens,) * rows))


def _head(config: ModelConfig, rows: int) -> LmHeadGreedy:
    return LmHeadGreedy(LmHeadSpec.of(config, rows))


def _layer_bytes(config: ModelConfig, down: DownDtype, rows: int, tokens: int) -> int:
    context = {
        "context_tokens": torch.full((rows,), tokens, dtype=torch.int32),
        "block_table": torch.zeros(rows, -(-tokens // PAGE_TOKENS), dtype=torch.int32),
    }
    return _hbm_bytes(_layer(config, down, rows, tokens), rows, context)


def _head_bytes(config: ModelConfig, rows: int) -> int:
    return _hbm_bytes(_head(config, rows), rows, {})


def _hbm_bytes(program: Program, rows: int, values: Mapping[str, Tensor]) -> int:
    """Bytes of one call on arguments that have the program's shapes and no memory of their own, but for `values`."""
    shaped = {
        a.name: torch.empty(1, dtype=a.dtype).expand([rows if size is None else size for size in a.shape])
        for a in program.arguments()
    }
    return program.hbm_bytes({**shaped, **values})


def _longest(config: ModelConfig) -> int:
    """Most tokens of context that the programs cover, by the model's positions and the contract's."""
    return min(config.max_position_tokens, MAX_ROPE_POSITIONS)


def _cut(contexts: Iterable[int], longest: int) -> tuple[int, ...]:
    return tuple(sorted({min(tokens, longest) for tokens in contexts}))


def _check_grid(
    longest: int,
    batches: Iterable[int],
    contexts: Iterable[int],
    simulated_batches: Iterable[int],
    simulated_contexts: Iterable[int],
) -> None:
    batches, known_rows = list(batches), list(simulated_batches)
    tokens, known_tokens = list(contexts), list(simulated_contexts)
    problems = []
    for what, values, limit in (
        ("batch", batches, MAX_BATCH),
        ("simulated batch", known_rows, BATCH_WINDOW_ROWS),
        ("context", tokens, longest),
        ("simulated context", known_tokens, longest),
    ):
        if not values:
            problems.append(f"no {what} is given")
        elif min(values) < 1 or max(values) > limit:
            positions = ", as the model's positions and the programs allow: leave the others out"
            problems.append(
                f"{what} of {min(values)} to {max(values)}: expected 1 to {limit}"
                + (positions if what.endswith("context") else "")
            )
    if not problems:
        windows = [_window_rows(batch) for batch in batches]
        for what, values, known in (("batch", windows, known_rows), ("context", tokens, known_tokens)):
            if min(values) < min(known) or max(values) > max(known):
                problems.append(
                    f"{what} of {min(values)} to {max(values)} lies outside the simulated {min(known)} to "
                    f"{max(known)}: nothing is extrapolated, simulate those ends too"
                )
    if problems:
        raise ProgramError("the steps cannot be estimated: " + "; ".join(problems))


def _cell_text(cell: StepCell) -> str:
    mark = "~" if cell.origin == "interpolated" else ""
    return f"{mark}{cell.step_us / 1000:.2f} ({cell.hbm_floor_us / 1000:.2f})"
