"""`greedy_sample` and `topk_select`: ids from FP32 logits, with their goldens.

Both take rows of `columns` logits, of which the first `real_vocab` are of real ids: padding is never read. Ties go to
the lowest id. Temperature, top-p and the random draw stay with the host, which gets 32 candidates a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS, padded_vocab
from kernels.errors import ProgramError
from kernels.goldens import greedy, top_ids
from kernels.programs.base import Argument, Program, ProgramSpec, check_rows
from kernels.programs.vocabulary import VocabularyChunks
from quantize.model_config import ModelConfig

__all__ = ["TOP_IDS", "GreedySample", "GreedySampleSpec", "TopkSelect", "TopkSelectSpec"]

TOP_IDS = 32
"""Candidates that `topk_select` returns for every row."""
GREEDY_CHUNK_TOKENS = 6144
TOPK_CHUNK_TOKENS = 6144


@dataclass(frozen=True)
class SamplingSpec(ProgramSpec, VocabularyChunks):
    """Shape of the logits: any number of rows, `batch_rows` of them in the sample inputs.

    A row is read in chunks of `chunk_tokens` ids; the last chunk ends at the last real id.
    """

    columns: int
    real_vocab: int
    batch_rows: int
    chunk_tokens: int
    window_rows: int = BATCH_WINDOW_ROWS

    def __post_init__(self) -> None:
        problems = []
        if not TOP_IDS <= self.real_vocab <= self.columns:
            problems.append(f"{self.real_vocab} real ids are not in {TOP_IDS}..{self.columns}, the logits' columns")
        if self.columns % 8:
            problems.append(f"columns {self.columns} is not a multiple of 8, the 32 bytes that a vector tile needs")
        if self.chunk_tokens % 32 or not 32 <= self.chunk_tokens <= self.real_vocab:
            problems.append(f"chunk_tokens {self.chunk_tokens} is not a multiple of 32 in 32..{self.real_vocab}")
        for name, rows in (("batch_rows", self.batch_rows), ("window_rows", self.window_rows)):
            if rows < 1:
                problems.append(f"{name} {rows} must be at least 1")
        if problems:
            raise ProgramError(f"no sampling program for this shape: {'; '.join(problems)}")


@dataclass(frozen=True)
class GreedySampleSpec(SamplingSpec):
    """Shape of `greedy_sample`."""

    @classmethod
    def of(cls, config: ModelConfig, batch_rows: int, chunk_tokens: int | None = None) -> GreedySampleSpec:
        """Logits of `config`, padded as the LM head slab is."""
        chunk = min(chunk_tokens or GREEDY_CHUNK_TOKENS, config.vocab_size // 32 * 32)
        return cls(padded_vocab(config.vocab_size), config.vocab_size, batch_rows, chunk)


@dataclass(frozen=True)
class TopkSelectSpec(SamplingSpec):
    """Shape of `topk_select`: one level where a chunk holds the vocabulary, else the best of the chunks' best."""

    @classmethod
    def of(cls, config: ModelConfig, batch_rows: int, chunk_tokens: int | None = None) -> TopkSelectSpec:
        """Logits of `config`, padded as the LM head slab is."""
        chunk = min(chunk_tokens or TOPK_CHUNK_TOKENS, config.vocab_size // 32 * 32)
        return cls(padded_vocab(config.vocab_size), config.vocab_size, batch_rows, chunk)


class SamplingProgram(Program):
    """What both programs share: their inputs."""

    spec: SamplingSpec

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random logits with many ties: within a chunk, across chunks, at the last real id; padding above them all."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(s.batch_rows, s.columns, generator=generator)
        # A coarse row has long ties everywhere, a flat one nothing else.
        logits[0::3] = (logits[0::3] * 4).round() / 4
        logits[1::5] = -1.5
        for row, ids in enumerate(
            [(0, 1), (s.real_vocab // 3, s.real_vocab - 1), (s.real_vocab - 1, s.real_vocab - 2)]
        ):
            if row < s.batch_rows:
                logits[row, list(ids)] = 9.0
        logits[:, s.real_vocab :] = 100.0
        return {**self.shape_inputs(), "logits": logits}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros: no value steers the control flow."""
        rows = self.spec.batch_rows
        return {
            a.name: torch.zeros([rows if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
        }

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse outputs with another number of rows than the logits, and logits that are not numbers."""
        outputs = [argument.name for argument in self.arguments() if argument.direction == "out"]
        check_rows(self.name, tensors, ["logits", *outputs])
        broken = ~tensors["logits"][:, : self.spec.real_vocab].isfinite()
        if bool(broken.any()):
            row, column = broken.nonzero()[0].tolist()
            value = float(tensors["logits"][row, column])
            raise ProgramError(f"{self.name} cannot be called: logit {column} of row {row} is {value}; expected finite")

    @property
    def windows(self) -> int:
        """Windows of rows in the sample inputs."""
        return -(-self.spec.batch_rows // self.spec.window_rows)


class GreedySample(SamplingProgram):
    """The id of every row's largest logit."""

    name = "greedy_sample"
    kernel_module = "kernels.programs.greedy_sample_kernel"
    spec: GreedySampleSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Logits; scratch with one value a block of columns; ids."""
        s = self.spec
        return (
            Argument("logits", torch.float32, (None, s.columns)),
            Argument("block_maxima", torch.float32, (s.window_rows, s.block_columns), "scratch"),
            Argument("block_ids", torch.float32, (s.window_rows, s.block_columns), "scratch"),
            Argument("ids", torch.int32, (None, 1), "out"),
        )

    def units(self) -> int:
        """For every window one body per chunk, and the choice among the blocks."""
        return self.windows * (self.spec.chunks + 1)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The greedy ids."""
        return {"ids": greedy(tensors["logits"], self.spec.real_vocab).to(torch.int32).unsqueeze(1)}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The real logits read, the ids written."""
        return self.spec.batch_rows * (self.spec.real_vocab + 1) * 4


class TopkSelect(SamplingProgram):
    """The 32 largest logits of every row and their ids, in order."""

    name = "topk_select"
    kernel_module = "kernels.programs.topk_select_kernel"
    spec: TopkSelectSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Logits; scratch with 32 candidates a chunk; values and ids, largest first."""
        s = self.spec
        candidates = s.chunks * TOP_IDS
        return (
            Argument("logits", torch.float32, (None, s.columns)),
            Argument("candidate_values", torch.float32, (s.window_rows, candidates), "scratch"),
            Argument("candidate_ids", torch.float32, (s.window_rows, candidates), "scratch"),
            Argument("values", torch.float32, (None, TOP_IDS), "out"),
            Argument("ids", torch.int32, (None, TOP_IDS), "out"),
        )

    def units(self) -> int:
        """For every window one body per chunk, and with several chunks one for the choice among them."""
        return self.windows * (self.spec.chunks + (self.spec.chunks > 1))

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values and ids by a stable sort."""
        values, ids = top_ids(tensors["logits"], self.spec.real_vocab, TOP_IDS)
        return {"values": values, "ids": ids.to(torch.int32)}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The real logits read, the candidates written."""
        return self.spec.batch_rows * (self.spec.real_vocab + 2 * TOP_IDS) * 4
