"""The PyPTO kernel of `prefill_layer`: the stages of `prefill_stages` over slabs of one layer.

Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.programs import blocks, prefill_stages
from kernels.programs.prefill_layer import PrefillLayer


def build(program: PrefillLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)

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
        tensors = types.SimpleNamespace(
            input_rms=input_rms,
            wq=wq,
            wk=wk,
            wv=wv,
            wq_scale=wq_scale,
            wk_scale=wk_scale,
            wv_scale=wv_scale,
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            wo=wo,
            wo_scale=wo_scale,
            post_rms=post_rms,
            w_gate=w_gate,
            w_up=w_up,
            w_gate_scale=w_gate_scale,
            w_up_scale=w_up_scale,
            w_down=w_down,
            w_down_scale=w_down_scale,
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
        )
        prefill_stages.layer_stages(spec, prefill_stages.LayerAt(), tensors, x, out)

    return prefill_layer
