"""The `pypto` executor: the engine's batches through the PyPTO programs, on an NPU or in the host's interpreter.

Both run the same programs over windows of up to 16 token rows: `decode_layer` for every layer, then `lm_head_greedy`
where logits are wanted; or `decode_step`, which is both in one. Rows of one sequence may share a window, since a layer
writes all keys before any row attends. Without an NPU the interpreter takes seconds per layer: it is there to check the
programs, not to serve.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS
from kernels.errors import KernelsError
from kernels.interpreter import Call, interpret, run_program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, layer_arguments, row_arguments
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec, step_rows
from kernels.programs.layer_slabs import stacked_slabs
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.slabs import Slabs
from serving.errors import ExecutorError
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.step import StepRows, plan_step

__all__ = ["HostPrograms", "Prompts", "PyptoExecutor", "RunsPrompts", "Window", "npu_available"]

logger = logging.getLogger(__name__)


class Window:
    """Up to 16 token rows of a step: hidden rows BF16 `[rows, hidden]`, their positions, and each row's pages."""

    def __init__(self, x: Tensor, positions: list[int], pages: list[list[int]]) -> None:
        self.x = x
        self.positions = positions
        self.pages = pages

    def padded(self, rows: int, scratch_page: int) -> Window:
        """The window with rows added up to `rows`, which stand one behind the other in `scratch_page`."""
        missing = rows - len(self.positions)
        x = torch.cat([self.x, self.x.new_zeros(missing, self.x.shape[1])])
        return Window(x, [*self.positions, *range(missing)], [*self.pages, *([scratch_page] for _ in range(missing))])

    def with_pages(self, number: dict[int, int]) -> Window:
        """The window with its pages renumbered."""
        return Window(self.x, self.positions, [[number[page] for page in row] for row in self.pages])

    def contexts(self) -> tuple[int, ...]:
        """Context length of every row, in tokens."""
        return tuple(position + 1 for position in self.positions)


class Programs(Protocol):
    """Runs the programs on a window, keeping weights and caches where it computes."""

    def run(self, window: Window, *, with_logits: bool) -> Tensor | None:
        """Write the rows' keys and values; returns logits FP32 `[rows, real_vocab]` on the CPU, or None."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


@dataclass(frozen=True)
class Prompts:
    """A step's chunks whole: hidden rows BF16 `[rows, hidden]`; per sequence what it has and brings, and its pages.

    `chunks` are pairs (tokens in the cache, new tokens), whose rows stand one behind the other in `x`.
    """

    x: Tensor
    chunks: tuple[tuple[int, int], ...]
    pages: list[list[int]]


@runtime_checkable
class RunsPrompts(Protocol):
    """Programs that take prompts whole."""

    def run_prompts(self, prompts: Prompts) -> Tensor:
        """Write the rows' keys and values; returns the last rows' logits FP32 `[sequences, real_vocab]`."""
        ...


class PyptoExecutor:
    """An `Executor` that computes with the PyPTO programs."""

    def __init__(self, slabs: Slabs, num_pages: int, programs: Programs | None = None) -> None:
        if num_pages < 1:
            raise ExecutorError(f"num_pages is {num_pages}; expected at least 1")
        self.config = slabs.config
        self.num_pages = num_pages
        self.max_context_tokens = slabs.tensors["rope_cos"].shape[0]
        self._embedding = slabs.tensors["embed_weight"]
        self._real_vocab = slabs.real_vocab
        self._programs: Programs | None = programs or _open_programs(slabs, num_pages)

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """Run `batch`; see `Executor.forward`. Raises ExecutorError when a chunk is out of range or a program fails."""
        if self._programs is None:
            raise ExecutorError("the executor is closed")
        step = plan_step(batch, self.config, self.num_pages, self.max_context_tokens)
        if isinstance(self._programs, RunsPrompts) and _has_prompts(batch):
            return self._run_prompts(self._programs, step, batch)
        logits = [torch.empty(0, self._real_vocab)]
        for part in step.split(BATCH_WINDOW_ROWS):
            wanted = part.logit_rows.to(torch.int64)
            try:
                rows = self._programs.run(self._window(part), with_logits=len(wanted) > 0)
            except KernelsError as error:
                raise ExecutorError(f"the PyPTO programs failed: {error}") from error
            if rows is not None:
                logits.append(rows[wanted])
        return torch.cat(logits)

    def _run_prompts(self, programs: RunsPrompts, step: StepRows, batch: Sequence[Chunk]) -> Tensor:
        prompts = Prompts(
            x=self._embedding[step.token_ids.to(torch.int64)],
            chunks=tuple((chunk.start_position, len(chunk.token_ids)) for chunk in batch),
            pages=[_pages(chunk) for chunk in batch],
        )
        try:
            logits = programs.run_prompts(prompts)
        except KernelsError as error:
            raise ExecutorError(f"the PyPTO programs failed: {error}") from error
        return logits[[index for index, chunk in enumerate(batch) if chunk.logits == "last"]]

    def close(self) -> None:
        """Release weights and caches."""
        if self._programs is not None:
            self._programs.close()
            self._programs = None

    def _window(self, part: StepRows) -> Window:
        positions = part.positions.tolist()
        pages = [
            part.tables[sequence, : position // PAGE_TOKENS + 1].tolist()
            for sequence, position in zip(part.sequence.tolist(), positions, strict=True)
        ]
        return Window(self._embedding[part.token_ids.to(torch.int64)], positions, pages)


class HostPrograms:
    """The programs in the host's interpreter: one subprocess per window, which gets the pages it touches and no others.

    Rows are padded to 16 wherever the interpreter multiplies floats across rows (a BF16 down projection, the LM head),
    so that a row's numbers do not depend on how many rows run beside it.
    """

    def __init__(self, slabs: Slabs, num_pages: int, *, whole_steps: bool = False) -> None:
        """Caches for `num_pages` pages; with `whole_steps` a window whose logits are wanted is one `decode_step`.

        A whole step pads all its stages to 16 rows, which costs the interpreter more than the calls it saves.
        """
        config = slabs.config
        self._slabs = slabs
        shape = (config.num_layers, num_pages + 1, PAGE_TOKENS, config.kv_size)
        self._caches = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}
        self._scratch_page = num_pages
        self._whole_steps = whole_steps

    def run(self, window: Window, *, with_logits: bool) -> Tensor | None:
        """Interpret every layer, and the LM head when logits are wanted."""
        real_rows = len(window.positions)
        whole_step = with_logits and self._whole_steps
        if whole_step or self._slabs.down == "bf16":
            window = window.padded(BATCH_WINDOW_ROWS, self._scratch_page)
        used = sorted({page for row in window.pages for page in row})
        window = window.with_pages({page: index for index, page in enumerate(used)})
        if whole_step:
            return self._run_step(window, used)[:real_rows]
        logits = self._run_layers(window, used, with_logits=with_logits)
        return None if logits is None else logits[:real_rows]

    def close(self) -> None:
        """Drop the caches."""
        self._caches = {}

    def _run_step(self, window: Window, used: list[int]) -> Tensor:
        slabs, config = self._slabs, self._slabs.config
        spec = DecodeStepSpec.of(config, slabs.down, window.contexts(), pages=len(used))
        rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        layer_slots, rows = len(used) * PAGE_TOKENS, len(window.positions)
        tensors = {
            "x": window.x,
            **stacked_slabs(slabs.tensors),
            **step_rows(window.positions, window.pages, *rope, config.num_layers, layer_slots),
            **{name: cache[:, used].flatten(0, 2) for name, cache in self._caches.items()},
            "final_norm": slabs.tensors["final_norm_weight"],
            "lm_head_weight": slabs.tensors["lm_head_weight"],
            "embed_weight": slabs.tensors["embed_weight"],
            "logits": torch.zeros(rows, slabs.real_vocab),
            "ids": torch.zeros(rows, 1, dtype=torch.int32),
        }
        done = run_program(DecodeStep(spec), tensors)
        for name, cache in self._caches.items():
            cache[:, used] = done[name].view(config.num_layers, len(used), PAGE_TOKENS, -1)
        return done["logits"]

    def _run_layers(self, window: Window, used: list[int], *, with_logits: bool) -> Tensor | None:
        slabs, config = self._slabs, self._slabs.config
        layer = DecodeLayer(DecodeLayerSpec.of(config, slabs.down, window.contexts(), pages=len(used)))
        rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        tensors = {"x.0": window.x, **row_arguments(window.positions, window.pages, *rope)}
        rows = {name: name for name in tensors if name != "x.0"}
        calls: list[Call] = []
        wanted: list[str] = []
        for index in range(config.num_layers):
            slab = {f"{name}.{index}": value for name, value in layer_arguments(slabs.layer(index)).items()}
            pages = {f"{name}.{index}": cache[index, used].flatten(0, 1) for name, cache in self._caches.items()}
            tensors |= slab | pages
            wanted += pages
            per_layer = {key.rpartition(".")[0]: key for key in (*slab, *pages)}
            calls.append(Call(layer, {"x": f"x.{index}", **rows, **per_layer}, {"out": f"x.{index + 1}"}))
        views = {}
        if with_logits:
            # The last layer writes the first rows of a full window, on which the LM head then runs.
            last = calls.pop()
            calls += [Call(last.program, {**last.bindings, "out": "last_rows"}), self._head_call()]
            tensors |= {
                "window": window.x.new_zeros(BATCH_WINDOW_ROWS, config.hidden_size),
                "lm_head_weight": slabs.tensors["lm_head_weight"],
                "final_norm": slabs.tensors["final_norm_weight"],
            }
            views["last_rows"] = ("window", len(window.positions))
            wanted.append("logits")
        done = interpret(calls, tensors, wanted, views=views)
        logits = done.pop("logits", None)
        for key, value in done.items():
            name, _, layer_index = key.rpartition(".")
            self._caches[name][int(layer_index), used] = value.view(len(used), PAGE_TOKENS, -1)
        return logits

    def _head_call(self) -> Call:
        head = LmHeadGreedy(LmHeadSpec.of(self._slabs.config, BATCH_WINDOW_ROWS))
        bindings = {"x": "window", "weight": "lm_head_weight", "final_norm": "final_norm"}
        return Call(head, bindings, {"logits": "logits"})


def _has_prompts(batch: Sequence[Chunk]) -> bool:
    """Whether a batch brings prompts (several tokens of a sequence), of which at most the last rows' logits count."""
    return any(len(chunk.token_ids) > 1 for chunk in batch) and all(chunk.logits != "all" for chunk in batch)


def _pages(chunk: Chunk) -> list[int]:
    """The pages that a chunk's sequence has up to the chunk's last token."""
    return list(chunk.pages[: -(-(chunk.start_position + len(chunk.token_ids)) // PAGE_TOKENS)])


def npu_available() -> bool:
    """Whether torch can compute on an Ascend NPU in this process."""
    if find_spec("torch_npu") is None:
        return False
    npu = getattr(import_module("torch_npu"), "npu", None)
    return npu is not None and bool(npu.is_available())


def _open_programs(slabs: Slabs, num_pages: int) -> Programs:
    if npu_available():
        from serving.executor.pypto_npu import NpuPrograms

        return NpuPrograms(slabs, num_pages)
    logger.warning("no NPU here: the PyPTO programs run in the host's interpreter, seconds per layer")
    return HostPrograms(slabs, num_pages)
