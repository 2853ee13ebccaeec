"""Prompts through `prefill_step` in the host's interpreter, for a batch at once.

`HostPrograms` runs a prompt as windows of decode rows, whose bits do not depend on how the prompt is cut. This runs it
as the program that an NPU would be given, all tokens of all sequences in one call: the same numbers but for the order
of FP32 sums, which an interpreter's matrix products of other heights do not promise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS
from kernels.interpreter import run_program
from kernels.programs.layer_slabs import stacked_slabs
from kernels.programs.prefill_layer import causal_bias, chunk_arguments
from kernels.programs.prefill_step import PrefillStep, PrefillStepSpec
from kernels.slabs import Slabs
from serving.executor.base import PAGE_TOKENS
from serving.executor.pypto import HostPrograms, Prompts

__all__ = ["HostPromptPrograms"]


class HostPromptPrograms(HostPrograms):
    """`HostPrograms` that takes prompts whole; its caches are BF16."""

    def __init__(self, slabs: Slabs, num_pages: int, *, whole_steps: bool = False) -> None:
        super().__init__(slabs, num_pages, whole_steps=whole_steps)

    def run_prompts(self, prompts: Prompts) -> Tensor:
        """Interpret one `prefill_step`; returns the logits FP32 `[sequences, real_vocab]` of the last rows."""
        slabs, config = self._slabs, self._slabs.config
        used = sorted({page for pages in prompts.pages for page in pages})
        number = {page: index for index, page in enumerate(used)}
        pages = [[number[page] for page in owned] for owned in prompts.pages]
        windows = -(-len(prompts.x) // BATCH_WINDOW_ROWS)
        spec = PrefillStepSpec.of(
            config, slabs.down, prompts.chunks, window_rows=min(PAGE_TOKENS, windows * BATCH_WINDOW_ROWS)
        )
        rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        sequences = len(prompts.chunks)
        tensors = {
            "x": prompts.x,
            **stacked_slabs(slabs.tensors),
            **chunk_arguments(prompts.chunks, pages, *rope),
            "causal_bias": causal_bias(),
            **{name: cache[:, used].flatten(0, 2) for name, cache in self._caches.items()},
            "final_norm": slabs.tensors["final_norm_weight"],
            "lm_head_weight": slabs.tensors["lm_head_weight"],
            "embed_weight": slabs.tensors["embed_weight"],
            "logits": torch.zeros(sequences, slabs.real_vocab),
            "ids": torch.zeros(sequences, 1, dtype=torch.int32),
        }
        done = run_program(PrefillStep(spec), tensors)
        for name, cache in self._caches.items():
            cache[:, used] = done[name].view(config.num_layers, len(used), PAGE_TOKENS, -1)
        return done["logits"]
