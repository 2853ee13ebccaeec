"""The PyPTO kernel of `decode_step`: layers in a loop over stacked slabs, LM head, greedy ids, the next embedding rows.

Every loop waits for the one before it. The hidden rows stay in place in the argument `x`. Annotations must be objects:
no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.programs import blocks, decode_stages, lm_head_kernel
from kernels.programs.decode_step import DecodeStep
from kernels.programs.lm_head import LmHeadSpec


def build(program: DecodeStep, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)
    head = spec.head

    # PyPTO refuses a return annotation. It interprets the body, and what the body calls by a plain name.
    @pypto.frontend.jit(**options)
    def decode_step(
        x: of.x,
        input_rms: of.input_rms,
        wq: of.wq,
        wk: of.wk,
        wv: of.wv,
        wq_scale: of.wq_scale,
        wk_scale: of.wk_scale,
        wv_scale: of.wv_scale,
        wo: of.wo,
        wo_scale: of.wo_scale,
        post_rms: of.post_rms,
        w_gate: of.w_gate,
        w_up: of.w_up,
        w_gate_scale: of.w_gate_scale,
        w_up_scale: of.w_up_scale,
        w_down: of.w_down,
        w_down_scale: of.w_down_scale,
        q_norm: of.q_norm,
        k_norm: of.k_norm,
        q_bias: of.q_bias,
        k_bias: of.k_bias,
        v_bias: of.v_bias,
        final_norm: of.final_norm,
        lm_head_weight: of.lm_head_weight,
        embed_weight: of.embed_weight,
        cos: of.cos,
        sin: of.sin,
        slots: of.slots,
        context_tokens: of.context_tokens,
        block_table: of.block_table,
        k_cache: of.k_cache,
        v_cache: of.v_cache,
        q_rows: of.q_rows,
        context_rows: of.context_rows,
        normed_rows: of.normed_rows,
        block_maxima: of.block_maxima,
        block_ids: of.block_ids,
        logits: of.logits,
        ids: of.ids,
    ):
        tensors = types.SimpleNamespace(
            x=x,
            input_rms=input_rms,
            wq=wq,
            wk=wk,
            wv=wv,
            wq_scale=wq_scale,
            wk_scale=wk_scale,
            wv_scale=wv_scale,
            wo=wo,
            wo_scale=wo_scale,
            post_rms=post_rms,
            w_gate=w_gate,
            w_up=w_up,
            w_gate_scale=w_gate_scale,
            w_up_scale=w_up_scale,
            w_down=w_down,
            w_down_scale=w_down_scale,
            q_norm=q_norm,
            k_norm=k_norm,
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            final_norm=final_norm,
            lm_head_weight=lm_head_weight,
            embed_weight=embed_weight,
            cos=cos,
            sin=sin,
            slots=slots,
            context_tokens=context_tokens,
            block_table=block_table,
            k_cache=k_cache,
            v_cache=v_cache,
            q_rows=q_rows,
            context_rows=context_rows,
            normed_rows=normed_rows,
            block_maxima=block_maxima,
            block_ids=block_ids,
            logits=logits,
            ids=ids,
        )
        batch, layers = tensors.x.shape[0], tensors.input_rms.shape[0]
        steps = tensors.context_tokens.shape[0] // batch
        layer_slots = tensors.k_cache.shape[0] // layers
        for step in pypto.loop(0, steps, 1, name="STEPS", idx_name="step"):
            for layer in pypto.loop(0, layers, 1, name="LAYERS", idx_name="layer", submit_before_loop=True):
                at = decode_stages.LayerAt(
                    layer=layer,
                    first_slot=layer * layer_slots,
                    slots_row=(step * layers + layer) * batch,
                    first_row=step * batch,
                )
                decode_stages.layer_stages(spec.layer, at, tensors, tensors.x, tensors.x)
            _next_tokens(head, tensors, step * batch)

    return decode_step


def _next_tokens(head: LmHeadSpec, tensors: Any, first_row: Any) -> None:
    """Logits and ids of one step, whose rows start at `first_row` of both, and the embedding rows of the ids."""
    for window in decode_stages.windows(tensors.x.shape[0]):
        for _ in pypto.loop(0, 1, 1, name="NORM", idx_name="norm", submit_before_loop=True):
            lm_head_kernel.norm_rows(
                head, tensors.x, tensors.final_norm, tensors.normed_rows, window.first, window.valid
            )
        for chunk in pypto.loop(0, head.chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
            lm_head_kernel.head_chunk(
                head,
                chunk,
                tensors.normed_rows,
                tensors.lm_head_weight,
                tensors.logits,
                first_row + window.first,
                tensors.block_maxima,
                tensors.block_ids,
                window.valid,
            )
        for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
            # Rows beyond the batch are gathered too, by whatever their scratch holds, and not written: a gather of some
            # valid rows by ids that were just made fails in the interpreter's late passes.
            best = lm_head_kernel.best_ids(head, tensors.block_maxima, tensors.block_ids)
            # In one row: ids in a column give rows that must be copied to be put together.
            chosen = pypto.reshape(pypto.clip(best, 0, head.real_vocab - 1), [head.window_rows])
            pypto.set_vec_tile_shapes(1, head.hidden_size)
            rows = pypto.index_select(tensors.embed_weight, 0, chosen)
            pypto.assemble(blocks.whole(rows, window.valid), [window.first, 0], tensors.x)
            pypto.assemble(blocks.whole(best, window.valid), [first_row + window.first, 0], tensors.ids)
