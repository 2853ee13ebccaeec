"""Paged attention of single-token rows, inlined by the decode kernels: online softmax over pages of 128 tokens.

Lengths and page numbers are read from tensors, so nothing of them is compiled in. A row's scores against a page are one
matrix product for all heads: the queries are spread, each head's at the columns of its keys and zeros beside it. The
values are weighted head by head, the softmax is taken for all heads of a row at once. A loop body takes several pages,
and one task their softmax; the arithmetic is that of a page after the other, so that their number changes no bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.decode_layer import DecodeLayerSpec
from kernels.programs.decode_tiles import PAGES_AT_ONCE
from kernels.tiles import choose_cube_tile

SOFTMAX_ROWS = 64
"""Most heads in one vector tile: 64 x 128 FP32 values are 32 KB, several of which are alive at once."""
MERGED_HEADS = 4
"""Heads whose values one task weights: starting a task costs twice what one head takes."""
SPREAD_SCOPE, ACCUMULATE_SCOPE, SOFTMAX_SCOPE, NO_SCOPE = 2, 3, 4, -1
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


@dataclass(frozen=True)
class _Running:
    """What the online softmax carries from pages to pages: FP32 `[heads, dim]` and twice `[heads, 1]`."""

    accumulator: Any
    total: Any
    maximum: Any


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
    heads = spec.num_heads
    pages = (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    running = _Running(
        pypto.tensor([heads, spec.head_dim], pypto.DT_FP32, "accumulator"),
        pypto.tensor([heads, 1], pypto.DT_FP32, "total"),
        pypto.tensor([heads, 1], pypto.DT_FP32, "maximum"),
    )
    groups = (pages + PAGES_AT_ONCE - 1) // PAGES_AT_ONCE
    for group in pypto.loop(0, groups, 1, name="PAGES", idx_name="group"):
        first = group * PAGES_AT_ONCE

        def attend(count: int, group: Any = group, first: Any = first) -> None:
            slots = [page_slot(first + page) for page in range(count)]
            valid = pypto.min(tokens - (first + count - 1) * PAGE_TOKENS, PAGE_TOKENS)
            _attend_pages(spec, row, group, slots, valid, pages_of, running, tensors)

        _with_count(pages - first, PAGES_AT_ONCE, attend)


def _with_count(left: Any, most: int, attend: Callable[[int], None]) -> None:
    """Call `attend` with the number of pages that are left, at most `most`: each number is code of its own."""
    if most == 1:
        attend(1)
    elif pypto.cond(left >= most):
        attend(most)
    else:
        _with_count(left, most - 1, attend)


def _attend_pages(
    spec: DecodeLayerSpec,
    row: Any,
    group: Any,
    slots: list[Any],
    last_valid: Any,
    pages_of: PageReader,
    running: _Running,
    tensors: Any,
) -> None:
    """Attend to the pages at `slots`, of which all but the last are full, as group number `group` of the row's."""
    _set_scope(NO_SCOPE)
    valid = [PAGE_TOKENS] * (len(slots) - 1) + [last_valid]
    products = [_products(spec, row, pages_of.keys(*page), tensors.q_rows) for page in zip(slots, valid, strict=True)]
    before = None if pypto.cond(pypto.is_loop_begin(group)) else running
    weights, rescales, total, maximum = _softmax(spec, products, before)
    _set_scope(NO_SCOPE)
    parts = [
        _weighted_values(spec, tokens, weight, pages_of.values(slot, tokens))
        for slot, tokens, weight in zip(slots, valid, weights, strict=True)
    ]
    # Apart from the softmax, which would otherwise wait for the values of the pages before.
    _set_scope(ACCUMULATE_SCOPE)
    accumulator = None if before is None else before.accumulator
    for part, rescale in zip(parts, rescales, strict=True):
        accumulator = part if rescale is None else pypto.add(pypto.mul(accumulator, rescale), part)
    if pypto.cond(pypto.is_loop_end(group)):
        result = blocks.to_bf16(pypto.div(accumulator, total))
        _set_scope(NO_SCOPE)
        pypto.assemble(result, [row * spec.num_heads, 0], tensors.context_rows)
    else:
        _set_scope(NO_SCOPE)
        running.accumulator[:] = accumulator
        running.total[:] = total
        running.maximum[:] = maximum


def _softmax(
    spec: DecodeLayerSpec, products: list[Any], before: _Running | None
) -> tuple[list[Any], list[Any], Any, Any]:
    """Weights BF16 of each page in turn, what rescales the values before it (None at the first), total and maximum.

    One task for all pages of a group, with the arithmetic of a page at a time.
    """
    total, maximum = (None, None) if before is None else (before.total, before.maximum)
    weights, rescales = [], []
    _set_scope(SOFTMAX_SCOPE)
    pypto.set_vec_tile_shapes(min(spec.num_heads, SOFTMAX_ROWS), PAGE_TOKENS)
    for product in products:
        scores = pypto.mul(product, spec.head_dim**-0.5)
        page_maximum = pypto.amax(scores, -1, keepdim=True)
        new_maximum = page_maximum if maximum is None else pypto.maximum(maximum, page_maximum)
        weight = blocks.to_bf16(pypto.exp(pypto.sub(scores, new_maximum)))
        page_total = pypto.sum(blocks.to_fp32(weight), -1, keepdim=True)
        rescale = None if maximum is None else pypto.exp(pypto.sub(maximum, new_maximum))
        total = page_total if rescale is None else pypto.add(pypto.mul(total, rescale), page_total)
        maximum = new_maximum
        weights.append(weight)
        rescales.append(rescale)
    return weights, rescales, total, maximum


def _set_scope(scope: int) -> None:
    """Mark the operations that follow; options are set together, or those left out fall back to their defaults."""
    pypto.set_pass_options(cube_nbuffer_setting={-1: MERGED_HEADS}, sg_set_scope=scope)


def _products(spec: DecodeLayerSpec, row: Any, keys: Any, q_rows: Any) -> Any:
    """Products of every query head with a page's keys: FP32 `[heads, 128]`, as many columns valid as keys."""
    heads, width = spec.num_heads, keys.shape[1]
    tile = choose_cube_tile(width, PAGE_TOKENS, 2, rows=heads, columns=PAGE_TOKENS)
    pypto.set_cube_tile_shapes(*tile.shapes())
    query = pypto.view(q_rows, [heads, width], [row * heads, 0])
    return pypto.matmul(query, keys, pypto.DT_FP32, b_trans=True)


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
