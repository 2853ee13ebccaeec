"""`turboquant_attention`: attention of single-token rows over a TurboQuant cache, as a program with its golden.

The arguments are those of `paged_attention` with codes and norms in place of keys and values, and the matrices by which
the layer's keys and values were turned. Nothing is decoded outside the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS
from kernels.kv_format import KvFormat
from kernels.programs.base import Argument, check_rows
from kernels.programs.paged_attention import PagedAttention, PagedAttentionSpec
from kernels.programs.turboquant_encode import format_problems, sample_matrices
from kernels.turboquant import TurboQuant
from kernels.turboquant_cache import code_columns, encode_rows, norm_columns, turboquant_attention
from quantize.model_config import ModelConfig

__all__ = ["TurboQuantAttention", "TurboQuantAttentionSpec"]


@dataclass(frozen=True)
class TurboQuantAttentionSpec(PagedAttentionSpec):
    """Shape of the attention and format of the cache; `sketch` is that of the keys."""

    bits: int
    sketch: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = format_problems(self.num_kv_heads, self.head_dim, self.bits)
        if problems:
            raise ProgramError(f"no turboquant_attention program for this shape: {'; '.join(problems)}")

    @classmethod
    def over(
        cls, config: ModelConfig, kv_format: KvFormat, contexts: tuple[int, ...], pages: int | None = None
    ) -> TurboQuantAttentionSpec:
        """As `PagedAttentionSpec.of`, over a cache of `kv_format`."""
        plain = PagedAttentionSpec.of(config, contexts, pages)
        return cls(**vars(plain), bits=kv_format.bits, sketch=kv_format.sketch)


class TurboQuantAttention(PagedAttention):
    """The attention at one shape."""

    name = "turboquant_attention"
    kernel_module = "kernels.programs.turboquant_attention_kernel"
    spec: TurboQuantAttentionSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Query rows, matrices, the four caches, lengths and pages in; context rows out."""
        s = self.spec
        bf16, int8, fp32, int32 = torch.bfloat16, torch.int8, torch.float32, torch.int32
        codes, dim = code_columns(s.num_kv_heads, s.head_dim, s.bits), s.head_dim
        return (
            Argument("q_rows", bf16, (s.batch_rows * s.num_heads, dim)),
            Argument("k_matrices", bf16, (2 * dim if s.sketch else dim, dim)),
            Argument("v_matrices", bf16, (dim, dim)),
            Argument("k_codes", int8, (None, codes)),
            Argument("k_norms", fp32, (None, norm_columns(s.num_kv_heads, s.sketch))),
            Argument("v_codes", int8, (None, codes)),
            Argument("v_norms", fp32, (None, norm_columns(s.num_kv_heads, sketch=False))),
            Argument("context_tokens", int32, (s.batch_rows,)),
            Argument("block_table", int32, (s.batch_rows, None)),
            Argument("context_rows", bf16, (s.batch_rows * s.num_heads, dim), "out"),
        )

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random queries, caches of encoded keys and values; pages in shuffled order, so that a wrong page shows."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        tensors = self._empty(torch.randperm(s.pages, generator=generator).tolist())
        tensors["q_rows"] = torch.randn(tensors["q_rows"].shape, generator=generator).to(torch.bfloat16)
        for name, sketch in (("k", s.sketch), ("v", False)):
            matrices = sample_matrices(s.head_dim, s.bits, sketch, generator)
            rows = torch.randn(s.pages * PAGE_TOKENS, s.kv_size, generator=generator)
            rows *= 0.5 + torch.rand(rows.shape[0], 1, generator=generator)
            codes, norms = encode_rows(TurboQuant.from_matrices(matrices, s.bits), rows.to(torch.bfloat16))
            tensors |= {f"{name}_matrices": matrices, f"{name}_codes": codes, f"{name}_norms": norms.contiguous()}
        return tensors

    def units(self) -> int:
        """The queries' turn and spread, one body per group of pages of every row, and the turn back."""
        return super().units() + 1

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden attention over the kept rows."""
        s = self.spec
        keys, values = (
            (
                TurboQuant.from_matrices(tensors[f"{name}_matrices"], s.bits),
                tensors[f"{name}_codes"],
                tensors[f"{name}_norms"],
            )
            for name in ("k", "v")
        )
        context = turboquant_attention(
            tensors["q_rows"].view(s.batch_rows, s.num_heads, s.head_dim),
            keys,
            values,
            tensors["context_tokens"].to(torch.int64) - 1,
            tensors["block_table"].to(torch.int64),
        )
        return {"context_rows": context.reshape(-1, s.head_dim)}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Queries in, contexts out, the matrices, and each row's codes and norms."""
        fixed = 2 * tensors["q_rows"].nbytes + tensors["k_matrices"].nbytes + tensors["v_matrices"].nbytes
        caches = [tensors[name] for name in ("k_codes", "k_norms", "v_codes", "v_norms")]
        token_bytes = sum(cache.shape[1] * cache.element_size() for cache in caches)
        return fixed + int(tensors["context_tokens"].sum()) * token_bytes

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse pages and lengths outside the caches, which the kernel would read as zeros."""
        check_rows(self.name, tensors, ("k_codes", "k_norms", "v_codes", "v_norms"))
        super().check_values({**tensors, "k_cache": tensors["k_codes"], "v_cache": tensors["v_codes"]})
