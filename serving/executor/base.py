"""What an executor is: the one call between the engine and the arithmetic.

The engine decides *which* tokens run and in which pages their keys and values live; an executor decides *how* they are
computed. Prefill, chunked prefill and decode are the same call: a batch of chunks, each some tokens of one sequence.
This module knows nothing of scheduling, sampling or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kernels.goldens import PAGE_TOKENS
from quantize.model_config import ModelConfig

__all__ = ["PAGE_TOKENS", "Chunk", "Executor"]


@dataclass(frozen=True)
class Chunk:
    """Some consecutive tokens of one sequence, to be run in one batch.

    `token_ids` stand at positions `start_position ..`; `pages` lists all pages of the sequence in order and covers at
    least `start_position + len(token_ids)` tokens. `logits` says which rows the caller wants back: the last token's,
    every token's, or none (a prefill chunk that is not the prompt's last).
    """

    token_ids: Sequence[int]
    start_position: int
    pages: Sequence[int]
    logits: Literal["last", "all", "none"] = "last"


class Executor(Protocol):
    """Runs batches of chunks on the model's weights and its paged KV cache.

    `config` is the model's shape, `num_pages` the pages that the caller may name (`0 .. num_pages - 1`), and
    `max_context_tokens` the longest sequence (the smaller of the model's and the RoPE table's length).
    """

    config: ModelConfig
    num_pages: int
    max_context_tokens: int

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """Run `batch`, write its keys and values into its pages, and return logits FP32 `[rows, real_vocab]`.

        Rows stand in the order of the chunks: one for "last", `len(token_ids)` for "all", none for "none". A chunk's
        numbers depend on its own sequence only: not on its batch mates, nor on how the sequence was cut into chunks.
        Raises ExecutorError on a chunk that is out of range, before anything is computed or written.
        """
        ...

    def close(self) -> None:
        """Release weights, cache and threads; calling it again does nothing."""
        ...
