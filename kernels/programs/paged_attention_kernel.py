"""The PyPTO kernel of `paged_attention`: the decode programs' attention over each row, with nothing around it.

Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, decode_attention
from kernels.programs.paged_attention import PagedAttention


def build(program: PagedAttention, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    # The attention reads heads and head_dim alone, which this specification has too.
    spec: Any = program.spec
    of = blocks.parameter_types(program)
    batch, heads, dim = spec.batch_rows, spec.num_heads, spec.head_dim

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def paged_attention(
        q_rows: of.q_rows,
        k_cache: of.k_cache,
        v_cache: of.v_cache,
        context_tokens: of.context_tokens,
        block_table: of.block_table,
        context_rows: of.context_rows,
    ):
        spread = pypto.tensor([batch * heads, spec.kv_size], pypto.DT_BF16, "spread")
        for _ in pypto.loop(0, 1, 1, name="SPREAD", idx_name="spread", submit_before_loop=True):
            queries = pypto.reshape(q_rows, [batch, heads, dim])
            decode_attention.spread_queries(queries, spec.num_kv_heads, spread)
        tensors = types.SimpleNamespace(q_rows=spread, k_cache=k_cache, v_cache=v_cache, context_rows=context_rows)
        for row in pypto.loop(0, spec.batch_rows, 1, name="ROWS", idx_name="row", submit_before_loop=True):
            _attend(spec, row, context_tokens[row], block_table, tensors)

    return paged_attention


def _attend(spec: Any, row: Any, tokens: Any, block_table: Any, tensors: Any) -> None:
    def page_slot(page: Any) -> Any:
        return block_table[row, page] * PAGE_TOKENS

    decode_attention.attend_row(spec, row, tokens, page_slot, tensors)
