"""The PyPTO kernel of `turboquant_attention`: the decode programs' attention, reading codes, in the rotated space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, decode_attention, turboquant_blocks
from kernels.programs.turboquant_attention import TurboQuantAttention


def build(program: TurboQuantAttention, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    # The attention reads heads and head_dim alone, which this specification has too.
    spec: Any = program.spec
    batch, heads, dim = spec.batch_rows, spec.num_heads, spec.head_dim
    key_dim = 2 * dim if spec.sketch else dim

    def attention(tensors: Any) -> None:
        spread = pypto.tensor([batch * heads, spec.num_kv_heads * key_dim], pypto.DT_BF16, "spread")
        turned = pypto.tensor([batch * heads, dim], pypto.DT_BF16, "turned")
        for _ in pypto.loop(0, 1, 1, name="SPREAD", idx_name="spread", submit_before_loop=True):
            queries = turboquant_blocks.turn_queries(tensors.q_rows, tensors.k_matrices)
            queries = pypto.reshape(queries, [batch, heads, key_dim])
            decode_attention.spread_queries(queries, spec.num_kv_heads, spread)
        pages = turboquant_blocks.kept_pages(spec, tensors.k_codes, tensors.k_norms, tensors.v_codes, tensors.v_norms)
        rotated = SimpleNamespace(q_rows=spread, context_rows=turned)
        for row in pypto.loop(0, batch, 1, name="ROWS", idx_name="row", submit_before_loop=True):

            def page_slot(page: Any, row: Any = row) -> Any:
                return tensors.block_table[row, page] * PAGE_TOKENS

            decode_attention.attend_row(spec, row, tensors.context_tokens[row], page_slot, rotated, pages)
        for _ in pypto.loop(0, 1, 1, name="TURN", idx_name="turn", submit_before_loop=True):
            tensors.context_rows[:] = turboquant_blocks.turn_back(turned, tensors.v_matrices)

    return blocks.jit_kernel(program, options, attention)
