"""The PyPTO kernels of the parts of a decoder layer. Annotations must be objects: no postponed evaluation here."""

# Parameters are annotated with values, which a type checker does not follow.
# mypy: disable-error-code="valid-type, name-defined, misc, no-untyped-def, untyped-decorator, index"

import types
from typing import Any

import pypto

from kernels.contract import BATCH_WINDOW_ROWS as WINDOW_ROWS
from kernels.programs import blocks, decode_stages, stages
from kernels.programs.layer_parts import KvWrite, LayerPart, NormQuantize, QkNormRope, QkvProject, SwigluMlp


def build(program: LayerPart, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    return _BUILDERS[type(program)](program.spec, blocks.parameter_types(program), options)


# PyPTO refuses a return annotation on what it compiles.


def _norm_quantize(spec: Any, of: Any, options: dict[str, Any]) -> Any:
    @pypto.frontend.jit(**options)
    def norm_quantize(x: of.x, input_rms: of.input_rms, normed: of.normed, codes: of.codes, scale: of.scale):
        for _ in pypto.loop(1, name="NORM", idx_name="norm"):
            pypto.set_vec_tile_shapes(1, spec.hidden_size)
            rows = blocks.to_bf16(blocks.rms_norm_rows(blocks.to_fp32(x), input_rms, spec.rms_norm_eps))
            quantized = blocks.operand(rows, "int8")
            # A value that is assigned is used up, and these rows were quantized too.
            normed[:] = blocks.to_bf16(blocks.to_fp32(rows))
            codes[:] = quantized.values
            scale[:] = quantized.scale

    return norm_quantize


def _qkv_project(spec: Any, of: Any, options: dict[str, Any]) -> Any:
    @pypto.frontend.jit(**options)
    def qkv_project(
        x: of.x,
        cos: of.cos,
        sin: of.sin,
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
        q: of.q,
        k: of.k,
        v: of.v,
    ):
        slabs = stages.Slabs(
            types.SimpleNamespace(
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
            )
        )
        for _ in pypto.loop(1, name="PROJECT", idx_name="project"):
            queries, keys, values = stages.project(spec, slabs, x, cos, sin)
            q[:] = pypto.reshape(queries, [spec.rows, spec.q_size])
            k[:] = keys
            v[:] = values

    return qkv_project


def _qk_norm_rope(spec: Any, of: Any, options: dict[str, Any]) -> Any:
    @pypto.frontend.jit(**options)
    def qk_norm_rope(projected: of.projected, cos: of.cos, sin: of.sin, q_norm: of.q_norm, q: of.q):
        for _ in pypto.loop(1, name="ROTATE", idx_name="rotate"):
            heads = pypto.reshape(projected, [spec.rows, spec.num_heads, spec.head_dim])
            if spec.qk_norm:
                heads = blocks.head_norm(heads, q_norm, spec.rms_norm_eps)
            q[:] = pypto.reshape(blocks.rotate(heads, cos, sin), [spec.rows, spec.q_size])

    return qk_norm_rope


def _kv_write(spec: Any, of: Any, options: dict[str, Any]) -> Any:
    @pypto.frontend.jit(**options)
    def kv_write(k: of.k, v: of.v, slots: of.slots, k_cache: of.k_cache, v_cache: of.v_cache):
        for _ in pypto.loop(1, name="WRITE", idx_name="write"):
            pypto.set_vec_tile_shapes(1, spec.kv_size)
            k_cache[:] = pypto.scatter_update(k_cache, -2, slots, k)
            v_cache[:] = pypto.scatter_update(v_cache, -2, slots, v)

    return kv_write


def _swiglu_mlp(spec: Any, of: Any, options: dict[str, Any]) -> Any:
    @pypto.frontend.jit(**options)
    def swiglu_mlp(
        residual: of.residual,
        post_rms: of.post_rms,
        w_gate: of.w_gate,
        w_up: of.w_up,
        w_gate_scale: of.w_gate_scale,
        w_up_scale: of.w_up_scale,
        w_down: of.w_down,
        w_down_scale: of.w_down_scale,
        out: of.out,
    ):
        slabs = stages.Slabs(
            types.SimpleNamespace(
                post_rms=post_rms,
                w_gate=w_gate,
                w_up=w_up,
                w_gate_scale=w_gate_scale,
                w_up_scale=w_up_scale,
                w_down=w_down,
                w_down_scale=w_down_scale,
            )
        )
        window = decode_stages.Window(0, spec.rows)
        left = decode_stages.operand_room(spec)
        kept = pypto.tensor([WINDOW_ROWS, spec.hidden_size], pypto.DT_FP32, "kept")
        for _ in pypto.loop(1, name="NORM", idx_name="norm"):
            rows = window.view(residual, spec.hidden_size)
            decode_stages.keep(stages.normed(spec, rows, slabs.vector("post_rms"), spec.rows), left)
            pypto.set_vec_tile_shapes(1, spec.hidden_size)
            kept[:] = pypto.add(rows, 0.0)
        decode_stages.finish_mlp(spec, slabs, left, kept, window, out)

    return swiglu_mlp


_BUILDERS = {
    NormQuantize: _norm_quantize,
    QkvProject: _qkv_project,
    QkNormRope: _qk_norm_rope,
    KvWrite: _kv_write,
    SwigluMlp: _swiglu_mlp,
}
