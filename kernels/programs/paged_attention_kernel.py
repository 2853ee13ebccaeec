"""The PyPTO kernel of `paged_attention`: the decode programs' attention by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, decode_attention
from kernels.programs.paged_attention import PagedAttention


def build(program: PagedAttention, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    # The attention reads heads and head_dim alone, which this specification has too.
    spec: Any = program.spec
    batch, heads, dim = spec.batch_rows, spec.num_heads, spec.head_dim

    def attention(tensors: Any) -> None:
        spread = pypto.tensor([batch * heads, spec.kv_size], pypto.DT_BF16, "spread")
        for _ in pypto.loop(0, 1, 1, name="SPREAD", idx_name="spread", submit_before_loop=True):
            queries = pypto.reshape(tensors.q_rows, [batch, heads, dim])
            decode_attention.spread_queries(queries, spec.num_kv_heads, spread)
        caches = SimpleNamespace(
            q_rows=spread, k_cache=tensors.k_cache, v_cache=tensors.v_cache, context_rows=tensors.context_rows
        )
        for row in pypto.loop(0, batch, 1, name="ROWS", idx_name="row", submit_before_loop=True):

            def page_slot(page: Any, row: Any = row) -> Any:
                return tensors.block_table[row, page] * PAGE_TOKENS

            decode_attention.attend_row(spec, row, tensors.context_tokens[row], page_slot, caches)

    return blocks.jit_kernel(program, options, attention)
