"""`paged_attention`: attention of single-token rows over the paged cache, as a program of its own with its golden.

`decode_layer` holds the same attention among its stages. Alone it is the stage that a device operator may implement
instead (`kernels.extern`): same arguments, same golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, paged_attention
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.programs.decode_tiles import page_groups
from quantize.model_config import ModelConfig

__all__ = ["PagedAttention", "PagedAttentionSpec"]


@dataclass(frozen=True)
class PagedAttentionSpec(ProgramSpec):
    """Shape of the attention of `batch_rows` tokens; the kernel depends on neither `pages` nor `contexts`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_rows: int
    pages: int
    contexts: tuple[int, ...]

    def __post_init__(self) -> None:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads")
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            problems.append(f"head_dim {self.head_dim} is not 16, 32, 48, ... 256")
        if len(self.contexts) != self.batch_rows or min(self.contexts, default=0) < 1:
            problems.append(f"contexts {self.contexts} must give one length >= 1 for each of {self.batch_rows} rows")
        elif sum(-(-tokens // PAGE_TOKENS) for tokens in self.contexts) > self.pages:
            problems.append(f"{self.pages} pages cannot hold contexts {self.contexts}")
        if problems:
            raise ProgramError(f"no paged_attention program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(cls, config: ModelConfig, contexts: tuple[int, ...], pages: int | None = None) -> PagedAttentionSpec:
        """The attention of `config` over one row per context length; by default one page more than needed."""
        needed = sum(-(-tokens // PAGE_TOKENS) for tokens in contexts)
        return cls(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            len(contexts),
            1 + needed if pages is None else pages,
            contexts,
        )

    @property
    def kv_size(self) -> int:
        """Width of a cache row."""
        return self.num_kv_heads * self.head_dim


class PagedAttention(Program):
    """The attention at one shape."""

    name = "paged_attention"
    kernel_module = "kernels.programs.paged_attention_kernel"
    spec: PagedAttentionSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Query rows, caches, lengths and pages in; context rows out."""
        s = self.spec
        bf16, int32 = torch.bfloat16, torch.int32
        return (
            Argument("q_rows", bf16, (s.batch_rows * s.num_heads, s.head_dim)),
            Argument("k_cache", bf16, (None, s.kv_size)),
            Argument("v_cache", bf16, (None, s.kv_size)),
            Argument("context_tokens", int32, (s.batch_rows,)),
            Argument("block_table", int32, (s.batch_rows, None)),
            Argument("context_rows", bf16, (s.batch_rows * s.num_heads, s.head_dim), "out"),
        )

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random queries and caches; pages in shuffled order, so that a wrong page shows."""
        generator = torch.Generator().manual_seed(seed)
        tensors = self._empty(torch.randperm(self.spec.pages, generator=generator).tolist())
        for name in ("q_rows", "k_cache", "v_cache"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).to(torch.bfloat16)
        return tensors

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for lengths and pages."""
        return self._empty(list(range(self.spec.pages)))

    def units(self) -> int:
        """The queries' spread, and one body per group of pages of every row."""
        return 1 + sum(page_groups(tokens) for tokens in self.spec.contexts)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden attention, narrowed to BF16."""
        s = self.spec
        context = paged_attention(
            tensors["q_rows"].view(s.batch_rows, s.num_heads, s.head_dim),
            tensors["k_cache"],
            tensors["v_cache"],
            tensors["context_tokens"].to(torch.int64) - 1,
            tensors["block_table"].to(torch.int64),
            s.num_kv_heads,
        )
        return {"context_rows": context.to(torch.bfloat16).view(-1, s.head_dim)}

    def tolerances(self) -> dict[str, str]:
        """FP32 sums may run in another order."""
        return {"context_rows": "1 BF16 ulp"}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Queries in, contexts out, and each row's keys and values."""
        rows = 2 * tensors["q_rows"].numel() * 2
        return rows + 2 * int(tensors["context_tokens"].sum()) * self.spec.kv_size * 2

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse pages and lengths outside the cache, which the kernel would read as zeros."""
        slots, table = tensors["k_cache"].shape[0], tensors["block_table"]
        problems = []
        if slots % PAGE_TOKENS or tensors["v_cache"].shape[0] != slots:
            problems.append(f"caches must be equal in length and whole pages of {PAGE_TOKENS} slots, have {slots}")
        for row, length in enumerate(tensors["context_tokens"].tolist()):
            pages = table[row, : max(0, -(-length // PAGE_TOKENS))].tolist()
            if not 1 <= length <= table.shape[1] * PAGE_TOKENS:
                problems.append(f"row {row}: context of {length} tokens is not in 1..{table.shape[1] * PAGE_TOKENS}")
            elif any(not 0 <= page < slots // PAGE_TOKENS for page in pages):
                problems.append(f"row {row}: pages {pages} are not all in the cache of {slots // PAGE_TOKENS}")
        if problems:
            raise ProgramError(f"{self.name} cannot be called: " + "; ".join(problems))

    def _empty(self, order: list[int]) -> dict[str, Tensor]:
        """Zeros of the sample's shapes, with the pages of `order` dealt out to the rows."""
        s = self.spec
        counts = [-(-tokens // PAGE_TOKENS) for tokens in s.contexts]
        table = torch.zeros(s.batch_rows, max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
            order = order[count:]
        slots = s.pages * PAGE_TOKENS
        tensors = {
            a.name: torch.zeros([slots if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
        }
        return tensors | {"context_tokens": torch.tensor(s.contexts, dtype=torch.int32), "block_table": table}
