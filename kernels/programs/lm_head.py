"""`lm_head_greedy`: final RMS norm, BF16 LM head in vocabulary chunks, and greedy sampling, with its golden.

In: BF16 hidden rows and the LM head slab, padded to a multiple of 512 rows. Out: FP32 logits over the real vocabulary,
and the id of the largest one: padded ids never win, and ties go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS, padded_vocab
from kernels.errors import ProgramError
from kernels.goldens import greedy, lm_head
from kernels.programs.base import Argument, Program, ProgramSpec, check_rows
from kernels.programs.vocabulary import VocabularyChunks
from kernels.tile_plan import check_head_tiles
from quantize.model_config import ModelConfig

__all__ = ["CHUNK_TOKENS", "LmHeadGreedy", "LmHeadSpec"]

CHUNK_TOKENS = 6144
"""Vocabulary rows per chunk: 24 cores x 256 columns, one wave of matmul tasks."""


@dataclass(frozen=True)
class LmHeadSpec(ProgramSpec, VocabularyChunks):
    """Shape of the LM head; `padded_vocab` rows of weight, `real_vocab` of them real.

    The program takes any number of hidden rows, in windows of `window_rows`; `batch_rows` of them are in the sample
    inputs.
    """

    hidden_size: int
    real_vocab: int
    padded_vocab: int
    rms_norm_eps: float
    batch_rows: int
    chunk_tokens: int
    window_rows: int = BATCH_WINDOW_ROWS

    def __post_init__(self) -> None:
        problems = []
        if self.hidden_size % 32:
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of 32")
        if not 1 <= self.real_vocab <= self.padded_vocab:
            problems.append(f"{self.real_vocab} real ids do not fit {self.padded_vocab} rows")
        if self.chunk_tokens % 32 or not 32 <= self.chunk_tokens <= self.real_vocab:
            problems.append(f"chunk_tokens {self.chunk_tokens} is not a multiple of 32 in 32..{self.real_vocab}")
        if self.batch_rows < 1:
            problems.append(f"batch_rows {self.batch_rows} must be at least 1")
        if self.window_rows < 1:
            problems.append(f"window_rows {self.window_rows} must be at least 1")
        if problems:
            raise ProgramError(f"no lm_head_greedy program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        batch_rows: int,
        chunk_tokens: int = CHUNK_TOKENS,
        window_rows: int = BATCH_WINDOW_ROWS,
    ) -> LmHeadSpec:
        """The LM head of `config`; the chunk is at most the real vocabulary, in blocks of 256 or 32."""
        unit = 256 if config.vocab_size >= 256 else 32
        return cls(
            hidden_size=config.hidden_size,
            real_vocab=config.vocab_size,
            padded_vocab=padded_vocab(config.vocab_size),
            rms_norm_eps=config.rms_norm_eps,
            batch_rows=batch_rows,
            chunk_tokens=min(chunk_tokens, config.vocab_size // unit * unit),
            window_rows=window_rows,
        )


class LmHeadGreedy(Program):
    """Final norm, LM head and greedy sampling at one shape."""

    name = "lm_head_greedy"
    kernel_module = "kernels.programs.lm_head_kernel"
    spec: LmHeadSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Hidden rows, norm, LM head slab; scratch rows and the chunks' winners; logits and ids."""
        s = self.spec
        fp32, bf16 = torch.float32, torch.bfloat16
        return (
            Argument("x", bf16, (None, s.hidden_size)),
            Argument("final_norm", fp32, (1, s.hidden_size)),
            Argument("weight", bf16, (s.padded_vocab, s.hidden_size)),
            Argument("normed_rows", bf16, (s.window_rows, s.hidden_size), "scratch"),
            Argument("block_maxima", fp32, (s.window_rows, s.block_columns), "scratch"),
            Argument("block_ids", fp32, (s.window_rows, s.block_columns), "scratch"),
            Argument("logits", fp32, (None, s.real_vocab), "out"),
            Argument("ids", torch.int32, (None, 1), "out"),
        )

    def check_tiles(self) -> None:
        """The tiles around the matmul of a chunk, with all rows of a window."""
        s = self.spec
        check_head_tiles(s.hidden_size, s.chunk_tokens, s.block_tokens, s.window_rows)

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random rows; ties planted within and across chunks, and a row that id 0 and its padding copies win."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        tensors = self.shape_inputs()
        x = torch.randn(s.batch_rows, s.hidden_size, generator=generator)
        weight = torch.randn(s.padded_vocab, s.hidden_size, generator=generator) / math.sqrt(s.hidden_size)
        direction = x / x.norm(dim=-1, keepdim=True)
        for row in range(min(s.batch_rows, 3)):
            first, second = [(0, 0), (s.real_vocab // 3, s.real_vocab // 3 + 1), (s.real_vocab // 2, s.real_vocab - 1)][
                row
            ]
            weight[first] = weight[second] = 2.0 * direction[row]
        weight[s.real_vocab :] = weight[0]
        tensors["x"] = x.to(torch.bfloat16)
        tensors["weight"] = weight.to(torch.bfloat16)
        tensors["final_norm"] = 0.5 + torch.rand(1, s.hidden_size, generator=generator)
        return tensors

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros: no value steers the control flow."""
        rows = self.spec.batch_rows
        return {
            a.name: torch.zeros([rows if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
        }

    def units(self) -> int:
        """For every window norm, one body per chunk, sample."""
        return -(-self.spec.batch_rows // self.spec.window_rows) * (2 + self.spec.chunks)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse outputs with another number of rows than the input."""
        check_rows(self.name, tensors, ("x", "logits", "ids"))

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Logits of the real vocabulary and the greedy ids."""
        s = self.spec
        weight = tensors["weight"][: s.real_vocab]
        logits = lm_head(tensors["x"], tensors["final_norm"][0], weight, s.rms_norm_eps)
        return {"logits": logits, "ids": greedy(logits, s.real_vocab).to(torch.int32).unsqueeze(1)}

    def tolerances(self) -> dict[str, str]:
        """Ids are exact; logits are FP32 sums whose order is not fixed."""
        return {"logits": "FP32 summation order"}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The weight's real rows once a window, the norm, the hidden rows, and the logits written."""
        s = self.spec
        windows = -(-s.batch_rows // s.window_rows)
        read = windows * s.real_vocab * s.hidden_size * 2 + s.hidden_size * 4 + s.batch_rows * s.hidden_size * 2
        return read + s.batch_rows * s.real_vocab * 4 + s.batch_rows * 4
