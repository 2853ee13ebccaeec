"""The `pypto` executor: the engine's batches through the PyPTO programs, on an NPU or in the host's interpreter.

Both run the same programs over all token rows of a step, whose number is not compiled in: `decode_layer` for every
layer, then `lm_head_greedy` where logits are wanted; or `decode_step`, which is both in one. Rows of one sequence stand
in the order of their positions, since a layer works in windows of 16 rows, each of which writes its keys before it
attends. Without an NPU the interpreter takes seconds per layer: it is there to check the programs, not to serve.
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
from kernels.programs.decode_cache import cache_arguments
from kernels.programs.decode_layer import DecodeLayerSpec, decode_layer, layer_arguments, row_arguments
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec, step_rows
from kernels.programs.layer_slabs import stacked_slabs
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.slabs import Slabs
from quantize.model_config import ModelConfig
from serving.errors import ExecutorError
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.kv_codec import open_codec
from serving.executor.step import StepRows, plan_step

__all__ = ["HostPrograms", "Prompts", "PyptoExecutor", "Rows", "RunsPrompts", "layer_matrices", "npu_available"]

logger = logging.getLogger(__name__)


class Rows:
    """The token rows of a step: hidden rows BF16 `[rows, hidden]`, their positions, and each row's pages."""

    def __init__(self, x: Tensor, positions: list[int], pages: list[list[int]]) -> None:
        self.x = x
        self.positions = positions
        self.pages = pages

    def padded(self, scratch_page: int) -> Rows:
        """Whole windows: rows are added behind, which stand one behind the other in `scratch_page`."""
        missing = -len(self.positions) % BATCH_WINDOW_ROWS
        x = torch.cat([self.x, self.x.new_zeros(missing, self.x.shape[1])])
        return Rows(x, [*self.positions, *range(missing)], [*self.pages, *([scratch_page] for _ in range(missing))])

    def with_pages(self, number: dict[int, int]) -> Rows:
        """The same rows with their pages renumbered."""
        return Rows(self.x, self.positions, [[number[page] for page in row] for row in self.pages])

    def contexts(self) -> tuple[int, ...]:
        """Context length of every row, in tokens."""
        return tuple(position + 1 for position in self.positions)


class Programs(Protocol):
    """Runs the programs on the rows of a step, keeping weights and caches where it computes."""

    def run(self, rows: Rows, *, with_logits: bool) -> Tensor | None:
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

    def __init__(self, slabs: Slabs, num_pages: int, programs: Programs | None = None, kv: str = "bf16") -> None:
        """With `programs`, or such as there are for caches of `kv` (`kernels.kv_format.KV_FORMATS`)."""
        if num_pages < 1:
            raise ExecutorError(f"num_pages is {num_pages}; expected at least 1")
        self.config = slabs.config
        self.num_pages = num_pages
        self.max_context_tokens = slabs.tensors["rope_cos"].shape[0]
        self._embedding = slabs.tensors["embed_weight"]
        self._real_vocab = slabs.real_vocab
        self._programs: Programs | None = programs or _open_programs(slabs, num_pages, kv)

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """Run `batch`; see `Executor.forward`. Raises ExecutorError when a chunk is out of range or a program fails."""
        if self._programs is None:
            raise ExecutorError("the executor is closed")
        step = plan_step(batch, self.config, self.num_pages, self.max_context_tokens)
        if isinstance(self._programs, RunsPrompts) and _has_prompts(batch):
            return self._run_prompts(self._programs, step, batch)
        if not step.count:
            return torch.empty(0, self._real_vocab)
        wanted = step.logit_rows.to(torch.int64)
        try:
            logits = self._programs.run(self._rows(step), with_logits=len(wanted) > 0)
        except KernelsError as error:
            raise ExecutorError(f"the PyPTO programs failed: {error}") from error
        return torch.empty(0, self._real_vocab) if logits is None else logits[wanted]

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

    def _rows(self, step: StepRows) -> Rows:
        positions = step.positions.tolist()
        pages = [
            step.tables[sequence, : position // PAGE_TOKENS + 1].tolist()
            for sequence, position in zip(step.sequence.tolist(), positions, strict=True)
        ]
        return Rows(self._embedding[step.token_ids.to(torch.int64)], positions, pages)


class HostPrograms:
    """The programs in the host's interpreter: one subprocess per step, which gets the pages it touches and no others.

    Windows are filled up to 16 rows wherever the interpreter multiplies floats across rows (a BF16 down projection, the
    LM head): its sums depend on how many there are, and a row's numbers must not depend on its batch mates.
    """

    def __init__(self, slabs: Slabs, num_pages: int, *, whole_steps: bool = False, kv: str = "bf16") -> None:
        """Caches for `num_pages` pages; with `whole_steps` a step whose logits are wanted is one `decode_step`.

        The LM head is part of that, so that all its stages run on whole windows. `kv` names how the caches keep keys
        and values (`kernels.kv_format.KV_FORMATS`).
        """
        if whole_steps and kv != "bf16":
            raise ExecutorError(f"found KV format {kv} for whole steps, which keep bf16; run layer after layer with it")
        config = slabs.config
        self._slabs, self._kv = slabs, kv
        self._matrices = layer_matrices(kv, config)
        self._caches = {
            a.name: torch.zeros(config.num_layers, num_pages + 1, PAGE_TOKENS, a.shape[1] or 1, dtype=a.dtype)
            for a in cache_arguments(DecodeLayerSpec.of(config, slabs.down, (1,), kv=kv))
            if a.direction == "inout"
        }
        self._scratch_page = num_pages
        self._whole_steps = whole_steps

    def run(self, rows: Rows, *, with_logits: bool) -> Tensor | None:
        """Interpret every layer, and the LM head when logits are wanted."""
        real_rows = len(rows.positions)
        whole_step = with_logits and self._whole_steps
        if whole_step or self._slabs.down == "bf16":
            rows = rows.padded(self._scratch_page)
        used = sorted({page for row in rows.pages for page in row})
        rows = rows.with_pages({page: index for index, page in enumerate(used)})
        if whole_step:
            return self._run_step(rows, used)[:real_rows]
        logits = self._run_layers(rows, used, with_logits=with_logits)
        return None if logits is None else logits[:real_rows]

    def close(self) -> None:
        """Drop the caches."""
        self._caches = {}

    def _run_step(self, rows: Rows, used: list[int]) -> Tensor:
        slabs, config = self._slabs, self._slabs.config
        spec = DecodeStepSpec.of(config, slabs.down, rows.contexts(), pages=len(used))
        rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        layer_slots, count = len(used) * PAGE_TOKENS, len(rows.positions)
        tensors = {
            "x": rows.x,
            **stacked_slabs(slabs.tensors),
            **step_rows(rows.positions, rows.pages, *rope, config.num_layers, layer_slots),
            **{name: cache[:, used].flatten(0, 2) for name, cache in self._caches.items()},
            "final_norm": slabs.tensors["final_norm_weight"],
            "lm_head_weight": slabs.tensors["lm_head_weight"],
            "embed_weight": slabs.tensors["embed_weight"],
            "logits": torch.zeros(count, slabs.real_vocab),
            "ids": torch.zeros(count, 1, dtype=torch.int32),
        }
        done = run_program(DecodeStep(spec), tensors)
        for name, cache in self._caches.items():
            cache[:, used] = done[name].view(config.num_layers, len(used), PAGE_TOKENS, -1)
        return done["logits"]

    def _run_layers(self, rows: Rows, used: list[int], *, with_logits: bool) -> Tensor | None:
        slabs, config = self._slabs, self._slabs.config
        layer = decode_layer(DecodeLayerSpec.of(config, slabs.down, rows.contexts(), pages=len(used), kv=self._kv))
        rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        tensors = {"x.0": rows.x, **row_arguments(rows.positions, rows.pages, *rope)}
        row_data = {name: name for name in tensors if name != "x.0"}
        calls: list[Call] = []
        wanted: list[str] = []
        for index in range(config.num_layers):
            of_layer = {**layer_arguments(slabs.layer(index)), **self._matrices[index]}
            slab = {f"{name}.{index}": value for name, value in of_layer.items()}
            pages = {f"{name}.{index}": cache[index, used].flatten(0, 1) for name, cache in self._caches.items()}
            tensors |= slab | pages
            wanted += pages
            per_layer = {key.rpartition(".")[0]: key for key in (*slab, *pages)}
            calls.append(Call(layer, {"x": f"x.{index}", **row_data, **per_layer}, {"out": f"x.{index + 1}"}))
        views = {}
        if with_logits:
            # The last layer writes the first rows of whole windows, on which the LM head then runs.
            count = len(rows.positions)
            head_rows = count + -count % BATCH_WINDOW_ROWS
            last = calls.pop()
            calls += [Call(last.program, {**last.bindings, "out": "last_rows"}), self._head_call(head_rows)]
            tensors |= {
                "head_rows": rows.x.new_zeros(head_rows, config.hidden_size),
                "lm_head_weight": slabs.tensors["lm_head_weight"],
                "final_norm": slabs.tensors["final_norm_weight"],
            }
            views["last_rows"] = ("head_rows", count)
            wanted.append("logits")
        done = interpret(calls, tensors, wanted, views=views)
        logits = done.pop("logits", None)
        for key, value in done.items():
            name, _, layer_index = key.rpartition(".")
            self._caches[name][int(layer_index), used] = value.view(len(used), PAGE_TOKENS, -1)
        return logits

    def _head_call(self, rows: int) -> Call:
        head = LmHeadGreedy(LmHeadSpec.of(self._slabs.config, rows))
        bindings = {"x": "head_rows", "weight": "lm_head_weight", "final_norm": "final_norm"}
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


def layer_matrices(kv: str, config: ModelConfig) -> list[dict[str, Tensor]]:
    """For every layer the arguments `k_matrices` and `v_matrices` of KV format `kv`, or none for `bf16`.

    They are the CPU executor's.
    """
    codec = open_codec(kv, config)
    if codec is None:
        return [{} for _ in range(config.num_layers)]
    return [
        {"k_matrices": key.matrices.contiguous(), "v_matrices": value.matrices.contiguous()}
        for key, value in zip(codec.keys, codec.values, strict=True)
    ]


def _open_programs(slabs: Slabs, num_pages: int, kv: str) -> Programs:
    if npu_available():
        from serving.executor.pypto_npu import NpuPrograms

        return NpuPrograms(slabs, num_pages, kv=kv)
    logger.warning("no NPU here: the PyPTO programs run in the host's interpreter, seconds per layer")
    return HostPrograms(slabs, num_pages, kv=kv)
