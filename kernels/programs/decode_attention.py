"""Paged attention of single-token rows, inlined by the decode kernels: online softmax over pages of 128 tokens.

Lengths and page numbers are read from tensors, so nothing of them is compiled in. A row's scores against a page are one
matrix product for all heads: the queries are spread, each head's at the columns of its keys and zeros beside it. The
values are weighted head by head, the softmax is taken for all heads of a row at once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.tiles import choose_cube_tile

SOFTMAX_ROWS = 64
"""Most heads in one vector tile: 64 x 128 FP32 values are 32 KB, several of which are alive at once."""
MERGED_HEADS = 4
"""Heads whose values one task weights: starting a task costs twice what one head takes."""
SPREAD_SCOPE, ACCUMULATE_SCOPE, NO_SCOPE = 2, 3, -1
"""Marks of operations that the compiler must keep in one task, apart from their neighbours."""


class PageReader(Protocol):
    """Reads a page of the cache; `first_slot` is the cache row at which it starts, `valid` its tokens."""

    def keys(self, first_slot: Any, valid: Any) -> Any:
        """Keys of all heads: BF16 `[128, key_width]`, `valid` rows of them valid."""
        ...

    def values(self, first_slot: Any, valid: Any) -> list[Any]:
        """Values of each key/value head: BF16 `[128, dim]`, `valid` rows of them valid."""
        ...


@dataclass(frozen=True)
class Bf16Pages:
    """Reads caches that hold BF16 keys and values `[slots, kv_heads * dim]`."""

    k_cache: Any
    v_cache: Any
    head_dim: int

    def keys(self, first_slot: Any, valid: Any) -> Any:
        """The keys' cache rows."""
        width = self.k_cache.shape[1]
        return pypto.view(self.k_cache, [PAGE_TOKENS, width], [first_slot, 0], valid_shape=[valid, width])

    def values(self, first_slot: Any, valid: Any) -> list[Any]:
        """The heads' columns of the values' cache rows."""
        dim = self.head_dim
        return [
            pypto.view(self.v_cache, [PAGE_TOKENS, dim], [first_slot, column], valid_shape=[valid, dim])
            for column in range(0, self.v_cache.shape[1], dim)
        ]


def spread_queries(q_bf16: Any, kv_heads: int, q_rows: Any) -> None:
    """Write queries BF16 `[rows, heads, dim]` to `q_rows` `[rows * heads, kv_heads * dim]`, zeros where not the head's.

    A zero adds nothing to a sum, so a product over the whole width is the head's own.
    """
    rows, heads, dim = q_bf16.shape
    group = heads // kv_heads
    pypto.set_vec_tile_shapes(heads)
    number = pypto.reshape(blocks.to_fp32(pypto.arange(heads)), [1, heads, 1])
    pypto.set_vec_tile_shapes(1, heads, dim)
    number = pypto.expand_clone(number, [1, heads, dim])
    masks = []
    for head in range(kv_heads):
        from_first = pypto.where(pypto.ge(number, float(head * group)), 1.0, 0.0)
        masks.append(pypto.where(pypto.ge(number, float((head + 1) * group)), 0.0, from_first))
    pypto.set_pass_options(sg_set_scope=SPREAD_SCOPE)
    q_fp32 = blocks.to_fp32(q_bf16)
    for head, mask in enumerate(masks):
        pypto.set_vec_tile_shapes(1, heads, dim)
        piece = pypto.reshape(blocks.to_bf16(pypto.mul(q_fp32, mask)), [rows * heads, dim])
        pypto.set_vec_tile_shapes(heads, dim)
        pypto.assemble(piece, [0, head * dim], q_rows)
    pypto.set_pass_options(sg_set_scope=NO_SCOPE)


def attend_row(
    spec: DecodeLayerSpec,
    row: Any,
    tokens: Any,
    page_slot: Any,
    tensors: Any,
    reader: PageReader | None = None,
) -> None:
    """Attend row `row` of the window to the `tokens` tokens of its sequence and write its context rows.

    `page_slot(page)` gives the cache row at which page number `page` of the sequence starts; `tensors` holds `q_rows`
    as `spread_queries` writes them, `context_rows`, and the `k_cache` and `v_cache` that are read without a `reader`.
    """
    pages_of = reader or Bf16Pages(tensors.k_cache, tensors.v_cache, spec.head_dim)
    dim, heads = spec.head_dim, spec.num_heads
    pages = (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    accumulator = pypto.tensor([heads, dim], pypto.DT_FP32, "accumulator")
    total = pypto.tensor([heads, 1], pypto.DT_FP32, "total")
    maximum = pypto.tensor([heads, 1], pypto.DT_FP32, "maximum")
    for page in pypto.loop(0, pages, 1, name="PAGES", idx_name="page"):
        _set_scope(NO_SCOPE)
        first_slot = page_slot(page)
        valid = pypto.min(tokens - page * PAGE_TOKENS, PAGE_TOKENS)
        scores = pypto.mul(_scores(spec, row, pages_of.keys(first_slot, valid), tensors.q_rows), dim**-0.5)
        page_maximum = pypto.amax(scores, -1, keepdim=True)
        if pypto.cond(pypto.is_loop_begin(page)):
            weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, page_maximum)))
            page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
            part = _weighted_values(spec, valid, weights, pages_of.values(first_slot, valid))
            if pypto.cond(pypto.is_loop_end(page)):
                result = blocks.to_bf16(pypto.div(part, page_total))
                pypto.assemble(result, [row * heads, 0], tensors.context_rows)
            else:
                accumulator[:] = part
                total[:] = page_total
                maximum[:] = page_maximum
        else:
            new_maximum = pypto.maximum(maximum, page_maximum)
            weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, new_maximum)))
            rescale = pypto.exp(pypto.sub(maximum, new_maximum))
            page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
            new_total = pypto.add(pypto.mul(total, rescale), page_total)
            part = _weighted_values(spec, valid, weights, pages_of.values(first_slot, valid))
            # Apart from the softmax, which would otherwise wait for the values of the page before.
            _set_scope(ACCUMULATE_SCOPE)
            new_accumulator = pypto.add(pypto.mul(accumulator, rescale), part)
            if pypto.cond(pypto.is_loop_end(page)):
                result = blocks.to_bf16(pypto.div(new_accumulator, new_total))
                _set_scope(NO_SCOPE)
                pypto.assemble(result, [row * heads, 0], tensors.context_rows)
            else:
                _set_scope(NO_SCOPE)
                accumulator[:] = new_accumulator
                total[:] = new_total
                maximum[:] = new_maximum


def _set_scope(scope: int) -> None:
    """Mark the operations that follow; options are set together, or those left out fall back to their defaults."""
    pypto.set_pass_options(cube_nbuffer_setting={-1: MERGED_HEADS}, sg_set_scope=scope)


def _scores(spec: DecodeLayerSpec, row: Any, keys: Any, q_rows: Any) -> Any:
    """Products of every query head with a page's keys: FP32 `[heads, 128]`, as many columns valid as keys."""
    heads, width = spec.num_heads, keys.shape[1]
    tile = choose_cube_tile(width, PAGE_TOKENS, 2, rows=heads, columns=PAGE_TOKENS)
    pypto.set_cube_tile_shapes(*tile.shapes())
    query = pypto.view(q_rows, [heads, width], [row * heads, 0])
    scores = pypto.matmul(query, keys, pypto.DT_FP32, b_trans=True)
    pypto.set_vec_tile_shapes(min(heads, SOFTMAX_ROWS), PAGE_TOKENS)
    return scores


def _weighted_values(spec: DecodeLayerSpec, valid: Any, weights: Any, values: list[Any]) -> Any:
    """Every head's weights BF16 `[heads, 128]` by a page's values: FP32 `[heads, dim]`."""
    dim, heads, group = spec.head_dim, spec.num_heads, spec.num_heads // spec.num_kv_heads
    pypto.set_cube_tile_shapes([16, 16], [PAGE_TOKENS, PAGE_TOKENS], [dim, dim])
    context = pypto.tensor([heads, dim], pypto.DT_FP32, "context")
    for head, of_head in enumerate(values):
        share = pypto.view(weights, [group, PAGE_TOKENS], [head * group, 0], valid_shape=[group, valid])
        pypto.assemble(pypto.matmul(share, of_head, pypto.DT_FP32), [head * group, 0], context)
    pypto.set_vec_tile_shapes(min(heads, SOFTMAX_ROWS), dim)
    return pypto.view(context, [heads, dim], [0, 0], valid_shape=[heads, dim])
