"""`embedding_gather`: rows of the embedding slab by token id, with its golden.

Ids outside the real vocabulary are refused at the call: the kernel would read another tensor's bytes, or the slab's
padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import padded_vocab
from kernels.errors import ProgramError
from kernels.programs.base import Argument, Program, ProgramSpec, check_rows
from quantize.model_config import ModelConfig

__all__ = ["EmbeddingGather", "EmbeddingGatherSpec"]


@dataclass(frozen=True)
class EmbeddingGatherSpec(ProgramSpec):
    """Shape of the embedding: `padded_vocab` rows, `real_vocab` of them real; `batch_rows` ids in the sample inputs."""

    hidden_size: int
    real_vocab: int
    padded_vocab: int
    batch_rows: int
    window_rows: int = 8

    def __post_init__(self) -> None:
        problems = []
        if self.hidden_size % 16:
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of 16, the 32 bytes of a vector tile")
        if not 1 <= self.real_vocab <= self.padded_vocab:
            problems.append(f"{self.real_vocab} real ids do not fit {self.padded_vocab} rows")
        for name, rows in (("batch_rows", self.batch_rows), ("window_rows", self.window_rows)):
            if rows < 1:
                problems.append(f"{name} {rows} must be at least 1")
        if problems:
            raise ProgramError(f"no embedding_gather program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(cls, config: ModelConfig, batch_rows: int) -> EmbeddingGatherSpec:
        """The embedding of `config`, padded as its slab is."""
        return cls(config.hidden_size, config.vocab_size, padded_vocab(config.vocab_size), batch_rows)


class EmbeddingGather(Program):
    """Hidden rows of token ids."""

    name = "embedding_gather"
    kernel_module = "kernels.programs.embedding_kernel"
    spec: EmbeddingGatherSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Ids, the embedding slab, hidden rows."""
        s = self.spec
        return (
            Argument("ids", torch.int32, (None,)),
            Argument("embed_weight", torch.bfloat16, (s.padded_vocab, s.hidden_size)),
            Argument("hidden", torch.bfloat16, (None, s.hidden_size), "out"),
        )

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random rows and ids, the last real id and a repeated one among them; padding rows of zeros."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, s.real_vocab, (s.batch_rows,), dtype=torch.int32, generator=generator)
        ids[0] = s.real_vocab - 1
        ids[-1] = ids[s.batch_rows // 2]
        weight = torch.randn(s.padded_vocab, s.hidden_size, generator=generator)
        weight[s.real_vocab :] = 0
        return {**self.shape_inputs(), "ids": ids, "embed_weight": weight.to(torch.bfloat16)}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros: no value steers the control flow."""
        rows = self.spec.batch_rows
        return {
            a.name: torch.zeros([rows if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
        }

    def units(self) -> int:
        """One body per window."""
        return -(-self.spec.batch_rows // self.spec.window_rows)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The slab's rows."""
        return {"hidden": tensors["embed_weight"][tensors["ids"].to(torch.int64)]}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Ids and their rows read, hidden rows written."""
        return self.spec.batch_rows * (4 + 2 * self.spec.hidden_size * 2)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse ids that are not in the real vocabulary, by row."""
        check_rows(self.name, tensors, ("ids", "hidden"))
        ids, vocabulary = tensors["ids"], self.spec.real_vocab
        wrong = ((ids < 0) | (ids >= vocabulary)).nonzero().flatten().tolist()
        if wrong:
            found = ", ".join(f"row {row}: {int(ids[row])}" for row in wrong[:4])
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise ProgramError(f"{self.name} cannot be called: ids are in 0..{vocabulary - 1}, but {found}{more}")
