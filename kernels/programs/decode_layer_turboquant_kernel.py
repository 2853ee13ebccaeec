"""The PyPTO kernel of `decode_layer_turboquant`: that of `decode_layer` with the arguments of the other cache.

Annotations must be objects: no postponed evaluation here.
"""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.programs import blocks, decode_stages
from kernels.programs.decode_layer import TurboQuantDecodeLayer


def build(program: TurboQuantDecodeLayer, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec, of = program.spec, blocks.parameter_types(program)

    # PyPTO refuses a return annotation.
    @pypto.frontend.jit(**options)
    def decode_layer_turboquant(
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
        k_matrices: of.k_matrices,
        v_matrices: of.v_matrices,
        k_codes: of.k_codes,
        k_norms: of.k_norms,
        v_codes: of.v_codes,
        v_norms: of.v_norms,
        q_rows: of.q_rows,
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
            slots=slots,
            context_tokens=context_tokens,
            block_table=block_table,
            k_matrices=k_matrices,
            v_matrices=v_matrices,
            k_codes=k_codes,
            k_norms=k_norms,
            v_codes=v_codes,
            v_norms=v_norms,
            q_rows=q_rows,
            context_rows=context_rows,
        )
        decode_stages.layer_stages(spec, decode_stages.LayerAt(), tensors, x, out)

    return decode_layer_turboquant
