"""The PyPTO kernel of `decode_layer`: one W8A8 decoder layer over a batch of single tokens.

Three stages, joined by scratch arguments: a prologue (norm, quantize, QKV, norms, RoPE, cache write), attention over
the pages of each row, and an epilogue (output projection, residual, MLP). Each stage is a `pypto.loop`, so that the
next one starts after it. Attention does the matrix products head by head and the softmax for all heads of a row at
once. Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

from typing import Any

import pypto

from kernels.goldens import PAGE_TOKENS
from kernels.programs import blocks
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.tiles import choose_cube_tile

SOFTMAX_ROWS = 64
"""Most heads in one vector tile: 64 x 128 FP32 values are 32 KB, several of which are alive at once."""


def build(program: DecodeLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def decode_layer(
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
        context_tokens: of.context_tokens,
        block_table: of.block_table,
        k_cache: of.k_cache,
        v_cache: of.v_cache,
        q_rows: of.q_rows,
        context_rows: of.context_rows,
        out: of.out,
    ):
        for _ in pypto.loop(1, name="PROLOGUE", idx_name="prologue"):
            _prologue(
                spec,
                (x, input_rms, cos, sin, slots),
                (wq, wk, wv, wq_scale, wk_scale, wv_scale),
                (q_bias, k_bias, v_bias, q_norm, k_norm),
                (q_rows, k_cache, v_cache),
            )
        for row in pypto.loop(0, spec.batch_rows, 1, name="ROWS", idx_name="row", submit_before_loop=True):
            tokens = context_tokens[row]
            _attend(spec, row, tokens, block_table, q_rows, (k_cache, v_cache), context_rows)
        for _ in pypto.loop(0, 1, 1, name="EPILOGUE", idx_name="epilogue", submit_before_loop=True):
            _epilogue(
                spec,
                (x, context_rows, wo, wo_scale, post_rms),
                (w_gate, w_up, w_gate_scale, w_up_scale, w_down, w_down_scale),
                out,
            )

    return decode_layer


def _prologue(spec: DecodeLayerSpec, inputs: Any, weights: Any, vectors: Any, targets: Any) -> None:
    """Norm, quantize, project, normalise heads, rotate; write the rows' keys and values to their slots."""
    x, input_rms, cos, sin, slots = inputs
    wq, wk, wv, wq_scale, wk_scale, wv_scale = weights
    q_bias, k_bias, v_bias, q_norm, k_norm = vectors
    q_rows, k_cache, v_cache = targets
    batch, dim, kv_size = spec.batch_rows, spec.head_dim, spec.kv_size
    pypto.set_vec_tile_shapes(1, spec.hidden_size)
    normed = blocks.to_bf16(blocks.rms_norm_rows(blocks.to_fp32(x), input_rms, spec.rms_norm_eps))
    codes, scale = blocks.quantize_rows(normed)
    q_tile = choose_cube_tile(spec.hidden_size, spec.q_size, 1)
    kv_tile = choose_cube_tile(spec.hidden_size, kv_size, 1)
    q = blocks.linear_w8a8(codes, scale, wq, wq_scale, q_tile)
    if spec.qkv_bias:
        q = pypto.add(q, q_bias)
    k = blocks.linear_w8a8(codes, scale, wk, wk_scale, kv_tile)
    v = blocks.linear_w8a8(codes, scale, wv, wv_scale, kv_tile)
    if spec.qkv_bias:
        k = pypto.add(k, k_bias)
        v = pypto.add(v, v_bias)
    v_bf16 = blocks.to_bf16(v)
    q3 = pypto.reshape(q, [batch, spec.num_heads, dim])
    k3 = pypto.reshape(k, [batch, spec.num_kv_heads, dim])
    if spec.qk_norm:
        q3 = blocks.head_norm(q3, q_norm, spec.rms_norm_eps)
        k3 = blocks.head_norm(k3, k_norm, spec.rms_norm_eps)
    q_rotated = pypto.reshape(blocks.rotate(q3, cos, sin), [batch * spec.num_heads, dim])
    k_rotated = pypto.reshape(blocks.rotate(k3, cos, sin), [batch, kv_size])
    pypto.set_vec_tile_shapes(spec.num_heads, dim)
    q_rows[:] = q_rotated
    pypto.set_vec_tile_shapes(batch, kv_size)
    k_cache[:] = pypto.scatter_update(k_cache, -2, slots, k_rotated)
    v_cache[:] = pypto.scatter_update(v_cache, -2, slots, v_bf16)


def _attend(
    spec: DecodeLayerSpec, row: Any, tokens: Any, block_table: Any, q_rows: Any, caches: Any, context_rows: Any
) -> None:
    """Online softmax of one row over its pages, all heads at once; writes the row's context."""
    dim, heads = spec.head_dim, spec.num_heads
    pages = (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    accumulator = pypto.tensor([heads, dim], pypto.DT_FP32, "accumulator")
    total = pypto.tensor([heads, 1], pypto.DT_FP32, "total")
    maximum = pypto.tensor([heads, 1], pypto.DT_FP32, "maximum")
    for page in pypto.loop(0, pages, 1, name="PAGES", idx_name="page"):
        first_slot = block_table[row, page] * PAGE_TOKENS
        valid = pypto.min(tokens - page * PAGE_TOKENS, PAGE_TOKENS)
        k_cache, v_cache = caches
        scores = pypto.mul(_scores(spec, row, first_slot, valid, q_rows, k_cache), dim**-0.5)
        page_maximum = pypto.amax(scores, -1, keepdim=True)
        if pypto.cond(pypto.is_loop_begin(page)):
            weights = blocks.to_bf16(pypto.exp(pypto.sub(scores, page_maximum)))
            page_total = pypto.sum(blocks.to_fp32(weights), -1, keepdim=True)
            part = _weighted_values(spec, first_slot, valid, weights, v_cache)
            if pypto.cond(pypto.is_loop_end(page)):
                result = blocks.to_bf16(pypto.div(part, page_total))
                pypto.assemble(result, [row * heads, 0], context_rows)
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
            part = _weighted_values(spec, first_slot, valid, weights, v_cache)
            new_accumulator = pypto.add(pypto.mul(accumulator, rescale), part)
            if pypto.cond(pypto.is_loop_end(page)):
                result = blocks.to_bf16(pypto.div(new_accumulator, new_total))
                pypto.assemble(result, [row * heads, 0], context_rows)
            else:
                accumulator[:] = new_accumulator
                total[:] = new_total
                maximum[:] = new_maximum


def _scores(spec: DecodeLayerSpec, row: Any, first_slot: Any, valid: Any, q_rows: Any, k_cache: Any) -> Any:
    """Products of every query head with a page's keys: FP32 `[heads, 128]`, `valid` columns of them valid."""
    dim, heads, group = spec.head_dim, spec.num_heads, spec.num_heads // spec.num_kv_heads
    pypto.set_cube_tile_shapes([16, 16], [dim, dim], [PAGE_TOKENS, PAGE_TOKENS])
    pypto.set_vec_tile_shapes(min(heads, SOFTMAX_ROWS), PAGE_TOKENS)
    scores = pypto.tensor([heads, PAGE_TOKENS], pypto.DT_FP32, "scores")
    for head in range(spec.num_kv_heads):
        query = pypto.view(q_rows, [group, dim], [row * heads + head * group, 0])
        keys = pypto.view(k_cache, [PAGE_TOKENS, dim], [first_slot, head * dim], valid_shape=[valid, dim])
        pypto.assemble(pypto.matmul(query, keys, pypto.DT_FP32, b_trans=True), [head * group, 0], scores)
    return pypto.view(scores, [heads, PAGE_TOKENS], [0, 0], valid_shape=[heads, valid])


def _weighted_values(spec: DecodeLayerSpec, first_slot: Any, valid: Any, weights: Any, v_cache: Any) -> Any:
    """Every head's weights BF16 `[heads, 128]` by a page's values: FP32 `[heads, dim]`."""
    dim, heads, group = spec.head_dim, spec.num_heads, spec.num_heads // spec.num_kv_heads
    pypto.set_cube_tile_shapes([16, 16], [PAGE_TOKENS, PAGE_TOKENS], [dim, dim])
    context = pypto.tensor([heads, dim], pypto.DT_FP32, "context")
    for head in range(spec.num_kv_heads):
        share = pypto.view(weights, [group, PAGE_TOKENS], [head * group, 0], valid_shape=[group, valid])
        values = pypto.view(v_cache, [PAGE_TOKENS, dim], [first_slot, head * dim], valid_shape=[valid, dim])
        pypto.assemble(pypto.matmul(share, values, pypto.DT_FP32), [head * group, 0], context)
    pypto.set_vec_tile_shapes(min(heads, SOFTMAX_ROWS), dim)
    return pypto.view(context, [heads, dim], [0, 0], valid_shape=[heads, dim])


def _epilogue(spec: DecodeLayerSpec, inputs: Any, weights: Any, out: Any) -> None:
    """Output projection, residual and SwiGLU MLP; the residual stays FP32 and is narrowed once."""
    x, context_rows, wo, wo_scale, post_rms = inputs
    w_gate, w_up, w_gate_scale, w_up_scale, w_down, w_down_scale = weights
    hidden, inter = spec.hidden_size, spec.intermediate_size
    pypto.set_vec_tile_shapes(spec.num_heads, spec.head_dim)
    context = pypto.reshape(context_rows, [spec.batch_rows, spec.q_size])
    codes, scale = blocks.quantize_rows(context)
    o_tile = choose_cube_tile(spec.q_size, hidden, 1)
    projected = blocks.linear_w8a8(codes, scale, wo, wo_scale, o_tile)
    residual = pypto.add(blocks.to_fp32(x), projected)
    normed = blocks.to_bf16(blocks.rms_norm_rows(residual, post_rms, spec.rms_norm_eps))
    codes, scale = blocks.quantize_rows(normed)
    up_tile = choose_cube_tile(hidden, inter, 1)
    gate = blocks.linear_w8a8(codes, scale, w_gate, w_gate_scale, up_tile)
    up = blocks.linear_w8a8(codes, scale, w_up, w_up_scale, up_tile)
    activated = blocks.to_bf16(pypto.mul(blocks.silu(gate), up))
    if spec.down == "int8":
        codes, scale = blocks.quantize_rows(activated)
        down_tile = choose_cube_tile(inter, hidden, 1)
        down = blocks.linear_w8a8(codes, scale, w_down, w_down_scale, down_tile)
    else:
        down_tile = choose_cube_tile(inter, hidden, 2)
        down = blocks.linear_bf16(activated, w_down, down_tile)
    pypto.set_vec_tile_shapes(spec.batch_rows, 2 * down_tile.n)
    out[:] = blocks.to_bf16(pypto.add(residual, down))
