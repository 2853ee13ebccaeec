"""The PyPTO kernel of `prefill_layer`: one W8A8 decoder layer over packed chunks of prompts.

Three stages, joined by scratch arguments: windows of rows are projected and write their keys and values; then blocks of
queries attend; then windows of rows are finished. A block of queries is what a chunk has in one page of positions, so
that only a block's last page needs a causal mask. Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.prefill_layer import PrefillLayer, PrefillLayerSpec
from kernels.programs.stages import FinishWeights, ProjectWeights, finish_rows, project_rows

SOFTMAX_ROWS = 64
"""Most rows in one vector tile: 64 x 128 FP32 values are 32 KB, several of which are alive at once."""

CACHE_ROWS = 16
"""Rows that one scatter writes: 16 x 1024 BF16 keys are 32 KB of the vector unit's buffer."""


def build(program: PrefillLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)
    window = spec.window_rows

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def prefill_layer(
        x: of.x,
        input_rms: of.input_rms,
        wq: of.wq,
        wk: of.wk,
        wv: of.wv,
        wq_scale: of.wq_scale,
        wk_scale: of.wk_scale,
        wv_scale: of.wv_scale,
        q_bias: of.q_bias,
        k_bias: of.k_bias,
        v_bias: of.v_bias,
        q_norm: of.q_norm,
        k_norm: of.k_norm,
        wo: of.wo,
        wo_scale: of.wo_scale,
        post_rms: of.post_rms,
        w_gate: of.w_gate,
        w_up: of.w_up,
        w_gate_scale: of.w_gate_scale,
        w_up_scale: of.w_up_scale,
        w_down: of.w_down,
        w_down_scale: of.w_down_scale,
        cos: of.cos,
        sin: of.sin,
        slots: of.slots,
        row_starts: of.row_starts,
        context_tokens: of.context_tokens,
        block_table: of.block_table,
        causal_bias: of.causal_bias,
        k_cache: of.k_cache,
        v_cache: of.v_cache,
        q_rows: of.q_rows,
        k_rows: of.k_rows,
        v_rows: of.v_rows,
        context_rows: of.context_rows,
        out: of.out,
    ):
        tokens = x.shape[0]
        windows = (tokens + window - 1) // window
        before = ProjectWeights(
            input_rms, wq, wk, wv, wq_scale, wk_scale, wv_scale, q_bias, k_bias, v_bias, q_norm, k_norm
        )
        after = FinishWeights(wo, wo_scale, post_rms, w_gate, w_up, w_gate_scale, w_up_scale, w_down, w_down_scale)
        for index in pypto.loop(0, windows, 1, name="PROJECT", idx_name="projected", submit_before_loop=True):
            first = index * window
            valid = pypto.min(tokens - first, window)
            _project(spec, first, valid, (x, cos, sin), before, (q_rows, k_rows, v_rows))
        for index in pypto.loop(
            0, (tokens + CACHE_ROWS - 1) // CACHE_ROWS, 1, name="CACHE", idx_name="cached", submit_before_loop=True
        ):
            first = index * CACHE_ROWS
            _write_cache(
                spec, first, pypto.min(tokens - first, CACHE_ROWS), slots, (k_rows, v_rows), (k_cache, v_cache)
            )
        sequences = context_tokens.shape[0]
        for sequence in pypto.loop(0, sequences, 1, name="SEQUENCES", idx_name="sequence", submit_before_loop=True):
            start = row_starts[sequence]
            context = context_tokens[sequence]
            cached = context - (row_starts[sequence + 1] - start)
            first_page = cached // PAGE_TOKENS
            count = (context + PAGE_TOKENS - 1) // PAGE_TOKENS - first_page
            for block in pypto.loop(0, count, 1, name="BLOCKS", idx_name="block"):
                page = first_page + block
                token = pypto.max(cached, page * PAGE_TOKENS)
                valid = pypto.min(context, (page + 1) * PAGE_TOKENS) - token
                queries = (start + token - cached, valid, token - page * PAGE_TOKENS, page + 1)
                for head in pypto.loop(0, spec.num_heads, 1, name="HEADS", idx_name="head"):
                    _attend(
                        spec,
                        sequence,
                        head,
                        queries,
                        block_table,
                        causal_bias,
                        q_rows,
                        (k_cache, v_cache),
                        context_rows,
                    )
        for index in pypto.loop(0, windows, 1, name="FINISH", idx_name="finished", submit_before_loop=True):
            first = index * window
            valid = pypto.min(tokens - first, window)
            hidden = _rows(x, window, spec.hidden_size, first, valid)
            context = _rows(context_rows, window, spec.q_size, first, valid)
            pypto.assemble(finish_rows(spec, hidden, context, after, valid), [first, 0], out)

    return prefill_layer


def _rows(tensor: Any, rows: int, width: int, first: Any, valid: Any) -> Any:
    """`valid` rows of a 2-D tensor from `first` on, as a window of `rows`."""
    return pypto.view(tensor, [rows, width], [first, 0], valid_shape=[valid, width])


def _project(
    spec: PrefillLayerSpec, first: Any, valid: Any, inputs: Any, weights: ProjectWeights, targets: Any
) -> None:
    """Project one window of rows; queries, keys and values go to scratch."""
    x, cos, sin = inputs
    rows, dim = spec.window_rows, spec.head_dim
    hidden = _rows(x, rows, spec.hidden_size, first, valid)
    cos, sin = _rows(cos, rows, dim, first, valid), _rows(sin, rows, dim, first, valid)
    for value, target in zip(project_rows(spec, hidden, weights, cos, sin, valid), targets, strict=True):
        _store(value, first, target)


def _store(value: Any, first: Any, target: Any) -> None:
    """Write a window of BF16 rows to scratch from row `first` on, in parts that fit the vector unit's buffer.

    Rows that are not valid are written too: a reshaped value has lost its valid shape. Scratch has room for them.
    """
    rows, width = value.shape
    part = CACHE_ROWS
    while part * width * 2 > blocks.ROW_TILE_BYTES:
        part //= 2
    for at in range(0, rows, part):
        pypto.assemble(pypto.view(value, [part, width], [at, 0], valid_shape=[part, width]), [first + at, 0], target)


def _write_cache(spec: PrefillLayerSpec, first: Any, valid: Any, slots: Any, sources: Any, caches: Any) -> None:
    """Put a few rows' keys and values into their slots.

    They come from scratch, not from `_project`: a scatter takes its whole source at once, and a reshaped one without
    its valid shape.
    """
    places = _rows(slots, CACHE_ROWS, 1, first, valid)
    pypto.set_vec_tile_shapes(CACHE_ROWS, spec.kv_size)
    for source, cache in zip(sources, caches, strict=True):
        rows = _rows(source, CACHE_ROWS, spec.kv_size, first, valid)
        cache[:] = pypto.scatter_update(cache, -2, places, rows)


def _attend(
    spec: PrefillLayerSpec,
    sequence: Any,
    head: Any,
    queries: Any,
    block_table: Any,
    causal_bias: Any,
    q_rows: Any,
    caches: Any,
    context_rows: Any,
) -> None:
    """Online softmax of one block of queries over the pages up to its own, for one head."""
    first_row, valid, offset, pages = queries
    rows, dim, kv_column = PAGE_TOKENS, spec.head_dim, head // spec.group * spec.head_dim
    accumulator = pypto.tensor([rows, dim], pypto.DT_FP32, "accumulator")
    total = pypto.tensor([rows, 1], pypto.DT_FP32, "total")
    maximum = pypto.tensor([rows, 1], pypto.DT_FP32, "maximum")
    k_cache, v_cache = caches
    for page in pypto.loop(0, pages, 1, name="PAGES", idx_name="page"):
        slot = block_table[sequence, page] * PAGE_TOKENS
        seen = pypto.min(offset + valid + (pages - 1 - page) * PAGE_TOKENS, PAGE_TOKENS)
        query = pypto.view(q_rows, [rows, dim], [first_row, head * dim], valid_shape=[valid, dim])
        keys = pypto.view(k_cache, [PAGE_TOKENS, dim], [slot, kv_column], valid_shape=[seen, dim])
        values = pypto.view(v_cache, [PAGE_TOKENS, dim], [slot, kv_column], valid_shape=[seen, dim])
        pypto.set_cube_tile_shapes([128, 128], [dim, dim], [PAGE_TOKENS, PAGE_TOKENS])
        products = pypto.matmul(query, keys, pypto.DT_FP32, b_trans=True)
        pypto.set_vec_tile_shapes(SOFTMAX_ROWS, PAGE_TOKENS)
        products = pypto.view(products, [rows, PAGE_TOKENS], [0, 0], valid_shape=[valid, seen])
        scores = pypto.mul(products, dim**-0.5)
        if pypto.cond(pypto.is_loop_end(page)):
            bias = pypto.view(causal_bias, [rows, PAGE_TOKENS], [offset, 0], valid_shape=[valid, seen])
            scores = pypto.add(scores, bias)
            _step(spec, page, scores, values, queries, head, (accumulator, total, maximum), context_rows, last=True)
        else:
            _step(spec, page, scores, values, queries, head, (accumulator, total, maximum), context_rows, last=False)


def _step(
    spec: PrefillLayerSpec,
    page: Any,
    scores: Any,
    values: Any,
    queries: Any,
    head: Any,
    state: Any,
    context_rows: Any,
    *,
    last: bool,
) -> None:
    """One page of the online softmax; the last one writes the block's context."""
    valid_rows = queries[1]
    accumulator, total, maximum = state
    page_maximum = pypto.amax(scores, -1, keepdim=True)
    if pypto.cond(pypto.is_loop_begin(page)):
        weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, page_maximum)))
        page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
        part = _weighted(spec, weights, values, queries)
        if last:
            _write(spec, part, page_total, queries, head, context_rows)
        else:
            accumulator[:] = part
            total[:] = page_total
            maximum[:] = page_maximum
    else:
        old_accumulator, old_total, old_maximum = (blocks.whole(value, valid_rows) for value in state)
        new_maximum = pypto.maximum(old_maximum, page_maximum)
        weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, new_maximum)))
        rescale = pypto.exp(pypto.sub(old_maximum, new_maximum))
        page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
        new_total = pypto.add(pypto.mul(old_total, rescale), page_total)
        part = _weighted(spec, weights, values, queries)
        new_accumulator = pypto.add(pypto.mul(old_accumulator, rescale), part)
        if last:
            _write(spec, new_accumulator, new_total, queries, head, context_rows)
        else:
            accumulator[:] = new_accumulator
            total[:] = new_total
            maximum[:] = new_maximum


def _weighted(spec: PrefillLayerSpec, weights: Any, values: Any, queries: Any) -> Any:
    """BF16 weights `[128, 128]` by a page's values: FP32 `[128, dim]`."""
    rows, dim = PAGE_TOKENS, spec.head_dim
    pypto.set_cube_tile_shapes([128, 128], [PAGE_TOKENS, PAGE_TOKENS], [dim, dim])
    part = pypto.matmul(weights, values, pypto.DT_FP32)
    pypto.set_vec_tile_shapes(SOFTMAX_ROWS, dim)
    return pypto.view(part, [rows, dim], [0, 0], valid_shape=[queries[1], dim])


def _write(spec: PrefillLayerSpec, accumulator: Any, total: Any, queries: Any, head: Any, context_rows: Any) -> None:
    """Divide, narrow, and put the head's context into its columns of the tokens' rows."""
    result = blocks.to_bf16(pypto.div(accumulator, total))
    pypto.assemble(result, [queries[0], head * spec.head_dim], context_rows)
