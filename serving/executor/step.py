"""From a batch of chunks to flat arrays: what every executor checks and computes before any arithmetic.

A step is a list of token rows, each with its position and the page table of its sequence. Bad chunks are refused here,
naming the chunk and the field, so that no backend ever sees an index out of range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.model_config import ModelConfig
from serving.errors import ExecutorError
from serving.executor.base import PAGE_TOKENS, Chunk


@dataclass(frozen=True)
class StepRows:
    """Token rows of one step; all tensors INT32 and contiguous.

    `token_ids`, `positions` and `sequence` are `[rows]`, the last one naming the row of `tables`
    `[sequences, max_pages]` that lists the pages of the token's sequence in order (unused entries are 0).
    `logit_rows` names the rows whose logits are wanted, in the order of the result.
    """

    token_ids: Tensor
    positions: Tensor
    sequence: Tensor
    tables: Tensor
    logit_rows: Tensor

    @property
    def count(self) -> int:
        """Number of token rows."""
        return self.token_ids.shape[0]

    def split(self, max_rows: int) -> Iterator[StepRows]:
        """Cut into steps of at most `max_rows` rows, in order.

        The results are those of one step: a token attends to earlier positions only, and these run before it.
        """
        for start in range(0, self.count, max_rows):
            stop = start + max_rows
            wanted = self.logit_rows[(self.logit_rows >= start) & (self.logit_rows < stop)]
            yield StepRows(
                self.token_ids[start:stop],
                self.positions[start:stop],
                self.sequence[start:stop],
                self.tables,
                (wanted - start).contiguous(),
            )


def plan_step(batch: Sequence[Chunk], config: ModelConfig, num_pages: int, max_context_tokens: int) -> StepRows:
    """Check every chunk of `batch` and lay its tokens out as rows.

    Raises ExecutorError naming the chunk, what was found and what was expected.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    tables: list[list[int]] = []
    logit_rows: list[int] = []
    for index, chunk in enumerate(batch):
        pages = check_chunk(index, chunk, config.vocab_size, num_pages, max_context_tokens)
        first, count = len(token_ids), len(chunk.token_ids)
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start_position, chunk.start_position + count))
        sequence.extend([index] * count)
        tables.append(pages)
        if chunk.logits == "all":
            logit_rows.extend(range(first, first + count))
        elif chunk.logits == "last":
            logit_rows.append(first + count - 1)
    width = max((len(pages) for pages in tables), default=0)
    padded = [pages + [0] * (width - len(pages)) for pages in tables]
    return StepRows(
        torch.tensor(token_ids, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(sequence, dtype=torch.int32),
        torch.tensor(padded, dtype=torch.int32).reshape(len(padded), width),
        torch.tensor(logit_rows, dtype=torch.int32),
    )


def check_chunk(index: int, chunk: Chunk, vocab_size: int, num_pages: int, max_context_tokens: int) -> list[int]:
    """Refuse a chunk that is out of range; returns the pages that its tokens need, in order."""
    count, start = len(chunk.token_ids), chunk.start_position
    if count == 0:
        raise ExecutorError(f"chunk {index} has no tokens; expected at least 1")
    if chunk.logits not in ("last", "all", "none"):
        raise ExecutorError(f"chunk {index} asks for logits {chunk.logits!r}; expected 'last', 'all' or 'none'")
    low, high = min(chunk.token_ids), max(chunk.token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ExecutorError(f"chunk {index} has token id {bad}; expected ids in 0..{vocab_size - 1}")
    end = start + count
    if start < 0 or end > max_context_tokens:
        raise ExecutorError(
            f"chunk {index} covers positions {start}..{end - 1}; expected positions in 0..{max_context_tokens - 1}"
        )
    needed = -(-end // PAGE_TOKENS)
    if len(chunk.pages) < needed:
        raise ExecutorError(
            f"chunk {index} has {len(chunk.pages)} pages; its {end} tokens need {needed} of {PAGE_TOKENS} tokens each"
        )
    pages = list(chunk.pages[:needed])
    if min(pages) < 0 or max(pages) >= num_pages:
        bad = min(pages) if min(pages) < 0 else max(pages)
        raise ExecutorError(f"chunk {index} names page {bad}; expected pages in 0..{num_pages - 1}")
    if len(set(pages)) != needed:
        raise ExecutorError(f"chunk {index} names a page twice: {pages}; every page of a sequence is its own")
    return pages
