"""The PyPTO kernel of `turboquant_attention`: the decode programs' attention, reading codes, in the rotated space.

Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks, decode_attention, turboquant_blocks
from kernels.programs.turboquant_attention import TurboQuantAttention


def build(program: TurboQuantAttention, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    # The attention reads heads and head_dim alone, which this specification has too.
    spec: Any = program.spec
    of = blocks.parameter_types(program)
    batch, heads, dim = spec.batch_rows, spec.num_heads, spec.head_dim
    key_dim = 2 * dim if spec.sketch else dim

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def turboquant_attention(
        q_rows: of.q_rows,
        k_matrices: of.k_matrices,
        v_matrices: of.v_matrices,
        k_codes: of.k_codes,
        k_norms: of.k_norms,
        v_codes: of.v_codes,
        v_norms: of.v_norms,
        context_tokens: of.context_tokens,
        block_table: of.block_table,
        context_rows: of.context_rows,
    ):
        spread = pypto.tensor([batch * heads, spec.num_kv_heads * key_dim], pypto.DT_BF16, "spread")
        turned = pypto.tensor([batch * heads, dim], pypto.DT_BF16, "turned")
        for _ in pypto.loop(0, 1, 1, name="SPREAD", idx_name="spread", submit_before_loop=True):
            queries = turboquant_blocks.turn_queries(q_rows, k_matrices)
            queries = pypto.reshape(queries, [batch, heads, key_dim])
            decode_attention.spread_queries(queries, spec.num_kv_heads, spread)
        pages = turboquant_blocks.kept_pages(spec, k_codes, k_norms, v_codes, v_norms)
        tensors = types.SimpleNamespace(q_rows=spread, context_rows=turned)
        for row in pypto.loop(0, batch, 1, name="ROWS", idx_name="row", submit_before_loop=True):
            _attend(spec, row, context_tokens[row], block_table, tensors, pages)
        for _ in pypto.loop(0, 1, 1, name="TURN", idx_name="turn", submit_before_loop=True):
            context_rows[:] = turboquant_blocks.turn_back(turned, v_matrices)

    return turboquant_attention


def _attend(spec: Any, row: Any, tokens: Any, block_table: Any, tensors: Any, pages: Any) -> None:
    def page_slot(page: Any) -> Any:
        return block_table[row, page] * PAGE_TOKENS

    decode_attention.attend_row(spec, row, tokens, page_slot, tensors, pages)
