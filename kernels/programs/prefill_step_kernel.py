"""The PyPTO kernel of `prefill_step`: layers in a loop over stacked slabs, then the LM head on sequences' last rows.

Every loop waits for the one before it. The hidden rows stay in place in the argument `x`. Annotations must be objects:
no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.programs import blocks, lm_head_kernel, prefill_stages
from kernels.programs.prefill_step import PrefillStep


def build(program: PrefillStep, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)
    head = spec.head

    # PyPTO refuses a return annotation. It interprets the body, and what the body calls by a plain name.
    @pypto.frontend.jit(**options)
    def prefill_step(
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
        hidden_rows: of.hidden_rows,
        normed_rows: of.normed_rows,
        block_maxima: of.block_maxima,
        block_ids: of.block_ids,
        logits: of.logits,
        ids: of.ids,
        next_rows: of.next_rows,
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
            row_starts=row_starts,
            context_tokens=context_tokens,
            block_table=block_table,
            causal_bias=causal_bias,
            k_cache=k_cache,
            v_cache=v_cache,
            q_rows=q_rows,
            k_rows=k_rows,
            v_rows=v_rows,
            context_rows=context_rows,
            hidden_rows=hidden_rows,
            normed_rows=normed_rows,
            block_maxima=block_maxima,
            block_ids=block_ids,
            logits=logits,
            ids=ids,
            next_rows=next_rows,
        )
        layers = tensors.input_rms.shape[0]
        layer_slots = tensors.k_cache.shape[0] // layers
        for layer in pypto.loop(0, layers, 1, name="LAYERS", idx_name="layer", submit_before_loop=True):
            at = prefill_stages.LayerAt(layer=layer, first_slot=layer * layer_slots)
            prefill_stages.layer_stages(spec.layer, at, tensors, tensors.x, tensors.x, tensors.hidden_rows)
        sequences = tensors.context_tokens.shape[0]
        for sequence in pypto.loop(0, sequences, 1, name="LAST", idx_name="sequence", submit_before_loop=True):
            _take_last_row(sequence, tensors)
        window = spec.head.window_rows
        windows = (sequences + window - 1) // window
        for index in pypto.loop(0, windows, 1, name="WINDOWS", idx_name="window", submit_before_loop=True):
            first = index * window
            valid = pypto.min(sequences - first, window)
            for _ in pypto.loop(0, 1, 1, name="NORM", idx_name="norm", submit_before_loop=True):
                lm_head_kernel.norm_rows(
                    head, tensors.hidden_rows, tensors.final_norm, tensors.normed_rows, first, valid
                )
            for chunk in pypto.loop(0, head.chunks, 1, name="CHUNKS", idx_name="chunk", submit_before_loop=True):
                lm_head_kernel.head_chunk(
                    head,
                    chunk,
                    tensors.normed_rows,
                    tensors.lm_head_weight,
                    tensors.logits,
                    first,
                    tensors.block_maxima,
                    tensors.block_ids,
                    valid,
                )
            for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
                best = lm_head_kernel.best_ids(head, tensors.block_maxima, tensors.block_ids, valid)
                pypto.assemble(best, [first, 0], tensors.ids)
        for sequence in pypto.loop(0, sequences, 1, name="NEXT", idx_name="chosen", submit_before_loop=True):
            chosen = pypto.view(tensors.ids, [1, 1], [sequence, 0])
            pypto.assemble(blocks.gather_rows(tensors.embed_weight, chosen), [sequence, 0], tensors.next_rows)

    return prefill_step


def _take_last_row(sequence: Any, tensors: Any) -> None:
    """Copy the hidden row of a sequence's last token to its place in the scratch, which the layers are done with."""
    width = tensors.x.shape[1]
    pypto.set_vec_tile_shapes(1, width)
    row = pypto.view(tensors.x, [1, width], [tensors.row_starts[sequence + 1] - 1, 0])
    pypto.assemble(row, [sequence, 0], tensors.hidden_rows)
